"""Loads and unloads models of a repository from one frontend process, for both tensor APIs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.table import ModelTable
from sie.frontend.tensors.lookup import TensorTable
from sie.frontend.tensors.states import reason_of
from sie.ipc.messages import ManageRepository, ModelEntry
from sie.values.errors import DeadlineExceeded, ModelLoadFailed

_MOVING: Final = frozenset(("loading", "unloading"))
_UNLOADING_NS: Final = 1_000_000_000
"""How long an unload waits for what it has begun: clients look at the index right after it, and an idle model goes at once."""


class RepositoryAdmin:
    """The models of the repositories, as an administrator handles them. Who may ask is for the caller to check."""

    def __init__(self, tensors: TensorTable, models: ModelTable, admin: ModelAdmin) -> None:
        self._tensors = tensors
        self._models = models
        self._admin = admin

    async def load(self, name: str, deadline_ns: int) -> None:
        """Read a model anew, load the versions that its policy names, and return when all of them have settled.

        A version that is loaded and whose files have not changed is left alone. Raises Unavailable unless
        repository_control is explicit, BadRequest for a name that is not in the repository, ModelLoadFailed (400) for
        a version that did not load, or not anew so that it is what it was, and DeadlineExceeded.
        """
        begun = await self._admin.ask(lambda number: ManageRepository(number, "load", name), deadline_ns)
        await self._settled(name, deadline_ns)
        if faults := self._faults(begun.models):
            raise ModelLoadFailed("; ".join(faults), http_status=400)

    async def unload(self, name: str, deadline_ns: int) -> None:
        """Unload all versions of a model, and return when they are gone, or after a second while requests still run.

        An unknown name is left alone.

        Raises Unavailable unless repository_control is explicit.
        """
        await self._admin.ask(lambda number: ManageRepository(number, "unload", name), deadline_ns)
        with contextlib.suppress(DeadlineExceeded):
            await self._settled(name, min(deadline_ns, time.monotonic_ns() + _UNLOADING_NS))

    async def reload(self, deadline_ns: int) -> bool:
        """Read all repositories anew, whatever repository_control says, and return when all of it has settled.

        What is gone is unloaded, what has changed is loaded again; what is new is loaded unless control is explicit.
        Returns whether there was anything to do.
        Raises ModelLoadFailed (400) that names each version that did not load; the others are as they should be.
        """
        begun = await self._admin.ask(lambda number: ManageRepository(number, "reload"), deadline_ns)
        for name in self._tensors.names:
            await self._settled(name, deadline_ns)
        if faults := self._faults(begun.models):
            raise ModelLoadFailed(f"Reloading models versions failed. {'; '.join(faults)}", http_status=400)
        return begun.has_changed

    def _faults(self, models: tuple[str, ...]) -> list[str]:
        """Return the reason of each of these versions that is not loaded from the files that were asked for."""
        faults = [_fault(model, self._tensors.hosted(model)) for model in models]
        return [fault for fault in faults if fault]

    async def _settled(self, name: str, deadline_ns: int) -> None:
        """Wait until no version of a model of a repository is on its way."""
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        try:
            async with asyncio.timeout(left_s):
                while any(map(_is_moving, self._tensors.versions(name).values())):
                    await self._models.wait_changed()
        except TimeoutError:
            raise DeadlineExceeded(
                f"Model '{name}' was not there at the request's deadline; it goes on loading"
            ) from None


def _is_moving(entry: ModelEntry) -> bool:
    return entry.card.kind == "tensor" and (entry.state in _MOVING or entry.reloading)


def _fault(model: str, entry: ModelEntry | None) -> str:
    """Return why a version that was to be loaded is not, or an empty text."""
    rule = entry.card.tensor if entry is not None else None
    if entry is None or rule is None:
        return f"failed to load '{model}', it was removed from the model repository meanwhile"
    if entry.state == "loaded" and not entry.is_outdated:
        return ""
    reason = reason_of(entry) or "not loaded"
    if not rule.version:
        return f"failed to load '{rule.name}', {reason}"
    return f"load failed for model '{rule.name}': version {rule.version} is at UNAVAILABLE state: {reason}"
