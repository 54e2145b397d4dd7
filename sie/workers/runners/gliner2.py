"""Runs a GLiNER2 model: takes windows of texts, and returns entities, relations and the scores of label groups.

The library's processor, model and decoder do the work. Windows of one task run together, sorted by length, but only if
padding cannot change an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.extract import Classification, Entity, Extraction, ExtractTask, Relation
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.packed.rotation import find_rotations
from sie.workers.runners.encode import weight_bytes
from sie.workers.runners.gliner import MAX_BATCH_WORDS, split_batches

_DEFAULT_THRESHOLD = 0.5
_CACHED_WORDS, _CACHED_CHARS = 8192, 64


class Gliner2Runner:
    """A loaded GLiNER2 model. Built by `sie.workers.loading.libraries`; used by one thread at a time."""

    dtype = "float32"
    """Format of the weights: the library decides about spans in the model's own format, where 16-bit scores tie."""

    def __init__(self, card: ModelCard, model: Any, limits: Limits) -> None:
        self.card = card
        self.memory_bytes = weight_bytes(model.parameters())
        self._model = model
        # The boundary head's relations see the padding, which would also give a window another one's rotary factors.
        is_alone = model.architecture == "boundary" or find_rotations(model) is not None
        self._max_batch_words = 0 if is_alone else MAX_BATCH_WORDS
        self._max_spans = limits.max_span_candidates
        self._device = next(model.parameters()).device
        model.processor.change_mode(is_training=False)
        limit_cache(model.processor)

    def run(self, step: RowStep) -> StepOutputs:
        """Return the extractions of a step; see `RowRunner`."""
        return StepOutputs(extract=self.run_extract(step.inputs, step.tasks))

    def run_extract(self, inputs: Sequence[NDArray[np.uint8]], tasks: Sequence[ExtractTask]) -> list[Extraction]:
        """Return each window's extraction; inputs are UTF-8, positions are code points within the window.

        classifications have each label of each group, in the task's order. Raises BadRequest for a threshold that leaves
        too many spans of a window.
        """
        found = [Extraction()] * len(inputs)
        texts = [bytes(window).decode() for window in inputs]
        lengths = [sum(1 for _ in self._model.processor.word_splitter(text)) for text in texts]
        groups: dict[ExtractTask, list[int]] = {}
        for item, task in enumerate(tasks):
            groups.setdefault(task, []).append(item)
        for task, members in groups.items():
            members.sort(key=lengths.__getitem__)
            for batch in split_batches(members, [lengths[item] for item in members], self._max_batch_words):
                answers = self._run([texts[item] for item in batch], task)
                for item, answer in zip(batch, answers, strict=True):
                    found[item] = Extraction(
                        list(_entities(texts[item], answer)),
                        list(_relations(texts[item], answer, task)),
                        [Classification(*one) for group in task.label_groups for one in answer[group.name]],
                    )
        return found

    def _run(self, texts: list[str], task: ExtractTask) -> list[dict[str, Any]]:
        """Return the library's answer for each window, from one forward pass."""
        model, threshold = self._model, _DEFAULT_THRESHOLD if task.threshold is None else task.threshold
        dicts, metadata = model._build_schema_dicts_and_metadata([_schema(model, task)] * len(texts))
        batch = model.processor.collate_fn_inference(
            list(zip(texts, dicts, strict=True)), error_policy="raise", architecture=model.architecture
        ).to(self._device)
        lowest = threshold if task.relation_threshold is None else min(threshold, task.relation_threshold)
        if model.architecture != "boundary":  # whose candidates have a fixed budget
            model._compute_direct_span_logits_batched = partial(self._span_logits, lowest)
        with torch.inference_mode():
            return model._extract_from_batch(batch, threshold, metadata, include_confidence=True, include_spans=True)

    def _span_logits(self, threshold: float, batch: Any, *embeddings: Any) -> Any:
        """Return the library's logits. Raises BadRequest for a threshold that leaves too many spans for its decoder.

        The decoder is Python code, and compares the spans of a label with each other.
        """
        logits, counts = type(self._model)._compute_direct_span_logits_batched(self._model, batch, *embeddings)
        for kinds, parts in zip(batch.task_types, logits, strict=True):
            own = [
                part[:1] if kind == "entities" else part
                for kind, part in zip(kinds, parts, strict=True)
                if part is not None
            ]
            num_spans = sum(int((torch.sigmoid(part) >= threshold).sum()) for part in own)
            if num_spans > self._max_spans:
                raise BadRequest(
                    f"A threshold of {threshold:g} leaves {num_spans} spans of a text to choose from, over "
                    f"max_span_candidates ({self._max_spans}); raise it, or send fewer labels - at `$.params.options.threshold`"
                )
        return logits, counts


def limit_cache(processor: Any) -> None:
    """Cache the tokens of short words only. The library would cache 65,536 words, each as long as a client makes it."""
    tokenize, kept = processor.tokenizer.tokenize, lru_cache(_CACHED_WORDS)(processor.tokenizer.tokenize)
    processor._tokenize_cached = lambda word: (kept if len(word) <= _CACHED_CHARS else tokenize)(word)


def _schema(model: Any, task: ExtractTask) -> Any:
    schema = model.create_schema()
    if task.labels:
        schema.entities(list(dict.fromkeys(task.labels)))
    if task.relation_labels:
        schema.relations(list(dict.fromkeys(task.relation_labels)), threshold=task.relation_threshold)
    for group in task.label_groups:
        # As several labels over a threshold of 0, so that the answer has all of them.
        function = "sigmoid" if task.classification_type == "multi-label" else "softmax"
        schema.classification(group.name, list(group.labels), multi_label=True, class_act=function, cls_threshold=0.0)
    return schema


def _entities(text: str, answer: dict[str, Any]) -> Iterator[Entity]:
    """Yield the entities of a window. The library may read a full stop behind the text, which is not part of it."""
    labelled = ((label, span) for part in answer.get("entities", ()) for label, spans in part.items() for span in spans)
    for label, span in sorted(labelled, key=lambda one: (one[1]["start"], one[1]["end"], one[0])):
        if span["start"] < len(text):
            yield Entity(label, span["confidence"], span["start"], min(span["end"], len(text)))


def _relations(text: str, answer: dict[str, Any], task: ExtractTask) -> Iterator[Relation]:
    """Yield the relations of a window; without a score of its own, a relation has that of its weaker end."""
    for name in dict.fromkeys(task.relation_labels):
        for pair in answer.get(name) or ():
            head, tail = (text[pair[end]["start"] : pair[end]["end"]] for end in ("head", "tail"))
            score = pair.get("confidence", min(pair[end]["confidence"] for end in ("head", "tail")))
            if head and tail:
                yield Relation(head, tail, name, score)
