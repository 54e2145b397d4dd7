"""Defines the bytes that two processes share: the drawings, their codecs, and the error for a peer that breaks them.

All integers are little-endian. A change to any drawing raises LAYOUT_VERSION, which both sides compare on attach.

Address, the `offset` field of a descriptor (u64), names an extent.

     63            48 47                                    0
    +----------------+---------------------------------------+
    | segment number | byte offset in that segment, 64 x k   |   segment 0: the sender's main segment
    +----------------+---------------------------------------+   segment 1..65535: one large payload

Descriptor (64 bytes): the only thing in a ring. A ring is a memfd of `capacity` descriptors and nothing else.

     0       2       4               8                              16                              24
    +-------+-------+---------------+-------------------------------+-------------------------------+
    | kind  | flags | generation    | request_id                    | offset (an address)           |
    +-------+-------+---------------+-------------------------------+-------+-------+-------+-------+
    | length                        | deadline_ns (CLOCK_MONOTONIC) | num_tokens    | part  | parts |
    +-------------------------------+-------------------------------+---------------+-------+-------+
    24                              32                              40              44      46      48
    | reserved, 16 zero bytes                                       |
    +---------------------------------------------------------------+ 64

Extent: the place of a payload in a segment. `length` in its descriptor is from its first byte to its last array's end.

     0        1       4               8               16                    16 + header_length
    +--------+-------+---------------+---------------+---------------------+----+
    | cancel | 0 0 0 | header_length | stopped       | header (msgpack)    | .. |
    +--------+-------+---------------+---------------+---------------------+----+ P = round_up(16 + header_length, 64)
    | array 0, C order          .. | array 1, C order          .. |  each starts 64 x k after P
    +------------------------------+------------------------------+

    cancel: 0, then 1 at most once. stopped: the choices of a generation request that are stopped, choice i as bit i & 7
    of byte 8 + (i >> 3); a bit is set at most once. Nothing else changes after the extent was handed over.

Counter page: one writer, many readers; `used` is written last, so a record is either whole or absent.

     0               8               16              24                                              64
    +---------------+---------------+---------------+-----------------------------------------------+
    | version       | used (bytes)  | dropped       | reserved                                      |
    +---------------+---------------+---------------+-----------------------------------------------+
    record, 64-byte aligned, the first at 64:
     0               4      5        8               12              16
    +---------------+------+--------+---------------+---------------+------------------------+----+
    | record_bytes  | kind | 0 0 0  | label_bytes   | num_words     | name, labels (msgpack) | .. | words, 8 x k
    +---------------+------+--------+---------------+---------------+------------------------+----+
    words: counter and gauge: f64 value. histogram: f64 sum, then u64 count of each bucket, the last one +Inf.

In-flight page: one writer; two slots, of which `turn & 1` is the valid one; `turn` is written last.

     0               8               16                     64                   64 + slot_bytes
    +---------------+---------------+----------------------+--------------------+-------------------+
    | version       | turn          | reserved             | slot 0             | slot 1            |
    +---------------+---------------+----------------------+--------------------+-------------------+
    slot:  0          8            16           24      32      40 .. 64    then `count` entries of 16 bytes
          +----------+------------+------------+-------+-------+----------+  0          4      8            16
          | step_seq | started_ns | allowed_ns | phase | count | reserved |  | frontend | 0    | request_id |
          +----------+------------+------------+-------+-------+----------+

Board of cores (`sie.shm.core_board`): a cache line for each worker, then one for each core. Every worker writes.

     0               4             64                       64 x (1 + workers)
    +---------------+-------------+------------------------+-----------------------------------------+
    | version (u32) | workers     | needed (u32), reserved | borrower (u32): worker + 1, 0: none  .. |
    +---------------+-------------+------------------------+-----------------------------------------+
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

import msgspec

from sie.values.errors import ProtocolError

LAYOUT_VERSION: Final = 2

ALIGNMENT: Final = 64
"""Every extent and every array starts at a multiple of this: a cache line, and aligned for any SIMD load."""

SEGMENT_SHIFT: Final = 48
OFFSET_MASK: Final = (1 << SEGMENT_SHIFT) - 1
MAX_SEGMENT_NUMBER: Final = (1 << 16) - 1

DESCRIPTOR_BYTES: Final = 64
DESCRIPTOR: Final = Struct("<HHIQQQQIHH16x")
assert DESCRIPTOR.size == DESCRIPTOR_BYTES

FLAG_ALONE: Final = 1
"""This request must run in a separate step, because its input was running when a worker died."""


class Kind(IntEnum):
    """The meaning of a descriptor."""

    SUBMIT = 1
    """Frontend to worker: run this extent."""
    REPLY = 2
    """Worker to frontend: the answer."""
    ERROR = 3
    """Worker to frontend: the answer is a `WireError`; with length 0 the work was cancelled."""
    TOKENS = 4
    """Worker to frontend: the new tokens of one or more steps for this frontend."""
    RELEASE = 5
    """Reader to writer: the extent at `offset` is no longer needed."""


# Plain integers for the hot path: an IntEnum member costs an attribute look-up and compares through Python.
SUBMIT: Final = 1
REPLY: Final = 2
ERROR: Final = 3
TOKENS: Final = 4
RELEASE: Final = 5
LAST_KIND: Final = 5


class Descriptor(msgspec.Struct, frozen=True, gc=False):
    """A private copy of one descriptor, in the order of its bytes."""

    kind: int
    flags: int
    generation: int
    request_id: int
    offset: int
    length: int
    deadline_ns: int
    num_tokens: int
    part: int
    parts: int


def check_version(version: int) -> None:
    """Raise ProtocolError when a peer's or a predecessor's layout is not this one."""
    if version != LAYOUT_VERSION:
        raise ProtocolError(f"layout {version} instead of {LAYOUT_VERSION}")


def round_up(nbytes: int) -> int:
    """Return the smallest multiple of ALIGNMENT that is at least nbytes."""
    return (nbytes + 63) & ~63
