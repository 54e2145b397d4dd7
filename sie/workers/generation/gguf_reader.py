"""Owns reading a GGUF file's metadata without its vocabulary, which a model's weights have no use for.

The library makes several numpy views of every token, score and merge: of a vocabulary of 262,144 tokens that takes a
minute, and transformers does it twice for one model. Everything else is the library's own reading.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np

_LONGEST_KEPT = 1024
"""Longer arrays are passed over; those that say something of a model's layers are shorter."""
_patching = threading.Lock()


class QuickReader(gguf.GGUFReader):
    """A reader whose long arrays are empty; the size of the vocabulary is kept as a field of its own."""

    def __init__(self, path: Any, mode: Any = "r") -> None:
        """Read a file's metadata and tensor table. Raises what the library raises."""
        self._num_tokens = 0
        super().__init__(path, mode)
        architecture = self.fields.get("general.architecture")
        name = f"{'' if architecture is None else bytes(architecture.parts[-1]).decode()}.vocab_size"
        if name not in self.fields and self._num_tokens:
            size = np.array([self._num_tokens], np.uint32)
            self.fields[name] = gguf.ReaderField(0, name, [size], [0], [gguf.GGUFValueType.UINT32])

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            length = int(self._get(orig_offs + 4, np.uint64)[0])
            if length > _LONGEST_KEPT and kind != gguf.GGUFValueType.ARRAY:
                size = self._array_bytes(kind, orig_offs + 12, length)
                return 12 + size, [], [], [gguf.GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)

    def _array_bytes(self, kind: Any, offset: int, length: int) -> int:
        """Return the size of an array's values. The first of strings is the vocabulary, before its merges."""
        item = self.gguf_scalar_to_np.get(kind)
        if item is not None:
            return length * np.dtype(item).itemsize
        if not self._num_tokens:
            self._num_tokens = length
        order = ">Q" if self.byte_order == "S" else "<Q"
        view = self.data.data
        place = offset
        for _ in range(length):
            place += 8 + struct.unpack_from(order, view, place)[0]
        return place - offset


@contextmanager
def quick_reading() -> Iterator[None]:
    """Let transformers read GGUF files quickly meanwhile; it looks the reader up by name whenever it reads one."""
    with _patching:
        original = gguf.GGUFReader
        gguf.GGUFReader = QuickReader  # type: ignore[misc]
        try:
            yield
        finally:
            gguf.GGUFReader = original  # type: ignore[misc]
