"""Defines the interface of an operation: prepare and submit a resolved request. Independent of dialects and routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.engine.interface import Pending
from sie.ipc.messages import ModelEntry
from sie.values.extract import Extraction
from sie.values.inference import EncodeRequest, ExtractRequest, ScoreRequest


class Submission(Protocol):
    """A request sent to a worker."""

    @property
    def pending(self) -> Pending:
        """The engine's record of the request."""
        ...


class Submitted(NamedTuple):
    """A submitted encode or score request, with the time that it took to read its items."""

    pending: Pending
    tokenization_ns: int


class TimedSubmission(Submission, Protocol):
    """A submission whose reply can be read with only the request."""

    @property
    def tokenization_ns(self) -> int:
        """The time to read the items; asked for when the reply is there."""
        ...


class PieceReader(Protocol):
    """Turns a worker's answer into extractions."""

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return one extraction for each text. pieces is the answer: an array for each work item."""
        ...


class ExtractSubmission(TimedSubmission, Protocol):
    """A submitted request to extract, with the data needed to read its reply."""

    @property
    def reading(self) -> PieceReader:
        """The reader of its reply."""
        ...

    @property
    def output(self) -> str:
        """The name of its reply's output."""
        ...

    @property
    def num_items(self) -> int:
        """Items of the work, not of the request."""
        ...

    @property
    def input_tokens(self) -> int:
        """Tokens of the texts and of the labels or queries, each counted once. Read it only when the reply is there."""
        ...


RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
SubmissionT_co = TypeVar("SubmissionT_co", bound=Submission, covariant=True)


class Operation(Protocol[RequestT_contra, SubmissionT_co]):
    """One operation of a process: encode, score or extract."""

    async def start(self, entry: ModelEntry, request: RequestT_contra, deadline_ns: int, /) -> SubmissionT_co:
        """Prepare a resolved request, for example by tokenising it, and submit it to the engine."""
        ...

    def reconfigure(self, limits: Limits) -> None:
        """Use reloaded limits for later requests."""
        ...


class EncodeOperation(Operation[EncodeRequest, TimedSubmission], Protocol):
    """The encode operation of a process."""

    def try_start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> TimedSubmission | None:
        """Do the work of `start` at once, or return None when that would block the event loop too long."""
        ...


ScoreOperation = Operation[ScoreRequest, TimedSubmission]
ExtractOperation = Operation[ExtractRequest, ExtractSubmission]
