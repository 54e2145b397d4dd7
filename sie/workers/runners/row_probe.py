"""Checks whether a tensor model treats its rows independently: random rows run alone and together.

A model that passes may still mix rows for other values, so an operator must enable this check.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.runtime.logs import get_logger
from sie.values.tensor import DATATYPES, TensorRule
from sie.values.work import TensorForm, TensorTask
from sie.workers.device.faults import raise_if_lost
from sie.workers.model_api import OutputTensor, TensorInputs, TensorRunner
from sie.workers.runners.tensor_arrays import as_array

_log = get_logger(__name__)
_ROWS: Final = ((1, 2), (3, 1), (2, 2))
"""Numbers of rows of two requests, which run alone and together."""
_SIZES: Final = (8, 64, 224)
"""Sizes to try for dimensions of any size; the first that the model accepts is used."""
_TOLERANCE: Final = {"FP16": 2e-2, "BF16": 2e-2}
"""Relative to the largest value; 1e-3 for other types."""


def probe_rows(runner: TensorRunner, rule: TensorRule) -> TensorRule:
    """Return the rule, set to join requests if every row gave the same values alone and beside others."""
    refusal = "it has string inputs or outputs" if _has_strings(rule) else ""
    for size in () if refusal else _SIZES:
        try:
            refusal = "" if _treats_rows_independently(runner, rule, size) else "rows give other values beside others"
            break
        except Exception as error:  # a model may fail on random values and still be served
            raise_if_lost(error)
            refusal = str(error) or type(error).__name__
    if refusal:
        _log.info("%s: requests are not joined: %s", rule.name, refusal)
    return rule if refusal else msgspec.structs.replace(rule, joins_requests=True)


def _has_strings(rule: TensorRule) -> bool:
    return any(spec.datatype == "BYTES" for spec in (*rule.inputs, *rule.outputs))


def _treats_rows_independently(runner: TensorRunner, rule: TensorRule, size: int) -> bool:
    rng = np.random.default_rng(0)
    for counts in _ROWS:
        requests = [_random_request(rule, count, size, rng) for count in counts]
        alone = [output for request in requests for output in runner.run_tensors([request]).outputs[0]]
        together = [output for outputs in runner.run_tensors(requests).outputs for output in outputs]
        if not all(_are_alike(*pair) for pair in zip(alone, together, strict=True)):
            return False
    return True


def _random_request(rule: TensorRule, num_rows: int, size: int, rng: np.random.Generator) -> TensorInputs:
    shapes = [(num_rows, *(size if n < 0 else n for n in spec.shape[1:])) for spec in rule.inputs]
    arrays = [random_array(spec.datatype, shape, rng) for spec, shape in zip(rule.inputs, shapes, strict=True)]
    forms = [TensorForm(spec.name, spec.datatype, a.shape) for spec, a in zip(rule.inputs, arrays, strict=True)]
    return TensorInputs(TensorTask(tuple(forms), (), 0), tuple(a.reshape(-1).view(np.uint8) for a in arrays))


def random_array(datatype: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Return random numbers of a datatype except BYTES: normal, or 0 and 1 for integers. BF16 is returned as its bits."""
    if datatype == "BF16":
        return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    dtype = np.dtype(DATATYPES[datatype])
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)  # valid indices for any table


def _are_alike(alone: OutputTensor, together: OutputTensor) -> bool:
    if alone.form != together.form:
        return False
    datatype = alone.form.datatype
    one, other = (_as_numbers(output) for output in (alone, together))
    scale = float(np.max(np.abs(one), initial=0, where=np.isfinite(one)))
    return np.allclose(one, other, rtol=0, atol=_TOLERANCE.get(datatype, 1e-3) * scale, equal_nan=True)


def _as_numbers(output: OutputTensor) -> NDArray[np.float64]:
    values = as_array(output.form, output.data)
    if output.form.datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)
