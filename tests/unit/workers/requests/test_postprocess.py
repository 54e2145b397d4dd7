from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from sie.values.card import LateInteraction, ModelCard
from sie.values.errors import Internal
from sie.values.extract import Entity, Extraction
from sie.values.work import WorkHeader
from sie.workers.model_api import StepOutputs
from sie.workers.requests.postprocess import finish_dense, finish_ragged, finish_rows_of, finish_sparse

CARD = ModelCard(id="a", kind="encoder", normalize=True)
ROWS = np.array([[3, 4], [0, -2], [8, 6], [1, 0]], np.float32)


def want(*outputs: str, **choices: Any) -> WorkHeader:
    return WorkHeader("a", "encode", 1, (), output_types=outputs, **choices)


def test_each_dense_row_is_finished_as_its_request_asked() -> None:
    wants = [want("dense"), want("dense", normalize=False), want("sparse"), want("dense", output_dtype="binary")]
    rows = {member: row for finished in finish_dense(CARD, wants, ROWS) for member, row in zip(*finished, strict=True)}
    assert set(rows) == {0, 1, 3}
    np.testing.assert_allclose(rows[0], [0.6, 0.8])
    np.testing.assert_array_equal(rows[1], [0, -2])
    np.testing.assert_array_equal(rows[3], [0b1000_0000])


def test_vectors_of_tokens_are_quantised_row_by_row() -> None:
    vectors = [ROWS[:2], None, ROWS[2:3], ROWS[:0]]
    wants = [want("multivector", output_dtype="int8"), want("dense"), want("multivector", output_dtype="int8"),
             want("multivector")]  # fmt: skip
    outputs = StepOutputs(ragged={"multivector": vectors})
    done = {item: arrays[0] for item, _, arrays in finish_ragged(CARD, wants, outputs)}
    np.testing.assert_array_equal(done[0], [[95, 127], [0, -127]])
    np.testing.assert_array_equal(done[2], [[127, 95]])
    assert (done[3].shape, done[3].dtype) == ((0, 2), np.float32)


@pytest.mark.parametrize(
    ("checkpoint", "asked", "length"), [(True, None, 1), (True, False, 5), (False, None, 5), (False, True, 1)]
)
def test_request_may_change_whether_vectors_of_tokens_have_unit_length(
    checkpoint: bool, asked: bool | None, length: float
) -> None:
    card = ModelCard(id="a", kind="encoder", late=LateInteraction(normalize=checkpoint))
    outputs = StepOutputs(ragged={"multivector": [ROWS[:1]]})
    [(_, _, (rows,))] = finish_ragged(card, [want("multivector", normalize=asked)], outputs)
    assert np.linalg.norm(rows) == pytest.approx(length)


@pytest.mark.parametrize("output_dtype", ["float32", "int8", "uint8", "binary"])
def test_sparse_values_are_never_below_float16(output_dtype: str) -> None:
    values = np.array([1e-9, 2], np.float32)
    assert finish_sparse(np.array([1, 2], np.int32), values, output_dtype)[1] is values


def test_sparse_value_over_float16s_range_becomes_its_largest() -> None:
    indices, values = finish_sparse(np.array([1, 2], np.int32), np.array([1e6, 2], np.float32), "float16")
    assert values.dtype == np.float16
    assert (indices.tolist(), values.tolist()) == ([1, 2], [65504, 2])


def test_vector_that_is_not_finite_is_an_error() -> None:
    outputs = StepOutputs(ragged={"multivector": [np.array([[np.nan, 1]], np.float32)]})
    with pytest.raises(Internal) as caught:
        list(finish_ragged(CARD, [want("multivector")], outputs))
    assert caught.value.code == "INFERENCE_ERROR"


def test_extractions_cross_as_msgpack() -> None:
    found = Extraction([Entity("PER", 0.5, 0, 3)])
    outputs = StepOutputs(extract=[found, Extraction()])
    done = list(finish_ragged(CARD, [want("extract"), want("extract")], outputs))
    assert [(item, output) for item, output, _ in done] == [(0, "extract"), (1, "extract")]
    assert msgspec.msgpack.decode(done[0][2][0].tobytes(), type=Extraction) == found


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(value: float) -> None:
    logits = np.array([[0, value]], np.float32)
    with pytest.raises(Internal, match="non-finite"):
        finish_rows_of(CARD, [want("logits")], StepOutputs(logits=logits))
    with pytest.raises(Internal, match="non-finite"):
        list(finish_ragged(CARD, [want("token_logits")], StepOutputs(token_logits=[logits])))


def test_logits_of_pairs_are_rows_as_they_are() -> None:
    (finished,) = finish_rows_of(CARD, [want("logits")] * 4, StepOutputs(logits=ROWS))
    assert finished.members == [0, 1, 2, 3]
    np.testing.assert_array_equal(finished.rows, ROWS)
