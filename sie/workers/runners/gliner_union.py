"""Runs the GLiNER models of a union: each window of a text goes through every one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sie.values.card import ModelCard
from sie.values.extract import Extraction, ExtractTask
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.runners.gliner import GlinerRunner


class GlinerUnionRunner:
    """Loaded GLiNER models that answer together. Built by `sie.workers.loading.libraries`; used by one thread at a time."""

    def __init__(self, card: ModelCard, members: Sequence[GlinerRunner]) -> None:
        self.card = card
        self.dtype = members[0].dtype
        """Format of the first member's weights."""
        self.memory_bytes = sum(member.memory_bytes for member in members)
        self._members = members

    def run(self, step: RowStep) -> StepOutputs:
        """Return the extractions of a step; see `RowRunner`."""
        return StepOutputs(extract=self.run_extract(step.inputs, step.tasks))

    def run_extract(self, inputs: Sequence[NDArray[np.uint8]], tasks: Sequence[ExtractTask]) -> list[Extraction]:
        """Return each window's extraction as `GlinerUnion` describes it. Members read the labels alone, by their defaults."""
        plain = [ExtractTask(labels=task.labels) for task in tasks]
        found = [member.run_extract(inputs, plain) for member in self._members]
        return [_joined(of_window) for of_window in zip(*found, strict=True)]


def _joined(of_window: Sequence[Extraction]) -> Extraction:
    entities = [entity for own in of_window for entity in own.entities]
    return Extraction(entities, data={"members": [len(own.entities) for own in of_window]})
