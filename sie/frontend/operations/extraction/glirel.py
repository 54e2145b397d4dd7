"""Prepares GLiREL requests: takes the entities of each item, finds their words, and counts tokens.

The worker gets a text's words and the places of the entities among them. It scores every label for every two entities.
Source: SIE API reference, section 19; glirel 1.2.1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.inputs.bounded_json import decode_typed
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.text_windows import split_words
from sie.frontend.inputs.tokenize import Tokenizer, bounds_of, too_long, unicode_error
from sie.frontend.operations.extraction.whole_texts import read_whole
from sie.values.errors import BadRequest, InputTooLong
from sie.values.extract import Entity, Extraction, ExtractTask, Glirel, Relation
from sie.values.glirel_items import MARKS, GlirelItem
from sie.values.inference import ExtractRequest

_SPECIAL_TOKENS: Final = 2
_MOST_GIVEN: Final = 4096  # the upper bound of max_relation_candidates, which is checked later
_PAIRS_PER_TOKEN: Final = 16
"""Pairs that take a token's time, with any number of labels. Measured on one core with a hidden size of 768: 8 beside
DeBERTa base (3.3 ms a token, 0.4 ms a pair), 22 beside DeBERTa large, the encoder of the published model."""
_Place = Annotated[int, msgspec.Meta(ge=0)]
_to_json: Final = msgspec.json.Encoder().encode


class _Given(msgspec.Struct, gc=False):
    start: _Place
    end: _Place
    text: str | None = None
    label: str = ""
    score: float = 1.0


class _Metadata(msgspec.Struct, gc=False):
    entities: Annotated[list[_Given], msgspec.Meta(max_length=_MOST_GIVEN)] | None = None


_FROM_MSGPACK: Final = msgspec.msgpack.Decoder(_Metadata)
_FROM_JSON: Final = msgspec.json.Decoder(_Metadata)
_NULLS: Final = (b"null", b"\xc0")
"""An absent value in JSON and in msgpack."""


def num_bytes(metadata: Mapping[int, msgspec.Raw]) -> int:
    """Return the size of all items' metadata, as they were sent."""
    return sum(memoryview(raw).nbytes for raw in metadata.values())


def read_given(request: ExtractRequest, limits: Limits) -> dict[int, tuple[Entity, ...]]:
    """Return the entities in each item's metadata. Those without a text get none here.

    Takes up to a second for the largest request. Raises BadRequest with the path of the fault, and for more entities,
    scores or characters than the limits.
    """
    decoder = _FROM_MSGPACK if request.is_msgpack else _FROM_JSON
    num_labels, num_scores, num_chars = len(set(request.task.labels)), 0, 0
    given: dict[int, tuple[Entity, ...]] = {}
    for index, raw in request.metadata.items():
        found = _decode(decoder, bytes(raw), f"$.items[{index}].metadata")
        where = f"$.items[{index}].metadata.entities"
        _check_count(len(found), limits, where)
        num_scores += len(found) * (len(found) - 1) * num_labels
        if num_scores > limits.max_relation_scores:
            raise BadRequest(
                f"Pairs of entities times labels are over max_relation_scores ({limits.max_relation_scores}); split the "
                f"request - at `{where}`"
            )
        for number, one in enumerate(found):
            _check_bounds(one.start, one.end, len(request.texts[index]), f"{where}[{number}]")
            num_chars += one.end - one.start if one.text is None else len(one.text)
        if num_chars > limits.max_reply_bytes:  # the answer has them
            raise BadRequest(
                f"The texts of the entities are over max_reply_bytes ({limits.max_reply_bytes}) - at `{where}`"
            )
        given[index] = tuple(Entity(one.label, one.score, one.start, one.end, one.text) for one in found)
    return given


def _decode(
    decoder: msgspec.json.Decoder[_Metadata] | msgspec.msgpack.Decoder[_Metadata], body: bytes, where: str
) -> list[_Given]:
    if body in _NULLS:
        return []
    try:
        return decode_typed(decoder, body).entities or []
    except BadRequest as error:
        raise BadRequest(error.message.replace("`$", f"`{where}")) from None


def _check_count(num_entities: int, limits: Limits, where: str) -> None:
    if num_entities > limits.max_relation_candidates:
        raise BadRequest(
            f"Entities are {num_entities}, over max_relation_candidates ({limits.max_relation_candidates}) - at `{where}`"
        )


def _check_bounds(start: int, end: int, num_chars: int, where: str) -> None:
    if end <= start:
        raise BadRequest(f"An entity must end after its start ({start}) - at `{where}.end`")
    if end > num_chars:
        raise BadRequest(f"An entity must end in its text, which has {num_chars} characters - at `{where}.end`")


def check_task(task: ExtractTask) -> None:
    """Raise BadRequest for a label with a mark of the model."""
    for index, label in enumerate(task.labels):
        if any(mark in label for mark in MARKS):
            raise BadRequest(f"A label must not hold any of {', '.join(MARKS)} - at `$.params.labels[{index}]`")


class RelationReading:
    """Prepares and reads one request; its work has one item for each text."""

    def __init__(
        self,
        rule: Glirel,
        task: ExtractTask,
        tokenizer: Tokenizer,
        limits: Limits,
        given: Mapping[int, Sequence[Entity]],
    ) -> None:
        self._rule = rule
        self._labels = tuple(dict.fromkeys(task.labels))
        self._tokenizer = tokenizer
        self._limits = limits
        self._given = dict(given)
        self.cuts: Cuts = {}
        self.num_tokens = 0
        """Tokens of the texts and labels; what an item costs has its pairs of entities, too."""
        self.num_chars = 0
        """Characters of the entities and relations that `read` returned."""

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent.

        Raises BadRequest for labels over a limit, and for entities that are too many or do not lie on words of the text.
        Raises InputTooLong for a text that the model cannot read at once.
        """
        prompt_tokens = self._count_prompt()
        try:
            items = [self._item(index, text) for index, text in enumerate(texts)]
            parts = [_to_json(item) for item in items]
            counts = [self._count(index, item.words, prompt_tokens) for index, item in enumerate(items)]
        except (TypeError, UnicodeEncodeError) as error:
            raise unicode_error((*texts, *self._labels), error) from None
        self.num_tokens = sum(counts)
        costs = [count + _pair_cost(len(item.spans)) for count, item in zip(counts, items, strict=True)]
        return [
            ("cu_seqlens", bounds_of(costs, len(costs))),
            ("text", np.frombuffer(b"".join(parts), np.uint8)),
            ("text_offsets", bounds_of(map(len, parts), len(parts))),
        ]

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return the given entities and the relations between them; the likeliest first.

        pieces are extractions as msgpack, uint8. The ends of their relations are numbers of given entities.
        """
        return [self._named(index, found) for index, found in enumerate(read_whole(pieces))]

    def _named(self, index: int, found: Extraction) -> Extraction:
        given = self._given.get(index, ())
        names = [entity.text or "" for entity in given]
        lengths, limit = [len(name) for name in names], self._limits.max_reply_bytes
        ends = [(int(one.head), int(one.tail)) for one in found.relations]
        self.num_chars += sum(lengths) + sum(lengths[head] + lengths[tail] for head, tail in ends)
        if self.num_chars > limit:
            raise BadRequest(
                f"The reply would hold over max_reply_bytes ({limit}) of the entities' texts; lower top_k, raise the "
                "threshold, or split the request"
            )
        relations = [
            Relation(names[head], names[tail], one.relation, one.score)
            for (head, tail), one in zip(ends, found.relations, strict=True)
        ]
        relations.sort(key=lambda one: (-one.score, one.relation, one.head, one.tail))
        return Extraction(list(given), relations)

    def _item(self, index: int, text: str) -> GlirelItem:
        given = self._given.get(index, ())
        where = f"$.items[{index}].metadata.entities"
        _check_count(len(given), self._limits, where)
        words = split_words(text)
        if not words:
            raise BadRequest(f"A text must not be blank - at `$.items[{index}].text`")
        if len(words) > self._rule.max_words:
            reason = f"{len(words)} words, and the model reads at most {self._rule.max_words} at once"
            raise self._too_long(index, reason)
        spans = [_words_of(entity, words, len(text), f"{where}[{number}]") for number, entity in enumerate(given)]
        self._given[index] = [_with_text(entity, text) for entity in given]
        return GlirelItem([text[start:end] for start, end in words], spans)

    def _count(self, index: int, words: list[str], prompt_tokens: int) -> int:
        """Return the tokens of an item's sequence. Raises InputTooLong for more than the model reads."""
        # A batch of one, because `encode` would block the event loop.
        (encoding,) = self._tokenizer.backend.encode_batch([words], is_pretokenized=True, add_special_tokens=False)
        num_tokens = len(encoding.ids) + prompt_tokens + _SPECIAL_TOKENS
        limit = self._tokenizer.card.max_sequence_length
        if limit is not None and num_tokens > limit:
            raise self._too_long(index, f"{num_tokens} tokens with the labels, and the model reads {limit} at once")
        return num_tokens

    def _count_prompt(self) -> int:
        limits = self._limits
        for index, label in enumerate(self._labels):
            if len(label) > limits.max_label_chars:
                raise BadRequest(
                    f"A label may have at most {limits.max_label_chars} characters - at `$.params.labels[{index}]`"
                )
        num_tokens = sum(len(ids) + 1 for ids in self._tokenizer.encode_plain(self._labels)) + 1
        if num_tokens > limits.max_prompt_tokens:
            raise BadRequest(
                f"The labels take {num_tokens} tokens, over max_prompt_tokens ({limits.max_prompt_tokens})"
            )
        return num_tokens

    def _too_long(self, index: int, reason: str) -> InputTooLong:
        return too_long(self._tokenizer.card, f"the text is too long: {reason} - at `$.items[{index}].text`")


def _words_of(entity: Entity, words: Sequence[tuple[int, int]], num_chars: int, where: str) -> tuple[int, int]:
    """Return the first and the last word that an entity touches. Raises BadRequest for one that is not in the text."""
    start, end = entity.start or 0, entity.end or 0
    _check_bounds(start, end, num_chars, where)
    first = bisect_right(words, start, key=itemgetter(1))
    last = bisect_left(words, end, key=itemgetter(0)) - 1
    if first > last:
        raise BadRequest(f"An entity must lie within its text and touch a word of it - at `{where}`")
    return first, last


def _with_text(entity: Entity, text: str) -> Entity:
    return msgspec.structs.replace(entity, text=text[entity.start : entity.end]) if entity.text is None else entity


def _pair_cost(num_entities: int) -> int:
    """Return the cost of the pairs of a text's entities, in tokens."""
    return num_entities * (num_entities - 1) // _PAIRS_PER_TOKEN
