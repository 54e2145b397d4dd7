"""Fixed dimensional encodings against the paper's definition, computed element by element."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sie.values.card import LateInteraction, ModelCard
from sie.values.muvera import Muvera
from sie.values.work import WorkHeader
from sie.workers.model_api import StepOutputs
from sie.workers.operations import costs_of
from sie.workers.requests.fixed_encoding import fixed_encoding
from sie.workers.requests.postprocess import finish_ragged, finish_rows_of

SMALL = Muvera(num_repetitions=3, num_simhash_projections=3, final_projection_dim=None, seed=5)
VECTORS = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)


def sketch(rows: NDArray[np.float64], seed: int, width: int) -> NDArray[np.float64]:
    """Return rows (n, d) with width elements: each of the d is added to a random one, with a random sign."""
    rng = np.random.default_rng(seed)
    places = rng.integers(0, width, size=rows.shape[1])
    signs = rng.choice(np.array([-1.0, 1.0], np.float32), size=rows.shape[1])
    found = np.zeros((len(rows), width))
    for column, place, sign in zip(rows.T, places, signs, strict=True):
        found[:, place] += sign * column
    return found


def gray(bits: tuple[int, ...]) -> int:
    """Return the place of these bits in the Gray code, found by counting it."""
    codes = [number ^ (number >> 1) for number in range(1 << len(bits))]
    return codes.index(int("".join(map(str, bits)), 2))


def reference(vectors: NDArray[np.float32], muvera: Muvera, *, is_query: bool) -> NDArray[np.float64]:
    tokens = vectors.astype(np.float64)
    if muvera.center_tokens:
        tokens = tokens - tokens.mean(axis=0)
    dims, count = tokens.shape[1], muvera.num_simhash_projections
    blocks: list[NDArray[np.float64]] = []
    for repetition in range(muvera.num_repetitions):
        seed = muvera.seed + repetition
        planes = np.random.default_rng(seed).normal(size=(dims, count)).astype(np.float32)
        codes = [tuple(int(token @ plane > 0) for plane in planes.T) for token in tokens]
        width = muvera.projection_dim
        projected = tokens if width is None else sketch(tokens, seed, width)
        block = np.zeros((1 << count, projected.shape[1]))
        for code in itertools.product((0, 1), repeat=count):
            members = [row for row, own in zip(projected, codes, strict=True) if own == code]
            if members:
                block[gray(code)] = sum(members) if is_query else sum(members) / len(members)
            elif muvera.fill_empty_partitions and not is_query:
                apart = [sum(a != b for a, b in zip(own, code, strict=True)) for own in codes]
                block[gray(code)] = projected[apart.index(min(apart))]
        blocks.append(block.ravel())
    whole = np.concatenate(blocks)
    if muvera.final_projection_dim is not None and muvera.final_projection_dim < len(whole):
        [whole] = sketch(whole[None], muvera.seed, muvera.final_projection_dim)
    return whole / np.linalg.norm(whole) if muvera.normalize else whole


@pytest.mark.parametrize("is_query", [True, False], ids=["query", "document"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"projection_dim": 2},
        {"final_projection_dim": 40},
        {"final_projection_dim": 144},
        {"projection_dim": 4, "final_projection_dim": 17, "normalize": True},
        {"center_tokens": True},
        {"fill_empty_partitions": True},
        {"fill_empty_partitions": True, "projection_dim": 3, "final_projection_dim": 50, "num_simhash_projections": 5},
    ],
    ids=str,
)
def test_encoding_is_the_papers(changes: dict[str, Any], is_query: bool) -> None:
    muvera = Muvera(**{**{name: getattr(SMALL, name) for name in SMALL.__struct_fields__}, **changes})
    row = fixed_encoding(VECTORS, muvera, is_query=is_query)
    assert (row.dtype, row.shape) == (np.float32, (muvera.width(6),))
    np.testing.assert_allclose(row, reference(VECTORS, muvera, is_query=is_query), atol=2e-6)


def test_defaults_are_those_of_the_reference() -> None:
    row = fixed_encoding(VECTORS, Muvera(), is_query=False)
    np.testing.assert_allclose(row, reference(VECTORS, Muvera(), is_query=False), atol=1e-5)
    assert row.shape == (10240,)


def test_item_without_vectors_gets_zeros() -> None:
    np.testing.assert_array_equal(fixed_encoding(VECTORS[:0], SMALL, is_query=False), np.zeros(SMALL.width(6)))


def test_dot_product_of_filled_encodings_estimates_maxsim() -> None:
    rng = np.random.default_rng(1)
    documents = rng.normal(size=(200, 12, 32)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=2, keepdims=True)
    queries = documents[:40, :5] + 0.1 * rng.normal(size=(40, 5, 32)).astype(np.float32)
    muvera = Muvera(num_repetitions=20, num_simhash_projections=4, fill_empty_partitions=True)
    stored = np.array([fixed_encoding(document, muvera, is_query=False) for document in documents])
    asked = np.array([fixed_encoding(query, muvera, is_query=True) for query in queries])
    exact = np.einsum("qtd,nsd->qnts", queries, documents).max(axis=3).sum(axis=2)
    assert (asked @ stored.T).argmax(axis=1).tolist() == exact.argmax(axis=1).tolist() == list(range(40))


def want(*outputs: str, **choices: Any) -> WorkHeader:
    return WorkHeader("a", "encode", 1, (), output_types=outputs, **choices)


def test_one_step_has_encodings_beside_other_outputs() -> None:
    card = ModelCard(id="a", kind="encoder", late=LateInteraction(), dims={"multivector": 6})
    wants = [want("dense", muvera=SMALL), want("multivector"), want("dense", "multivector", muvera=SMALL, is_query=True),
             want("dense", muvera=SMALL, output_dtype="int8", normalize=False)]  # fmt: skip
    outputs = StepOutputs(ragged={"multivector": [VECTORS, VECTORS, VECTORS[:3], VECTORS]})
    rows = {item: row for finished in finish_rows_of(card, wants, outputs) for item, row in zip(*finished, strict=True)}
    unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
    assert set(rows) == {0, 2, 3}
    np.testing.assert_allclose(rows[0], reference(unit, SMALL, is_query=False), atol=2e-6)
    np.testing.assert_allclose(rows[2], reference(unit[:3], SMALL, is_query=True), atol=2e-6)
    raw = reference(VECTORS, SMALL, is_query=False)
    np.testing.assert_allclose(rows[3], raw / np.abs(raw).max() * 127, atol=0.51)
    assert [item for item, _, _ in finish_ragged(card, wants, outputs)] == [1, 2]


def test_encoding_that_takes_longer_than_the_model_makes_steps_smaller() -> None:
    card = ModelCard(id="a", kind="encoder", late=LateInteraction(), dims={"multivector": 128})
    many = Muvera(num_repetitions=256, num_simhash_projections=10, projection_dim=32, fill_empty_partitions=True)

    def costs(**choices: Any) -> list[int]:
        request: Any = SimpleNamespace(costs=[3, 300], comparison=None, header=want("dense", expand_to=0, **choices))
        return costs_of(request, card)

    assert costs() == [3, 300]
    few, more = costs(muvera=Muvera())
    assert (3 < few < 6, 300 < more < 320) == (True, True)
    assert costs(muvera=many)[0] > 50  # 50 ms for three tokens on one core, and 570 ms for 300
    assert costs(muvera=many)[1] > 800
    assert costs(muvera=many, is_query=True)[0] < 25
