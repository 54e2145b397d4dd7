"""Reads an uploaded skill, a zip archive or the files of a folder, and writes it as an archive of our own.

An archive comes from a stranger, so these are bounded before they are read: its directory, the number of its entries,
and the bytes that come out. Names never become paths here. Source: generation API reference, section 8.8.
"""

from __future__ import annotations

import re
import stat
import struct
import zipfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, Final, NamedTuple, cast

from sie.runtime.strange_yaml import read_strange_yaml
from sie.values.errors import BadRequest

_MANIFEST: Final = "SKILL.md"
_MAX_FRONT_BYTES: Final = 16 * 1024
_MAX_NAME_CHARS: Final = 255
_MAX_DESCRIPTION_CHARS: Final = 4096
_MAX_PATH_BYTES: Final = 1024
_MAX_PART_BYTES: Final = 255
_MAX_DEPTH: Final = 16
_BYTES_AN_ENTRY: Final = 46 + 2 * _MAX_PATH_BYTES
"""Room of one entry in an archive's directory."""
_END: Final = struct.Struct("<4s4H2LH")
"""The end of an archive's directory: APPNOTE.TXT 6.3.10, section 4.3.16."""
_END_MARK: Final = b"PK\x05\x06"
_END64_MARK: Final = b"PK\x06\x07"
_LOCATOR_BYTES: Final = 20
_MAX_COMMENT_BYTES: Final = (1 << 16) - 1
_METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED: Final = 0x1
_JUNK: Final = "__MACOSX/"
"""The folder that macOS adds to every archive."""
_PIECE_BYTES: Final = 1 << 18
_PLAIN_TIME: Final = (1980, 1, 1, 0, 0, 0)
_FRONT: Final = re.compile(rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_DRIVE: Final = re.compile(r"\A[A-Za-z]:")


class BundleLimits(NamedTuple):
    """Limits of one skill."""

    max_bytes: int
    """Of its files together, unpacked."""
    max_files: int


class Manifest(NamedTuple):
    """The facts of a skill, from the front matter of its SKILL.md, and the folder of our archive with its files."""

    name: str
    description: str
    folder: str


class Part(NamedTuple):
    """One file of a folder."""

    path: str
    source: BinaryIO


def pack_archive(archive: BinaryIO, target: IO[bytes], limits: BundleLimits) -> Manifest:
    """Write the files of a zip archive as a skill's archive into target. Raises BadRequest (422) naming the fault."""
    _check_directory(archive, limits)
    with _readable(archive) as opened:
        entries = [one for one in opened.infolist() if not one.is_dir() and not one.filename.startswith(_JUNK)]
        for info in entries:
            _check_entry(info)
        return _pack([info.filename for info in entries], [_Entry(opened, info) for info in entries], target, limits)


def pack_folder(parts: Sequence[Part], target: IO[bytes], limits: BundleLimits) -> Manifest:
    """Write the files of a folder as a skill's archive into target. Raises BadRequest (422) naming the fault."""
    return _pack([part.path for part in parts], [_Loose(part.source) for part in parts], target, limits)


class _Entry(NamedTuple):
    archive: zipfile.ZipFile
    info: zipfile.ZipInfo

    def pieces(self) -> Iterator[bytes]:
        with self.archive.open(self.info) as source:
            yield from iter(lambda: source.read(_PIECE_BYTES), b"")


class _Loose(NamedTuple):
    source: BinaryIO

    def pieces(self) -> Iterator[bytes]:
        self.source.seek(0)
        yield from iter(lambda: self.source.read(_PIECE_BYTES), b"")


def _pack(
    paths: Sequence[str], sources: Sequence[_Entry | _Loose], target: IO[bytes], limits: BundleLimits
) -> Manifest:
    if len(paths) > limits.max_files:
        raise _wrong(f"has {len(paths)} files, more than max_skill_files ({limits.max_files})")
    names = [_clean_path(path) for path in paths]
    inner = _find_root(names)
    _check_distinct(inner)
    name, description = _read_front(next(sources[inner.index(_MANIFEST)].pieces(), b"")[:_MAX_FRONT_BYTES])
    folder = folder_name(name)
    left = limits.max_bytes
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as written:
        for path, source in zip(inner, sources, strict=True):
            with written.open(_plain_entry(f"{folder}/{path}"), "w") as entry:
                for piece in source.pieces():
                    left -= len(piece)
                    if left < 0:
                        raise _wrong(f"has more than max_skill_bytes ({limits.max_bytes}) when unpacked")
                    entry.write(piece)
    return Manifest(name, description, folder)


def _plain_entry(path: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(path, _PLAIN_TIME)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return entry


def folder_name(name: str) -> str:
    """Return the folder in which a skill of this name is shown to a model: letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:64] or "skill"


def _find_root(names: Sequence[str]) -> list[str]:
    """Return the paths of all files below the skill's root, which is the only folder if SKILL.md is not outside it."""
    if _MANIFEST in names:
        return list(names)
    first = {name.partition("/")[0] for name in names}
    if len(first) == 1:
        inner = [name.partition("/")[2] for name in names]
        if _MANIFEST in inner:
            return inner
    raise _wrong(f"must hold {_MANIFEST} at its root, or in its only folder")


def _clean_path(path: str) -> str:
    """Return a path of plain parts, or raise BadRequest."""
    shown = path if len(path) <= 80 else f"{path[:80]}..."
    if not path or path.startswith("/") or "\\" in path or _DRIVE.match(path):
        raise _wrong(f"has the path {shown!r}, which must be relative, with slashes")
    if any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) < 0xE000 for char in path):
        raise _wrong(f"has the path {shown!r}, which holds control characters")
    parts = path.removeprefix("./").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise _wrong(f"has the path {shown!r}, which leaves its folder or has an empty part")
    is_long = len(path.encode()) > _MAX_PATH_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in parts)
    if is_long or len(parts) > _MAX_DEPTH:
        raise _wrong(f"has the path {shown!r}, which is too long or too deep")
    return "/".join(parts)


def _check_distinct(names: Sequence[str]) -> None:
    """Refuse two files with one path, and a path that is a file and a folder."""
    known = set(names)
    folders = {name[:place] for name in names for place, char in enumerate(name) if char == "/"}
    if len(known) != len(names) or known & folders:
        raise _wrong("has two files with the same path")


def _check_directory(archive: BinaryIO, limits: BundleLimits) -> None:
    """Refuse an archive whose directory is absurd, before it is read into memory.

    The directory is looked for as `zipfile` does: at the end of the file, else before the last comment.
    """
    size = archive.seek(0, 2)
    start = max(0, size - _END.size - _MAX_COMMENT_BYTES - _LOCATOR_BYTES)
    archive.seek(start)
    tail = archive.read()
    place = len(tail) - _END.size
    if place < 0 or not tail.startswith(_END_MARK, place) or tail[-2:] != b"\0\0":
        place = tail.rfind(_END_MARK)
    if place < 0 or len(tail) - place < _END.size:
        raise _wrong("is not a zip archive")
    if tail.startswith(_END64_MARK, max(0, place - _LOCATOR_BYTES)):
        raise _wrong("is a zip64 archive, which is for larger ones than may be uploaded")
    num_entries, directory_bytes = _END.unpack_from(tail, place)[4:6]
    # An archive has an entry for each folder, too.
    if num_entries > 2 * limits.max_files or directory_bytes > 2 * limits.max_files * _BYTES_AN_ENTRY:
        raise _wrong(f"has {num_entries} entries, and may have {limits.max_files} files (max_skill_files)")
    archive.seek(0)


@contextmanager
def _readable(archive: BinaryIO) -> Generator[zipfile.ZipFile]:
    """Open an archive. Whatever `zipfile` raises about strange data becomes BadRequest; OSError stays, it is the disk's."""
    try:
        with zipfile.ZipFile(archive) as opened:
            yield opened
    except (BadRequest, OSError):
        raise
    except Exception as error:  # zipfile and zlib name dozens: struct.error, EOFError, NotImplementedError, ...
        raise _wrong(f"is not a zip archive that can be read: {error}") from None


def _check_entry(info: zipfile.ZipInfo) -> None:
    mode = info.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise _wrong(f"holds {info.filename[:80]!r}, which is a link or a device; only files are allowed")
    if info.flag_bits & _ENCRYPTED:
        raise _wrong("is encrypted")
    if info.compress_type not in _METHODS:
        raise _wrong("must be stored or deflated: other ways to compress are not supported")


def _read_front(text: bytes) -> tuple[str, str]:
    """Return the name and the description in the front matter of a SKILL.md."""
    found = _FRONT.match(text)
    if found is None:
        raise _wrong(f"has a {_MANIFEST} that does not begin with front matter between '---' lines (up to 16 KiB)")
    try:
        fields = read_strange_yaml(found[1])
    except ValueError as error:
        raise _wrong(f"has a {_MANIFEST} whose front matter is not valid YAML: {error}") from None
    values = cast("dict[Any, Any]", fields) if isinstance(fields, dict) else {}
    return (
        _read_line(values, "name", _MAX_NAME_CHARS),
        _read_line(values, "description", _MAX_DESCRIPTION_CHARS),
    )


def _read_line(fields: dict[Any, Any], name: str, max_chars: int) -> str:
    value = fields.get(name)
    text = value.strip() if isinstance(value, str) else ""
    if not text or len(text) > max_chars:
        raise _wrong(f"needs a '{name}' of 1 to {max_chars} characters in the front matter of {_MANIFEST}")
    return text


def _wrong(reason: str) -> BadRequest:
    return BadRequest(f"The skill {reason}", http_status=422, extras={"param": "files"})
