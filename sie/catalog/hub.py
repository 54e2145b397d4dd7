"""Downloads a spec without a directory as a complete, verified snapshot into the hub's own cache.

The library resumes a file whose connection broke, and keeps complete files. It does not compare hashes, so this module
does, once for each revision. Only files that can be read without running them are fetched. `HF_HUB_OFFLINE`,
`HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME` are the library's and have their usual meaning.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sie.catalog.files import refuse
from sie.catalog.hub_client import PAUSES_S, use_patient_clients
from sie.catalog.hub_errors import classify, explain, shown_size
from sie.catalog.spec import ModelSpec
from sie.values.errors import ModelLoadFailed

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

Progress = Callable[[float, str], None]
"""Receives the completed fraction, 0 to 1, and the current activity."""

ALLOWED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata"]
CONFIGURATION = ["*config.json", "modules.json"]
"""Small files that show whether the weights are worth downloading."""
IGNORED = ["onnx/*", "openvino/*", "coreml/*", "runs/*", "checkpoint-*/*"]
_DIGESTS = {64: "sha256", 40: "sha1"}  # a blob is named by its LFS or by its git hash
_CHUNK_BYTES = 1 << 20
_PARTIAL: Final = ".incomplete"
_STALE_S: Final = 600.0
_LOCK_S: Final = 0.05
_QUIET_S: Final = 0.2
_REPORT_S: Final = 5.0


def fetch(spec: ModelSpec, on_progress: Progress, allowed: Sequence[str] = ALLOWED, stage: str = "") -> str:
    """Return the directory of the model's snapshot; download missing files that match `allowed`.

    The hub resolves a revision that is not a commit. When the hub cannot be reached, the cached revision is used.
    A busy hub is asked again, unless every file is here. stage names the activity in place of what is done in detail.
    Raises ModelLoadFailed with `error_class` GATED, NOT_FOUND, NETWORK, TIMEOUT, STORAGE, CONFIG or UNKNOWN.
    """
    import huggingface_hub
    from huggingface_hub.utils import logging as hub_logging

    if hub_logging.get_verbosity() == logging.WARNING:  # its default; a warning would break the bar
        hub_logging.set_verbosity_error()
        warnings.filterwarnings("ignore", module=huggingface_hub.__name__)
    shown = _Shown(on_progress, stage)
    shown.report(0.0, "asking the hub")
    cached = ""
    try:
        cached = find_cached(spec, allowed)
        _remove_stale_parts(spec)
        use_patient_clients(shown.report_wait, () if cached else PAUSES_S)
        directory = huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            spec.id,
            revision=spec.revision,
            allow_patterns=list(allowed),
            ignore_patterns=IGNORED,
            tqdm_class=_progress_bar(shown.report, _missing_bytes(spec, allowed)),
        )
    except ModelLoadFailed:
        raise
    except Exception as error:
        error_class = classify(error)
        if not cached or error_class not in ("NETWORK", "TIMEOUT"):  # the library itself knows only some of these
            raise refuse(spec.id, explain(error, spec) + directory_hint(spec.id), error_class) from error
        directory = cached
    _verify(spec, Path(directory), shown.report)
    return directory


class _Shown:
    """The progress that was reported last. A wait for the hub is shown at that fraction."""

    def __init__(self, on_progress: Progress, stage: str) -> None:
        self._on_progress = on_progress
        self._stage = stage
        self._fraction = 0.0

    def report(self, fraction: float, text: str) -> None:
        self._fraction = 0.0 if self._stage else fraction
        self._on_progress(self._fraction, self._stage or text)

    def report_wait(self, text: str) -> None:
        self._on_progress(self._fraction, text)


def find_cached(spec: ModelSpec, allowed: Sequence[str] = ALLOWED) -> str:
    """Return the directory of the model's snapshot, or empty unless all of those files are known to be on this machine.

    Never asks the hub.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        if not list_files(spec):
            return ""
        return huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            spec.id,
            revision=spec.revision,
            allow_patterns=list(allowed),
            ignore_patterns=IGNORED,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return ""
    except HFValidationError as error:
        raise refuse(spec.id, explain(error, spec) + directory_hint(spec.id)) from error


def directory_hint(model_id: str) -> str:
    """Return how to name the directory that has the id of a model of the hub, after `; `; empty if there is none."""
    with contextlib.suppress(OSError):  # an id may be too long for a path
        if Path(model_id).is_dir():
            return f"; there is a directory here of this name: write ./{model_id}"
    return ""


def list_files(spec: ModelSpec) -> Sequence[RepoFile]:
    """Return the files of a model's repository as the hub last listed them; empty if this host has no such list."""
    try:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError
    except ImportError:  # an older library keeps no list of a snapshot's files
        return ()
    try:
        return get_cached_repo_tree(spec.id, revision=spec.revision)
    except CachedRepoTreeNotFoundError:
        return ()


def _remove_stale_parts(spec: ModelSpec) -> None:
    """Delete the parts of this model's files that killed downloads have left. The library resumes none of them.

    A part stays while a process holds the lock of its file, or has written to it lately: some file systems between hosts
    give the lock to everyone. Other names stay, because an older library resumes them.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock

    cache, name = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=spec.id, repo_type="model")
    for part in (cache / name / "blobs").glob(f"*.{'[0-9a-f]' * 8}{_PARTIAL}"):
        lock = cache / ".locks" / name / f"{part.name.partition('.')[0]}.lock"
        with contextlib.suppress(OSError):  # `Timeout` of a lock is one
            if time.time() - part.stat().st_mtime > _STALE_S:
                with WeakFileLock(lock, timeout=_LOCK_S):
                    part.unlink()


def remove_partial_files() -> None:
    """Delete the files that this process is downloading. The library uses none of them again.

    It looks until it has found none for a moment: the threads that download may be about to open the next file, or to
    move one that is complete to its place.
    """
    quiet_s = time.monotonic()
    while time.monotonic() - quiet_s < _QUIET_S:
        if sum(map(_removed, Path("/proc/self/fd").iterdir())):
            quiet_s = time.monotonic()
        time.sleep(_QUIET_S / 20)


def _removed(entry: Path) -> bool:
    """Delete the file of a descriptor if it is the part of a download; return whether it was."""
    with contextlib.suppress(OSError):
        path = entry.readlink()  # a deleted file's path has another end
        if path.suffix == _PARTIAL:
            path.unlink()
            return True
    return False


def _missing_bytes(spec: ModelSpec, allowed: Sequence[str]) -> int:
    """Return the size of the files to download; 0 while the hub's list is not known here."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    wanted = filter_repo_objects(
        list_files(spec), allow_patterns=list(allowed), ignore_patterns=IGNORED, key=lambda file: file.path
    )
    return sum(
        file.size
        for file in wanted
        if not isinstance(try_to_load_from_cache(spec.id, file.path, revision=spec.revision), str)
    )


def _progress_bar(on_progress: Progress, expected_bytes: int) -> type[Any]:
    """Return a tqdm class that reports each new percent of the bytes, or what came in _REPORT_S, instead of drawing.

    The library adds a file to its bar's total when the file begins, so the total alone would show 100 % after the small
    files. Only `update` reports, because an unclosed bar draws once more when it is garbage collected.
    """
    from huggingface_hub.utils import tqdm

    text = f"downloading {shown_size(expected_bytes)}" if expected_bytes else "downloading"
    shown, shown_s = -1, 0.0

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.update(file=io.StringIO(), disable=False)
            super().__init__(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType]  # tqdm has no types

        def display(self, *args: Any, **kwargs: Any) -> None:
            pass

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal shown, shown_s
            updated = super().update(n)
            total = max(expected_bytes, self.total or 0)
            percent = int(100 * self.n / total) if self.unit == "B" and total else -1
            now_s = time.monotonic()
            if percent > shown or (percent == shown and now_s - shown_s > _REPORT_S):
                shown, shown_s = percent, now_s
                on_progress(min(percent / 100, 1.0), text)
            return updated

    return Bar


def _verify(spec: ModelSpec, snapshot: Path, on_progress: Progress) -> None:
    """Compare every file with the hash that names its blob; a wrong file is deleted, so the next try fetches it.

    A marker beside the snapshots records that a revision was verified.
    """
    marker = snapshot.parent.parent / ".sie-verified" / snapshot.name
    files = list(_blobs(snapshot))
    listed = "\n".join(sorted(f"{link.relative_to(snapshot)} {blob.name}" for link, blob in files))
    try:
        if marker.exists() and marker.read_text() == listed:
            return
        for number, (link, blob) in enumerate(files):
            on_progress(number / len(files), "verifying")
            if _hash(blob, _DIGESTS[len(blob.name)]) != blob.name:
                blob.unlink()
                link.unlink()
                raise refuse(spec.id, f"{link.name} did not match its hash and was deleted", "NETWORK")
    except OSError as error:
        raise refuse(spec.id, f"{error.filename}: {error.strerror}", "STORAGE") from error
    _write_marker(marker, listed)


def _write_marker(marker: Path, text: str) -> None:
    try:
        marker.parent.mkdir(exist_ok=True)
        marker.write_text(text)
    except OSError:
        return  # a read-only cache cannot keep the marker, so each start verifies it


def _blobs(snapshot: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (link, blob) of each file whose blob name is a hash."""
    for link in sorted(snapshot.rglob("*")):
        if link.is_symlink():
            blob = link.resolve()
            if len(blob.name) in _DIGESTS and blob.is_file():
                yield link, blob


def _hash(blob: Path, algorithm: str) -> str:
    """Return the hexadecimal hash: SHA-256 of the content, or SHA-1 as git hashes a file."""
    digest = hashlib.new(algorithm, usedforsecurity=algorithm == "sha256")
    if algorithm == "sha1":
        digest.update(b"blob %d\0" % blob.stat().st_size)
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
