"""Runs the prepare helper, a process that fetches a hub model and converts a slow tokenizer.

Only that process may import transformers or talk to a hub. A hanging download or a crashing tokenizer harms only that
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from sie.catalog.lora import reason_of, refuse_adapter
from sie.catalog.prepare import Failed, Fetched, Found, Message, Ready, Report, Request
from sie.catalog.spec import ModelSpec, RepositoryModel
from sie.config.settings import Settings
from sie.runtime.own_modules import run_module
from sie.runtime.progress import Progress
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import Internal, WireError, from_wire, not_loaded, to_wire

_MAX_LINE_BYTES = 16 << 20
_UNEXPECTED = "the prepare helper sent an unexpected message"
_MAX_READERS = 4
"""Helpers that read repository models, or check models, at the same time. There may be many models, and each takes about a second."""
_CHECK_TIMEOUT_S: Final = 60.0
_LEAVE_S: Final = 2.0


class Preparer:
    """Prepares models, in one helper process each."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._cache_dir = settings.models.cache_dir
        self._converts = settings.models.convert
        self._chat_template = settings.generation.chat_template
        self._timeout_s = settings.models.load_timeout_s
        self._progress = progress
        self._readers = asyncio.Semaphore(_MAX_READERS)

    def reconfigure(self, settings: Settings) -> None:
        """Apply reloaded settings to helpers that start from now on."""
        self._timeout_s = settings.models.load_timeout_s

    async def prepare(self, spec: ModelSpec, *, is_check: bool = False) -> ModelCard | WireError:
        """Return the card of a model that is now on disk, or the error. With is_check nothing is downloaded."""
        request = Request(
            spec=spec, cache_dir=self._cache_dir, is_check=is_check, chat_template=self._chat_template,
            converts=self._converts,
        )  # fmt: skip
        async with self._readers if spec.tensor is not None or is_check else contextlib.nullcontext():
            last = await self._run(request)
        if isinstance(last, Ready):
            return last.card
        return last.error if isinstance(last, Failed) else failed(spec, _UNEXPECTED, "ENGINE")

    async def find_models(self, repositories: tuple[str, ...], only: str = "") -> list[RepositoryModel] | WireError:
        """Return the models of the repositories, all or only the one named `only`, or the error."""
        spec = ModelSpec(id=only)
        last = await self._run(Request(spec=spec, cache_dir=self._cache_dir, repositories=repositories))
        if isinstance(last, Found):
            return last.models
        return last.error if isinstance(last, Failed) else failed(spec, _UNEXPECTED, "ENGINE")

    async def fetch_adapter(self, adapter: AdapterSpec) -> str | WireError:
        """Return the directory of an adapter that is now on disk, or the error."""
        spec = ModelSpec(id=adapter.id, revision=adapter.revision)
        last = await self._run(Request(spec=spec, cache_dir=self._cache_dir, is_adapter=True))
        if isinstance(last, Fetched):
            return last.directory
        reason = reason_of(from_wire(last.error)) if isinstance(last, Failed) else _UNEXPECTED
        return to_wire(refuse_adapter(adapter.id, reason))

    async def _run(self, request: Request) -> Ready | Fetched | Found | Failed:
        """Run one helper and return its final message."""
        helper = await asyncio.create_subprocess_exec(
            *run_module("sie.catalog.prepare"), msgspec.json.encode(request).decode(),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, limit=_MAX_LINE_BYTES,
            process_group=0,  # Ctrl-C at a terminal must reach only the supervisor
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._timeout_s) as silence:
                return await self._follow(helper, request.spec, silence)
        except TimeoutError:
            reason = f"its download or preparation made no progress within load_timeout_s ({self._timeout_s:g} s)"
            return Failed(failed(request.spec, reason, "TIMEOUT"))
        finally:
            await _end(helper)

    async def _follow(
        self, helper: asyncio.subprocess.Process, spec: ModelSpec, silence: asyncio.Timeout
    ) -> Ready | Fetched | Found | Failed:
        """Return the last message of a helper. Each message of its progress starts the time limit again."""
        assert helper.stdout is not None
        try:
            async for line in helper.stdout:
                message = msgspec.json.decode(line, type=Message)
                if isinstance(message, Report):
                    silence.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
                    self._progress.update(spec.id, message.fraction, message.text)
                else:
                    return message
        except ValueError as error:  # asyncio raises it for a line over the limit, msgspec for half a line
            return Failed(failed(spec, f"the prepare helper's answer cannot be read: {error}", "ENGINE"))
        return Failed(failed(spec, "the prepare helper ended without an answer", "ENGINE"))


async def _end(helper: asyncio.subprocess.Process) -> None:
    """End a helper, and give it a moment to delete what it has downloaded in part."""
    with contextlib.suppress(ProcessLookupError):
        helper.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await helper.wait()
        helper.kill()
    await helper.wait()


def check_models(settings: Settings, specs: Sequence[ModelSpec]) -> dict[str, ModelCard | WireError]:
    """Return the result of `Preparer.prepare` for each model, by id, without downloading any.

    All together may take _CHECK_TIMEOUT_S; models that are not done by then have no entry.
    """
    return asyncio.run(_check_models(settings, specs))


def prepare_models(settings: Settings, specs: Sequence[ModelSpec]) -> dict[str, ModelCard | WireError]:
    """Return the card or the error of each model, by id. A model without a directory is downloaded if its files are missing."""
    return asyncio.run(_prepare_models(settings, specs, is_check=False))


async def _check_models(settings: Settings, specs: Sequence[ModelSpec]) -> dict[str, ModelCard | WireError]:
    found: dict[str, ModelCard | WireError] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            await _prepare_models(settings, specs, is_check=True, found=found)
    return found


async def _prepare_models(
    settings: Settings,
    specs: Sequence[ModelSpec],
    *,
    is_check: bool,
    found: dict[str, ModelCard | WireError] | None = None,
) -> dict[str, ModelCard | WireError]:
    progress = Progress(sys.stderr, "text")
    preparer = Preparer(settings, progress)
    found = {} if found is None else found

    async def prepare(spec: ModelSpec) -> None:
        found[spec.id] = await preparer.prepare(spec, is_check=is_check)

    try:
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                group.create_task(prepare(spec))
    finally:
        progress.close()
    return found


def failed(spec: ModelSpec, reason: str, error_class: str) -> WireError:
    """Return the error of a failed model load in wire form; error_class as in the API reference, section 12."""
    return to_wire(Internal(not_loaded(spec.id, reason), extras={"error_class": error_class}))
