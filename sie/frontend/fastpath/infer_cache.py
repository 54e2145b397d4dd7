"""Owns what is known of requests to infer that come again and again: all but the elements of their tensors.

Clients send the same JSON with other elements behind it. Once such a request went the whole way, its like is recognised by
the model's path, the bytes of the JSON and the length of the body, and only its elements are looked at. The same holds for
the JSON of its answer, by the header of the worker's reply. What is kept ends with the models and limits that it was
judged by.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from sie.config.limits import Limits
from sie.frontend.dialects.kserve.infer import InferCall
from sie.frontend.engine.worker_link import Reply
from sie.frontend.tensors.infer import Plan, places_of
from sie.frontend.tensors.paths import ModelPath
from sie.ipc.messages import ModelEntry
from sie.shm.extent import split_extent
from sie.shm.layout import ProtocolError
from sie.values.errors import Internal

_MAX_KNOWN: Final = 256
_MAX_ANSWERS: Final = 16
_MAX_HEAD_BYTES: Final = 4096
_read_times: Final = struct.Struct("<3q").unpack_from


class Basis(NamedTuple):
    """What requests are judged by; models is another object whenever any model has changed."""

    models: object
    limits: Limits


class KnownAnswer(NamedTuple):
    """What answers with one header of a reply have in common; nbytes is the least that its payload has."""

    text: bytes
    """The JSON, which the tensors follow."""
    places: tuple[slice, ...]
    """Where those lie in the payload of the reply."""
    times_offset: int
    nbytes: int


class KnownInfer(NamedTuple):
    """A request that was judged, but for its elements: call may hold those of another one."""

    path: ModelPath
    entry: ModelEntry
    plan: Plan
    call: InferCall
    places: tuple[slice, ...]
    """Where the elements of its inputs lie in its body."""
    answers: dict[bytes, KnownAnswer]
    """Its answers so far, by the header of their reply."""


class ReadAnswer(NamedTuple):
    """The body of an answer, the bytes of its JSON, and the reply's times as `timing_of` takes them."""

    body: bytes
    json_bytes: int
    times: tuple[int, int, int]


class KnownInfers:
    """The requests to infer that one process knows."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, bytes], KnownInfer] = {}
        self._splits: dict[str, int] = {}
        self._basis: Basis | None = None

    def find(self, model: str, length: str, body: bytes, models: object, limits: Limits) -> KnownInfer | None:
        """Return what is known of a request by its path's model, the header that says how long its JSON is, and its body.

        models and limits are those of a `Basis`.
        """
        split, basis = self._splits.get(length), self._basis
        if split is None or basis is None or basis.models is not models or basis.limits is not limits:
            return None
        return self._known.get((model, len(body), body[:split]))

    def learn(self, model: str, length: str, body: bytes, basis: Basis, known: KnownInfer) -> None:
        """Keep what was found out about a request, to be found by the same words."""
        old = self._basis
        is_same = old is not None and old.models is basis.models and old.limits is basis.limits
        if not is_same or max(len(self._known), len(self._splits)) >= _MAX_KNOWN:
            self._known.clear()
            self._splits.clear()
            self._basis = basis
        split = self._splits[length] = int(length)
        self._known[model, len(body), body[:split]] = known


def places_in(body: bytes, length: str, call: InferCall) -> tuple[slice, ...] | None:
    """Return where the elements of a request lie in its body; None for one whose like is not to be known by its JSON.

    length, which was judged, is how long that is. Elements in the JSON itself, a time of its own and classes, which are
    made of elements, are left to the longer way.
    """
    request, start = call.request, int(length)
    if not 0 < start <= _MAX_HEAD_BYTES or request.timeout_us or any(wanted.num_classes for wanted in call.wanted):
        return None
    places: list[slice] = []
    for tensor in request.inputs:
        places.append(slice(start, start + len(tensor.data)))
        start += len(tensor.data)
    return tuple(places) if start == len(body) else None


def header_of(raw: Reply) -> bytes:
    """Return the header of a reply. Raises Internal, having let the reply go, for one that cannot be read."""
    try:
        return split_extent(raw.view)[0]
    except ProtocolError as error:
        raw.release()
        raise Internal("the worker's reply could not be read") from error


def read_answer(answers: dict[bytes, KnownAnswer], raw: Reply) -> ReadAnswer | None:
    """Return the answer in a reply, having let that go; None, the reply being kept, for one whose like was not seen."""
    try:
        header, payload = split_extent(raw.view)
    except ProtocolError:
        return None
    known = answers.get(header)
    if known is None or len(payload) < known.nbytes:
        return None
    times = _read_times(payload, known.times_offset)
    body = b"".join([known.text, *[payload[place] for place in known.places]])
    raw.release()
    return ReadAnswer(body, len(known.text), times)


def learn_answer(answers: dict[bytes, KnownAnswer], header: bytes, body: bytes, json_bytes: int) -> None:
    """Keep what answers with this header of a reply have in common, where all tensors lie behind the JSON."""
    times_offset, spans, nbytes = places_of(header)
    if len(answers) < _MAX_ANSWERS and json_bytes + sum([end - start for start, end in spans]) == len(body):
        places = tuple([slice(start, end) for start, end in spans])
        answers[header] = KnownAnswer(body[:json_bytes], places, times_offset, nbytes)
