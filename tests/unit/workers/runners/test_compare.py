"""Scores by vectors, against sentence-transformers' MultiVectorEncoder and against the formulas of bge-m3."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sie.frontend.operations.comparisons import comparison_arrays, resolve_compared
from sie.values.card import ModelCard
from sie.values.inference import ScoreRequest
from sie.values.work import WorkHeader
from sie.workers.model_api import Comparison, Side
from sie.workers.requests.quantise import finish_rows
from sie.workers.runners import compare as compare_module
from sie.workers.runners.compare import max_sims, sparse_dots
from tests.unit.workers.runners.test_tokens import CASES, FIXED, WIDTH, write_own

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
QUERY = "w1 w2 w3 , w4"


def sides_of(model: Any, query: str, documents: list[str], **options: Any) -> tuple[list[np.ndarray], list[Side]]:
    """Return a request's texts and their sides as a frontend sends them and a worker reads them."""
    request = ScoreRequest(model="test/model", query=query, documents=documents, options=options)
    request.compared = resolve_compared(options, model.card)
    arrays = dict(comparison_arrays(model.card, model.tokenizer, request))
    bounds = arrays["cu_seqlens"]
    assert (bounds.dtype, arrays["token_ids"].dtype) == (np.int32, np.int32)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(arrays["token_ids"]), len(documents) + 2)
    header = WorkHeader("test/model", "score", len(documents) + 1, (), compared=request.compared,
                        normalize=options.get("normalize"))  # fmt: skip
    comparison = Comparison(header)
    texts = [arrays["token_ids"][start:end] for start, end in pairwise(bounds.tolist())]
    return texts, [Side(comparison, number == 0) for number in range(len(texts))]


def scores_of(model: Any, query: str, documents: list[str], **options: Any) -> np.ndarray:
    scores = model.runner.run_comparisons(*sides_of(model, query, documents, **options))
    assert (scores.shape, scores.dtype, scores[0, 0]) == ((len(documents) + 1, 1), np.float32, 0)
    return scores[1:, 0]


def _expected(sentence_transformers: Any, directory: Path, query: str, documents: list[str]) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sentence_transformers.MultiVectorEncoder(str(directory), device="cpu", local_files_only=True)
        vectors = model.encode_document(documents, batch_size=3)
        return model.similarity(model.encode_query([query]), vectors)[0].float().numpy()


@pytest.mark.parametrize("case", CASES)
def test_colbert_equals_multi_vector_encoder(
    case: str, make_checkpoint: Any, serve: Any, texts: Any, sentence_transformers: Any
) -> None:
    layout, rules = CASES[case]
    directory = make_checkpoint("bert")
    layout(directory, **rules)
    documents = [text for text in texts if text != "."]  # of which nothing is left where punctuation is skipped
    scores = scores_of(serve(directory), QUERY, documents)
    expected = _expected(sentence_transformers, directory, QUERY, documents)
    assert np.ptp(scores) > 0.05
    np.testing.assert_allclose(scores, expected, rtol=2e-3, atol=2e-3)  # a sum over up to 32 query tokens


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet"])
def test_score_is_the_same_alone_in_every_place_and_over_any_steps(
    family: str, make_checkpoint: Any, serve: Any, texts: Any
) -> None:
    directory = make_checkpoint(family)
    write_own(directory, **FIXED, mask={"skiplist_words": [","]})
    model = serve(directory)
    alone = np.array([scores_of(model, QUERY, [text])[0] for text in texts])
    other_alone = np.array([scores_of(model, "w9", [text])[0] for text in texts])
    for shift in range(0, len(texts), 2):
        turned = texts[shift:] + texts[:shift]
        np.testing.assert_allclose(np.roll(scores_of(model, QUERY, turned), shift), alone, **TOLERANCE)
    inputs, sides = sides_of(model, QUERY, texts)
    others, other_sides = sides_of(model, "w9", texts)
    first = model.runner.run_comparisons([inputs[0], others[0], inputs[3]], [sides[0], other_sides[0], sides[3]])
    last = model.runner.run_comparisons([*others[1:], *inputs[1:]], [*other_sides[1:], *sides[1:]])
    np.testing.assert_allclose(first[:, 0], [0, 0, alone[2]], **TOLERANCE)
    np.testing.assert_allclose(last[:, 0], [*other_alone, *alone], **TOLERANCE)


def test_normalize_option_decides_over_the_checkpoint(make_checkpoint: Any, serve: Any, texts: Any) -> None:
    directory = make_checkpoint("bert")
    write_own(directory)
    model = serve(directory)
    query, documents = model.run([QUERY], "multivector", True)[0], model.run(texts, "multivector")
    expected = [(query @ rows.T).max(1).sum() for rows in documents]
    np.testing.assert_allclose(scores_of(model, QUERY, texts, normalize=False), expected, rtol=2e-3)


# --- bge-m3 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def m3(make_checkpoint: Any, serve: Any) -> Any:
    directory = make_checkpoint("xlm-roberta")
    save_file({"weight": torch.randn(1, 32) / 10, "bias": torch.ones(1)}, directory / "sparse_linear.safetensors")
    save_file({"weight": torch.randn(WIDTH, 32), "bias": torch.randn(WIDTH)}, directory / "colbert_linear.safetensors")
    return serve(directory)


def _m3_parts(model: Any, query: str, documents: list[str], to_rows: Any) -> np.ndarray:
    """Return (n, 3): cosine, dot product of lexical weights and MaxSim over the query's length, by their formulas."""
    texts = [query, *documents]
    dense = finish_rows(model.run(texts, "dense"), normalize=True)
    sparse = to_rows(model.run(texts, "sparse"), model.card.dims["sparse"])
    vectors = [finish_rows(rows, normalize=True) for rows in model.run(texts, "multivector")]
    late = [(vectors[0] @ rows.T).max(1).sum() / len(vectors[0]) for rows in vectors[1:]]
    return np.stack([dense[1:] @ dense[0], sparse[1:] @ sparse[0], late], axis=1)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, (1, 0, 0)),
        ({"score_mode": None}, (1, 0, 0)),
        ({"score_mode": "dense"}, (1, 0, 0)),
        ({"score_mode": "sparse"}, (0, 1, 0)),
        ({"score_mode": "colbert"}, (0, 0, 1)),
        ({"score_mode": "hybrid"}, (0.4, 0.2, 0.4)),
        ({"score_mode": "hybrid", "score_weights": [1, 2.5, 0]}, (1, 2.5, 0)),
    ],
)
def test_m3_mode_is_its_formula(options: Any, weights: Any, m3: Any, texts: Any, to_rows: Any) -> None:
    query = "w1 w2 w3 w4 w5 w6 w7 w8 w9 " + texts[0]
    scores = scores_of(m3, query, texts, **options)
    assert np.ptp(scores) > 0.005
    expected = _m3_parts(m3, query, texts, to_rows) @ np.array(weights)
    np.testing.assert_allclose(scores, expected, rtol=2e-3, atol=5e-4)


def test_modes_share_a_step(m3: Any, texts: Any) -> None:
    modes = ("dense", "sparse", "colbert", "hybrid")
    asked = [sides_of(m3, f"w{number}", texts, score_mode=mode) for number, mode in enumerate(modes)]
    inputs = [ids for texts_of_one, _ in asked for ids in texts_of_one]
    together = m3.runner.run_comparisons(inputs, [side for _, sides in asked for side in sides])
    alone = np.concatenate([m3.runner.run_comparisons(*one) for one in asked])
    np.testing.assert_allclose(together, alone, **TOLERANCE)


def test_m3_whose_heads_are_pickled_scores_by_its_dense_vectors(make_checkpoint: Any, serve: Any, texts: Any) -> None:
    directory = make_checkpoint("xlm-roberta")
    for name in ("sparse", "colbert"):
        (directory / f"{name}_linear.pt").write_bytes(b"a pickle")
    model = serve(directory)
    rows = finish_rows(model.run([QUERY, *texts], "dense"), normalize=True)
    np.testing.assert_allclose(scores_of(model, QUERY, texts), rows[1:] @ rows[0], **TOLERANCE)


def test_document_without_a_token_has_the_lowest_score(m3: Any) -> None:
    for mode, expected in (("dense", 0.0), ("sparse", 0.0), ("colbert", -np.inf), ("hybrid", -np.inf)):
        inputs, sides = sides_of(m3, "w1 w2", ["w3", "w1"], score_mode=mode)
        whole = m3.runner.run_comparisons(inputs, sides)
        inputs[1] = inputs[1][:0]
        scores = m3.runner.run_comparisons(inputs, sides)
        assert scores[1, 0] == expected
        np.testing.assert_allclose(scores[2], whole[2], **TOLERANCE)
        inputs[0] = inputs[0][:0]  # a query without a token matches nothing
        assert m3.runner.run_comparisons(inputs, sides)[2, 0] == 0


def test_what_is_kept_of_a_query_is_not_the_steps_memory(m3: Any) -> None:
    inputs, sides = sides_of(m3, "w1 w2", ["w3 " * 100] * 20, score_mode="hybrid", normalize=False)
    m3.runner.run_comparisons(inputs, sides)
    kept = sides[0].comparison.query
    for tensor in (kept.dense, kept.multivector):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_max_sims_in_pieces_equals_its_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, rows = torch.randn(7, 5, generator=generator), torch.randn(12, 5, generator=generator)
    counts = [3, 0, 8, 1]
    expected = [(query @ part.T).amax(1).sum() if len(part) else -np.inf for part in rows.split(counts)]
    for chunk_bytes in (1, 4 * 12 * 2, 1 << 20):
        monkeypatch.setattr(compare_module, "_CHUNK_BYTES", chunk_bytes)
        np.testing.assert_allclose(max_sims(query, rows, counts), expected, rtol=1e-5)
    assert max_sims(query, rows[:0], [0, 0]).tolist() == [-np.inf, -np.inf]
    assert max_sims(query[:0], rows, counts).tolist() == [0, 0, 0, 0]


def test_sparse_dots_count_shared_indices_only() -> None:
    def entries(**values: float) -> tuple[np.ndarray, np.ndarray]:
        indices = np.array([int(name[1:]) for name in values], np.int32)
        return indices, np.array(list(values.values()), np.float32)

    query = entries(i2=0.5, i5=2.0, i9=1.0)
    documents = [entries(i5=3.0, i9=0.25), entries(), entries(i1=9.0, i3=9.0, i10=9.0), entries(i2=1.0)]
    assert sparse_dots(query, documents).tolist() == [6.25, 0, 0, 0.5]
    assert sparse_dots(entries(), documents).tolist() == [0, 0, 0, 0]


def test_card_names_the_score(m3: Any) -> None:
    assert m3.card.outputs == ("dense", "sparse", "multivector", "score")
    assert "score" not in m3.card.dims
    assert m3.card.compares
    assert not ModelCard(id="a", kind="cross-encoder", outputs=("score",)).compares
