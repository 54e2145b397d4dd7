"""Defines the interface of an operation: prepare and submit a judged request. Knows no dialect and no route."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from sie.frontend.engine.worker_link import Pending
from sie.ipc.messages import ModelEntry


class Submission(Protocol):
    """A request that a worker has."""

    @property
    def pending(self) -> Pending:
        """The record by which the engine knows the request."""
        ...


class Started(NamedTuple):
    """A submitted request whose reply needs nothing but the request to be read."""

    pending: Pending
    tokenization_ns: int


RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
SubmissionT_co = TypeVar("SubmissionT_co", bound=Submission, covariant=True)


class Operation(Protocol[RequestT_contra, SubmissionT_co]):
    """One operation of a process: encode, score or extract."""

    async def start(self, entry: ModelEntry, request: RequestT_contra, deadline_ns: int, /) -> SubmissionT_co:
        """Prepare a judged request, for example by tokenising it, and submit it to the engine."""
        ...
