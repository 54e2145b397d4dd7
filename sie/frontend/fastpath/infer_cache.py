"""Caches the layout of infer requests and of their answers. Must never keep the elements of a request.

Clients often send the same JSON with other tensor elements behind it. The cache key of a checked request is the model's
path, the bytes of the JSON and the length of the body. A hit reads only the elements. The JSON of an answer is cached by
the header of the worker's reply. All entries are dropped when the models or the limits change.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sie.config.limits import Limits
from sie.frontend.dialects.kserve.infer import InferCall
from sie.frontend.engine.interface import Reply
from sie.frontend.http.routing import Match
from sie.frontend.tensors.held_reply import places_of
from sie.frontend.tensors.infer import Plan
from sie.ipc.messages import ModelEntry
from sie.values.errors import Internal, ProtocolError
from sie.values.work_bytes import REPLY_TIMES, split_extent

_MAX_REQUESTS: Final = 256
_MAX_ANSWERS: Final = 16
_MAX_HEAD_BYTES: Final = 4096
_read_times: Final = REPLY_TIMES.unpack_from


class Basis(NamedTuple):
    """The models and limits that requests were checked against. models is a new object after any model has changed."""

    models: object
    limits: Limits


class CachedAnswer(NamedTuple):
    """The layout of all answers whose replies have one header. nbytes is the smallest valid size of the payload."""

    text: bytes
    """The JSON; the tensors follow it."""
    places: tuple[slice, ...]
    """The slices of the tensors in the payload of the reply."""
    times_offset: int
    nbytes: int


class CachedInfer(NamedTuple):
    """A checked request. If it has places, its elements must be read from the body, never from call."""

    found: Match
    entry: ModelEntry
    plan: Plan
    call: InferCall
    places: tuple[slice, ...]
    """The slices of the inputs' elements in the body."""
    answers: dict[bytes, CachedAnswer]
    """The layouts of its answers, by the header of the reply."""


class ReadAnswer(NamedTuple):
    """The body of an answer, the size of its JSON, and the times of the reply in the form that `timing_of` takes."""

    body: bytes
    json_bytes: int
    times: tuple[int, int, int]


class InferCache:
    """The cached infer requests of one process."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, int, bytes], CachedInfer] = {}
        self._splits: dict[str, int] = {}
        self._basis: Basis | None = None

    def find(self, model: str, length: str, body: bytes, models: object, limits: Limits) -> CachedInfer | None:
        """Return the cached request with the same model, JSON and body length, or None.

        length is the value of the header with the length of the JSON. models and limits are those of a `Basis`.
        """
        split, basis = self._splits.get(length), self._basis
        if split is None or basis is None or basis.models is not models or basis.limits is not limits:
            return None
        return self._requests.get((model, len(body), body[:split]))

    def add(self, model: str, length: str, body: bytes, basis: Basis, cached: CachedInfer) -> None:
        """Cache a checked request. Drops all entries first if the basis has changed or the cache is full."""
        old = self._basis
        is_same = old is not None and old.models is basis.models and old.limits is basis.limits
        if not is_same or max(len(self._requests), len(self._splits)) >= _MAX_REQUESTS:
            self._requests.clear()
            self._splits.clear()
            self._basis = basis
        split = self._splits[length] = int(length)
        self._requests[model, len(body), body[:split]] = cached


def places_in(body: bytes, length: str, call: InferCall) -> tuple[slice, ...] | None:
    """Return the slices of a request's elements in its body, or None if the request cannot be cached by its JSON.

    length is the checked length of the JSON. A request is not cacheable if it has elements in the JSON, its own timeout,
    or classes among its outputs, because classes are computed from elements.
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
    """Return the header of a reply. Releases the reply and raises Internal if it cannot be read."""
    try:
        return split_extent(raw.view)[0]
    except ProtocolError as error:
        raw.release()
        raise Internal("the worker's reply could not be read") from error


def read_answer(answers: dict[bytes, CachedAnswer], raw: Reply) -> ReadAnswer | None:
    """Return the answer and release the reply; return None and keep the reply if its header is new or malformed."""
    try:
        header, payload = split_extent(raw.view)
    except ProtocolError:
        return None
    cached = answers.get(header)
    if cached is None or len(payload) < cached.nbytes:
        return None
    times = _read_times(payload, cached.times_offset)
    body = b"".join([cached.text, *[payload[place] for place in cached.places]])
    raw.release()
    return ReadAnswer(body, len(cached.text), times)


def cache_answer(answers: dict[bytes, CachedAnswer], header: bytes, body: bytes, json_bytes: int) -> None:
    """Cache the layout of answers whose replies have this header, if all their tensors follow the JSON."""
    times_offset, spans, nbytes = places_of(header)
    if len(answers) < _MAX_ANSWERS and json_bytes + sum([end - start for start, end in spans]) == len(body):
        places = tuple([slice(start, end) for start, end in spans])
        answers[header] = CachedAnswer(body[:json_bytes], places, times_offset, nbytes)
