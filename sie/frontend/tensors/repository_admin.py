"""Loads and unloads models of a repository from one frontend process, for both tensor APIs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.model_table import ModelTable
from sie.frontend.tensors.lookup import TensorTable
from sie.frontend.tensors.states import reason_of
from sie.ipc.messages import ManageRepository, ModelEntry
from sie.values.errors import DeadlineExceeded, ModelLoadFailed

_MOVING: Final = frozenset(("loading", "unloading"))
_UNLOADING_NS: Final = 1_000_000_000
"""How long an unload waits to finish. Clients read the index right after it, and an idle model unloads at once."""


class RepositoryAdmin:
    """Loads and unloads the models of the repositories. The caller checks the permission."""

    def __init__(self, tensors: TensorTable, models: ModelTable, admin: ModelAdmin) -> None:
        self._tensors = tensors
        self._models = models
        self._admin = admin

    async def load(self, name: str, deadline_ns: int) -> None:
        """Read a model again, load the versions that its policy names, and return when all of them have settled.

        A loaded version with unchanged files stays as it is. Raises Unavailable unless repository_control is explicit,
        BadRequest for a name that is not in the repository, and DeadlineExceeded. Raises ModelLoadFailed (400) for a
        version that did not load, or did not reload and so stays as it was.
        """
        begun = await self._admin.ask(lambda number: ManageRepository(number, "load", name), deadline_ns)
        await self._settled(name, deadline_ns)
        if faults := self._faults(begun.models):
            raise ModelLoadFailed("; ".join(faults), http_status=400)

    async def unload(self, name: str, deadline_ns: int) -> None:
        """Unload all versions of a model. Return when they are gone, or after a second while requests still run.

        An unknown name is ignored. Raises Unavailable unless repository_control is explicit.
        """
        await self._admin.ask(lambda number: ManageRepository(number, "unload", name), deadline_ns)
        with contextlib.suppress(DeadlineExceeded):
            await self._settled(name, min(deadline_ns, time.monotonic_ns() + _UNLOADING_NS))

    async def reload(self, deadline_ns: int) -> bool:
        """Read all repositories again, whatever repository_control says, and return when all models have settled.

        Removed models are unloaded, and changed ones are reloaded. New ones are loaded unless control is explicit.
        Returns whether anything had changed.
        Raises ModelLoadFailed (400), which names each version that did not load; the others are up to date.
        """
        begun = await self._admin.ask(lambda number: ManageRepository(number, "reload"), deadline_ns)
        for name in self._tensors.names:
            await self._settled(name, deadline_ns)
        if faults := self._faults(begun.models):
            raise ModelLoadFailed(f"Reloading models versions failed. {'; '.join(faults)}", http_status=400)
        return begun.has_changed

    def _faults(self, models: tuple[str, ...]) -> list[str]:
        """Return the reason for each of these versions that is not loaded from the requested files."""
        faults = [_fault(model, self._tensors.hosted(model)) for model in models]
        return [fault for fault in faults if fault]

    async def _settled(self, name: str, deadline_ns: int) -> None:
        """Wait until no version of a repository's model is loading or unloading."""
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        try:
            async with asyncio.timeout(left_s):
                while any(map(_is_moving, self._tensors.versions(name).values())):
                    await self._models.wait_changed()
        except TimeoutError:
            raise DeadlineExceeded(
                f"Model '{name}' was not loaded at the request's deadline; it continues to load"
            ) from None


def _is_moving(entry: ModelEntry) -> bool:
    return entry.card.kind == "tensor" and (entry.state in _MOVING or entry.reloading)


def _fault(model: str, entry: ModelEntry | None) -> str:
    """Return the reason why a version is not loaded as requested, or an empty text."""
    rule = entry.card.tensor if entry is not None else None
    if entry is None or rule is None:
        return f"failed to load '{model}', it was removed from the model repository meanwhile"
    if entry.state == "loaded" and not entry.is_outdated:
        return ""
    reason = reason_of(entry) or "not loaded"
    if not rule.version:
        return f"failed to load '{rule.name}', {reason}"
    return f"load failed for model '{rule.name}': version {rule.version} is at UNAVAILABLE state: {reason}"
