"""Finds the bytes of each tensor in a file that `torch.save` wrote, in its zip form or the form before torch 1.6.

The pickle inside is interpreted by a confined process, whose answer is checked here against the file's size: what it
says can name wrong values of the same file, and nothing else. Nothing is unpacked, so a zip's names are only keys.
Source: torch 2.13 serialization.py; the zip form is stored, never compressed.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from sie.catalog.pickled.program import LEGACY, ZIPPED, Layout, Refusal, Refused, Tensor
from sie.runtime.helper import Helper, HelperFailed

DTYPE_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_PICKLE: Final = "data.pkl"
_LITTLE: Final = b"little"
_ZIP_START: Final = b"PK\x03\x04"
_LEGACY_START: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of the older form: its magic number."""
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_LENGTH: Final = struct.Struct("<q")
_MAX_PICKLE_BYTES: Final = 16 << 20
_MAX_ENTRIES: Final = 200_000
_MAX_DIRECTORY_BYTES: Final = 64 << 20
_END64: Final = struct.Struct("<4s36xQ8x")
_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_END: Final = struct.Struct("<4s8xL4xH")
"""The records at the end of a zip, in their order. Only zips with 64-bit sizes have the first two."""
_MAX_GROWTH: Final = 4
"""Most growth by conversion, which writes tied weights once for each name. More growth is meant to fill the disk."""
_TIMEOUT_S: Final = 120.0


class Slab(msgspec.Struct, frozen=True):
    """A tensor's place in a file: its first value is at byte `start`. Strides count values."""

    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor alone, without the gaps between its values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def span_bytes(self) -> int:
        """The bytes from its first value to the end of its last one."""
        if not self.num_bytes:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether its values follow one another in the file in their own order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def find_tensors(path: Path) -> dict[str, Slab]:
    """Return the place of each tensor of a pickled file by name.

    Raises OSError, and Refused for a file that holds anything but plain tensors, is cut or damaged, or names places
    outside of itself.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Refused("it is not a plain file")
        start = file.read(len(_LEGACY_START))
        if start.startswith(_ZIP_START):
            layout, places = _find_zipped(file, status.st_size)
        elif start == _LEGACY_START:
            layout, places = _find_legacy(file, status.st_size)
        else:
            raise Refused("it is neither of the two forms that torch writes")
    slabs = {name: _slab(name, tensor, layout, places) for name, tensor in layout.tensors.items()}
    if sum(slab.num_bytes for slab in slabs.values()) > _MAX_GROWTH * status.st_size:
        raise Refused(f"its tensors would take over {_MAX_GROWTH} times its own {status.st_size} bytes")
    return slabs


def _slab(name: str, tensor: Tensor, layout: Layout, places: Mapping[str, tuple[int, int]]) -> Slab:
    """Return a tensor's place. Raises Refused if a value of it lies outside of its storage."""
    storage, place = layout.storages.get(tensor.storage), places.get(tensor.storage)
    if storage is None or place is None:
        raise Refused(f"the storage of {name[:80]!r} is missing")
    width = DTYPE_BYTES[storage.dtype]
    start, size = place
    if storage.num_values * width > size:
        raise Refused(f"the storage of {name[:80]!r} has {size} bytes and should have {storage.num_values * width}")
    slab = Slab(storage.dtype, start + tensor.offset * width, tensor.shape, tensor.strides)
    if tensor.offset * width + slab.span_bytes > storage.num_values * width:
        raise Refused(f"tensor {name[:80]!r} reaches beyond its storage")
    return slab


def _find_zipped(file: BinaryIO, file_bytes: int) -> tuple[Layout, dict[str, tuple[int, int]]]:
    """Return the layout, and the place and size of each storage by key."""
    _check_directory(file, file_bytes)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = _checked_entries(archive)
            prefix = _prefix(entries)
            order = entries.get(f"{prefix}byteorder")
            if order is not None and (order.file_size != len(_LITTLE) or archive.read(order) != _LITTLE):
                raise Refused("its numbers are big-endian")
            if entries[f"{prefix}{_PICKLE}"].file_size > _MAX_PICKLE_BYTES:
                raise Refused(f"its pickle is over {_MAX_PICKLE_BYTES} bytes")
            program = archive.read(f"{prefix}{_PICKLE}")
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise Refused(f"it is cut or damaged: {error}") from error
    folder = f"{prefix}data/"
    stored = {name.removeprefix(folder): entry for name, entry in entries.items() if name.startswith(folder)}
    places = {key: (_data_start(file, entry), entry.file_size) for key, entry in stored.items()}
    _check_places(places.values(), file_bytes)
    return _interpret(ZIPPED + program), places


def _check_directory(file: BinaryIO, file_bytes: int) -> None:
    """Raise Refused for a list of entries that would fill the memory: the library reads it at once.

    The records must lie where torch writes them, without a comment after them, so that the library finds no others.
    Source: PKWARE's APPNOTE, sections 4.3.14 to 4.3.16.
    """
    records_bytes = _END64.size + _LOCATOR.size + _END.size
    start = file_bytes - records_bytes
    file.seek(max(0, start))
    records = file.read(records_bytes).rjust(records_bytes, b"\0")
    mark, size, comment_bytes = _END.unpack_from(records, _END64.size + _LOCATOR.size)
    is_regular = mark == b"PK\x05\x06" and comment_bytes == 0
    locator_mark, place = _LOCATOR.unpack_from(records, _END64.size)
    if locator_mark == b"PK\x06\x07":
        mark, size = _END64.unpack_from(records)
        is_regular = is_regular and mark == b"PK\x06\x06" and place == start
    if not is_regular:
        raise Refused("it is cut or damaged: its end is not the one that torch writes")
    if size > _MAX_DIRECTORY_BYTES:
        raise Refused(f"its list of entries has {size} bytes")


def _checked_entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the entries by name. Raises Refused for what torch never writes."""
    entries: dict[str, zipfile.ZipInfo] = {}
    if len(archive.infolist()) > _MAX_ENTRIES:
        raise Refused(f"it has over {_MAX_ENTRIES} entries")
    for entry in archive.infolist():
        shown = repr(entry.orig_filename[:80])
        if entry.filename in entries:
            raise Refused(f"it has two entries {shown}")
        if entry.orig_filename.startswith("/") or "\\" in shown or ".." in entry.filename.split("/"):
            raise Refused(f"its entry {shown} leads out of it")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise Refused(f"its entry {shown} is a symbolic link")
        if entry.flag_bits & 1:
            raise Refused(f"its entry {shown} is encrypted")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise Refused(f"its entry {shown} is compressed, which torch never does")
        entries[entry.filename] = entry
    return entries


def _prefix(entries: Mapping[str, zipfile.ZipInfo]) -> str:
    found = [name.removesuffix(_PICKLE) for name in entries if name.endswith(f"/{_PICKLE}") and name.count("/") == 1]
    if len(found) != 1:
        raise Refused(f"it has {len(found)} files {_PICKLE}, and torch writes one")
    if f"{found[0]}constants.pkl" in entries:
        raise Refused("it is a TorchScript program, not weights")
    return found[0]


def _data_start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Return the first byte of an entry's content. The extra field of its local header may be longer than listed."""
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise Refused("it is cut")
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    if magic != _ZIP_START:
        raise Refused("it is damaged: an entry has no header")
    return entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes


def _check_places(places: Iterable[tuple[int, int]], file_bytes: int) -> None:
    """Raise Refused if a place lies outside of the file, or two overlap."""
    end = 0
    for start, size in sorted(places):
        if start < end:
            raise Refused("two of its entries overlap")
        end = start + size
    if end > file_bytes:
        raise Refused("it is cut: an entry reaches beyond its end")


def _find_legacy(file: BinaryIO, file_bytes: int) -> tuple[Layout, dict[str, tuple[int, int]]]:
    file.seek(0)
    layout = _interpret(LEGACY + file.read(_MAX_PICKLE_BYTES))
    places: dict[str, tuple[int, int]] = {}
    position = layout.start
    for key in layout.keys:
        storage = layout.storages.get(key)
        if storage is None:
            raise Refused("it lists a storage that no tensor has")
        file.seek(position)
        head = file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise Refused("it is cut")
        if _LENGTH.unpack(head)[0] != storage.num_values:
            raise Refused("a storage has another length than its pickle says")
        size = storage.num_values * DTYPE_BYTES[storage.dtype]
        places[key] = (position + _LENGTH.size, size)
        position += _LENGTH.size + size
        if position > file_bytes:
            raise Refused("it is cut: a storage reaches beyond its end")
    return layout, places


def _interpret(request: bytes) -> Layout:
    """Return what the confined process reads in a pickle. Raises Refused."""

    async def ask() -> bytes:
        helper = Helper("sie.catalog.pickled.program")
        try:
            return await helper.ask(request, timeout_s=_TIMEOUT_S, max_reply_bytes=4 * _MAX_PICKLE_BYTES)
        finally:
            helper.close()

    try:
        found = msgspec.json.decode(asyncio.run(ask()), type=Layout | Refusal)
    except TimeoutError:
        raise Refused(f"its pickle was not read within {_TIMEOUT_S:g} s") from None
    except (HelperFailed, msgspec.DecodeError) as error:
        raise Refused("its pickle could not be read in the memory for it") from error
    if isinstance(found, Refusal):
        raise Refused(found.reason)
    return found
