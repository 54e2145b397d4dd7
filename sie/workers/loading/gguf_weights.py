"""Reads the tensors of a GGUF file whose architecture has a row of its own, and undoes what its converter changed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.catalog.files import refuse
from sie.catalog.gguf_architectures import Row, find_row
from sie.catalog.gguf_reader import WeightsReader
from sie.values.card import ModelCard
from sie.workers.loading.dequantised import LazyTensor

_POSITIONS: Final = "position_embd.weight"
_HEADS: Final = {".attn_q.": "attention.head_count", ".attn_k.": "attention.head_count_kv"}


def open_gguf(card: ModelCard) -> dict[str, LazyTensor]:
    """Return all tensors of a card's GGUF file by their names there, as float32 on the CPU when they are indexed.

    Raises ModelLoadFailed if the file was damaged or replaced after the card was made, and OSError.
    """
    try:
        reader = WeightsReader(card.gguf_file)
        name = str(reader.fields["general.architecture"].contents())
        row = _row(reader)
        heads = {part: _number(reader, f"{name}.{key}", f"{name}.{_HEADS['.attn_q.']}") for part, key in _HEADS.items()}
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise refuse(card.id, f"{Path(card.gguf_file).name} cannot be read any more: {error}", "STORAGE") from error
    return {
        tensor.name: LazyTensor(_shape(tensor, row), partial(_read, tensor, row, heads)) for tensor in reader.tensors
    }


def _number(reader: WeightsReader, key: str, otherwise: str) -> int:
    return int(reader.fields.get(key, reader.fields[otherwise]).contents())


def _row(reader: WeightsReader) -> Row:
    names = ("general.architecture", "tokenizer.ggml.model")
    row = find_row({name: reader.fields[name].contents() for name in names if name in reader.fields})
    if row is None:
        raise ValueError("its architecture is another one")
    return row


def _shape(tensor: Any, row: Row) -> tuple[int, ...]:
    rows, *widths = map(int, reversed(tensor.shape))
    return (rows + row.first_position if tensor.name == _POSITIONS else rows, *widths)


def _read(tensor: Any, row: Row, heads: dict[str, int]) -> Tensor:
    values: NDArray[Any] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if row.converted == "norms" and tensor.name.endswith("norm.weight"):
        values = values - 1
    if row.converted == "permuted":
        for part, count in heads.items():
            if part in tensor.name:
                pairs = values.reshape(count, -1, 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
    if tensor.name == _POSITIONS and row.first_position:
        values = np.concatenate((np.zeros((row.first_position, values.shape[1]), np.float32), values))
    return torch.from_numpy(np.array(values, np.float32))
