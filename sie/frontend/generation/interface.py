"""Defines what routes know of text generation: a starter, and the run of one request. `Generator` and `Run` are one kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from sie.frontend.engine.interface import Pending
from sie.ipc.messages import ModelEntry
from sie.values.errors import SieError
from sie.values.generate import GenerateEvent, GenerateReply, GenerateRequest, GenerateUsage
from sie.values.inference import Timing


class TextRun(Protocol):
    """A submitted request. Take its events once, with `wait` or `async for`, or its whole answer with `whole`.

    A caller that stops before the last event must call `give_up`.
    """

    model: str
    """Id of the answering model."""
    prompts: Sequence[str]
    """Texts of its prompts, if the request wants them back; else empty."""
    is_over: bool
    """Whether the last event was taken."""

    @property
    def num_prompts(self) -> int:
        """The number of the request's prompts."""
        ...

    @property
    def pendings(self) -> Sequence[Pending]:
        """The request's parts on the engine. Each is abandoned when the client leaves."""
        ...

    async def wait_first(self, timeout_s: float) -> None:
        """Wait for the first event, at most timeout_s. Raises the error of a request that ended before it."""
        ...

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s; the caller must send them now."""
        ...

    def __aiter__(self) -> AsyncIterator[GenerateEvent]: ...

    async def whole(self) -> GenerateReply:
        """Return the whole answer."""
        ...

    async def gather(self) -> list[GenerateEvent]:
        """Return all events of a request with one prompt."""
        ...

    def give_up(self, error: SieError) -> None:
        """Abandon what is under way; a caller that still waits gets this error."""
        ...

    def timing(self, began_ns: int) -> Timing:
        """Return the timing of a request up to now; began_ns: when its headers were read."""
        ...

    def usage(self) -> GenerateUsage:
        """Return the usage so far."""
        ...


class TextStarter(Protocol):
    """Starts requests to generate."""

    async def start(
        self, entry: ModelEntry, request: GenerateRequest, deadline_ns: int, *, salt: bytes = b"", echoes: bool = False
    ) -> TextRun:
        """Submit a request to the model of a served entry. deadline_ns: the deadline of the first token."""
        ...

    async def prompt_ids(self, entry: ModelEntry, request: GenerateRequest) -> list[list[int]]:
        """Return the tokens of a request's prompts."""
        ...

    def close(self) -> None:
        """End what the starter began."""
        ...
