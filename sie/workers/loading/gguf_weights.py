"""Reads the tensors of a GGUF file whose architecture has a row of its own, and undoes what its converter changed."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.catalog.gguf_architectures import Row, find_row
from sie.catalog.gguf_reader import WeightsReader
from sie.native.encoder import empty_aligned
from sie.values.card import ModelCard
from sie.workers.device.cores import on_all_cores
from sie.workers.loading.dequantised import LazyTensor

_POSITIONS: Final = "position_embd.weight"
_KEYS_AND_VALUES: Final = "attn_kv_b"
_PLAIN: Final = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_PIECE: Final = 1 << 17
"""Values that are dequantised at once, so that their temporary arrays stay in a core's cache."""
_HEADS: Final = {".attn_q.": "attention.head_count", ".attn_k.": "attention.head_count_kv"}


def open_gguf(card: ModelCard, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Return all tensors of a card's GGUF file by their names there, on the CPU when they are indexed.

    Quantised weights are read in dtype, others in float32.

    Raises ModelLoadFailed if the file was damaged or replaced after the card was made, and OSError.
    """
    try:
        reader = WeightsReader(card.gguf_file)
        name = str(reader.fields["general.architecture"].contents())
        row = _row(reader)
        heads = {part: _number(reader, f"{name}.{key}", f"{name}.{_HEADS['.attn_q.']}") for part, key in _HEADS.items()}
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise refuse(card.id, f"{Path(card.gguf_file).name} cannot be read any more: {error}", "STORAGE") from error
    tensors = {
        tensor.name: LazyTensor(_shape(tensor, row), partial(_read, tensor, row, heads, dtype))
        for tensor in reader.tensors
    }
    for name in list(tensors):
        for whole, parts in row.joined.items():
            if name.endswith(f".{parts[0]}.weight"):
                _join(tensors, name.removesuffix(f"{parts[0]}.weight"), whole, parts)
    return tensors


def _join(tensors: dict[str, LazyTensor], layer: str, whole: str, parts: tuple[str, str]) -> None:
    """Replace two tensors (n, m, inputs) of a layer by the one that they make, (n, both m, inputs).

    That of keys is (n, inputs, m), and keys and values make a flat one, (n * both m, inputs). Two tensors that do not
    fit stay as they are: the load then reports that the whole one is missing.
    """
    name, (first_name, second_name) = f"{layer}{whole}.weight", (f"{layer}{part}.weight" for part in parts)
    if name in tensors or second_name not in tensors:
        return
    first, second = tensors[first_name], tensors[second_name]
    is_keys = whole == _KEYS_AND_VALUES
    if not len(first.shape) == len(second.shape) == 3:
        return
    (num, rows, inputs), others = first.shape, second.shape
    if is_keys:
        rows, inputs = inputs, rows
    if (num, inputs) != others[::2]:
        return

    def read() -> Tensor:
        values = first[...].transpose(1, 2) if is_keys else first[...]
        return torch.cat((values, second[...]), 1).view(shape)

    joined = rows + others[1]
    shape = (num * joined, inputs) if is_keys else (num, joined, inputs)
    del tensors[first_name], tensors[second_name]
    tensors[name] = LazyTensor(shape, read)


def _number(reader: WeightsReader, key: str, otherwise: str) -> int:
    return int(reader.fields.get(key, reader.fields[otherwise]).contents())


def _row(reader: WeightsReader) -> Row:
    row = find_row({name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1})
    if row is None:
        raise ValueError("its architecture is another one")
    return row


def _shape(tensor: Any, row: Row) -> tuple[int, ...]:
    rows, *widths = map(int, reversed(tensor.shape))
    if not widths and tensor.name.endswith(row.rows_of_one):
        return (1, rows)
    return (rows + row.first_position if tensor.name == _POSITIONS else rows, *widths)


def _read(tensor: Any, row: Row, heads: dict[str, int], dtype: torch.dtype) -> Tensor:
    values = _dequantise(tensor, dtype)
    if row.converted == "norms" and tensor.name.endswith("norm.weight"):
        values -= 1
    if values.ndim == 1 and tensor.name.endswith(row.rows_of_one):
        values = values[None]
    if row.converted == "permuted":
        for part, count in heads.items():
            if part in tensor.name:
                values = values.view(count, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if tensor.name == _POSITIONS and row.first_position:
        values = torch.cat((values.new_zeros(row.first_position, values.shape[1]), values))
    return values


def _dequantise(tensor: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the file: in dtype if it is quantised, else in float32.

    The float32 values of a table of tokens would take a gigabyte, whose pages cost more time than the values.
    """
    stored: NDArray[Any] = tensor.data.view(np.ndarray)  # numpy's class of mapped files makes each slice slow
    if tensor.tensor_type in _PLAIN:
        return torch.from_numpy(np.array(dequantize(stored, tensor.tensor_type), np.float32))
    shape = tuple(map(int, reversed(tensor.shape)))
    whole = torch.from_numpy(empty_aligned(prod(shape) * dtype.itemsize)).view(dtype).view(-1, shape[-1])
    blocks = stored.reshape(len(whole), -1)
    step = max(1, _PIECE // shape[-1])

    def read(first: int) -> None:
        piece = dequantize(blocks[first : first + step], tensor.tensor_type)
        whole[first : first + step] = torch.from_numpy(piece)

    on_all_cores(read, range(0, len(whole), step))
    return whole.view(shape)
