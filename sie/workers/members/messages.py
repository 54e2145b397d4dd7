"""The messages from a leader to its followers and back: msgpack, each after its length, over a socket pair.

A step's message says which tokens run, where their keys and values are, and which rows of logits are needed. Sampling
belongs to the leader, so followers get no draws.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from socket import socket
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.config.generation_settings import Generation
from sie.ipc.messages import CacheRoom
from sie.values.card import ModelCard
from sie.values.errors import WireError
from sie.values.generate import Sampling
from sie.workers.model_api import Draw, Scored, Slot

_LENGTH: Final = struct.Struct("<I")
_DRAWN: Final = (Draw(Sampling(temperature=0.0), 0, 0),)
_INT32: Final = np.dtype("<i4")


class FollowerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch record on a follower's command line, as JSON. socket_fd and store_fd are inherited."""

    leader_pid: int
    socket_fd: int
    store_fd: int
    name: str
    """In logs."""
    rank: int
    size: int
    device: str
    cores: tuple[int, ...]
    log_format: str
    log_level: str


class Start(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Leader to follower, first: the model to load, and the settings that the leader loads it with."""

    card: ModelCard
    generation: Generation
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    room: CacheRoom
    timeout_s: float
    native_kernels: bool


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Follower to leader: the load has ended, with an error if it failed."""

    error: WireError | None = None


class _Part(msgspec.Struct, array_like=True, frozen=True):
    """A slot: token ids and blocks as int32; scored are the first token and the number of tokens that are scored."""

    token_ids: bytes
    start: int
    blocks: bytes
    draws: bool
    scored: tuple[int, int] | None
    rotary_length: int


class Step(msgspec.Struct, tag=True, frozen=True):
    """Leader to follower: run a step of generated text."""

    parts: list[_Part]
    copies: list[tuple[int, int]]

    @classmethod
    def of(cls, slots: Sequence[Slot], copies: Sequence[tuple[int, int]]) -> Step:
        """Return the message of a step."""
        return cls([_part_of(slot) for slot in slots], [(int(source), int(target)) for source, target in copies])

    def slots(self) -> list[Slot]:
        """Return slots that compute the same rows of logits as those of the message's step."""
        return [_slot_of(part) for part in self.parts]


class Embed(msgspec.Struct, tag=True, frozen=True):
    """Leader to follower: run a step of vectors; token ids of each text as int32."""

    texts: list[bytes]

    @classmethod
    def of(cls, texts: Sequence[NDArray[np.int32]]) -> Embed:
        """Return the message of a step."""
        return cls([_bytes(ids) for ids in texts])

    def token_ids(self) -> list[NDArray[np.int32]]:
        """Return the token ids of each text."""
        return [np.frombuffer(ids, _INT32) for ids in self.texts]


Message = Start | Loaded | Step | Embed
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message's bytes, with their length before them."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket) -> Message | None:
    """Return the next message, or None after the other end has closed. Raises OSError, msgspec's errors."""
    length = _read(sock, _LENGTH.size)
    body = None if length is None else _read(sock, _LENGTH.unpack(length)[0])
    return None if body is None else _decoder.decode(body)


def _read(sock: socket, num_bytes: int) -> bytearray | None:
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    while done < num_bytes:
        count = sock.recv_into(view[done:])
        if not count:
            return None
        done += count
    return data


def _bytes(numbers: Sequence[int] | NDArray[np.int32]) -> bytes:
    return np.asarray(numbers, _INT32).tobytes()


def _part_of(slot: Slot) -> _Part:
    scored = None if slot.scored is None else (slot.scored.first, len(slot.scored.targets))
    blocks = _bytes(slot.blocks)
    return _Part(_bytes(slot.token_ids), int(slot.start), blocks, bool(slot.draws), scored, int(slot.rotary_length))


def _slot_of(part: _Part) -> Slot:
    token_ids = np.frombuffer(part.token_ids, _INT32)
    blocks = np.frombuffer(part.blocks, _INT32).tolist()
    scored = None if part.scored is None else _scored(*part.scored)
    return Slot(token_ids, part.start, blocks, _DRAWN if part.draws else (), scored, part.rotary_length)


def _scored(first: int, count: int) -> Scored:
    empty = np.empty((count, 0), np.float32)
    return Scored(first, np.zeros(count, np.int32), np.empty(count, np.float32), empty.astype(np.int32), empty)
