"""Owns what is known of requests to encode one text and nothing else, by their model: all but the text and its row.

Most small requests are of this kind. Once one of them went the whole way, what its card made of it stands here, and for each
header of a reply what lies before the row in an answer as msgpack. What is kept ends with the models and limits that it
was judged by.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sie.config.limits import Limits
from sie.frontend.engine.request_layout import EncodeWords
from sie.frontend.engine.worker_link import Reply
from sie.frontend.operations.reply_reader import TIMES_BYTES, place_of_row, read_times
from sie.ipc.messages import ModelEntry
from sie.shm.extent import split_extent
from sie.shm.layout import ProtocolError
from sie.values.encode import EncodeRequest

_MAX_KNOWN: Final = 1024
_MAX_ROWS: Final = 16
_DENSE_ONLY: Final = ("dense",)


class KnownRow(NamedTuple):
    """What answers with one header of a reply have in common."""

    before: bytes
    """The answer up to the row."""
    place: slice
    """Where the row lies in the payload of the reply."""


class KnownText(NamedTuple):
    """A model that was asked for a text's dense vector without a word more."""

    model: str
    """As it was asked for."""
    entry: ModelEntry
    words: EncodeWords
    rows: dict[bytes, KnownRow]
    """Its answers so far, by the header of their reply."""

    def request_of(self, text: str) -> EncodeRequest:
        """Return the request for a text, judged and resolved."""
        _, output_dtype, _, _, output_types = self.words
        return EncodeRequest(model=self.model, texts=[text], output_types=output_types, output_dtype=output_dtype)


class KnownTexts:
    """The models of one process that are known in this way."""

    def __init__(self) -> None:
        self._known: dict[str, KnownText] = {}
        self._models: object = None
        self._limits: Limits | None = None

    def find(self, model: str, models: object, limits: Limits) -> KnownText | None:
        """Return what is known of a model; models is another object whenever any of them has changed."""
        if models is not self._models or limits is not self._limits:
            return None
        return self._known.get(model)

    def learn(
        self, models: object, limits: Limits, entry: ModelEntry, request: EncodeRequest, words: EncodeWords
    ) -> None:
        """Keep what a card made of a request that was no more than a text; others are not kept."""
        if request.options or request.instruction or request.output_types != _DENSE_ONLY or request.images is not None:
            return
        if models is not self._models or limits is not self._limits or len(self._known) >= _MAX_KNOWN:
            self._known.clear()
            self._models, self._limits = models, limits
        self._known[request.model] = KnownText(request.model, entry, words, {})


class ReadRow(NamedTuple):
    """The answer up to the row, the row (in the reply's memory), and the reply's times as `timing_of` takes them."""

    before: bytes
    row: memoryview
    times: tuple[int, int, int]


def read_row(known: KnownText, raw: Reply) -> ReadRow | None:
    """Return the row in a reply; None for one whose like was not seen, or that is broken, for others to say."""
    try:
        header, payload = split_extent(raw.view)
    except ProtocolError:
        return None
    found = known.rows.get(header)
    if found is None or len(payload) < found.place.stop:
        return None
    return ReadRow(found.before, payload[found.place], read_times(payload))


def learn_row(known: KnownText, raw: Reply, before: bytes) -> None:
    """Keep what an answer with this reply, which was read, begins with."""
    header, _ = split_extent(raw.view)
    place = place_of_row(header)
    if len(known.rows) < _MAX_ROWS and place.start >= TIMES_BYTES:
        known.rows[header] = KnownRow(before, place)
