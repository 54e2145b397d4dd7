"""Loads a model on a CPU so that all workers of the host share its weights: from a file that the first load writes.

The first worker computes the weights, writes them, frees them and loads again from the file, as all later loads do.
Other workers wait for it. Whatever goes wrong with the file, the model is loaded without it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final, TypeVar

from sie.config.sections import Models
from sie.runtime.free_memory import release_free_memory
from sie.runtime.logs import get_logger
from sie.values.card import ModelCard
from sie.workers.device.faults import is_out_of_memory
from sie.workers.prepared.folder import Folder, Lock, LockTimeoutError, Name, weights_folder
from sie.workers.prepared.identity import name_of, source_bytes
from sie.workers.prepared.session import Reading, Writing, entered
from sie.workers.prepared.weights_file import DamagedFileError, WeightsFile, Writer, has_room

_log = get_logger(__name__)
Progress = Callable[[float, str], None]
"""Takes the fraction done, 0 to 1, and the current activity."""
RunnerT = TypeVar("RunnerT")
_UNSERVED: Final = "unserved"
_MARK_BYTES: Final = 1 << 20


def load_shared(
    card: ModelCard,
    models: Models,
    weights: Any,
    load: Callable[[], RunnerT],
    on_progress: Progress,
    *,
    lent_cores: Collection[int] = (),
) -> RunnerT:
    """Return what load returns, with its weights in a file that other workers map, too, if that is possible.

    weights are further settings, of JSON's types, that the weights depend on. load may be called up to three times.
    Its threads use lent_cores, too, while other workers wait for the file. Raises what load raises.
    """
    folder = Folder(weights_folder(models))
    try:
        num_bytes = source_bytes(card)
        if not models.share_weights or num_bytes < models.min_shared_weights_bytes:
            return load()
        name = name_of(card, models.dtype, weights)
        folder.make()
        is_writable = num_bytes <= models.max_weights_bytes and has_room(folder.path, num_bytes)
    except OSError as error:
        _log.warning("%s: its weights are not shared: %s", card.id, error)
        return load()
    shared = _Shared(card, folder, name, load, lent_cores)
    runner = shared.from_file()
    if runner is None and not shared.must_load_alone:
        if is_writable:
            on_progress(0.0, "waiting for another worker that prepares the weights")
            runner = shared.prepared(models.load_timeout_s / 2, models.max_weights_bytes)
        else:
            _log.warning(
                "%s: its weights are not shared: a file of %d MiB would exceed max_weights_bytes, or fill the disk of %s",
                card.id, num_bytes >> 20, folder.path,
            )  # fmt: skip
    return load() if runner is None else runner


class _Shared:
    """One load."""

    def __init__(
        self, card: ModelCard, folder: Folder, name: Name, load: Callable[[], Any], lent_cores: Collection[int]
    ) -> None:
        self._card = card
        self._folder = folder
        self._name = name
        self._path = folder.file_of(name)
        self._load = load
        self._lent_cores = lent_cores
        self._lasting_fault = ""
        self.must_load_alone = False
        """Whether the model cannot be served from the file, always or at this moment."""

    def from_file(self) -> Any:
        """Return the runner with the file's weights, or None if there is no whole file or it cannot be used."""
        try:
            file = WeightsFile(self._path)
        except FileNotFoundError:
            return None
        except (DamagedFileError, ValueError) as error:
            _log.warning("%s: the prepared weights %s are made again: %s", self._card.id, self._path, error)
            return None
        except OSError as error:  # of this process and this moment: the file may be good
            self._load_alone(error)
            return None
        self._folder.mark_used(self._path)
        self.must_load_alone = _UNSERVED in file.facts
        return None if self.must_load_alone else self._load_from(file)

    def _load_from(self, file: WeightsFile) -> Any:
        try:
            with entered(Reading(file)):
                runner = self._load()
        except Exception as error:  # a model may do anything with weights that it finds in an unusual place
            if is_out_of_memory(error):
                raise
            self._load_alone(error)
            return None
        file.forget_pages()
        return runner

    def _load_alone(self, fault: Exception) -> None:
        text = f"{type(fault).__name__}: {fault}"
        _log.warning("%s: its prepared weights are not used: %s", self._card.id, text)
        self.must_load_alone = True
        if not isinstance(fault.__cause__ or fault, OSError):
            self._lasting_fault = text

    def prepared(self, timeout_s: float, max_bytes: int) -> Any:
        """Return the runner of a file that this load or another one writes now; None if there will be no file.

        After timeout_s, half of the time that the supervisor gives a load, the model is loaded without one.
        """
        try:
            with self._folder.lock(self._name, timeout_s) as lock:
                if lock.was_given_up:
                    return None
                runner = self.from_file()
                return self._write(max_bytes, lock) if runner is None and not self.must_load_alone else runner
        except LockTimeoutError:
            _log.warning("%s: another process prepares its weights for %d s already", self._card.id, timeout_s)
        except OSError as error:
            _log.warning("%s: its weights are not shared: %s", self._card.id, error)
        return None

    def _write(self, max_bytes: int, lock: Lock) -> Any:
        """Load, and write the weights; return the runner of the file, or that of the load where there is no file."""
        with suppress(OSError):
            self._path.unlink()  # a damaged file: nobody else replaces it while the lock is held
        with using_cores(self._lent_cores), closing(Writer(self._path, max_bytes)) as writer:
            session = Writing(writer, lock.give_up)
            with entered(session):
                runner = self._load()
            if session.error is None and session.has_changed_tensors:
                self._mark_unserved("its steps write into its weights")
                return runner
            error = session.error or _publish(writer)
        if error is not None:
            lock.give_up()
            _log.warning("%s: its weights are not shared: %s", self._card.id, error)
            return runner
        _log.info("%s: wrote the prepared weights %s", self._card.id, self._path)
        self._folder.remove_surplus(self._name, max_bytes)
        del runner, session
        _free_heap()
        found = self.from_file()
        if self._lasting_fault:
            self._mark_unserved(self._lasting_fault)
        return found

    def _mark_unserved(self, reason: str) -> None:
        """Write a file that tells later loads not to try. The caller holds the lock."""
        _log.warning("%s: its weights are not shared: %s", self._card.id, reason)
        self.must_load_alone = True
        with suppress(OSError), closing(Writer(self._path, _MARK_BYTES)) as writer:
            writer.facts[_UNSERVED] = reason
            _publish(writer)


@contextmanager
def using_cores(lent: Collection[int]) -> Iterator[None]:
    """Let this thread, and those that it starts within the block, run on lent cores besides its own."""
    own = os.sched_getaffinity(0)
    with suppress(OSError):  # the cores of this process have changed since it started
        os.sched_setaffinity(0, own.union(lent))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)


def _publish(writer: Writer) -> Exception | None:
    """Publish a file; return the error if that is impossible."""
    try:
        writer.publish()
    except (OSError, TypeError) as error:  # a fact may be of a type that JSON does not have
        return error
    return None


def _free_heap() -> None:
    """Give the memory of unreferenced objects back to the system."""
    gc.collect()
    release_free_memory()
