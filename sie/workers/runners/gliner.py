"""Runs a GLiNER model: takes windows of texts, and returns entities and relations.

The library's collator, model and decoder do the work. Its data loader, its progress bars and its pairwise comparison of
spans are not used. Windows of one task run together, sorted by length, so that batches have little padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.extract import Entity, Extraction, ExtractTask, Gliner, Relation
from sie.values.spans import choose_spans
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.packed.rotation import find_rotations
from sie.workers.runners.encode import weight_bytes

_DEFAULT_THRESHOLD = 0.5
MAX_BATCH_WORDS = 8192
"""Most words of a batch, including padding: the spans of all words are in memory at once."""

Words = list[tuple[str, int, int]]
"""The words of a window: text, start and end."""


class GlinerRunner:
    """A loaded GLiNER model. Built by `sie.workers.loading.libraries`; used by one thread at a time."""

    def __init__(self, card: ModelCard, model: Any, dtype: str, limits: Limits) -> None:
        assert isinstance(card.extract, Gliner)
        self.card = card
        self.dtype = dtype
        """Format of the weights: float32, bfloat16 or float16."""
        self.memory_bytes = weight_bytes(model.parameters())
        self._relations = card.extract.relations
        self._model = model
        # Padding would give a window the rotary factors of a longer one.
        self._max_batch_words = MAX_BATCH_WORDS if find_rotations(model) is None else 0
        self._collator = model.create_collator()
        self._split = model.data_processor.words_splitter
        self._finds_ends = model.config.span_mode == "token_level"
        self._max_spans = limits.max_span_candidates
        model.decoder.greedy_search = _choose_best
        if self._relations:
            _limit_candidates(model.model, limits.max_relation_candidates)

    def run(self, step: RowStep) -> StepOutputs:
        """Return the extractions of a step; see `RowRunner`."""
        return StepOutputs(extract=self.run_extract(step.inputs, step.tasks))

    def run_extract(self, inputs: Sequence[NDArray[np.uint8]], tasks: Sequence[ExtractTask]) -> list[Extraction]:
        """Return each window's extraction; inputs are UTF-8, positions are code points within the window.

        Raises BadRequest for a threshold that leaves too many spans of a window.
        """
        found = [Extraction()] * len(inputs)
        texts = [bytes(window).decode() for window in inputs]
        words: list[Words] = [list(self._split(text)) for text in texts]
        groups: dict[ExtractTask, list[int]] = {}
        for item, task in enumerate(tasks):
            if words[item]:
                groups.setdefault(task, []).append(item)
        for task, members in groups.items():
            members.sort(key=lambda item: len(words[item]))
            for batch in split_batches(members, [len(words[item]) for item in members], self._max_batch_words):
                answers = self._run([words[item] for item in batch], task)
                for item, (spans, relations) in zip(batch, answers, strict=True):
                    found[item] = _extraction(texts[item], words[item], spans, relations)
        return found

    def _run(self, windows: list[Words], task: ExtractTask) -> list[tuple[list[Any], list[Any]]]:
        """Return the library's spans and relations of each window, from one forward pass."""
        model = self._model
        threshold = _DEFAULT_THRESHOLD if task.threshold is None else task.threshold
        rows = model.prepare_base_input([[text for text, _, _ in words] for words in windows])
        labels = list(dict.fromkeys(task.labels))
        choice: dict[str, Any] = {
            "threshold": threshold,
            "flat_ner": task.flat_ner is not False,
            "multi_label": bool(task.multi_label),
        }
        if not self._relations:
            batch = model.collate_batch(rows, labels, self._collator)
            output = _in_float32(model.run_batch(batch, threshold=threshold))
            self._check_spans(output.logits, [len(words) for words in windows], threshold)
            return [(spans, []) for spans in model.decode_batch(output, batch, **choice)]
        batch = model.collate_batch(rows, labels, self._collator, list(dict.fromkeys(task.relation_labels)))
        output = _in_float32(model.run_batch(batch, threshold=threshold))
        self._check_spans(output.logits, [len(words) for words in windows], threshold)
        spans, relations = model.decode_batch(output, batch, relation_threshold=task.relation_threshold, **choice)
        return list(zip(spans, relations if task.relation_labels else [[]] * len(windows), strict=True))

    def _check_spans(self, logits: torch.Tensor, lengths: Sequence[int], threshold: float) -> None:
        """Raise BadRequest for a threshold that leaves too many spans for the decoder, which is Python code.

        logits are (n, words, widths, labels). For a model that finds ends they are (n, words, labels,
        start | end | inside), and the decoder tries every start with every end.
        """
        is_word = torch.arange(logits.shape[1])[None] < torch.tensor(lengths)[:, None]
        passes = (torch.sigmoid(logits) > threshold) & is_word.to(logits.device)[:, :, None, None]
        if self._finds_ends:
            num_starts, num_ends = passes[..., 0].flatten(1).sum(1), passes[..., 1].flatten(1).sum(1)
            counts: list[int] = (num_starts * num_ends).tolist()
        else:
            counts = passes.flatten(1).sum(1).tolist()
        if max(counts) > self._max_spans:
            raise BadRequest(
                f"A threshold of {threshold:g} leaves {max(counts)} spans of a text to choose from, over "
                f"max_span_candidates ({self._max_spans}); raise it, or send fewer labels - at `$.params.options.threshold`"
            )


def _choose_best(spans: list[Any], flat_ner: bool = True, multi_label: bool = False) -> list[Any]:
    """Return the result of the library's `greedy_search`, in the order of the words."""
    best_first = sorted(spans, key=lambda span: -span.score)
    kept = choose_spans([(span.start, span.end + 1) for span in best_first], flat=flat_ner, multi_label=multi_label)
    return sorted((best_first[place] for place in kept), key=lambda span: span.start)


def split_batches(members: list[int], lengths: list[int], max_words: int) -> Iterator[list[int]]:
    """Yield the members, sorted by length, in batches of at most max_words with padding, or of one member."""
    start = 0
    for place, length in enumerate(lengths):
        if place > start and (place - start + 1) * length > max_words:
            yield members[start:place]
            start = place
    yield members[start:]


def _extraction(text: str, words: Words, spans: list[Any], relations: list[Any]) -> Extraction:
    """Return the library's answer with positions in the window instead of word indices."""

    def place(span: Any) -> tuple[int, int]:
        return words[span.start][1], words[span.end][2]

    def cut(span: Any) -> str:
        start, end = place(span)
        return text[start:end]

    entities = [Entity(span.entity_type, span.score, *place(span)) for span in spans]
    ties = [
        Relation(cut(spans[head]), cut(spans[tail]), relation, score)
        for head, relation, tail, score in relations
        if head < len(spans) and tail < len(spans)
    ]
    return Extraction(entities, ties)


def _in_float32(output: Any) -> Any:
    """Return the model's output with float32 logits: 16-bit scores would tie, or miss a threshold."""
    for name in ("logits", "rel_logits"):
        logits = getattr(output, name, None)
        if isinstance(logits, torch.Tensor):
            output[name] = logits.float()
    return output


def _limit_candidates(core: Any, max_candidates: int) -> None:
    """Limit the search for relations to the first entities of a window.

    The library pairs every span over the threshold with every other one. So memory would grow with the square of a
    number that a client's threshold controls. The entities themselves do not change.
    """
    represent = core.represent_spans

    def represent_some(*args: Any, **kwargs: Any) -> Any:
        scores, spans, mask, places, *others = represent(*args, **kwargs)
        if spans is not None and spans.shape[1] > max_candidates:
            spans, mask = spans[:, :max_candidates], mask[:, :max_candidates]
            places = places[:, :max_candidates] if places is not None else None
        return (scores, spans, mask, places, *others)

    core.represent_spans = represent_some
