"""Converts checkpoints with pickled weights, or without their encoder's configuration, to complete directories.

The source is only read. The new directory has its own copies of the small files, and appears at once when it is
complete. `sie.catalog.pickled` reads the pickles without running them.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from sie.catalog.files import Checkpoint, open_checkpoint, refuse
from sie.catalog.gliner_parts import Encoders, add_encoders, lacks_encoder
from sie.catalog.hub import ALLOWED, IGNORED
from sie.catalog.hub_errors import shown_size
from sie.catalog.modules import read_modules
from sie.catalog.pickled.program import Refused
from sie.catalog.pickled.safetensors_file import write_safetensors
from sie.catalog.pickled.torch_file import Slab, find_tensors

Progress = Callable[[float, str], None]

_FOLDER: Final = "converted"
_STAGED: Final = ".converting-"
_FORM: Final = b"1"
"""Changes when a conversion's result does, so that older results are not used."""
_NAMES: Final = (
    (re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"), r"model\1.safetensors"),
    (re.compile(r"adapter_model\.bin"), "adapter_model.safetensors"),
    (re.compile(r"(sparse_linear|colbert_linear)\.pt"), r"\1.safetensors"),
)
"""The pickled files that are converted, and the names of the results. Others, such as an optimizer's, are left out."""
_HEADS: Final = ("sparse_linear.pt", "colbert_linear.pt")
_INDEX: Final = "pytorch_model.bin.index.json"
_NEW_INDEX: Final = "model.safetensors.index.json"
_WHOLE: Final = "model.safetensors"


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


class Pickled(msgspec.Struct, frozen=True):
    """A pickled file of a checkpoint, and the file that it becomes; both paths are relative to the checkpoint."""

    source: str
    target: str


Found = list[tuple[Pickled, dict[str, Slab]]]
"""Pickled files with the places of their tensors."""


def needs_conversion(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint has weights or heads as pickles only, or lacks its encoder's configuration."""
    return bool(find_pickled(checkpoint)) or lacks_encoder(checkpoint)


def find_pickled(checkpoint: Checkpoint) -> list[Pickled]:
    """Return the pickled files without a converted one beside them. Raises ModelLoadFailed for links that lead out."""
    found: list[Pickled] = []
    for path in _files(checkpoint):
        target = next((form.sub(new, path.name) for form, new in _NAMES if form.fullmatch(path.name)), None)
        if target is None:
            continue
        name = str(path.relative_to(checkpoint.root))
        folder = name.removesuffix(path.name)
        is_weights = path.name.startswith("pytorch_model")
        beside = (_WHOLE, _NEW_INDEX) if is_weights else (target,)
        if not any(checkpoint.find(folder + other) for other in beside):
            checkpoint.find(name)
            found.append(Pickled(name, folder + target))
    return found


def missing_weights(checkpoint: Checkpoint) -> list[str]:
    """Return the patterns of pickled files that a download without them may lack."""
    modules = [module for module in read_modules(checkpoint) or () if module.name not in ("Pooling", "Normalize")]
    folders = dict.fromkeys(f"{module.folder}/" if module.folder else "" for module in modules) or {"": None}
    return [
        *(f"{folder}pytorch_model*.bin" for folder in folders if not _has_weights(checkpoint, folder)),
        *_HEADS,
    ]


def _has_weights(checkpoint: Checkpoint, folder: str) -> bool:
    return any(checkpoint.find(folder + name) is not None for name in (_WHOLE, _NEW_INDEX))


def convert_cached(
    model_id: str, source: str, cache_dir: str, on_progress: Progress, encoders: Encoders, *, is_check: bool = False
) -> str | None:
    """Return a directory with safetensors for a checkpoint: its own if it needs no conversion, else one in the cache.

    With is_check nothing is converted: return None if that would be needed. The cache keeps a result until the source
    changes. Raises ModelLoadFailed as `convert` does.
    """
    checkpoint = open_checkpoint(model_id, source)
    if not needs_conversion(checkpoint):
        return source
    target = Path(cache_dir, _FOLDER, _fingerprint(checkpoint))
    if target.is_dir():
        return str(target)
    if is_check:
        return None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
    except OSError as error:
        raise refuse(model_id, f"{error.filename}: {error.strerror}", "STORAGE") from error
    convert(model_id, source, target, on_progress, encoders, is_private=True)
    return str(target)


def convert(
    model_id: str, source: str, target: Path, on_progress: Progress, encoders: Encoders, *, is_private: bool = False
) -> None:
    """Write a checkpoint with safetensors to the new directory `target`; its parent must exist.

    encoders returns the directory of the encoder that a GLiNER model names. is_private: only this user may read it.
    Raises ModelLoadFailed: CONFIG for pickles that are refused, STORAGE for a disk that is full or read-only.
    """
    checkpoint = open_checkpoint(model_id, source)
    try:
        with _staged(target, is_private=is_private) as staged:
            found = [(one, _find_tensors(checkpoint, one, on_progress)) for one in find_pickled(checkpoint)]
            _check_room(checkpoint, found, staged)
            _copy_kept(checkpoint, staged)
            _write_tensors(checkpoint, found, staged, on_progress)
            _convert_indexes(checkpoint, staged)
            if lacks_encoder(checkpoint):
                on_progress(1.0, "completing the configuration")
                add_encoders(checkpoint, staged, encoders)
            _sync(staged)
    except OSError as error:
        raise refuse(model_id, f"{error.filename or target}: {error.strerror or error}", "STORAGE") from error


def _find_tensors(checkpoint: Checkpoint, one: Pickled, on_progress: Progress) -> dict[str, Slab]:
    on_progress(0.0, f"reading {one.source}")
    try:
        return find_tensors(checkpoint.root / one.source)
    except Refused as error:
        raise refuse(checkpoint.id, f"{one.source}: {error}") from error


def _num_bytes(found: Found) -> int:
    return sum(slab.num_bytes for _, slabs in found for slab in slabs.values())


def _check_room(checkpoint: Checkpoint, found: Found, staged: Path) -> None:
    total = _num_bytes(found) + sum(path.stat().st_size for path in _kept(checkpoint))
    free = shutil.disk_usage(staged).free
    if total > free:
        raise refuse(
            checkpoint.id,
            f"its files take {shown_size(total)}, and {staged.parent} has {shown_size(free)} left",
            "STORAGE",
        )


def _write_tensors(checkpoint: Checkpoint, found: Found, staged: Path, on_progress: Progress) -> None:
    total, done = max(1, _num_bytes(found)), 0
    for one, slabs in found:

        def on_bytes(count: int, name: str = one.source) -> None:
            nonlocal done
            done += count
            on_progress(done / total, f"converting {name}")

        target = staged / one.target
        target.parent.mkdir(exist_ok=True)
        try:
            write_safetensors(checkpoint.root / one.source, slabs, target, on_bytes)
        except Refused as error:
            raise refuse(checkpoint.id, f"{one.source}: {error}") from error


def _convert_indexes(checkpoint: Checkpoint, staged: Path) -> None:
    """Write the index of weights in several files anew. An index that names other files is refused when it is read."""
    for path in _files(checkpoint):
        name = str(path.relative_to(checkpoint.root))
        target = staged / name.replace(_INDEX, _NEW_INDEX)
        if path.name != _INDEX or target.exists():
            continue
        index = checkpoint.read_json(name, _Index) or _Index()
        form, new = _NAMES[0]
        weights = {tensor: form.sub(new, file) for tensor, file in index.weight_map.items()}
        target.write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": weights}))


def _copy_kept(checkpoint: Checkpoint, staged: Path) -> None:
    """Copy small files, and link the safetensors that are there already."""
    for found in _kept(checkpoint):
        target = staged / found.relative_to(checkpoint.root)
        target.parent.mkdir(exist_ok=True)
        if target.suffix != ".safetensors" or not _link(found.resolve(), target):
            shutil.copyfile(found, target)


def _kept(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield the files that are served as they are. Raises ModelLoadFailed for links that lead out."""
    for path in _files(checkpoint):
        name = str(path.relative_to(checkpoint.root))
        is_kept = any(fnmatch.fnmatch(name, pattern) for pattern in ALLOWED) and path.name != _INDEX
        if is_kept and checkpoint.find(name) is not None:  # None: a link to nothing
            yield path


def _link(source: Path, target: Path) -> bool:
    """Make a hard link, or return False where the file systems differ or do not allow it."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _files(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield the files of a checkpoint and of its folders, sorted, without the folders of other formats."""
    for path in sorted([*checkpoint.root.glob("*"), *checkpoint.root.glob("*/*")]):
        name = str(path.relative_to(checkpoint.root))
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if not is_hidden and not path.is_dir() and not any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED):
            yield path


@contextlib.contextmanager
def _staged(target: Path, *, is_private: bool) -> Iterator[Path]:
    """Yield a new directory that becomes `target` at the end, or is removed after an error."""
    staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=target.parent))
    lock = os.open(staged, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield staged
        if not is_private:
            mask = os.umask(0)
            os.umask(mask)
            staged.chmod(0o777 & ~mask)
        try:
            staged.rename(target)  # ORDER: after the last byte; a reader sees the whole directory or none
        except OSError:
            if not is_private or not target.is_dir():  # another process has made the same
                raise
    finally:
        os.close(lock)
        shutil.rmtree(staged, ignore_errors=True)


def _sync(staged: Path) -> None:
    """Write all files to the disk: otherwise a power cut may leave the directory's name without their bytes."""
    for path in [*staged.rglob("*"), staged]:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _remove_abandoned(folder: Path) -> None:
    """Remove what conversions that were killed have left. A living one holds the lock of its directory."""
    for path in folder.glob(f"{_STAGED}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Return a digest of the files' names, places, sizes and times."""
    digest = hashlib.blake2b(_FORM, digest_size=16)
    for path in _files(checkpoint):
        real = path.resolve()
        if real.is_file():
            status = real.stat()
            digest.update(
                b"\0%s\0%s\0%d\0%d" % (os.fsencode(path), os.fsencode(real), status.st_size, status.st_mtime_ns)
            )
    return digest.hexdigest()
