"""Writes a step's outputs into replies: rows to their places; other outputs wait until the reply is complete.

`max_pending_reply_bytes` bounds the waiting outputs of all requests together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from sie.config.settings import Settings
from sie.values.card import ModelCard
from sie.workers.model_api import StepOutputs
from sie.workers.requests.postprocess import Finished, finish_ragged, finish_rows_of
from sie.workers.requests.ragged import KeptBytes
from sie.workers.requests.worker_request import Link, ReplyLayout, Request
from sie.workers.scheduling.waiting import WaitingItem
from sie.workers.scheduling.waiting_queue import singles


class ReplyWriter:
    """The unfinished replies of one worker's requests."""

    def __init__(self, settings: Settings) -> None:
        self._kept = KeptBytes(settings.memory.max_pending_reply_bytes)
        self._max_reply_bytes = settings.limits.max_reply_bytes
        self._waiting: deque[Request] = deque()

    def __bool__(self) -> bool:
        """Whether complete replies wait for memory."""
        return bool(self._waiting)

    def try_reserve(self, request: Request, layout: ReplyLayout, now_ns: int) -> bool:
        """Reserve the reply of a request, so that its items may run. Return False if it finds no memory now.

        A reply of unknown size needs none yet, and has no layout.
        """
        if request.form.is_ragged:
            request.start_ragged(self._kept, self._max_reply_bytes, now_ns)
            return True
        return request.try_reserve(layout, now_ns)

    def put(self, card: ModelCard, items: list[WaitingItem], outputs: StepOutputs, ran_ns: int) -> None:
        """Convert outputs for each request, and send the complete replies.

        No row is written before all outputs are valid: a failed step runs again and must not write twice. Raises the
        errors of the conversion.
        """
        began_ns = time.monotonic_ns()
        has_rows_only = outputs.has_rows_only
        if not has_rows_only:  # outputs of unknown size are kept item by item
            items = list(singles(items))
        wants = [item.request.header for item in items]
        rows = finish_rows_of(card, wants, outputs, [item.num_items for item in items])
        ragged = [] if has_rows_only else list(finish_ragged(card, wants, outputs))
        took_ns = time.monotonic_ns() - began_ns
        for finished in rows:
            _put_rows(items, finished)
        for place, output, arrays in ragged:
            _keep(items[place], output, arrays)
        for item, tensors in zip(
            items, outputs.tensors.outputs if outputs.tensors else (), strict=outputs.tensors is not None
        ):
            if not item.request.ended:
                item.request.keep_tensors(tensors)
        for request in {id(item.request): item.request for item in items}.values():
            request.inference_ns += ran_ns
            request.postprocessing_ns += took_ns
            if request.num_left == 0 and not request.ended and not request.try_reply():
                self._waiting.append(request)

    def retry(self, now_ns: int, may_get_memory: Callable[[], bool]) -> None:
        """Retry the replies that wait for memory. End those without a waiting client, and, if no memory will be free, all others.

        may_get_memory tells whether a frontend still holds a reply that it will release; replies sent here count.
        """
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.ended:
                continue
            if request.is_cancelled or request.deadline_ns <= now_ns:
                request.cancel()
            elif not request.try_reply():
                if may_get_memory():
                    self._waiting.append(request)
                else:
                    request.fail(request.lack_of_memory())

    def drop(self, link: Link) -> None:
        """Drop the replies to a frontend that is gone."""
        for request in self._waiting:
            if request.link is link:
                request.drop()


def _put_rows(items: list[WaitingItem], finished: Finished) -> None:
    members, rows = finished
    data = rows.data.cast("B")
    row_bytes = len(data) // len(rows)
    end = 0
    for member in members:
        item = items[member]
        start, end = end, end + item.num_items
        if item.request.ended:  # another step of the request ended it meanwhile
            continue
        if item.request.ragged is None:
            item.request.put_rows(item.index, item.num_items, data[start * row_bytes : end * row_bytes])
        else:
            assert item.num_items == 1, "outputs of unknown size have been told apart"
            _keep(item, "dense", (rows[start],))


def _keep(item: WaitingItem, output: str, arrays: tuple[NDArray[Any], ...]) -> None:
    if not item.request.ended:  # an earlier output of this step may have exceeded a limit
        item.request.keep(output, item.index, arrays)
