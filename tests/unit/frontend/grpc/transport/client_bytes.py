"""The bytes of a gRPC client: those that it sends, and what those that it receives say. Knows no server."""

from __future__ import annotations

from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.headers import entry
from sie.frontend.grpc.transport.message_framing import PREFIX

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
SETTINGS_FRAME = frames.settings_frame({})
OPENING = frames.PREFACE + SETTINGS_FRAME


def split_frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found: list[tuple[int, int, int, bytes]] = []
    at = 0
    while at < len(data):
        high, low, kind, flags, stream = frames.HEAD.unpack_from(data, at)
        end = at + frames.HEAD_BYTES + (high << 16 | low)
        assert end <= len(data), "a frame that is cut"
        found.append((kind, flags, stream, data[at + frames.HEAD_BYTES : end]))
        at = end
    return found


def block(path: str = MODEL_INFER, method: str = "POST", **headers: str) -> bytes:
    """Return the header block of a call; names have _ for -."""
    fields = {":method": method, ":scheme": "http", ":path": path, "te": "trailers", "content-type": "application/grpc"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    return b"".join(entry(name.encode(), value.encode()) for name, value in fields.items() if value)


def headers(stream: int, data: bytes | None = None, flags: int = frames.END_HEADERS) -> bytes:
    return frames.frame(frames.HEADERS, flags, stream, block() if data is None else data)


def prefixed(message: bytes, packed: int = 0) -> bytes:
    return PREFIX.pack(packed, len(message)) + message


def data(stream: int, payload: bytes, flags: int = frames.END_STREAM) -> bytes:
    return frames.frame(frames.DATA, flags, stream, payload)


def a_call(stream: int, message: bytes = b"hello") -> bytes:
    return headers(stream) + data(stream, prefixed(message))


def answered(received: list[tuple[int, int, int, bytes]], stream: int) -> bytes:
    """Return the message of an answer that ended well."""
    own = [frame for frame in received if frame[2] == stream]
    assert own[0][0] == frames.HEADERS, own
    assert own[-1][:2] == (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM), own
    assert b"grpc-status\x010" in own[-1][3]
    return b"".join(payload for kind, _, _, payload in own if kind == frames.DATA)[5:]


def grpc_status(received: list[tuple[int, int, int, bytes]], stream: int) -> int:
    """Return the status that a call ended with."""
    block_ = next(payload for kind, flags, own, payload in received if own == stream and kind == 1 and flags & 1)
    at = block_.index(b"grpc-status") + len(b"grpc-status")
    return int(block_[at + 1 : at + 1 + block_[at]])


def ended_with(received: list[tuple[int, int, int, bytes]]) -> int | None:
    """Return the code of GOAWAY, if there is one."""
    return next(
        (int.from_bytes(payload[4:8], "big") for kind, _, _, payload in received if kind == frames.GOAWAY), None
    )


def reset_with(received: list[tuple[int, int, int, bytes]], stream: int) -> int | None:
    """Return the code of a stream's RST_STREAM, if there is one."""
    return next(
        (
            int.from_bytes(payload, "big")
            for kind, _, own, payload in received
            if (kind, own) == (frames.RST_STREAM, stream)
        ),
        None,
    )
