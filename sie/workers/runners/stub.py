"""Runs a stub model: it returns rows from a hash of the text, after the delays of its options.

The formulas are in `sie.catalog.stub`.

Never imports torch: a worker that serves only stubs stays small and starts at once.
"""

from __future__ import annotations

import hashlib
import re
import struct
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.catalog.stub import BYTES_PER_TOKEN, adapted_text, count_stub_tokens
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import Internal
from sie.values.extract import Classification, DetectedObject, Entity, Extraction, ExtractTask
from sie.values.work import TensorForm, TensorTask
from sie.workers.device.faults import DeviceLostError
from sie.workers.model_api import ImageItem, OutputTensor, RowStep, StepOutputs, TensorInputs, TensorOutputs, Want
from sie.workers.runners.stub_faults import StubFaults

_NUM_ENTRIES = 16
"""Most entries of a stub's sparse vector."""
_WORD = re.compile(r"\S+")


class StubRunner:
    """Returns the card's outputs for texts, scores for pairs, and extractions for texts with labels.

    Building it takes the card's `load_ms`.
    """

    def __init__(self, card: ModelCard, slot: int = 0) -> None:
        """Take a stub's card; slot is the worker's slot, which one of the deliberate faults uses."""
        if card.stub is None:
            raise Internal(f"model {card.id!r} is not a stub")
        self.card = card
        self._options = card.stub
        self._max_bytes = card.stub.max_tokens * BYTES_PER_TOKEN
        self.memory_bytes = card.stub.memory_mb << 20
        self.adapters = StubAdapters()
        self._ragged: dict[str, Callable[[bytes | memoryview], Any]] = {
            "sparse": self._sparse, "multivector": self._multivector,
        }  # fmt: skip
        """Makes one text's output of each kind."""
        self._faults = StubFaults(card.stub, slot) if card.stub.has_faults else None
        time.sleep(card.stub.load_ms / 1e3)
        if self._faults is not None:
            self._faults.load()

    def run(self, step: RowStep) -> StepOutputs:
        """Return the outputs of a step; see `RowRunner`."""
        if step.operation == "score":
            return StepOutputs(scores=self.run_pairs(step.inputs))
        if step.operation == "extract":
            return StepOutputs(extract=self.run_extract(step.inputs, step.tasks))
        return self.run_wants(step.inputs, step.wants, step.loras)

    def run_texts(self, texts: Sequence[bytes | memoryview], loras: Sequence[str] = ()) -> NDArray[np.float32]:
        """Return (n, dense) float32 rows; sleep `latency_ms`, and `per_token_us` for each token of the step."""
        self._take_time(texts)
        return self._dense(_adapted(texts, loras))

    def _dense(self, texts: Sequence[bytes | memoryview]) -> NDArray[np.float32]:
        width = self._options.dense
        digests = b"".join([hashlib.shake_256(text).digest(width) for text in texts])
        rows = np.frombuffer(digests, dtype=np.int8).reshape(len(texts), width)
        values = np.true_divide(rows, np.float32(127), dtype=np.float32)
        return values if self._faults is None else self._faults.spoil(values, texts)

    def run_pairs(self, pairs: Sequence[bytes | memoryview]) -> NDArray[np.float32]:
        """Return (n, 1) float32 scores, 0 to 1; takes as long as `run_texts`."""
        self._take_time(pairs)
        scores = [int.from_bytes(hashlib.shake_256(pair).digest(3), "little") / 2**24 for pair in pairs]
        values = np.array(scores, dtype=np.float32)[:, None]
        return values if self._faults is None else self._faults.spoil(values, pairs)

    def run_extract(
        self, inputs: Sequence[bytes | NDArray[np.uint8] | ImageItem], tasks: Sequence[ExtractTask]
    ) -> list[Extraction]:
        """Return entities and classifications of texts, objects of images; takes as long as `run_texts`."""
        self._take_time([_bytes_of(item) if isinstance(item, ImageItem) else item for item in inputs])
        return [
            _detect(item, task) if isinstance(item, ImageItem) else _extract(bytes(item)[: self._max_bytes], task)
            for item, task in zip(inputs, tasks, strict=True)
        ]

    def run_tensors(self, requests: Sequence[TensorInputs]) -> TensorOutputs:
        """Return each request's inputs as its outputs, without a copy; takes as long as `run_texts`."""
        self._spend(sum(request.task.cost for request in requests))
        return TensorOutputs([_identity(request) for request in requests])

    def _take_time(self, texts: Sequence[bytes | memoryview | NDArray[np.uint8]]) -> None:
        options = self._options
        if self._faults is not None:
            self._faults.step(texts)
        if options.takes_time:
            self._spend(sum(count_stub_tokens(len(text), options.max_tokens) for text in texts))

    def _spend(self, tokens: int) -> None:
        options = self._options
        if options.takes_time:
            if 0 < options.lost_tokens < tokens:
                raise DeviceLostError(f"CUDA error: unspecified launch failure (a stub's step of {tokens} tokens)")
            if 0 < options.oom_tokens < tokens:
                raise MemoryError(f"a stub's step of {tokens} tokens, over oom_tokens")
            held = b"\1" * (tokens * options.kib_per_token << 10)  # ones, because zeros may never take real pages
            time.sleep(options.latency_ms / 1e3 + tokens * options.per_token_us / 1e6)
            del held

    def run_wants(
        self, inputs: Sequence[bytes | memoryview | ImageItem], wants: Sequence[Want], loras: Sequence[str] = ()
    ) -> StepOutputs:
        """Return the outputs that each item requests; takes the time of one step."""
        inputs = [_bytes_of(item) if isinstance(item, ImageItem) else item for item in inputs]
        wanted = {output for want in wants for output in want.output_types}
        self._take_time(inputs)
        inputs = _adapted(inputs, loras)
        dense = self._dense(inputs) if "dense" in wanted else None
        ragged: dict[str, Sequence[Any]] = {
            output: [make(text) if output in want.output_types else None
                     for text, want in zip(inputs, wants, strict=True)]
            for output, make in self._ragged.items() if output in wanted
        }  # fmt: skip
        return StepOutputs(dense, ragged)

    def _sparse(self, text: bytes | memoryview) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        digest = hashlib.shake_256(b"sparse" + bytes(text)).digest(4 * _NUM_ENTRIES)
        indices = np.unique(np.frombuffer(digest, "<u4") % self.card.dims["sparse"]).astype(np.int32)
        return indices, ((1 + indices % 127) / 127).astype(np.float32)

    def _multivector(self, text: bytes | memoryview) -> NDArray[np.float32]:
        width = self.card.dims["multivector"]
        num_tokens = count_stub_tokens(len(text), self._options.max_tokens)
        rows = (hashlib.shake_256(row.to_bytes(4, "little") + bytes(text)).digest(width) for row in range(num_tokens))
        values = np.frombuffer(b"".join(rows), np.int8).reshape(num_tokens, width)
        return np.true_divide(values, np.float32(127), dtype=np.float32)


def _identity(request: TensorInputs) -> tuple[OutputTensor, ...]:
    return tuple([OutputTensor(form, request.data[index]) for form, index in _outputs_of(request.task)])


@lru_cache(maxsize=256)
def _outputs_of(task: TensorTask) -> list[tuple[TensorForm, int]]:
    """Return each output, and the index of the input whose bytes it repeats."""
    found = {form.name.replace("INPUT", "OUTPUT"): (form, index) for index, form in enumerate(task.inputs)}
    wanted = [(name, *found[name]) for name in task.outputs or found]
    return [(TensorForm(name, form.datatype, form.shape), index) for name, form, index in wanted]


def _bytes_of(item: ImageItem) -> bytes:
    """Return the bytes that represent an item of images in the formulas."""
    return b"".join([struct.pack("<2I", *image.shape[:2]) + image.tobytes() for image in item.images])


class StubAdapters:
    """The adapters of a stub: their names change its digests."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def read(self, spec: AdapterSpec) -> None:
        """Wait for the adapter's `load_ms`. Raises Internal for an adapter with files, which a stub cannot run."""
        if spec.stub is None:
            raise Internal(f"Adapter '{spec.id}' cannot be loaded: model '{spec.model}' is a stub")
        time.sleep(spec.stub.load_ms / 1e3)

    def install(self, name: str, weights: None) -> int:
        """Accept the adapter's name in texts; it has no bytes."""
        self._names.add(name)
        return 0

    def remove(self, name: str) -> None:
        """Remove the adapter."""
        self._names.discard(name)


def _adapted(texts: Sequence[bytes | memoryview], loras: Sequence[str]) -> Sequence[bytes | memoryview]:
    """Return the bytes to hash for each text."""
    if not loras:
        return texts
    return [adapted_text(bytes(text), lora) if lora else text for text, lora in zip(texts, loras, strict=True)]


def _extract(utf8: bytes, task: ExtractTask) -> Extraction:
    text, least = utf8.decode(errors="ignore"), task.threshold or 0.0  # a cut may go through a character
    labels = task.labels or ("word",)
    entities: list[Entity] = []
    for word in _WORD.finditer(text):
        digest = hashlib.shake_256(b"extract" + word[0].encode()).digest(5)
        score = _fraction(digest[2:])
        if digest[0] < 128 and score >= least:
            entities.append(Entity(labels[digest[1] % len(labels)], score, word.start(), word.end()))
    fits = [Classification(label, _fraction(hashlib.shake_256(b"class" + label.encode() + b"\0" + utf8).digest(3)))
            for label in task.labels]  # fmt: skip
    best_first = sorted(fits, key=lambda fit: -fit.score)
    return Extraction(entities, classifications=[fit for fit in best_first if fit.score >= least])


def _detect(item: ImageItem, task: ExtractTask) -> Extraction:
    pixels, least = _bytes_of(item), task.threshold or 0.0
    height, width = item.images[0].shape[:2]
    objects: list[DetectedObject] = []
    for label in task.labels or ("object",):
        digest = hashlib.shake_256(b"object" + label.encode() + b"\0" + pixels).digest(11)
        left, top, right, bottom = struct.unpack("<4H", digest[3:])
        x, y = left % width, top % height
        place = x, y, 1 + right % (width - x), 1 + bottom % (height - y)
        objects.append(DetectedObject(label, _fraction(digest[:3]), place))
    best_first = sorted(objects, key=lambda found: -found.score)
    return Extraction(objects=[found for found in best_first if found.score >= least])


def _fraction(digest: bytes) -> float:
    return int.from_bytes(digest, "little") / 2**24
