"""Runs the extract operation for every model family: from a typed request to the findings in each item.

One request is one submit. Its work may have more items than the request: one for each window of a text, or for each
text and label. The worker spreads them over steps, and the family's `Reading` joins them again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.engine.interface import Engine, Pending, Reply
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.inputs.mixed import mix_items
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.text_bounds import check_chars
from sie.frontend.inputs.tokenize import LONG_TEXT_BYTES, Tokenizer, is_long
from sie.frontend.models.model_table import ModelTable
from sie.frontend.operations.extraction import (
    boxes,
    gliclass,
    gliner,
    gliner_union,
    glirel,
    image_texts,
    label_pairs,
    text_classes,
    token_labels,
)
from sie.frontend.operations.extraction.boxes import BoxReading
from sie.frontend.operations.extraction.gliclass import LabelReading
from sie.frontend.operations.extraction.gliner import WindowReading
from sie.frontend.operations.extraction.gliner_union import UnionReading
from sie.frontend.operations.extraction.glirel import RelationReading
from sie.frontend.operations.extraction.image_texts import PromptReading
from sie.frontend.operations.extraction.label_pairs import PairReading
from sie.frontend.operations.extraction.text_classes import ClassReading
from sie.frontend.operations.extraction.token_labels import TokenReading
from sie.frontend.operations.extraction.whole_texts import TextReading
from sie.frontend.operations.interface import ExtractSubmission
from sie.frontend.operations.reply_reader import read_pieces, timing_of
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal
from sie.values.extract import (
    Detection,
    Entity,
    Extraction,
    ExtractRule,
    ExtractTask,
    Gliclass,
    Gliner,
    GlinerUnion,
    Glirel,
    ImageToText,
    TextClassification,
    TokenClassification,
    ZeroShot,
)
from sie.values.inference import ExtractReply, ExtractRequest
from sie.values.work import WorkHeader
from sie.values.work_bytes import MAX_HEADER_BYTES

_MANY_ENTITIES: Final = 512
"""Up to this number of given entities, finding them among the words of their texts takes less than 2 ms."""
_to_msgpack: Final = msgspec.msgpack.Encoder().encode
_MAX_TASK_BYTES: Final = MAX_HEADER_BYTES // 2
"""The rest of the header holds the model's name and the arrays."""


class Reading(Protocol):
    """One family's conversion of texts to work, and of the worker's answer to extractions."""

    cuts: Cuts
    """The texts that `prepare` cut. For a detector, the labels that it cut."""

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent, the bounds of the work's items first."""
        ...

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return one extraction for each text; pieces are the worker's answer, one for each work item."""
        ...


class Submitted(NamedTuple):
    """A request sent to a worker, with the data needed to read its reply."""

    pending: Pending
    reading: Reading
    output: str
    num_items: int
    """Items of the work, not of the request."""
    tokenization_ns: int
    input_tokens: int
    """Tokens of the texts and of the labels or queries, each counted once. Images have none."""


class Extractor:
    """Run extract requests on the engine."""

    def __init__(
        self, engine: Engine, models: ModelTable, limits: Limits, pool: ThreadPoolExecutor, images: ImageReader
    ) -> None:
        self._engine = engine
        self._images = images
        self._models = models
        self._limits = limits
        self._pool = pool

    def reconfigure(self, limits: Limits) -> None:
        """Use reloaded limits for later requests."""
        self._limits = limits

    async def start(self, entry: ModelEntry, request: ExtractRequest, deadline_ns: int) -> Submitted:
        """Tokenise and submit a resolved request.

        Raises the errors of admission, the family's `Reading` and `ImageReader.read`, BadRequest for too many pairs, and
        InputTooLong for a text of too many characters.
        """
        began_ns = time.monotonic_ns()
        card, task, rule = entry.card, request.task, entry.card.extract
        assert rule is not None
        check_pairs(request, card, self._limits)
        told = _task_bytes(rule, task)
        tokenizer = await self._models.tokenizer(entry) if card.tokenizer_file else None
        if tokenizer is not None:
            check_chars(card.id, [*request.texts, *request.pairs.values()], tokenizer.max_chars)
        reading = _reading(card, request, tokenizer, self._limits)
        pool = None if tokenizer is None else tokenizer.pool
        if request.images is None:
            num_entities = sum(map(len, request.given.values()))
            arrays = await self._prepare(
                reading, request.texts, task, rule, pool, seconds=request.pairs.values(), num_entities=num_entities
            )
            input_tokens, request.cuts = int(arrays[0][1][-1]), reading.cuts
            if isinstance(reading, RelationReading):
                input_tokens = reading.num_tokens
        else:
            arrays, input_tokens = await self._prepare_images(
                reading, request, card, request.images, deadline_ns, pool=pool
            )
        cu_seqlens = arrays[0][1]
        num_tokens = int(cu_seqlens[-1])
        took_ns = time.monotonic_ns() - began_ns
        header = WorkHeader(card.id, "extract", len(cu_seqlens) - 1, (), output_types=(rule.gives,), task=told)
        if request.images is None:
            pending = self._engine.submit(header, arrays, num_tokens, deadline_ns)
        else:
            pending = await self._engine.submit_large(header, arrays, num_tokens, deadline_ns)
        return Submitted(pending, reading, rule.gives, header.num_items, took_ns, input_tokens)

    async def _prepare_images(
        self,
        reading: Reading,
        request: ExtractRequest,
        card: ModelCard,
        images: dict[int, list[memoryview]],
        deadline_ns: int,
        *,
        pool: ThreadPoolExecutor | None,
    ) -> tuple[Arrays, int]:
        """Return the arrays of a request with images, and the number of tokens in its texts and queries."""
        rule, image_rule, num_items = card.extract, card.image, len(request.texts)
        assert rule is not None
        assert image_rule is not None
        if isinstance(reading, BoxReading | PromptReading):
            queries = await self._prepare(reading, reading.texts, request.task, rule, pool)
            read = await self._images.read(images, image_rule, deadline_ns)
            reading.see(read)
            request.cuts = dict.fromkeys(range(num_items), min(reading.cuts.values())) if reading.cuts else {}
            return [*mix_items(num_items, read, image_rule, None), *queries], len(queries[0][1])
        texts = [text for item, text in enumerate(request.texts) if item not in images]
        arrays = await self._prepare(reading, texts, request.task, rule, pool) if texts else None
        places = [item for item in range(num_items) if item not in images]
        request.cuts = {places[number]: limit for number, limit in reading.cuts.items()}
        read = await self._images.read(images, image_rule, deadline_ns)
        num_tokens = 0 if arrays is None else int(arrays[0][1][-1])
        return mix_items(num_items, read, image_rule, arrays), num_tokens

    async def _prepare(
        self,
        reading: Reading,
        texts: list[str],
        task: ExtractTask,
        rule: ExtractRule,
        pool: ThreadPoolExecutor | None,
        *,
        seconds: Collection[str] = (),
        num_entities: int = 0,
    ) -> Arrays:
        """Tokenise at once, or on a thread when that would block the event loop too long.

        pool is the tokenizer's own thread, or None if it has none. seconds are the second texts of pairs, and num_entities
        counts the given entities; the reading has both.
        """
        if pool is None and not is_long_work(rule, task, [*texts, *seconds], num_entities):
            return reading.prepare(texts)
        return await asyncio.get_running_loop().run_in_executor(pool or self._pool, reading.prepare, texts)


def check_pairs(request: ExtractRequest, card: ModelCard, limits: Limits) -> None:
    """Raise BadRequest for a request of more texts times labels than a limit."""
    assert card.extract is not None
    num_pairs, limit = len(request.texts) * _num_rows(card.extract, request.task), limits.max_label_pairs
    if num_pairs > limit:
        raise BadRequest(
            f"Items times labels (or label groups) are {num_pairs}, over max_label_pairs ({limit}); split the request"
        )


def check_task(card: ModelCard, task: ExtractTask) -> None:
    """Raise BadRequest for a task that this card's model cannot do; works without a tokenizer."""
    match card.extract:
        case TokenClassification() as rule:
            token_labels.check_task(card.id, rule, task)
        case ZeroShot() if not task.by_class:
            label_pairs.check_task(task)
        case TextClassification() as rule:
            text_classes.check_task(card.id, rule, task)
        case Gliner() as rule:
            gliner.check_task(rule, task)
        case GlinerUnion() as rule:
            gliner_union.check_task(card.id, rule, task)
        case Glirel():
            glirel.check_task(task)
        case Gliclass() as rule:
            gliclass.check_task(rule, task)
        case Detection() as rule:
            boxes.check_task(card.id, rule, task)
        case ImageToText() as rule:
            image_texts.check_task(card.id, rule, task)
        case _:
            pass


def is_long_work(rule: ExtractRule, task: ExtractTask, texts: Sequence[str], num_entities: int = 0) -> bool:
    """Tell whether a request should be prepared on a thread; each row of work has a text and labels."""
    if num_entities > _MANY_ENTITIES:
        return True
    labels = [*task.labels, *task.relation_labels, *(label for group in task.label_groups for label in group.labels)]
    examples = [example.text for example in task.examples]
    return is_long([*texts, *labels, *examples], LONG_TEXT_BYTES // _num_rows(rule, task))


def _task_bytes(rule: ExtractRule, task: ExtractTask) -> bytes:
    """Return the task as bytes for the worker: for a detector only the threshold for boxes, for a generator of texts
    only their length.

    Raises BadRequest when the labels do not fit into the header.
    """
    if isinstance(rule, Detection):
        return _to_msgpack(ExtractTask(threshold=boxes.box_threshold(rule, task)))
    if isinstance(rule, ImageToText):
        return _to_msgpack(ExtractTask(max_new_tokens=task.max_new_tokens or rule.max_new_tokens))
    if rule.gives != "extract":
        return b""
    encoded = _to_msgpack(task)
    if len(encoded) > _MAX_TASK_BYTES:
        raise BadRequest(
            f"The labels and options take {len(encoded)} bytes, and a model that reads them itself takes at most "
            f"{_MAX_TASK_BYTES} - at `$.params`"
        )
    return encoded


def _num_rows(rule: ExtractRule, task: ExtractTask) -> int:
    """Return how many sequences each text appears in, without counting windows."""
    return len(task.labels if isinstance(rule, ZeroShot) else task.label_groups) or 1


def _reading(card: ModelCard, request: ExtractRequest, tokenizer: Tokenizer | None, limits: Limits) -> Reading:
    rule, task = card.extract, request.task
    if isinstance(rule, Gliner) and tokenizer is not None:
        return WindowReading(rule, task, tokenizer, limits)
    if isinstance(rule, GlinerUnion) and tokenizer is not None:
        return UnionReading(rule, task, tokenizer, limits)
    if isinstance(rule, Glirel) and tokenizer is not None:
        return RelationReading(rule, task, tokenizer, limits, request.given)
    if isinstance(rule, Gliclass) and tokenizer is not None:
        return LabelReading(rule, task, tokenizer, limits)
    if isinstance(rule, TokenClassification) and tokenizer is not None:
        return TokenReading(rule, task, tokenizer, limits)
    if isinstance(rule, ZeroShot) and task.by_class:
        rule = rule.classes
    if isinstance(rule, TextClassification) and tokenizer is not None:
        return ClassReading(rule, task, tokenizer, request.pairs)
    if isinstance(rule, ZeroShot) and tokenizer is not None:
        return PairReading(rule, task, tokenizer)
    if isinstance(rule, Detection) and tokenizer is not None:
        return BoxReading(rule, task, tokenizer)
    if isinstance(rule, ImageToText) and tokenizer is not None:
        return PromptReading(rule, task, tokenizer)
    return TextReading(card, task.overflow_policy)


def read_extractions(
    reply: Reply, submitted: ExtractSubmission, request: ExtractRequest, began_ns: int, max_chars: int
) -> ExtractReply:
    """Return the findings and the times, copied out of a reply's extent.

    began_ns is when the request's headers were read. Raises Internal when the extent does not match the layout, and
    BadRequest when the entities' texts have more than max_chars characters.
    """
    pieces, times = read_pieces(reply, submitted.output, submitted.num_items)
    try:
        extractions = submitted.reading.read(pieces)
    except ValueError as error:  # NumPy's, for arrays of another shape
        raise Internal("the worker's reply has another shape than the request") from error
    if len(extractions) != len(request.texts):
        raise Internal("the worker's reply has another shape than the request")
    named, num_chars = fill_texts(extractions, request.texts, max_chars)
    if isinstance(submitted.reading, RelationReading):
        num_chars = submitted.reading.num_chars
    return ExtractReply(
        model=request.model,
        extractions=named,
        input_tokens=submitted.input_tokens,
        num_images=len(request.images or ()),
        num_chars=num_chars,
        timing=timing_of(reply, times, began_ns, submitted.tokenization_ns),
    )


def fill_texts(extractions: Sequence[Extraction], texts: Sequence[str], max_chars: int) -> tuple[list[Extraction], int]:
    """Return the extractions with a text for each entity, cut by its offsets, and the number of characters cut.

    A worker sends offsets alone, and spans may overlap, so that their texts together are many times as long as the
    request. Raises BadRequest for more than max_chars.
    """
    num_chars = sum(
        [(one.end or 0) - (one.start or 0) for found in extractions for one in found.entities if _lacks_text(one)]
    )
    if num_chars > max_chars:
        raise BadRequest(
            f"The texts of the entities take {num_chars} characters, over max_reply_bytes ({max_chars}); split the request, "
            "or raise the threshold"
        )
    return [_with_texts(found, text) for found, text in zip(extractions, texts, strict=True)], num_chars


def _with_texts(found: Extraction, text: str) -> Extraction:
    entities = [
        msgspec.structs.replace(entity, text=text[entity.start : entity.end]) if _lacks_text(entity) else entity
        for entity in found.entities
    ]
    return msgspec.structs.replace(found, entities=entities)


def _lacks_text(entity: Entity) -> bool:
    return entity.text is None and entity.start is not None
