"""Sends the state of all models and workers to every frontend, and judges whether the server is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

from sie.ipc import messages
from sie.supervisor.child import ChildState
from sie.supervisor.children import Children
from sie.supervisor.model_registry import ModelRegistry

_SHOWN_STATES: Final[dict[ChildState, Literal["starting", "ready", "lost", "dead"]]] = {
    "waiting": "starting", "starting": "starting", "ready": "ready", "lost": "lost", "gone": "dead",
}  # fmt: skip
WithAdapters = Callable[[tuple[messages.ModelEntry, ...]], tuple[messages.ModelEntry, ...]]


class StateBroadcast:
    """The state of one server as its frontends know it."""

    def __init__(
        self,
        registry: ModelRegistry,
        children: Children,
        not_ready_reason: Callable[[], str],
        on_first_ready: Callable[[], None],
    ) -> None:
        """not_ready_reason: returns a reason, other than models, for not being ready, or an empty text."""
        self._registry = registry
        self._children = children
        self._not_ready_reason = not_ready_reason
        self._on_first_ready = on_first_ready
        self._with_adapters: WithAdapters = tuple
        self._is_due = False
        self._failed: set[str] = set()
        """The models that the metrics show as failed."""
        self._config_error = ""
        self.tls_error = ""
        """The reason why the latest TLS files were refused; empty if they were accepted."""
        self.was_ready = False
        """Whether everything was ready at least once."""

    def bind_adapters(self, with_adapters: WithAdapters) -> None:
        """Set the function that adds adapters to model entries."""
        self._with_adapters = with_adapters

    @property
    def num_loaded(self) -> int:
        """The number of models loaded on at least one worker."""
        return sum(entry.state == "loaded" for entry in self._registry.entries())

    def is_progressing(self) -> bool:
        """Return whether something that readiness needs is in progress, not only waiting for a retry."""
        return bool(self._not_ready_reason()) or any(
            self._registry.records[name].wanted for name in self._registry.missing()
        )

    def reason(self) -> str:
        """Return why the server is not ready, or an empty text if it is."""
        missing = self._registry.missing_reasons()
        reasons = (self._not_ready_reason(), f"not loaded: {missing}" if missing else "")
        return "; ".join(filter(None, reasons))

    def set_config_error(self, problem: str) -> None:
        """Tell all frontends why a reload of the settings was refused; empty if it was accepted."""
        self._config_error = problem
        self.broadcast()

    def set_tls_error(self, problem: str) -> None:
        """Tell all frontends why new TLS files were refused; empty if they were accepted."""
        self.tls_error = problem
        self.broadcast()

    def message(self) -> messages.Models:
        """Return the state of all models and workers, as sent to frontends."""
        reason = self.reason()
        workers = tuple(
            messages.WorkerEntry(
                slot=worker.slot,
                device=worker.place.device,
                pid=worker.peer_pid,
                state=_SHOWN_STATES[worker.state],
                restarts=worker.num_restarts,
            )
            for worker in self._children.workers
        )
        entries = self._with_adapters(self._registry.entries())
        return messages.Models(entries, not reason, reason, workers, self._config_error, self.tls_error)

    def broadcast(self) -> None:
        """Send the state to all frontends, once per loop iteration for any number of changes."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._broadcast_now)

    def _broadcast_now(self) -> None:
        self._is_due = False
        message = self.message()
        self._children.send_all(self._children.frontends, message)
        self._show_failed(self._registry.failed())
        if message.ready and not self.was_ready:
            self.was_ready = True
            self._on_first_ready()

    def _show_failed(self, failed: set[str]) -> None:
        for model in failed ^ self._failed:
            self._children.page.show_failed(model, has_failed=model in failed)
        self._failed = failed
