"""Runs the prepare helper: fetches a hub model and converts a slow tokenizer, in a process of its own.

Only that process may import transformers or talk to a hub; a download that hangs or a tokenizer that crashes takes
nothing else with it.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from sie.catalog.prepare import Failed, Message, Report, Request
from sie.catalog.spec import ModelSpec
from sie.errors import Internal, WireError, to_wire
from sie.progress import Progress
from sie.settings import Settings
from sie.types import ModelCard

_MAX_LINE_BYTES = 4 << 20


class Preparer:
    """Prepares models, one helper process for each."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._cache_dir = settings.models.cache_dir
        self._timeout_s = settings.models.load_timeout_s
        self._progress = progress

    def reconfigure(self, settings: Settings) -> None:
        """Take over reloaded settings, for the helpers started from now on."""
        self._timeout_s = settings.models.load_timeout_s

    async def prepare(self, spec: ModelSpec) -> ModelCard | WireError:
        """Return the card of a model that is now on disk, or why it is not."""
        helper = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sie.catalog.prepare", msgspec.json.encode(Request(spec=spec, cache_dir=self._cache_dir)).decode(),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, limit=_MAX_LINE_BYTES,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(helper, spec)
        except TimeoutError:
            return failed(spec, f"not fetched within load_timeout_s ({self._timeout_s:g} s)", "TIMEOUT")
        finally:
            if helper.returncode is None:
                helper.kill()
            await helper.wait()

    async def _follow(self, helper: asyncio.subprocess.Process, spec: ModelSpec) -> ModelCard | WireError:
        assert helper.stdout is not None
        async for line in helper.stdout:
            message = msgspec.json.decode(line, type=Message)
            if isinstance(message, Report):
                self._progress.update(spec.id, message.fraction, message.text)
            else:
                return message.error if isinstance(message, Failed) else message.card
        return failed(spec, "the prepare helper ended without an answer", "ENGINE")


def failed(spec: ModelSpec, reason: str, error_class: str) -> WireError:
    """Return why a model is not loaded, as it crosses processes; error_class as in the API reference, section 12."""
    return to_wire(Internal(f"Model '{spec.id}': {reason}", extras={"error_class": error_class}))
