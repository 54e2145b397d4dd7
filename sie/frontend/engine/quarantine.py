"""Refuses the inputs that killed two workers, for a time. An input is identified by its content, not by its sender."""

from __future__ import annotations

import hashlib
import time

import msgspec

from sie.values.errors import PoisonInput
from sie.values.generate import GenerateTask
from sie.values.work import WorkHeader
from sie.values.work_bytes import array_view, read_extent

_decoder = msgspec.msgpack.Decoder(WorkHeader)
_task_decoder = msgspec.msgpack.Decoder(GenerateTask)
_encoder = msgspec.msgpack.Encoder()
_QUARANTINE_S = 600.0
"""Long enough to stop a retry loop. Short enough that an innocent input is soon accepted again."""


class QuarantinedInputs:
    """Digests of refused inputs, each until it expires."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}
        self._last_s = 0.0
        """When the last of them expires."""

    def __bool__(self) -> bool:
        """Whether there may be any: then each input has to be hashed."""
        if self._until_s and time.monotonic() >= self._last_s:
            self._until_s.clear()
        return bool(self._until_s)

    def add(self, digest: bytes) -> None:
        """Refuse this input from now on."""
        now_s = time.monotonic()
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[digest] = self._last_s = now_s + _QUARANTINE_S

    def check(self, extent: memoryview) -> None:
        """Raise PoisonInput when a request's extent holds a refused input."""
        if self._until_s.get(digest_of(extent), 0.0) > time.monotonic():
            raise poison()


def digest_of(extent: memoryview) -> bytes:
    """Return the identity of a request's input: its header and its arrays, without the unused bytes between them."""
    header, payload = read_extent(extent, _decoder)
    if header.operation == "generate":
        header = msgspec.structs.replace(header, task=_input_of(header.task))
    digest = hashlib.blake2b(_encoder.encode(header), digest_size=16)
    for ref in header.arrays:
        digest.update(array_view(payload, ref).data)
    return digest.digest()


def _input_of(task: bytes) -> bytes:
    """Return a task to generate without its seed, which may be random, and its salt, which depends on the sender."""
    asked = _task_decoder.decode(task)
    sampling = msgspec.structs.replace(asked.sampling, seed=0)
    return _encoder.encode(msgspec.structs.replace(asked, sampling=sampling, salt=b""))


def poison() -> PoisonInput:
    """Return the error for the client of a refused input."""
    return PoisonInput("Two workers died while they ran this input, so it is refused")
