"""Owns the way of a step's outputs into replies: rows to their places, the rest kept until a reply is whole and has room.

What all requests of the worker keep together is bounded by `max_pending_reply_bytes`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from sie.config.settings import Settings
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.workers.model_api import StepOutputs
from sie.workers.requests.finish import Finished, finish_ragged, finish_rows_of
from sie.workers.requests.ragged import KeptBytes
from sie.workers.requests.request import Link, Request
from sie.workers.scheduling.waiting import Waiting

NEVER_FITS = "The reply would not fit into this worker's memory for replies; split the request"


class Answers:
    """Replies on their way, of all requests of one worker."""

    def __init__(self, settings: Settings) -> None:
        self._kept = KeptBytes(settings.memory.max_pending_reply_bytes)
        self._max_reply_bytes = settings.limits.max_reply_bytes
        self._waiting: deque[Request] = deque()

    def __bool__(self) -> bool:
        """Whether whole replies wait for room."""
        return bool(self._waiting)

    def try_start(self, request: Request, code: str, width: int, now_ns: int) -> bool:
        """Let a request's items run; False when its reply has a fixed size, and there is no room for it now.

        code and width are those of its rows, as `operations.row_layout` returns them.
        """
        if request.is_ragged:
            request.start_ragged(self._kept, self._max_reply_bytes, now_ns)
            return True
        return request.try_start(code, width, now_ns)

    def put(self, card: ModelCard, items: list[Waiting], outputs: StepOutputs, ran_ns: int) -> None:
        """Turn outputs into what each request asked for, and send the replies that are whole.

        No row goes to its place before all are good: a step that fails is run again, and must not fill a place twice.
        Raises what finishing raises.
        """
        began_ns = time.monotonic_ns()
        wants = [item.request.header for item in items]
        rows = finish_rows_of(card, wants, outputs)
        ragged = list(finish_ragged(card, wants, outputs))
        took_ns = time.monotonic_ns() - began_ns
        for finished in rows:
            _put_rows(items, finished)
        for place, output, arrays in ragged:
            _keep(items[place], output, arrays)
        for item, tensors in zip(items, outputs.tensors or (), strict=outputs.tensors is not None):
            if not item.request.ended:
                item.request.keep_tensors(tensors)
        for request in {id(item.request): item.request for item in items}.values():
            request.inference_ns += ran_ns
            request.postprocessing_ns += took_ns
            if request.num_left == 0 and not request.ended and not request.try_answer():
                self._waiting.append(request)

    def retry(self, now_ns: int, may_get_room: Callable[[], bool]) -> None:
        """Try the replies that had no room again; end those that nobody waits for, and what can never have room.

        may_get_room tells whether a frontend still has a reply that it will give back; replies sent here count.
        """
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.ended:
                continue
            if request.is_cancelled or request.deadline_ns <= now_ns:
                request.cancel()
            elif not request.try_answer():
                if may_get_room():
                    self._waiting.append(request)
                else:
                    request.fail(BadRequest(NEVER_FITS))

    def drop(self, link: Link) -> None:
        """Forget the replies to a frontend that is gone."""
        for request in self._waiting:
            if request.link is link:
                request.drop()


def _put_rows(items: list[Waiting], finished: Finished) -> None:
    members, rows = finished
    data = rows.data.cast("B")
    row_bytes = len(data) // len(members)
    for place, row in enumerate(members):
        item = items[row]
        if item.request.ragged is None:
            item.request.put_row(item.index, data[place * row_bytes : (place + 1) * row_bytes])
        else:
            _keep(item, "dense", (rows[place],))


def _keep(item: Waiting, output: str, arrays: tuple[NDArray[Any], ...]) -> None:
    if not item.request.ended:  # an earlier output of this step may have been too much
        item.request.keep(output, item.index, arrays)
