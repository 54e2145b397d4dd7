"""Provides the parts that tensor runners share: conversion of bytes to NumPy arrays and back, and error analysis.

BF16 is passed as its bits in uint16. The elements of BYTES must be UTF-8, since runtimes support no other strings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.values.bytes_tensor import FramingError, frame_elements, split_elements
from sie.values.errors import BadRequest, Internal
from sie.values.tensor import DATATYPES
from sie.values.work import TensorForm
from sie.workers.model_api import OutputTensor, TensorInputs

_ABOUT_INPUTS = re.compile(
    r"shape|dimension|\bdim\b|\bsizes?\b|axis|axes|rank|broadcast|out of (data )?bounds|out of range|indices|index|length|"
    r"mismatch|split|divisible|empty",
    re.IGNORECASE,
)
_SOURCE = re.compile(r"\s\S+\.(?:cc|h|cpp|cu|cuh):\d+[^\n]*?\)(?=\s)|\[ONNXRuntimeError\] : \d+ : \w+ : |\s+\Z")
"""Matches an error's location in onnxruntime's source, and its number."""


def as_array(form: TensorForm, data: NDArray[np.uint8]) -> NDArray[Any]:
    """Return a tensor's bytes as an array of its shape, a view if NumPy has the type; BYTES give `str` objects.

    Raises BadRequest if the bytes do not match the form.
    """
    try:
        if form.datatype == "BYTES":
            return _strings(form, data)
        if form.datatype == "BOOL":
            return (data != 0).reshape(form.shape)  # NumPy accepts only 0 and 1 as a bool
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
    """Return a runtime's output as bytes: little-endian, C order, without a copy if it already has this layout."""
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
    """Return the start of each request's rows along the first dimension, and the end of the last one's."""
    if len(requests) == 1:
        return [0, 1]
    return list(itertools.accumulate((request.task.inputs[0].shape[0] for request in requests), initial=0))


def input_of(request: TensorInputs, name: str) -> tuple[TensorForm, NDArray[np.uint8]]:
    """Return one input of a request; all requests of a step have the same inputs."""
    return next((form, data) for form, data in zip(request.task.inputs, request.data, strict=True) if form.name == name)


def names_sizes(text: str) -> bool:
    """Tell whether an error is about sizes or indices, which depend on the inputs."""
    return bool(_ABOUT_INPUTS.search(text))


def without_source(error: BaseException) -> str:
    """Return a runtime's message on one line, without its source location."""
    return " ".join(_SOURCE.sub(" ", f" {error} ").split())


def cut_rows(
    model_id: str,
    requests: Sequence[TensorInputs],
    names: Sequence[str],
    arrays: Sequence[NDArray[Any]],
    datatypes: Mapping[str, str],
) -> list[tuple[OutputTensor, ...]]:
    """Return each request's part of the outputs of one run, by its number of rows; arrays are in the order of names.

    Raises Internal if the number of rows differs from the inputs': each request then runs by itself
    (`sie.workers.recovery`).
    """
    bounds = rows_of(requests)
    is_shared = len(requests) > 1
    if is_shared and any(array.ndim == 0 or len(array) != bounds[-1] for array in arrays):
        raise Internal(f"Model '{model_id}' returns a different number of rows than it received")
    return [
        tuple(
            as_output(name, datatypes[name], array[start:end] if is_shared else array)
            for name, array in zip(names, arrays, strict=True)
        )
        for start, end in itertools.pairwise(bounds)
    ]
