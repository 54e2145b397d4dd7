"""What tests of runners with several outputs share: a loaded runner, and requests for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.prompts import apply_prompt
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.work import WorkHeader
from sie.workers.loading import loader
from sie.workers.loading.loader import load_encoder


class Served:
    """A checkpoint as it is served: texts in, the runner's outputs out."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        self.card = read_card(ModelSpec(id="test/model"), str(directory))
        self.runner: Any = load_encoder(self.card, "cpu", dtype, lambda _fraction, _text: None)
        self.tokenizer = Tokenizer.load(self.card)

    def inputs(self, texts: list[str], is_query: bool = False, max_tokens: int | None = None) -> list[np.ndarray]:
        prompted = apply_prompt(self.card, texts, {}, None, is_query)
        token_ids, bounds = self.tokenizer.encode_texts(prompted, is_query, max_tokens)
        return np.split(token_ids, bounds[1:-1])

    def want(self, *outputs: str, is_query: bool = False, expand_to: int | None = None) -> WorkHeader:
        return WorkHeader("test/model", "encode", 1, (), output_types=outputs, is_query=is_query, expand_to=expand_to)

    def run(self, texts: list[str], output: str, is_query: bool = False) -> Any:
        wants = [self.want(output, is_query=is_query)] * len(texts)
        outputs = self.runner.run_wants(self.inputs(texts, is_query), wants)
        return outputs.dense if output == "dense" else outputs.ragged[output]


@pytest.fixture(scope="session")
def serve() -> type[Served]:
    return Served


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Texts of equal and of different lengths, one of them empty, with punctuation, one over every limit here."""
    random = np.random.default_rng(3)
    made = [" ".join(f"w{i}" for i in random.integers(0, 200, n)) for n in (5, 40, 5, 0, 250, 1, 19)]
    return [*made, "w1 , w2 . w3 .", "."]


@pytest.fixture(scope="session")
def sentence_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sentence_transformers

    return sentence_transformers


def dense_of(entries: list[tuple[np.ndarray, np.ndarray]], width: int) -> np.ndarray:
    """Return sparse vectors as rows, after a look at their form."""
    rows = np.zeros((len(entries), width), np.float32)
    for row, (indices, values) in zip(rows, entries, strict=True):
        assert indices.dtype == np.int32
        assert (np.diff(indices) > 0).all()
        assert (values > 0).all()
        row[indices] = values
    return rows


@pytest.fixture(scope="session")
def to_rows() -> Any:
    return dense_of


@pytest.fixture
def formats_read(monkeypatch: pytest.MonkeyPatch) -> list[set[torch.dtype]]:
    """Return the formats of each model's weights as they were read, before anything was converted."""
    formats: list[set[torch.dtype]] = []
    read = loader.read_pretrained

    def watch(*arguments: Any, **options: Any) -> Any:
        model = read(*arguments, **options)
        formats.append({weight.dtype for weight in model.parameters()})
        return model

    monkeypatch.setattr(loader, "read_pretrained", watch)
    return formats
