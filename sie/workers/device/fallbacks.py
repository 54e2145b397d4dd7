"""Collects the fallbacks of a load: each place that chooses a slower way notes it here, with its reason.

A load's report carries the list to `/v1/models` and the metrics, so that no fallback is known to the log alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sie.runtime.logs import get_logger
from sie.values.fallbacks import MEANINGS, Fallback, FallbackName

_log = get_logger(__name__)


class Fallbacks:
    """The fallbacks of one load, by name; only the first reason for each is kept."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._found: dict[FallbackName, Fallback] = {}

    def add(self, name: FallbackName, reason: str) -> None:
        """Add a fallback, and log a warning if it is a new one."""
        if name not in self._found:
            self._found[name] = Fallback(name, reason)
            _log.warning("%s: %s: %s", self._model, MEANINGS[name], reason)

    @property
    def found(self) -> tuple[Fallback, ...]:
        """All of them, in the order in which they were added."""
        return tuple(self._found.values())


_current: ContextVar[Fallbacks | None] = ContextVar("fallbacks", default=None)


@contextmanager
def collecting(model: str) -> Iterator[Fallbacks]:
    """Collect the fallbacks that this thread notes within the block, which loads a model."""
    own = Fallbacks(model)
    token = _current.set(own)
    try:
        yield own
    finally:
        _current.reset(token)


def note(name: FallbackName, reason: str) -> None:
    """Note that the model that this thread loads has a fallback. Outside of a load it is only logged."""
    (_current.get() or Fallbacks("a model")).add(name, reason)
