"""Defines the engine that operations use: submit a prepared request, and abandon it. `ShmEngine` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from sie.frontend.engine.request_layout import RequestLayout
from sie.frontend.engine.token_stream import TokenStream
from sie.frontend.engine.worker_link import Pending
from sie.shm.extent_headers import WorkHeader
from sie.values.errors import SieError

Arrays = Sequence[tuple[str, NDArray[Any]]]
"""The arrays that an operation needs, by name; `sie.shm.extent_headers` lists them."""


class Engine(Protocol):
    """Takes prepared requests to a worker and brings their replies (`sie.frontend.engine.engine.ShmEngine`).

    Every submit raises Overloaded if memory or the queue is full, PoisonInput for a quarantined input, and Unavailable
    if no worker has the model. Await `reply()` of the returned `Pending` for the `Reply`.
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
        """Submit a request to generate, whose tokens go to `stream` as they come."""
        ...

    def abandon(self, pending: Pending, error: SieError) -> None:
        """End the client's wait with an error, and tell the worker not to run the request."""
        ...

    def finish(self, pending: Pending) -> None:
        """Abandon a request whose remaining output is not needed."""
        ...
