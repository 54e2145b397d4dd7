from __future__ import annotations

import math

import numpy as np
import pytest

from sie.values.errors import BadRequest, Internal
from sie.workers.requests.quantise import finish_rows, output_layout

ROWS = np.random.default_rng(7).normal(size=(6, 37)).astype(np.float32)
ROWS[2] = 0.0
ROWS[3] = 0.25
ROWS[4, :4] = [1.0, -1.0, 0.5, -0.5]


def _reference(row: list[float], output_dtype: str) -> list[float]:
    """The formulas of the API reference, one value at a time in Python (round() is half to even)."""
    if output_dtype == "float16":
        return [float(np.float16(x)) for x in row]
    if output_dtype == "int8":
        scale = max(abs(x) for x in row) or 1.0
        return [round(x / scale * 127) for x in row]
    if output_dtype == "uint8":
        low, extent = min(row), (max(row) - min(row)) or 1.0
        return [round((x - low) / extent * 255) for x in row]
    if output_dtype == "float32":
        return row
    bits = "".join("1" if x > 0 else "0" for x in row)
    return [int(bits[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(bits), 8)]


@pytest.mark.parametrize("output_dtype", ["float32", "float16", "int8", "uint8", "binary", "ubinary"])
def test_values_follow_the_published_formula(output_dtype: str) -> None:
    got = finish_rows(ROWS, normalize=False, output_dtype=output_dtype)
    code, width = output_layout(ROWS.shape[1], None, output_dtype)
    assert (got.dtype, got.shape) == (np.dtype(code), (len(ROWS), width))
    expected = np.array([_reference(row, output_dtype) for row in ROWS.tolist()])
    # float32 arithmetic may land on the other side of a half: one step, and in few places.
    wrong = got.astype(np.float64) != expected
    assert np.abs(got.astype(np.float64) - expected).max() <= (1 if output_dtype in ("int8", "uint8") else 0)
    assert wrong.mean() < 0.01


@pytest.mark.parametrize(
    ("dims", "cut", "output_dtype", "layout"),
    [
        (384, None, "float32", ("<f4", 384)),
        (384, 128, "float16", ("<f2", 128)),
        (9, None, "int8", ("|i1", 9)),
        (9, None, "uint8", ("|u1", 9)),
        (9, None, "binary", ("|u1", 2)),
        (9, 8, "ubinary", ("|u1", 1)),
    ],
)
def test_layout_names_code_and_width(dims: int, cut: int | None, output_dtype: str, layout: tuple[str, int]) -> None:
    assert output_layout(dims, cut, output_dtype) == layout


def test_cut_row_has_unit_length_again() -> None:
    rows = finish_rows(ROWS, normalize=True, truncate_dim=5)
    expected = [[x / (math.sqrt(sum(v * v for v in row)) or 1.0) for x in row] for row in ROWS[:, :5].tolist()]
    np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_zero_row_stays_zero_and_large_row_does_not_overflow() -> None:
    rows = np.array([[0.0, 0.0], [3e38, 0.0]], dtype=np.float32)
    np.testing.assert_array_equal(finish_rows(rows, normalize=True), [[0.0, 0.0], [1.0, 0.0]])


def test_rows_are_written_where_the_caller_says_and_left_as_they_were() -> None:
    before = ROWS.copy()
    out = np.empty((len(ROWS), 16), dtype=np.int8)
    got = finish_rows(ROWS, normalize=True, truncate_dim=16, output_dtype="int8", out=out)
    assert got is out
    np.testing.assert_array_equal(out, finish_rows(ROWS, normalize=True, truncate_dim=16, output_dtype="int8"))
    np.testing.assert_array_equal(ROWS, before)


@pytest.mark.parametrize("out", [np.empty((6, 36), np.float32), np.empty((6, 37), np.float16)])
def test_place_of_another_shape_is_refused(out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="out is"):
        finish_rows(ROWS, normalize=False, out=out)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("output_dtype", ["float32", "binary"])
def test_value_that_is_not_finite_is_an_error(value: float, output_dtype: str) -> None:
    rows = ROWS.copy()
    rows[4, 3] = value
    with pytest.raises(Internal) as caught:
        finish_rows(rows, normalize=True, output_dtype=output_dtype)
    assert (caught.value.code, caught.value.http_status, caught.value.extras) == ("INFERENCE_ERROR", 500, {})


@pytest.mark.parametrize("output_dtype", ["float16", "uint8"])
def test_value_too_large_for_the_type_is_an_error(output_dtype: str) -> None:
    with pytest.raises(Internal, match="not finite"):
        finish_rows(np.array([[3e38, -3e38]], dtype=np.float32), normalize=False, output_dtype=output_dtype)


@pytest.mark.parametrize(("cut", "output_dtype"), [(0, "float32"), (38, "float32"), (None, "float64"), (None, "")])
def test_width_or_type_that_does_not_exist_is_refused(cut: int | None, output_dtype: str) -> None:
    with pytest.raises(BadRequest):
        finish_rows(ROWS, normalize=False, truncate_dim=cut, output_dtype=output_dtype)


def test_no_rows_give_no_rows() -> None:
    assert finish_rows(np.empty((0, 8), np.float32), normalize=True, output_dtype="binary").shape == (0, 1)
