"""Defines the interface of an engine: a submitted request is a `Pending`, which ends with a `Reply`.

Operations, dialects and routes know only this interface. `sie.frontend.engine.engine.ShmEngine` implements it with
shared memory, and its `ShmPending` and `ShmReply` satisfy the protocols here without wrappers. The plain classes
`TokenStream` and `RequestLayout` are part of the interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from sie.frontend.engine.request_layout import RequestLayout
from sie.frontend.engine.token_stream import TokenStream
from sie.values.errors import SieError
from sie.values.work import WorkHeader

Arrays = Sequence[tuple[str, NDArray[Any]]]
"""The arrays that an operation needs, by name; `sie.values.work` lists them."""


class Reply(Protocol):
    """The answer to a request. Its reader copies what it needs, or encodes it, and then calls `release` once."""

    view: memoryview
    """Header and arrays as bytes (`sie.values.work_bytes`); read-only, valid until `release`."""
    num_tokens: int
    """Tokens of the request, as they were submitted."""
    submitted_ns: int

    def release(self) -> None:
        """Give the memory of `view` back."""
        ...


class Pending(Protocol):
    """One submitted request until its reply."""

    submitted_ns: int
    deadline_ns: int
    """When the engine ends the request, on CLOCK_MONOTONIC. A stream moves it with each token."""
    future: asyncio.Future[Any]
    """Done with a `Reply` or an error. Await `reply` instead; a callback may take the result, and then releases it."""

    async def reply(self) -> Reply:
        """Wait for the reply, which the caller releases. Raises the error that ended the request.

        If the caller is cancelled, nobody gets the reply, and the engine releases it.
        """
        ...

    def stop(self, choice: int) -> None:
        """Ask for no more tokens of one choice of a request to generate."""
        ...


class Engine(Protocol):
    """Takes prepared requests to a worker and brings their replies.

    Every submit raises Overloaded if memory or the queue is full, PoisonInput for a quarantined input, and Unavailable
    if no worker has the model. An `id:profile` in the header's model becomes the model that workers know.
    """

    def submit(self, header: WorkHeader, arrays: Arrays, num_tokens: int, deadline_ns: int) -> Pending:
        """Submit one request. deadline_ns is on CLOCK_MONOTONIC."""
        ...

    def submit_parts(
        self, layout: RequestLayout, parts: Sequence[bytes | memoryview], num_tokens: int, deadline_ns: int
    ) -> Pending:
        """Submit a request that already has a layout and whose arrays are bytes."""
        ...

    async def submit_large(self, header: WorkHeader, arrays: Arrays, num_tokens: int, deadline_ns: int) -> Pending:
        """Submit a request whose arrays take long to copy, without blocking the event loop."""
        ...

    async def submit_stream(
        self, header: WorkHeader, arrays: Arrays, num_tokens: int, deadline_ns: int, stream: TokenStream
    ) -> Pending:
        """Submit a request to generate, and join `stream` to it: its tokens go there as they come.

        deadline_ns is the deadline of the first token. The reply has the totals; the stream reads and releases it.
        """
        ...

    def abandon(self, pending: Pending, error: SieError) -> None:
        """End the client's wait with an error, and tell the worker not to run the request."""
        ...

    def finish(self, pending: Pending) -> None:
        """Abandon a request whose remaining output is not needed."""
        ...
