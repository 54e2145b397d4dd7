"""The parts that runners of tensors share: bytes to NumPy arrays and back, and the blame for a runtime's error.

BF16 crosses as its bits in uint16. The elements of BYTES are UTF-8 for a runtime, which knows no other strings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.shm.extent_headers import TensorForm
from sie.values.bytes_tensor import FramingError, frame_elements, split_elements
from sie.values.errors import BadRequest, Internal
from sie.values.tensor import DATATYPES
from sie.workers.model_api import OutputTensor, TensorInputs

_ABOUT_INPUTS = re.compile(
    r"shape|dimension|\bdim\b|axis|axes|rank|broadcast|out of (data )?bounds|out of range|indices|index|length|"
    r"mismatch|split|divisible|empty",
    re.IGNORECASE,
)
_SOURCE = re.compile(r"\s\S+\.(?:cc|h|cpp|cu|cuh):\d+[^\n]*?\)(?=\s)|\[ONNXRuntimeError\] : \d+ : \w+ : |\s+\Z")
"""Where in onnxruntime's own source an error was raised, and its number."""


def as_array(form: TensorForm, data: NDArray[np.uint8]) -> NDArray[Any]:
    """Return a tensor's bytes as an array of its shape, a view where NumPy has the type; BYTES are `str` objects.

    Raises BadRequest for bytes that are not such a tensor.
    """
    try:
        if form.datatype == "BYTES":
            return _strings(form, data)
        if form.datatype == "BOOL":
            return (data != 0).reshape(form.shape)  # a bool of another value than 0 or 1 is not one to NumPy
        return data.view(DATATYPES[form.datatype]).reshape(form.shape)
    except (ValueError, KeyError) as error:
        raise BadRequest(f"Input '{form.name}' does not hold {form.datatype} of shape {list(form.shape)}") from error


def _strings(form: TensorForm, data: NDArray[np.uint8]) -> NDArray[Any]:
    try:
        elements = [element.decode() for element in split_elements(data.data)]
    except FramingError as error:
        raise BadRequest(f"Input '{form.name}': {error}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"Input '{form.name}': this model takes texts, and an element is not UTF-8") from None
    array: NDArray[Any] = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(form.shape)


def as_output(name: str, datatype: str, array: Any) -> OutputTensor:
    """Return a runtime's output as the bytes that cross: little-endian, C order, without a copy where it is so."""
    array = np.asarray(array)
    if datatype == "BYTES":
        framed = frame_elements(
            element if isinstance(element, bytes) else str(element).encode() for element in array.ravel()
        )
        data = np.frombuffer(framed, np.uint8)
    else:
        data = np.ascontiguousarray(array, DATATYPES[datatype]).reshape(-1).view(np.uint8)
    return OutputTensor(TensorForm(name, datatype, array.shape), data)


def rows_of(requests: Sequence[TensorInputs]) -> list[int]:
    """Return where each request's rows begin along the first dimension, and where the last one's end."""
    if len(requests) == 1:
        return [0, 1]
    return list(itertools.accumulate((request.task.inputs[0].shape[0] for request in requests), initial=0))


def input_of(request: TensorInputs, name: str) -> tuple[TensorForm, NDArray[np.uint8]]:
    """Return one input of a request; the requests of a step all have the same."""
    return next((form, data) for form, data in zip(request.task.inputs, request.data, strict=True) if form.name == name)


def names_sizes(text: str) -> bool:
    """Tell whether an error is about sizes or indices, which a model takes from what it was given."""
    return bool(_ABOUT_INPUTS.search(text))


def without_source(error: BaseException) -> str:
    """Return a runtime's message on one line, without the place in its source."""
    return " ".join(_SOURCE.sub(" ", f" {error} ").split())


def cut_rows(
    model_id: str,
    requests: Sequence[TensorInputs],
    names: Sequence[str],
    arrays: Sequence[NDArray[Any]],
    datatypes: Mapping[str, str],
) -> list[tuple[OutputTensor, ...]]:
    """Return each request's part of what one run gave, by the rows that it brought; arrays are in the order of names.

    Raises Internal when the rows are not those that went in: each request is run by itself then
    (`sie.workers.recovery`).
    """
    bounds = rows_of(requests)
    is_shared = len(requests) > 1
    if is_shared and any(array.ndim == 0 or len(array) != bounds[-1] for array in arrays):
        raise Internal(f"Model '{model_id}' gives another number of rows than it was given")
    return [
        tuple(
            as_output(name, datatypes[name], array[start:end] if is_shared else array)
            for name, array in zip(names, arrays, strict=True)
        )
        for start, end in itertools.pairwise(bounds)
    ]
