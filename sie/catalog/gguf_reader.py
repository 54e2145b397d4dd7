"""Reads a GGUF file's metadata quickly.

The library makes several numpy views of every token, score and merge. For a vocabulary of 262,144 tokens that takes
half a minute, and transformers repeats it for each fact that it needs. This module reads a vocabulary once, in one
pass, or skips it when only the weights matter. The library reads everything else. Imports gguf.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any

import gguf
import numpy as np
from gguf import quants
from numpy.typing import NDArray

_LONG = 1024
"""Longer arrays belong to a vocabulary; arrays about a model's layers are shorter."""
_LONGEST_NAME = 1 << 16
_MOST_DIMS = 4
_MOST_VALUES = 1 << 48
_MOST_LISTED = 1 << 24
"""Over the size of any vocabulary."""
_PIECE = 1 << 17
"""Values that are dequantised at once."""
_patching = threading.Lock()


class _Reader(gguf.GGUFReader):
    """A reader that reads long arrays with its own method, and whose errors name the field or tensor at fault.

    The library trusts the lengths in a file: where one is too large, it reads to the end of the file without an error.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it is cut off")
        return super()._get(offset, dtype, count, override_order)

    def _build_fields(self, offs: int, count: int) -> int:
        name = "the header"
        for _ in range(count):
            name = self._name_at(offs, f"the field behind {name}")
            with _naming(name):
                offs = super()._build_fields(offs, 1)
                if offs > len(self.data):
                    raise ValueError("it is cut off")
        return offs

    def _get_tensor_info_field(self, orig_offs: int) -> Any:
        name = self._name_at(orig_offs, f"the entry of a tensor at byte {orig_offs}")
        with _naming(name):
            field = super()._get_tensor_info_field(orig_offs)
            shape: list[int] = field.parts[3].tolist()
            if len(shape) > _MOST_DIMS or prod(shape) > _MOST_VALUES:
                raise ValueError(f"its shape begins with {shape[:_MOST_DIMS]}")
        return field

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        found: dict[str, Any] = {}
        for field in fields:
            name = bytes(field.parts[1]).decode()
            with _naming(name):
                super()._build_tensors(start_offs, [field])
                if name in found:
                    raise ValueError("there are two of it")
            found[name] = self.tensors[0]
        self.tensors = list(found.values())

    def _name_at(self, offset: int, otherwise: str) -> str:
        """Return the text at a place, which is the name of a field or tensor. Raises ValueError."""
        with _naming(otherwise):
            length = int(self._get(offset, np.uint64)[0])
            if length > _LONGEST_NAME:
                raise ValueError(f"its name has {length} bytes")
            return bytes(self._get(offset + 8, np.uint8, length)).decode("utf-8", "backslashreplace")

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            length = int(self._get(orig_offs + 4, np.uint64)[0])
            if length > _MOST_LISTED:
                raise ValueError(f"it has {length} values")
            if length > _LONG and kind != gguf.GGUFValueType.ARRAY:
                nbytes, parts = self._read_long(kind, orig_offs + 12, length)
                return 12 + nbytes, parts, list(range(len(parts))), [gguf.GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)

    def _read_long(self, kind: Any, offset: int, length: int) -> tuple[int, list[Any]]:
        """Return the size in bytes of an array's values, and its parts; transformers reads one value from each part."""
        raise NotImplementedError

    def _strings(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each string of an array."""
        unpack = struct.Struct(">Q" if self.byte_order == "S" else "<Q").unpack_from
        view = self.data.data
        for _ in range(length):
            start = offset + 8
            offset = start + unpack(view, start - 8)[0]
            yield start, offset


class VocabularyReader(_Reader):
    """A reader of all fields, with the vocabulary's strings as bytes."""

    def _read_long(self, kind: Any, offset: int, length: int) -> tuple[int, list[Any]]:
        item = self.gguf_scalar_to_np.get(kind)
        if item is not None:
            values = self._get(offset, item, length)
            return values.nbytes, [(value,) for value in values.tolist()]
        view = self.data.data
        places = list(self._strings(offset, length))
        return places[-1][1] - offset, [bytes(view[start:end]) for start, end in places]


class WeightsReader(_Reader):
    """A reader whose long arrays are empty; the size of the vocabulary is kept as a separate field."""

    def __init__(self, path: Any, mode: Any = "r") -> None:
        """Read a file's metadata and tensor table. Raises the library's errors."""
        self._num_tokens = 0
        super().__init__(path, mode)
        architecture = self.fields.get("general.architecture")
        name = f"{'' if architecture is None else bytes(architecture.parts[-1]).decode()}.vocab_size"
        if name not in self.fields and self._num_tokens:
            size = np.array([self._num_tokens], np.uint32)
            self.fields[name] = gguf.ReaderField(0, name, [size], [0], [gguf.GGUFValueType.UINT32])

    def _read_long(self, kind: Any, offset: int, length: int) -> tuple[int, list[Any]]:
        item = self.gguf_scalar_to_np.get(kind)
        if item is not None:
            return length * np.dtype(item).itemsize, []
        if not self._num_tokens:  # the first array of strings is the vocabulary, before its merges
            self._num_tokens = length
        return max(end for _, end in self._strings(offset, length)) - offset, []


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the name of a part of the file before the errors about it, which the library raises in many forms."""
    try:
        yield
    except Exception as error:
        reason = "it is cut off" if isinstance(error, IndexError | struct.error) else str(error)
        raise ValueError(f"{name}: {reason}") from error


@contextmanager
def reading_with(open_file: Callable[..., gguf.GGUFReader]) -> Iterator[None]:
    """Make transformers open GGUF files with another reader in this block, and convert their weights in larger pieces.

    It looks up the functions for each file. The results are the same.
    """
    places: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", open_file),
        (gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)),  # asked for each module, and takes 10 ms
        (quants, "_apply_over_grouped_rows", _apply_to_rows),
        (import_module("transformers.integrations.gguf.reader"), "_mapped", _mapped),
    ]
    with _patching:
        places = [place for place in places if hasattr(*place[:2])]  # one of them is private to the library
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, value in places:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


def _mapped(path: str) -> NDArray[Any]:
    """Return a file's bytes, mapped. A plain view: numpy's own class for mapped files makes each slice ten times as slow."""
    return np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)


def _apply_to_rows(
    func: Callable[[NDArray[Any]], NDArray[Any]], arr: NDArray[Any], otype: Any, oshape: tuple[int, ...]
) -> NDArray[Any]:
    """Return func(rows) for all rows, in pieces that a core's cache holds. The library's have 16 rows, which is slow.

    arr is (..., bytes), and the result (..., values) is of otype and oshape. The library passes these names.
    """
    rows = arr.reshape(-1, arr.shape[-1])
    found = np.empty((len(rows), oshape[-1]), otype)
    step = max(1, _PIECE // max(1, oshape[-1]))
    for first in range(0, len(rows), step):
        found[first : first + step] = func(rows[first : first + step])
    return found.reshape(oshape)
