"""The encode, score and extract operations of a gateway: requests become work items, and results become replies.

Hosts tokenise. A gateway checks what a host would check of the whole request, because each host sees only one item.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sie.cluster.gateway.in_flight import InFlight
from sie.cluster.gateway.requested_placement import Placement, current_caller
from sie.cluster.gateway.work_items import RemotePending, RemoteReply
from sie.cluster.payloads import ItemOperation, Result
from sie.cluster.reply_forms import join_replies, read_arrays, read_times, with_times
from sie.cluster.request_forms import Piece, encode_items, extract_items, score_item
from sie.cluster.subjects import Lane
from sie.config.limits import Limits
from sie.frontend.operations.encode import check_encode
from sie.frontend.operations.extraction.extract import check_pairs
from sie.frontend.operations.extraction.whole_texts import TextReading
from sie.frontend.operations.score import check_score
from sie.ipc.messages import ModelEntry
from sie.values.inference import EncodeRequest, ExtractRequest, ScoreRequest

ChooseLane = Callable[[str], tuple[Lane, Placement]]
"""Returns the lane that serves a model for the request of the running task, and the placement that it wants.

Raises SieErrors.
"""
_EXTRACT: Final = "extract"


class HasCuts(Protocol):
    """A request whose items may be cut."""

    cuts: dict[int, int]


class RemoteSubmission:
    """A request whose items are on their way."""

    def __init__(self, pending: RemotePending, card_reading: TextReading | None = None) -> None:
        self.pending = pending
        self.output = _EXTRACT
        self.num_items = len(pending.items)
        self._reading = card_reading

    @property
    def reading(self) -> TextReading:
        """The reader of an extraction, which a host has made already."""
        assert self._reading is not None
        return self._reading

    @property
    def tokenization_ns(self) -> int:
        """The longest time in which a host read an item."""
        return max(result.tokenization_ns for result in self.pending.results if result is not None)

    @property
    def input_tokens(self) -> int:
        """Tokens of all items, as their hosts counted them."""
        return sum(result.num_tokens for result in self.pending.results if result is not None)


class RemoteOperation:
    """The part that all operations share: it submits items, and has the limits of the settings."""

    def __init__(self, in_flight: InFlight, choose_lane: ChooseLane, limits: Limits) -> None:
        self._in_flight = in_flight
        self._choose_lane = choose_lane
        self._limits = limits

    def reconfigure(self, limits: Limits) -> None:
        """Use reloaded limits for later requests."""
        self._limits = limits

    def _submit(
        self, entry: ModelEntry, operation: ItemOperation, pieces: Sequence[Piece], deadline_ns: int, request: HasCuts
    ) -> RemotePending:
        def join(results: Sequence[Result], submitted_ns: int) -> RemoteReply:
            request.cuts = _cuts_of(pieces, results)
            if isinstance(request, EncodeRequest):
                request.image_tokens = sum(result.image_tokens for result in results)
            return join_results(results, submitted_ns)

        lane, placement = self._choose_lane(entry.card.id)
        return self._in_flight.submit(
            lane, operation, entry.card.id, pieces, deadline_ns=deadline_ns, join=join, placement=placement,
            caller=current_caller(),
        )  # fmt: skip


class RemoteEncoder(RemoteOperation):
    """Encodes on hosts."""

    async def start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> RemoteSubmission:
        """Publish a resolved request. Raises BadRequest if it is too large, and Overloaded."""
        return self.try_start(entry, request, deadline_ns)

    def try_start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> RemoteSubmission:
        """Publish a resolved request, without waiting: hosts tokenise. Raises as `start`."""
        check_encode(entry.card, request, self._limits)
        return RemoteSubmission(self._submit(entry, "encode", encode_items(request), deadline_ns, request))


class RemoteScorer(RemoteOperation):
    """Scores on hosts."""

    async def start(self, entry: ModelEntry, request: ScoreRequest, deadline_ns: int) -> RemoteSubmission:
        """Publish a resolved request as one item. Raises BadRequest if it is too large, and Overloaded."""
        check_score(entry.card, request, self._limits)
        return RemoteSubmission(self._submit(entry, "score", [Piece(score_item(request))], deadline_ns, request))


class RemoteExtractor(RemoteOperation):
    """Extracts on hosts."""

    async def start(self, entry: ModelEntry, request: ExtractRequest, deadline_ns: int) -> RemoteSubmission:
        """Publish a resolved request. Raises BadRequest if it is too large, and Overloaded."""
        check_pairs(request, entry.card, self._limits)
        pending = self._submit(entry, "extract", extract_items(request), deadline_ns, request)
        return RemoteSubmission(pending, TextReading(entry.card, request.task.overflow_policy))


def join_results(results: Sequence[Result], submitted_ns: int) -> RemoteReply:
    """Return the reply of a request from its items' results. Raises ProtocolError.

    Clocks of hosts differ, so only durations are taken from them. All time that they do not explain counts as waiting.
    """
    known = [read_times(result.reply) for result in results]
    inference_ns, after_ns = (max(times[place] for times in known) for place in (1, 2))
    spent_ns = inference_ns + after_ns + max(result.tokenization_ns for result in results)
    started_ns = submitted_ns + max(0, time.monotonic_ns() - submitted_ns - spent_ns)
    times = started_ns, inference_ns, after_ns
    if len(results) == 1:
        view = with_times(results[0].reply, times)
    else:
        view = join_replies([read_arrays(result.reply) for result in results], times)
    return RemoteReply(view, sum(result.num_tokens for result in results), submitted_ns)


def _cuts_of(pieces: Sequence[Piece], results: Sequence[Result]) -> dict[int, int]:
    """Return the cuts by number of the input; a result counts from its item's first."""
    return {
        piece.first + number: limit
        for piece, result in zip(pieces, results, strict=True) if result.cuts
        for number, limit in result.cuts.items()
    }  # fmt: skip
