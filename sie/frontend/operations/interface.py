"""Defines the interface of an operation: prepare and submit a resolved request. Independent of dialects and routes."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from sie.frontend.engine.interface import Pending
from sie.ipc.messages import ModelEntry


class Submission(Protocol):
    """A request sent to a worker."""

    @property
    def pending(self) -> Pending:
        """The engine's record of the request."""
        ...


class Started(NamedTuple):
    """A submitted request whose reply can be read with only the request."""

    pending: Pending
    tokenization_ns: int


RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
SubmissionT_co = TypeVar("SubmissionT_co", bound=Submission, covariant=True)


class Operation(Protocol[RequestT_contra, SubmissionT_co]):
    """One operation of a process: encode, score or extract."""

    async def start(self, entry: ModelEntry, request: RequestT_contra, deadline_ns: int, /) -> SubmissionT_co:
        """Prepare a resolved request, for example by tokenising it, and submit it to the engine."""
        ...
