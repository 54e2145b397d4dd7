"""Reads a checkpoint's small files. Must refuse a file that lies outside the checkpoint.

A directory is read as it is on disk. A symbolic link must stay beneath it. In the hub's cache layout
(`models--X/snapshots/REVISION`, whose files are links to `models--X/blobs`), it must stay beneath the repository's
folder. Source: fault sheet S31.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sie.values.errors import ModelLoadFailed, not_loaded

_MAX_JSON_BYTES = 16 << 20
_OF_PATHS = frozenset((
    errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR,
))  # fmt: skip
"""Errors that a path has until somebody changes it; others, such as those of a disk or a network, may pass."""
T = TypeVar("T")


def refuse(model_id: str, reason: str, error_class: str = "CONFIG") -> ModelLoadFailed:
    """Return the error for a checkpoint that will not be served. CONFIG is permanent, STORAGE is retried."""
    return ModelLoadFailed(not_loaded(model_id, reason), extras={"error_class": error_class})


def refuse_unreadable(model_id: str, name: str, error: OSError) -> ModelLoadFailed:
    """Return the error for a file that cannot be read; it is permanent if another try would fail in the same way."""
    return refuse(model_id, f"{name}: {error.strerror}", "CONFIG" if error.errno in _OF_PATHS else "STORAGE")


def decode_json(data: bytes, form: type[T]) -> T:
    """Decode JSON into the given form; accepts the Infinity and NaN that Python writes. Raises DecodeError."""
    try:
        return msgspec.json.decode(data, type=form)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        try:
            value = json.loads(data)
        except ValueError:
            raise error from None
        return msgspec.convert(value, form)


class Checkpoint(msgspec.Struct, frozen=True):
    """A model's directory: absolute, existing, and the only place its files are read from."""

    id: str
    root: Path
    boundary: Path
    """The folder that must contain every file's real path."""

    def find(self, name: str) -> Path | None:
        """Return the path of a file or folder of the checkpoint, or None when it does not exist.

        Raises ModelLoadFailed when the path leads outside the checkpoint, for a name that no file can have, for a pipe or
        another special file, and for a file that this user may not read.
        """
        path = self.root / name
        try:
            real = path.resolve()
            outside = not real.is_relative_to(self.boundary)
            if not outside and not real.exists():
                return None
            is_plain = outside or real.is_file() or real.is_dir()
        except OSError as error:
            raise refuse_unreadable(self.id, name, error) from error
        except ValueError:  # it holds a null character
            raise refuse(self.id, f"{name!r} is not the name of a file") from None
        if outside:
            raise refuse(self.id, f"{name} leads out of the model's directory")
        if not is_plain:  # a read of a pipe waits for ever
            raise refuse(self.id, f"{name} is not a file")
        if not os.access(path, os.R_OK):
            raise refuse(self.id, f"{name}: {os.strerror(errno.EACCES)}")
        return path

    def folder(self, name: str) -> Checkpoint:
        """Return a folder of the checkpoint as a separate checkpoint with the same boundary."""
        path = self.find(name)
        if path is None or not path.is_dir():
            raise refuse(self.id, f"there is no directory {name}")
        return Checkpoint(self.id, path, self.boundary)

    def read_json(self, name: str, form: type[T]) -> T | None:
        """Return the JSON of a file in the given form, or None when the file does not exist."""
        path = self.find(name)
        if path is None:
            return None
        try:
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise refuse(self.id, f"{name} is over {_MAX_JSON_BYTES} bytes")
            return decode_json(path.read_bytes(), form)
        except OSError as error:
            raise refuse_unreadable(self.id, name, error) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise refuse(self.id, f"{name} cannot be read: {error}") from error

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object of a file, or an empty one when the file does not exist."""
        return self.read_json(name, dict[str, Any]) or {}


def open_checkpoint(model_id: str, directory: str) -> Checkpoint:
    """Return the checkpoint in a directory. Raises ModelLoadFailed when the directory does not exist."""
    root = Path(directory).absolute()
    try:
        if not root.is_dir():
            reason = f"{root} is not a directory or a .gguf file" if root.exists() else f"there is no directory {root}"
            raise refuse(model_id, reason, "STORAGE")
    except OSError as error:
        raise refuse_unreadable(model_id, str(root), error) from error
    boundary = root.resolve()
    if boundary.parent.name == "snapshots" and boundary.parent.parent.name.startswith("models--"):
        boundary = boundary.parent.parent
    return Checkpoint(model_id, root, boundary)
