"""Checks whether a tensor request fits its model, before any of its data is copied. Pure; used by every tensor dialect.

Must not trust sizes that a client declares: they are computed without overflow and compared with the bytes received.
Error texts are those of Triton, if it has one. Source: KServe v2 sheet, sections 5 to 8.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from math import prod
from typing import Final

from sie.values.bytes_tensor import FramingError, element_bounds
from sie.values.errors import BadRequest
from sie.values.tensor import DATATYPES, ITEM_BYTES, MAX_RANK, Tensor, TensorRequest, TensorRule, TensorSpec

_MAX_SIZE: Final = (1 << 63) - 1
_STUB_INPUT: Final = re.compile(r"INPUT[0-9]{1,2}")


def check_request(rule: TensorRule, request: TensorRequest, max_strings: int) -> None:
    """Raise BadRequest unless a request fits this model; max_strings limits the total number of its BYTES elements."""
    inputs = request.inputs
    _check_names(rule, inputs)
    specs = {spec.name: spec for spec in rule.inputs}
    for tensor in inputs:
        check_datatype(tensor.name, tensor.datatype)
        spec = specs.get(tensor.name)
        if spec is not None and tensor.datatype != spec.datatype and rule.platform != "stub":
            raise BadRequest(
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                f"but model '{rule.name}' expects '{spec.datatype}'"
            )
        check_dimensions(tensor.name, tensor.shape)
        if spec is not None and rule.platform != "stub":
            _check_shape(rule, spec, tensor.shape)
    if rule.max_batch_size:
        _check_batch(rule, inputs)
    for tensor in inputs:
        max_strings -= check_data(rule.name, tensor, max_strings)
    check_outputs(rule, request.outputs, [tensor.name for tensor in inputs])


def _check_names(rule: TensorRule, inputs: Sequence[Tensor]) -> None:
    names: set[str] = set()
    known = {spec.name for spec in rule.inputs}
    for tensor in inputs:
        if tensor.name in names:
            raise BadRequest(f"input '{tensor.name}' already exists in request")
        if tensor.name not in known and not (rule.platform == "stub" and _STUB_INPUT.fullmatch(tensor.name)):
            raise BadRequest(f"unexpected inference input '{tensor.name}' for model '{rule.name}'")
        names.add(tensor.name)
    missing = [spec.name for spec in rule.inputs if not spec.optional and spec.name not in names]
    if missing and not (rule.platform == "stub" and names):
        raise BadRequest(
            f"expected {len(rule.inputs)} inputs but got {len(inputs)} inputs for model '{rule.name}'. "
            f"Got input(s) {[tensor.name for tensor in inputs]}, but missing required input(s) {missing}. "
            "Please provide all required input(s)."
        )


def check_datatype(name: str, datatype: str) -> None:
    """Raise BadRequest for a datatype that the protocol does not have."""
    if datatype not in DATATYPES:
        raise BadRequest(f"invalid datatype for input {name}: '{datatype[:32]}'")


def check_dimensions(name: str, shape: Sequence[int]) -> None:
    """Raise BadRequest for an impossible shape."""
    if len(shape) > MAX_RANK:
        raise BadRequest(f"input '{name}' has {len(shape)} dimensions, but may have at most {MAX_RANK}")
    if any(not 0 <= size <= _MAX_SIZE for size in shape):
        raise BadRequest(f"input '{name}' has a dimension that is negative or over 63 bits: {_shown(shape)[:200]}")


def _check_shape(rule: TensorRule, spec: TensorSpec, shape: Sequence[int]) -> None:
    wanted = spec.shape
    if len(wanted) != len(shape) or any(a not in (-1, b) for a, b in zip(wanted, shape, strict=True)):
        raise BadRequest(
            f"unexpected shape for input '{spec.name}' for model '{rule.name}'. "
            f"Expected {_shown(wanted)}, got {_shown(shape)}"
        )


def _check_batch(rule: TensorRule, inputs: Sequence[Tensor]) -> None:
    """Check the batch size. The shapes are already checked, so every input has a first dimension."""
    batch = inputs[0].shape[0]
    for tensor in inputs:
        if tensor.shape[0] != batch:
            raise BadRequest(f"input '{tensor.name}' batch size does not match other inputs for '{rule.name}'")
    if batch > rule.max_batch_size:
        raise BadRequest(f"inference request batch-size must be <= {rule.max_batch_size} for '{rule.name}'")
    if batch < 1:
        raise BadRequest(f"inference request batch-size must be >= 1 for '{rule.name}'")


def check_data(model: str, tensor: Tensor, max_strings: int) -> int:
    """Raise BadRequest unless a tensor has as many bytes as its shape says. Return the number of its BYTES elements."""
    count = prod(tensor.shape)
    if tensor.datatype == "BYTES":
        return _check_elements(model, tensor, count, max_strings)
    nbytes = count * ITEM_BYTES[tensor.datatype]
    if nbytes != len(tensor.data):
        raise BadRequest(
            f"input byte size mismatch for input '{tensor.name}' for model '{model}'. "
            f"Expected {nbytes}, got {len(tensor.data)}"
        )
    return 0


def _check_elements(model: str, tensor: Tensor, count: int, max_strings: int) -> int:
    if count > max_strings and len(tensor.data) >= 4 * count:
        raise BadRequest(
            f"input '{tensor.name}' has {count} string elements, over max_tensor_strings; split the request"
        )
    try:
        # Finding one element more than expected is enough to know that there are too many.
        found = sum(1 for _ in itertools.islice(element_bounds(tensor.data), min(count, max_strings) + 1))
    except FramingError as error:
        raise BadRequest(
            f"incomplete string {error.part} for inference input '{tensor.name}', {error.reason}"
        ) from None
    if found != count:
        raise BadRequest(
            f"expected {count} string elements for inference input '{tensor.name}' for model '{model}', got {found}"
        )
    return count


def check_outputs(rule: TensorRule, outputs: Sequence[str], inputs: Sequence[str]) -> None:
    """Raise BadRequest for an output that the model does not have; inputs are those of the request."""
    known = {spec.name for spec in rule.outputs}
    if rule.platform == "stub":
        known = {name.replace("INPUT", "OUTPUT") for name in inputs}
    for name in outputs:
        if name not in known:
            raise BadRequest(f"unexpected inference output '{name}' for model '{rule.name}'")


def _shown(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
