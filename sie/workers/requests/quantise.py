"""Cuts, normalises and converts the rows of a reply.

Pure NumPy, one call for all rows of a step with equal options. Formulas: SIE API reference, section 5 (rounding is half to even).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sie.values.errors import BadRequest, NonFinite
from sie.values.inference import OUTPUT_DTYPES

_DTYPE_CODES = {"float32": "<f4", "float16": "<f2", "int8": "|i1", "uint8": "|u1", "binary": "|u1", "ubinary": "|u1"}
_MIN_NORM = 1e-12  # as torch.nn.functional.normalize: a zero row stays zero


def output_layout(dims: int, truncate_dim: int | None, output_dtype: str) -> tuple[str, int]:
    """Return the NumPy dtype code and the number of elements of one reply row.

    dims is the model's own width. Raises BadRequest for an unknown type or a width outside 1..dims.
    """
    if output_dtype not in _DTYPE_CODES:
        raise BadRequest(f"Unsupported output_dtype: {output_dtype}; one of {', '.join(OUTPUT_DTYPES)}")
    width = dims if truncate_dim is None else truncate_dim
    if not 1 <= width <= dims:
        raise BadRequest(f"cannot cut a vector of {dims} dimensions to {width}")
    return _DTYPE_CODES[output_dtype], (width + 7) // 8 if output_dtype.endswith("binary") else width


def finish_rows(
    rows: NDArray[np.float32],
    *,
    normalize: bool,
    truncate_dim: int | None = None,
    output_dtype: str = "float32",
    out: NDArray[np.generic] | None = None,
) -> NDArray[np.generic]:
    """Cut, L2-normalise and convert a runner's rows, in that order, so that a cut row has unit length again.

    rows (n, d) float32, not modified. normalize is the request's choice, or else the card's. Returns (n, width) of the
    type that `output_layout` names, in C order: `out` if given (that shape and type), else a new array, or rows if
    nothing changes them. Raises NonFinite.
    """
    code, width = output_layout(rows.shape[1], truncate_dim, output_dtype)
    if out is not None and (out.shape != (rows.shape[0], width) or out.dtype != np.dtype(code)):
        raise ValueError(f"out is {out.shape} {out.dtype}, the answer is {(rows.shape[0], width)} {code}")
    _check_finite(rows)
    values = rows[:, :truncate_dim]
    if normalize:
        values = _normalized(values)
    if out is None and output_dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    if out is None:
        out = np.empty((rows.shape[0], width), dtype=code)
    _convert(values, output_dtype, out)
    return out


def check_scores(model_id: str, scores: NDArray[np.float32]) -> None:
    """Raise NonFinite if a score is not finite. Source: SIE API reference, section 6."""
    if not np.isfinite(scores).all():
        raise NonFinite(f"Model '{model_id}' produced non-finite scores")


def _check_finite(rows: NDArray[np.generic]) -> None:
    # The message names no row: row numbers of a step mean nothing to a client.
    if not np.isfinite(rows).all():
        raise NonFinite("the model produced a value that is not finite")


def _normalized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    norm = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))  # float64: a large float32 squared overflows
    return rows / np.maximum(norm, _MIN_NORM).astype(np.float32)[:, None]


def _convert(rows: NDArray[np.float32], output_dtype: str, out: NDArray[np.generic]) -> None:
    if output_dtype == "float32":
        out[...] = rows
    elif output_dtype == "float16":
        with np.errstate(over="ignore"):  # reported by the check below, as an error of these rows
            out[...] = rows
        _check_finite(out)
    elif output_dtype == "int8":
        scale = np.abs(rows).max(axis=1, keepdims=True)
        scale[scale == 0] = 1
        out[...] = np.rint(rows / scale * np.float32(127))
    elif output_dtype == "uint8":
        low = rows.min(axis=1, keepdims=True)
        with np.errstate(over="ignore"):
            extent = rows.max(axis=1, keepdims=True) - low
        _check_finite(extent)
        extent[extent == 0] = 1
        out[...] = np.rint((rows - low) / extent * np.float32(255))
    else:
        out[...] = np.packbits(rows > 0, axis=1)
