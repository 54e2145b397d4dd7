"""The encode, score and extract operations of a gateway: requests become work items, and results become replies.

Hosts tokenise. A gateway checks what a host would check of the whole request, because each host sees only one item.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sie.cluster.gateway.in_flight import InFlight
from sie.cluster.gateway.placement import Placement, current_caller
from sie.cluster.gateway.work_items import RemotePending, RemoteReply
from sie.cluster.payloads import ItemOperation, Result
from sie.cluster.reply_forms import TIMES, Arrays, join_replies, read_arrays, with_times
from sie.cluster.request_forms import encode_items, extract_items, score_item
from sie.cluster.subjects import Lane
from sie.config.limits import Limits
from sie.frontend.operations.encode import check_encode
from sie.frontend.operations.extraction.extract import check_pairs
from sie.frontend.operations.extraction.whole_texts import TextReading
from sie.frontend.operations.interface import Started
from sie.frontend.operations.score import check_score
from sie.ipc.messages import ModelEntry
from sie.values.errors import ProtocolError
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
    """What the operations share: submitting items, and the limits of the settings."""

    def __init__(self, in_flight: InFlight, choose_lane: ChooseLane, limits: Limits) -> None:
        self._in_flight = in_flight
        self._choose_lane = choose_lane
        self._limits = limits

    def reconfigure(self, limits: Limits) -> None:
        """Use reloaded limits for later requests."""
        self._limits = limits

    def _submit(
        self, entry: ModelEntry, operation: ItemOperation, bodies: Sequence[bytes], deadline_ns: int, request: HasCuts
    ) -> RemotePending:
        def join(results: Sequence[Result], submitted_ns: int) -> RemoteReply:
            request.cuts = _cuts_of(results, is_one=operation == "score")
            if isinstance(request, EncodeRequest):
                request.image_tokens = sum(result.image_tokens for result in results)
            return join_results(results, submitted_ns)

        lane, placement = self._choose_lane(entry.card.id)
        return self._in_flight.submit(
            lane, operation, entry.card.id, bodies, deadline_ns=deadline_ns, join=join, placement=placement,
            caller=current_caller(),
        )  # fmt: skip


class RemoteEncoder(RemoteOperation):
    """Encodes on hosts."""

    async def start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> RemoteSubmission:
        """Publish a resolved request. Raises BadRequest if it is too large, and Overloaded."""
        check_encode(entry.card, request, self._limits)
        return RemoteSubmission(self._submit(entry, "encode", encode_items(request), deadline_ns, request))

    def try_start(self, entry: ModelEntry, request: EncodeRequest, deadline_ns: int) -> Started | None:
        """Return None: a gateway serves every request in a task."""
        return None


class RemoteScorer(RemoteOperation):
    """Scores on hosts."""

    async def start(self, entry: ModelEntry, request: ScoreRequest, deadline_ns: int) -> RemoteSubmission:
        """Publish a resolved request as one item. Raises BadRequest if it is too large, and Overloaded."""
        check_score(entry.card, request, self._limits)
        return RemoteSubmission(self._submit(entry, "score", [score_item(request)], deadline_ns, request))


class RemoteExtractor(RemoteOperation):
    """Extracts on hosts."""

    async def start(self, entry: ModelEntry, request: ExtractRequest, deadline_ns: int) -> RemoteSubmission:
        """Publish a resolved request. Raises BadRequest if it is too large, and Overloaded."""
        check_pairs(request, entry.card, self._limits)
        pending = self._submit(entry, "extract", extract_items(request), deadline_ns, request)
        return RemoteSubmission(pending, TextReading(entry.card, request.task.overflow_policy))


def join_results(results: Sequence[Result], submitted_ns: int) -> RemoteReply:
    """Return the reply of a request from its items' results. Raises ProtocolError.

    Clocks of hosts differ, so only durations are taken from them: the start is what leaves the rest for the queue.
    """
    replies = [read_arrays(result.reply) for result in results]
    inference_ns, after_ns = (max(_time(reply, place) for reply in replies) for place in (1, 2))
    spent_ns = inference_ns + after_ns + max(result.tokenization_ns for result in results)
    started_ns = submitted_ns + max(0, time.monotonic_ns() - submitted_ns - spent_ns)
    times = started_ns, inference_ns, after_ns
    view = with_times(results[0].reply, times) if len(results) == 1 else join_replies(replies, times)
    return RemoteReply(view, sum(result.num_tokens for result in results), submitted_ns)


def _time(reply: Arrays, place: int) -> int:
    times = reply.get(TIMES)
    if times is None or times.shape != (3,) or times.dtype.str != "<i8":
        raise ProtocolError("a reply without times")
    return int(times[place])


def _cuts_of(results: Sequence[Result], *, is_one: bool) -> dict[int, int]:
    """Return the cuts by number of the input; a request to score is one item, and its cuts have their numbers."""
    if is_one:
        return dict(results[0].cuts)
    return {index: next(iter(result.cuts.values())) for index, result in enumerate(results) if result.cuts}
