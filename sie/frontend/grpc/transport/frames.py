"""Encodes and decodes HTTP/2 frames, and defines protocol faults. Pure. Source: RFC 9113, sections 4 to 7."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

HEAD: Final = struct.Struct(">BHBBL")
"""Length (high byte, low 16 bits), type, flags, stream."""
HEAD_BYTES: Final = 9
DEFAULT_WINDOW: Final = 65_535
MAX_WINDOW: Final = (1 << 31) - 1
DEFAULT_FRAME_BYTES: Final = 16_384
DEFAULT_TABLE_BYTES: Final = 4096
MAX_FRAME_BYTES: Final = (1 << 24) - 1
STREAM_MASK: Final = (1 << 31) - 1

_U32: Final = struct.Struct(">L")
_SETTING: Final = struct.Struct(">HL")
_SETTING_LIMITS: Final[dict[int, tuple[int, int]]] = {
    ENABLE_PUSH: (0, 1),
    INITIAL_WINDOW_SIZE: (0, MAX_WINDOW),
    MAX_FRAME_SIZE: (DEFAULT_FRAME_BYTES, MAX_FRAME_BYTES),
}


class Code(IntEnum):
    """The error code of a stream or connection. Source: RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """A breach of the protocol or of a limit that ends the connection."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class StreamFault(Exception):
    """A breach of the protocol that ends one stream."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def settings_frame(values: dict[int, int]) -> bytes:
    """Return SETTINGS with these values, keyed by setting number."""
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*item) for item in values.items()]))


def window_frame(stream: int, num_bytes: int) -> bytes:
    """Return WINDOW_UPDATE. Stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, _U32.pack(num_bytes))


def reset_frame(stream: int, code: Code) -> bytes:
    """Return RST_STREAM."""
    return frame(RST_STREAM, 0, stream, _U32.pack(code))


def goaway_frame(last_stream: int, code: Code, text: str = "") -> bytes:
    """Return GOAWAY. No stream above last_stream was or will be served."""
    return frame(GOAWAY, 0, 0, _U32.pack(last_stream) + _U32.pack(code) + text.encode()[:200])


def read_u32(payload: bytes, kind: str) -> int:
    """Return the number in a frame, without its reserved bit. Raises ConnectionFault."""
    if len(payload) != _U32.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"{kind} of {len(payload)} bytes")
    (value,) = _U32.unpack(payload)
    return value & MAX_WINDOW


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the values in SETTINGS, the last of each setting. Raises ConnectionFault for a forbidden value."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    found: dict[int, int] = {}
    for number, value in _SETTING.iter_unpack(payload):
        least, most = _SETTING_LIMITS.get(number, (0, 1 << 32))
        if not least <= value <= most:
            code = Code.FLOW_CONTROL_ERROR if number == INITIAL_WINDOW_SIZE else Code.PROTOCOL_ERROR
            raise ConnectionFault(code, f"setting {number} is {value}")
        found[number] = value
    return found


def strip_padding(flags: int, payload: bytes) -> bytes:
    """Return a HEADERS frame's part of the header block. Raises ConnectionFault for padding beyond the frame."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start, end = 1, end - (payload[0] if payload else 1)
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "padding beyond its frame")
    return payload[start:end]
