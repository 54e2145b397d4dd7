"""Every way of scoring a pair, against sentence-transformers' CrossEncoder or a plain forward pass of transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

from sie.catalog.directory import read_card
from sie.catalog.spec import ModelSpec
from sie.frontend.pairs import pair_arrays
from sie.frontend.tokenize import Tokenizer
from sie.types import ModelCard
from sie.workers.loader import load_scorer
from sie.workers.runners import Pair
from sie.workers.runners.score import ScoreRunner

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
QUERY = "w1 w2 w3 w4"


def _documents() -> list[str]:
    """Return texts of equal and of different lengths, one empty and one over every limit here."""
    random = np.random.default_rng(4)
    return [" ".join(f"w{i}" for i in random.integers(0, 200, n)) for n in (5, 40, 5, 0, 250, 1, 19)]


def _load(directory: Path, dtype: str = "float32", model_id: str = "test/model") -> ScoreRunner:
    card = read_card(ModelSpec(id=model_id), str(directory))
    return load_scorer(card, "cpu", dtype, lambda *_: None)  # type: ignore[arg-type]


def _pairs(card: ModelCard, query: str, documents: list[str], instruction: str | None = None) -> list[Pair]:
    """Return the pairs as a frontend sends them and a worker reads them."""
    arrays = dict(pair_arrays(card, Tokenizer.load(card), query, documents, instruction))
    bounds = arrays["cu_seqlens"][1:-1]
    token_ids = np.split(arrays["token_ids"], bounds)
    if "token_types" not in arrays:
        return list(map(Pair, token_ids))
    return list(map(Pair, token_ids, np.split(arrays["token_types"], bounds)))


def _scores(runner: ScoreRunner, query: str, documents: list[str]) -> np.ndarray:
    return runner.run_pairs(_pairs(runner.card, query, documents))[:, 0]


@pytest.fixture
def make_scorer(make_checkpoint: Any) -> Any:
    """Return a function that writes a sequence classifier whose tokenizer joins pairs and whose logits lie apart."""

    def make(family: str, *, typed: bool = False, num_labels: int = 1, **changes: Any) -> Path:
        directory = make_checkpoint(family, num_labels=num_labels, **changes)
        config = transformers.AutoConfig.from_pretrained(directory)
        _save_random(transformers.AutoModelForSequenceClassification.from_config(config), directory)
        _join_pairs(directory, typed=typed)
        return directory

    return make


def _save_random(model: Any, directory: Path) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)


def _join_pairs(directory: Path, *, typed: bool) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save_pretrained(directory)
    _edit(
        directory,
        "tokenizer_config.json",
        model_input_names=["input_ids", "attention_mask", *["token_type_ids"] * typed],
    )


def _edit(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _expected(directory: Path, query: str, documents: list[str]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(directory), device="cpu", local_files_only=True)
        if type(model.tokenizer).__name__ == "Qwen2Tokenizer":
            # It would cut these words into bytes: transformers picks a tokenizer's class by the model's family.
            model[0].processor = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        return np.asarray(model.predict([(query, document) for document in documents], batch_size=3))


@pytest.mark.parametrize(
    ("family", "changes", "packed", "view"),
    [
        ("bert", {"typed": True}, True, "ends"),
        ("bert", {}, True, "ends"),
        ("roberta", {}, True, "ends"),
        ("xlm-roberta", {}, True, "ends"),
        ("modernbert", {"classifier_pooling": "cls"}, True, "ends"),
        ("modernbert", {"classifier_pooling": "mean"}, True, "all"),
        ("mpnet", {}, False, "ends"),
        ("electra", {"typed": True}, True, "ends"),
        ("distilbert", {}, True, "ends"),
        ("deberta-v2", {}, False, "ends"),
        ("albert", {}, False, "model"),
        ("qwen2", {}, True, "ends"),
        ("qwen3", {}, True, "ends"),
    ],
)
def test_family_equals_cross_encoder(family: str, changes: Any, packed: bool, view: str, make_scorer: Any) -> None:
    directory, documents = make_scorer(family, **changes), _documents()
    runner = _load(directory)
    scores = _scores(runner, QUERY, documents)
    assert (runner.execution.packed, runner.view) == (packed, view)
    assert runner.card.outputs == ("score",)
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, _expected(directory, QUERY, documents), **TOLERANCE)
