"""Lists what a client may not send, and the code by which each breach ends its stream or its connection (RFC 9113)."""

from __future__ import annotations

import struct

from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.frames import Code
from tests.unit.frontend.grpc.transport.client_bytes import a_call, block, data, headers

U32 = struct.Struct(">L")
GREASE = frames.frame(0x0B, 0xFF, 7, b"extension")


def window(stream: int, num_bytes: int) -> bytes:
    return frames.frame(frames.WINDOW_UPDATE, 0, stream, U32.pack(num_bytes))


WHOLE = block()
STREAMED = block(path="/inference.GRPCInferenceService/ModelStreamInfer")
LONG = b"\0" + (1 << 20).to_bytes(4, "big")
"""The prefix of a message that does not end soon."""
MANY_CALLS = b"".join(headers(stream) for stream in range(1, 2001, 2))
CONNECTION_FAULTS: dict[str, tuple[bytes, Code]] = {
    "DATA on stream 0": (data(0, b"x"), Code.PROTOCOL_ERROR),
    "DATA before its stream": (data(5, b"x"), Code.PROTOCOL_ERROR),
    "DATA padded beyond its end": (headers(1) + frames.frame(0, frames.PADDED, 1, b"\x09x"), Code.PROTOCOL_ERROR),
    "DATA padded without a length": (headers(1) + frames.frame(0, frames.PADDED, 1), Code.PROTOCOL_ERROR),
    "HEADERS on stream 0": (headers(0), Code.PROTOCOL_ERROR),
    "HEADERS on an even stream": (headers(2), Code.PROTOCOL_ERROR),
    "HEADERS padded beyond their end": (frames.frame(1, 0xC, 1, b"\xff" + WHOLE), Code.PROTOCOL_ERROR),
    "HEADERS with half a priority": (frames.frame(1, 0x24, 1, b"\0\0"), Code.PROTOCOL_ERROR),
    "a stream used again": (a_call(1) + headers(1), Code.STREAM_CLOSED),
    "a stream below the last": (a_call(5) + headers(3), Code.STREAM_CLOSED),
    "no HPACK": (headers(1, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), Code.COMPRESSION_ERROR),
    "an index of nothing": (headers(1, b"\xff\x7f"), Code.COMPRESSION_ERROR),
    "a table beyond its limit": (headers(1, b"\x3f\xff\xff\x7f"), Code.COMPRESSION_ERROR),
    "a block that is interrupted": (frames.frame(1, 0, 1, WHOLE) + data(1, b""), Code.PROTOCOL_ERROR),
    "a block that another interrupts": (frames.frame(1, 0, 1, WHOLE) + headers(3), Code.PROTOCOL_ERROR),
    "a block that an extension interrupts": (frames.frame(1, 0, 1, WHOLE) + GREASE, Code.PROTOCOL_ERROR),
    "a block that goes on elsewhere": (frames.frame(1, 0, 1, b"") + frames.frame(9, 4, 3, WHOLE), Code.PROTOCOL_ERROR),
    "CONTINUATION of nothing": (frames.frame(9, 4, 1, WHOLE), Code.PROTOCOL_ERROR),
    "CONTINUATION without end": (frames.frame(1, 0, 1) + frames.frame(9, 0, 1) * 100, Code.ENHANCE_YOUR_CALM),
    "a block without end": (frames.frame(1, 0, 1) + frames.frame(9, 0, 1, b"\0" * 16_000) * 20, Code.ENHANCE_YOUR_CALM),
    "a frame of 16 MiB": (b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", Code.FRAME_SIZE_ERROR),
    "HEADERS of 1 MB": (b"\x0f\x00\x00\x01\x04\x00\x00\x00\x01", Code.ENHANCE_YOUR_CALM),
    "an extension of 16 MiB": (b"\xff\xff\xff\x77\x00\x00\x00\x00\x01", Code.FRAME_SIZE_ERROR),
    "PING of 7 bytes": (frames.frame(6, 0, 0, b"1234567"), Code.FRAME_SIZE_ERROR),
    "PING of a stream": (frames.frame(6, 0, 1, b"12345678"), Code.PROTOCOL_ERROR),
    "PING of 1 MiB": (b"\x10\x00\x00\x06\x00\x00\x00\x00\x00", Code.FRAME_SIZE_ERROR),
    "SETTINGS of a stream": (frames.frame(4, 0, 1), Code.PROTOCOL_ERROR),
    "SETTINGS of 5 bytes": (frames.frame(4, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
    "SETTINGS acknowledged with some": (frames.frame(4, 1, 0, b"123456"), Code.FRAME_SIZE_ERROR),
    "a window of 2^31": (frames.settings_frame({4: 1 << 31}), Code.FLOW_CONTROL_ERROR),
    "frames of 1 byte": (frames.settings_frame({5: 1}), Code.PROTOCOL_ERROR),
    "push as 2": (frames.settings_frame({2: 2}), Code.PROTOCOL_ERROR),
    "a push": (frames.frame(5, 4, 1, b"\0\0\0\2"), Code.PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (headers(1) + frames.frame(3, 0, 1, b"123"), Code.FRAME_SIZE_ERROR),
    "RST_STREAM of the connection": (frames.frame(3, 0, 0, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
    "RST_STREAM before its stream": (frames.frame(3, 0, 7, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 3 bytes": (frames.frame(8, 0, 0, b"123"), Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of 0": (window(0, 0), Code.PROTOCOL_ERROR),
    "a window over 2^31": (window(0, (1 << 31) - 1), Code.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE before its stream": (window(9, 1), Code.PROTOCOL_ERROR),
    "PRIORITY of 4 bytes": (frames.frame(2, 0, 1, b"1234"), Code.FRAME_SIZE_ERROR),
    "PRIORITY of the connection": (frames.frame(2, 0, 0, b"12345"), Code.PROTOCOL_ERROR),
    "GOAWAY of a stream": (frames.frame(7, 0, 1, b"\0" * 8), Code.PROTOCOL_ERROR),
    "GOAWAY of 4 bytes": (frames.frame(7, 0, 0, b"\0" * 4), Code.FRAME_SIZE_ERROR),
    "a flood of PING": (frames.frame(6, 0, 0, b"12345678") * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of SETTINGS": (frames.settings_frame({}) * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of acknowledgements": (frames.frame(4, 1, 0) * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of PRIORITY": (frames.frame(2, 0, 1, b"12345") * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of extensions": (frames.frame(0x42, 0, 1) * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of WINDOW_UPDATE": (window(0, 1) * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of empty DATA": (headers(1) + data(1, b"", 0) * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of DATA of one byte": (headers(1) + data(1, LONG, 0) + data(1, b"x", 0) * 12_000, Code.ENHANCE_YOUR_CALM),
    "a flood of empty messages": (headers(1, STREAMED) + data(1, bytes(5 * 40_000), 0), Code.ENHANCE_YOUR_CALM),
    "a flood of windows of many calls": (
        MANY_CALLS + b"".join(frames.settings_frame({4: 65_535 + i % 2}) for i in range(400)), Code.ENHANCE_YOUR_CALM
    ),
    "a flood of many settings": (frames.frame(4, 0, 0, b"\0\x63\0\0\0\0" * 2730) * 60, Code.ENHANCE_YOUR_CALM),
    "HEADERS of many entries": (headers(1, WHOLE + b"\0\1a\0" * 600), Code.ENHANCE_YOUR_CALM),
    "HEADERS of one-byte indexes": (headers(1, b"\x81" * 3000), Code.ENHANCE_YOUR_CALM),
    "HEADERS of table sizes": (headers(1, b"\x20" * 3000), Code.COMPRESSION_ERROR),
    "a flood of CONTINUATION": (
        b"".join(
            headers(stream, WHOLE, 0) + frames.frame(9, 0, stream) * 60 + frames.frame(9, 4, stream)
            for stream in range(1, 601, 2)
        ), Code.ENHANCE_YOUR_CALM,
    ),
    "a flood of padding": (headers(1) + frames.frame(0, 8, 1, b"\0") * 12_000, Code.ENHANCE_YOUR_CALM),
}  # fmt: skip

STREAM_FAULTS: dict[str, tuple[bytes, Code]] = {
    "no path": (headers(1, block(path="")), Code.PROTOCOL_ERROR),
    "no method": (headers(1, block(method="")), Code.PROTOCOL_ERROR),
    "two paths": (headers(1, b"\0\x05:path\x01/" + WHOLE), Code.PROTOCOL_ERROR),
    "an unknown pseudo-header": (headers(1, b"\0\x05:patx\x01/" + WHOLE), Code.PROTOCOL_ERROR),
    "a pseudo-header behind others": (headers(1, WHOLE + b"\0\x0a:authority\x01a"), Code.PROTOCOL_ERROR),
    "a name in capitals": (headers(1, block(X_Big="1")), Code.PROTOCOL_ERROR),
    "a line feed in a value": (headers(1, block(x_note="a\r\nb: c")), Code.PROTOCOL_ERROR),
    "a NUL in a value": (headers(1, block(x_note="a\0b")), Code.PROTOCOL_ERROR),
    "a header of the connection": (headers(1, block(connection="close")), Code.PROTOCOL_ERROR),
    "chunked": (headers(1, block(transfer_encoding="chunked")), Code.PROTOCOL_ERROR),
    "another te": (headers(1, block(te="gzip")), Code.PROTOCOL_ERROR),
    "headers within a call": (headers(1) + headers(1), Code.PROTOCOL_ERROR),
    "a window of 0": (headers(1) + window(1, 0), Code.PROTOCOL_ERROR),
    "a window over 2^31": (headers(1) + window(1, (1 << 31) - 1), Code.FLOW_CONTROL_ERROR),
}
