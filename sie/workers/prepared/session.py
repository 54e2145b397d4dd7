"""Gives a load its weights: computed, computed and written to a file, or from a file that an earlier load wrote.

The code that converts and packs weights asks here for each result, under a name, and says how to compute it. A load
that computes and one that reads run the same code, so they ask in the same order; equal names are numbered. A session
belongs to the thread that entered it. While weights come from a file, the model is built without any (`is_skeleton`):
its parameters are on torch's meta device until `sie.workers.prepared.placing` puts the file's in their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.workers.prepared.weights_file import WeightsFile, Writer


class MissingWeightsError(Exception):
    """The file does not fit the model: it was written by another kind of load."""


class Session(Protocol):
    """The source of one load's weights."""

    is_skeleton: bool
    is_trial: bool
    """Whether the loaded model is dropped after its weights were written."""

    def array(self, name: str, make: Callable[[], NDArray[np.uint8]], form: str) -> NDArray[np.uint8]:
        """Return an array's bytes."""
        ...

    def tensor(self, name: str, make: Callable[[], Tensor], *, is_table: bool) -> Tensor:
        """Return a tensor."""
        ...

    def watch(self, tensor: Tensor) -> None:
        """Notice writes into a tensor of the model."""
        ...

    def recall(self, name: str) -> Any:
        """Return a fact that an earlier load found, or None."""
        ...

    def remember(self, name: str, fact: Any) -> None:
        """Keep a fact."""
        ...


class Computing:
    """Computes everything, and keeps nothing."""

    is_skeleton = False
    is_trial = False

    def array(self, name: str, make: Callable[[], NDArray[np.uint8]], form: str) -> NDArray[np.uint8]:
        del name, form
        return make()

    def tensor(self, name: str, make: Callable[[], Tensor], *, is_table: bool) -> Tensor:
        del name, is_table
        return make()

    def watch(self, tensor: Tensor) -> None:
        del tensor

    def recall(self, name: str) -> Any:
        del name

    def remember(self, name: str, fact: Any) -> None:
        del name, fact


class Writing:
    """Computes everything, and writes it to a file. A full disk ends the writing, and not the load."""

    is_skeleton = False
    is_trial = True

    def __init__(self, writer: Writer, on_error: Callable[[], None]) -> None:
        """on_error is called once, perhaps on another thread, as soon as there will be no file."""
        self._writer = writer
        self._on_error = on_error
        writer.on_error = self.abandon
        self._names = _Names()
        self._watched: list[tuple[Tensor, int]] = []
        self.error: OSError | None = None
        """The reason why there will be no file."""

    def array(self, name: str, make: Callable[[], NDArray[np.uint8]], form: str) -> NDArray[np.uint8]:
        made = make()
        self._add(name, made, form, made.shape)
        return made

    def tensor(self, name: str, make: Callable[[], Tensor], *, is_table: bool) -> Tensor:
        del is_table
        made = make().detach()
        data = made.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._add(name, data, str(made.dtype).removeprefix("torch."), tuple(made.shape))
        return made

    def watch(self, tensor: Tensor) -> None:
        self._watched.append((tensor, tensor._version))

    def recall(self, name: str) -> Any:
        del name

    def remember(self, name: str, fact: Any) -> None:
        self._writer.facts[self._names.next(name)] = fact

    @property
    def has_changed_tensors(self) -> bool:
        """Whether the load or its trial steps wrote into a watched tensor: no mapping can serve such a model."""
        return any(tensor._version != version for tensor, version in self._watched)

    def _add(self, name: str, data: NDArray[np.uint8], form: str, shape: tuple[int, ...]) -> None:
        if self.error is None:
            self._writer.add(self._names.next(name), data.reshape(-1), form, shape)

    def abandon(self, error: OSError) -> None:
        """Write nothing more: there will be no file."""
        self.error, self.is_trial = error, False
        self._on_error()


class Reading:
    """Takes weights and facts from a file, where it has them."""

    is_skeleton = True
    is_trial = False

    def __init__(self, file: WeightsFile) -> None:
        self._file = file
        self._names = _Names()

    def array(self, name: str, make: Callable[[], NDArray[np.uint8]], form: str) -> NDArray[np.uint8]:
        del make  # it would compute from weights that are not there
        full = self._find(name)
        if self._file.place(full).format != form:
            raise MissingWeightsError(f"{full} is in the format {self._file.place(full).format!r}, and not {form!r}")
        return self._file.view(full)

    def tensor(self, name: str, make: Callable[[], Tensor], *, is_table: bool) -> Tensor:
        del make
        full = self._find(name)
        place = self._file.place(full)
        dtype: torch.dtype = getattr(torch, place.format)
        if not place.num_bytes:
            return torch.empty(place.shape, dtype=dtype)
        if is_table:
            self._file.keep_small(full)
        return torch.from_numpy(self._file.view(full)).view(dtype).view(place.shape)

    def watch(self, tensor: Tensor) -> None:
        del tensor

    def recall(self, name: str) -> Any:
        return self._file.facts.get(self._names.next(name))

    def remember(self, name: str, fact: Any) -> None:
        del name, fact

    def _find(self, name: str) -> str:
        full = self._names.next(name)
        if full not in self._file:
            raise MissingWeightsError(f"there is no {full}")
        return full


class _Names:
    """Numbers equal names in their order."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, name: str) -> str:
        self._seen[name] += 1
        return f"{name}#{self._seen[name]}"


_session = ContextVar[Session]("session", default=Computing())  # noqa: B039  # it has no state


@contextmanager
def entered(session: Session) -> Iterator[None]:
    """Give the loads of this thread, within the block, their weights from a session."""
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


def is_skeleton() -> bool:
    """Tell whether this load's weights come from a file: models are built without any, and nothing may compute them."""
    return _session.get().is_skeleton


def is_trial() -> bool:
    """Tell whether the model that this load makes is dropped after its weights were written, and loaded again."""
    return _session.get().is_trial


def array(name: str, make: Callable[[], NDArray[np.uint8]], form: str) -> NDArray[np.uint8]:
    """Return packed bytes: those that `make` returns, or the same from a file, read-only. form names their layout."""
    return _session.get().array(name, make, form)


def tensor(name: str, make: Callable[[], Tensor], *, is_table: bool = False) -> Tensor:
    """Return the tensor that `make` returns, or the same from a file, read-only. Of a table, steps read a few rows."""
    return _session.get().tensor(name, make, is_table=is_table)


def watch(tensor: Tensor) -> None:
    """Notice if the load or its trial steps write into a tensor of the model. Other workers will map it read-only."""
    _session.get().watch(tensor)


def recall(name: str) -> Any:
    """Return the fact that an earlier load of the same file remembered, as JSON gives it back; None if there is none."""
    return _session.get().recall(name)


def remember(name: str, fact: Any) -> None:
    """Keep a fact, of JSON's types, for later loads of the same weights."""
    _session.get().remember(name, fact)


def abandon(reason: str) -> None:
    """Let this load write no file, because what it found out may be wrong for later loads."""
    current = _session.get()
    if isinstance(current, Writing):
        current.abandon(OSError(reason))
