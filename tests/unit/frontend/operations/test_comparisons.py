"""The vectors that a score request compares, and the arrays of its texts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.comparisons import comparison_arrays, resolve_compared
from sie.values.card import LateInteraction, ModelCard, ScoreRule
from sie.values.errors import BadRequest
from sie.values.inference import ScoreRequest

WORDS = ["<s>", "</s>", "<unk>", "[Q]", "[D]", *(f"w{i}" for i in range(50))]
M3 = ModelCard(id="m3", kind="encoder", outputs=("dense", "sparse", "multivector", "score"),
               dims={"dense": 4, "sparse": 9, "multivector": 4}, late=LateInteraction())  # fmt: skip
PART = ModelCard(id="m3", kind="encoder", outputs=("dense", "multivector", "score"),
                 dims={"dense": 4, "multivector": 4}, late=LateInteraction(),
                 missing_outputs={"sparse": "sparse_linear.pt is pickled"})  # fmt: skip
COLBERT = ModelCard(id="cb", kind="encoder", outputs=("multivector", "score"), dims={"multivector": 4},
                    late=LateInteraction())  # fmt: skip
CROSS = ModelCard(id="ce", kind="cross-encoder", outputs=("score",), score=ScoreRule(activation="Sigmoid"))
STUB = ModelCard(id="stub", kind="stub", outputs=("dense", "multivector", "score"), dims={"dense": 4})


@pytest.mark.parametrize(
    ("card", "options", "compared"),
    [
        (COLBERT, {}, (("multivector", 1.0),)),
        (CROSS, {}, ()),
        (STUB, {}, ()),
        (M3, {}, (("dense", 1.0),)),
        (M3, {"score_mode": "hybrid"}, (("dense", 0.4), ("sparse", 0.2), ("multivector", 0.4))),
        (M3, {"score_mode": "hybrid", "score_weights": [0, 2, 0]}, (("sparse", 2.0),)),
        (PART, {"score_mode": "hybrid", "score_weights": (1, 0, 1)}, (("dense", 1.0), ("multivector", 1.0))),
        (PART, {"score_mode": "colbert", "score_weights": None}, (("multivector", 1.0),)),
    ],
)
def test_options_choose_what_is_compared(card: ModelCard, options: Any, compared: Any) -> None:
    assert resolve_compared(options, card) == compared


@pytest.mark.parametrize(
    ("card", "options", "part"),
    [
        (M3, {"score_mode": "fast"}, "Valid: ['colbert', 'dense', 'hybrid', 'sparse']"),
        (M3, {"score_mode": ["dense"]}, "Invalid score_mode ['dense']"),
        (M3, {"score_mode": ""}, "Invalid score_mode ''"),
        (M3, {"score_weights": [1, 1, 1]}, "belongs to score_mode 'hybrid', not 'dense'"),
        *[
            (M3, {"score_mode": "hybrid", "score_weights": weights}, "three numbers from 0 to 1000000, not all 0")
            for weights in ([], [1, 2], [1, 2, 3, 4], [0, 0, 0], [-1, 1, 1], [True, 1, 1], ["1", 1, 1], "abc",
                            [float("nan"), 1, 1], [float("inf"), 1, 1], [10**400, 1, 1], {"dense": 1})
        ],
        (PART, {"score_mode": "sparse"}, "no sparse output (sparse_linear.pt is pickled)"),
        (PART, {"score_mode": "hybrid"}, "does not support score_mode 'hybrid'"),
        (COLBERT, {"score_mode": "colbert"}, "does not support option 'score_mode'"),
        (CROSS, {"score_weights": [1, 1, 1]}, "does not support option 'score_weights'"),
        (STUB, {"score_mode": "dense"}, "does not support option 'score_mode'"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_by_name(card: ModelCard, options: Any, part: str) -> None:
    with pytest.raises(BadRequest) as caught:
        resolve_compared(options, card)
    assert part in caught.value.message


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Any:
    def make(prompts: dict[str, str] | None = None, **late: Any) -> Tokenizer:
        vocabulary = {word: number for number, word in enumerate(WORDS)}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        card = ModelCard(id="cb", kind="encoder", outputs=COLBERT.outputs, dims=COLBERT.dims, prompts=prompts or {},
                         tokenizer_file=str(path), vocab_size=len(WORDS), late=LateInteraction(**late))  # fmt: skip
        return Tokenizer.load(card)

    return make


def _texts(tokenizer: Tokenizer, query: str, documents: list[str], **fields: Any) -> list[str]:
    """Return each item's tokens as words, the query first."""
    request = ScoreRequest(model="cb", query=query, documents=documents, **fields)
    (bounds_name, bounds), (ids_name, token_ids) = comparison_arrays(tokenizer.card, tokenizer, request)
    assert (bounds_name, ids_name, bounds.dtype, token_ids.dtype) == ("cu_seqlens", "token_ids", "int32", "int32")
    items = [token_ids[start:end] for start, end in pairwise(bounds)]
    return [" ".join(WORDS[token] for token in ids) for ids in items]


def test_query_and_documents_are_read_by_their_own_rules(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(query_prefix="[Q] ", document_prefix="[D] ", query_length=4, document_length=5)
    found = _texts(tokenizer, "w1 w2 w3 w4", ["w5 w6 w7 w8 w9", "", "w1"])
    assert found == ["<s> [Q] w1 </s>", "<s> [D] w5 w6 </s>", "<s> [D] </s>", "<s> [D] w1 </s>"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"max_seq_length": 4}, ["<s> [Q] w1 </s>", "<s> [D] w5 </s>"]),
        ({"query_max_length": 4}, ["<s> [Q] w1 </s>", "<s> [D] w5 w6 </s>"]),
        ({"max_seq_length": 4, "query_max_length": 3}, ["<s> [Q] </s>", "<s> [D] w5 </s>"]),
        ({"max_seq_length": 9, "query_max_length": 9}, ["<s> [Q] w1 w2 </s>", "<s> [D] w5 w6 </s>"]),
    ],
)
def test_lengths_of_the_request_only_lower_the_checkpoints(make_tokenizer: Any, options: Any, found: list[str]) -> None:
    tokenizer = make_tokenizer(query_prefix="[Q] ", document_prefix="[D] ", query_length=5, document_length=5)
    assert _texts(tokenizer, "w1 w2 w3", ["w5 w6 w7"], options=options) == found


def test_checkpoints_prompts_are_used(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer({"query": "w40 ", "document": "w41 "})
    assert _texts(tokenizer, "w1", ["w2"]) == ["<s> w40 w1 </s>", "<s> w41 w2 </s>"]


def test_instruction_is_the_querys_alone(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    assert _texts(tokenizer, "w1", ["w2", "w3"], instruction="w9") == ["<s> w9 w1 </s>", "<s> w2 </s>", "<s> w3 </s>"]
    options = {"query_template": "w30 {instruction} {text}", "doc_template": "w31 {text}"}
    found = _texts(tokenizer, "w1", ["w2"], instruction="w9", options=options)
    assert found == ["<s> w30 w9 w1 </s>", "<s> w31 w2 </s>"]


@pytest.mark.parametrize(("query", "documents"), [("\ud800", ["w1"]), ("w1", ["w1", "\udfff"])])
def test_text_that_is_no_unicode_is_refused(make_tokenizer: Any, query: str, documents: list[str]) -> None:
    with pytest.raises(BadRequest, match="lone surrogate"):
        _texts(make_tokenizer(), query, documents)
