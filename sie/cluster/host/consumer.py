"""Pulls the work items of one model from its durable consumer, as many as the host has credit for.

A pull request stays open at the server until it is filled, so an item arrives without a poll. All hosts of a lane share
the consumer. Source of the protocol: NATS, ADR-13 (pull subscribe internals).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api

from sie.cluster.connection import Connection
from sie.cluster.subjects import Lane, consumer_name, work_stream, work_subject
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
ACK_WAIT_S: Final = 2.5
"""An item is delivered again if its host says nothing for this long; a live host says so each second."""
_IDLE_S: Final = 600.0
_EXPIRES_S: Final = 4.0
"""A consumer's new leader has lost the open requests, without a sign to a host that is connected elsewhere: ask again."""
_MARGIN_S: Final = 1.0
_MAX_ACK_PENDING: Final = 65_536
_PENDING: Final = "Nats-Pending-Messages"
_NO_RESPONDERS: Final = "503"
_DELETED: Final = "Consumer Deleted"

_SMOOTHING: Final = 0.1

Take = Callable[[Msg], Awaitable[int]]
"""Starts to work on a message, without waiting for the end. Returns the number of its items."""


class _Inbox:
    """A subject for the messages of some pull requests: how many were asked for, and until when they may come."""

    __slots__ = ("asked", "ends_s", "subject", "subscription")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.asked = 0
        self.ends_s = 0.0
        self.subscription: Subscription | None = None


class Consumer:
    """The open pull requests for one model.

    An item does not say which request brought it, so a request that was lost cannot be told from one that waits. The
    requests therefore use two inboxes in turn, each for as long as a request lasts. When an inbox ends, all requests of
    it stop counting, lost ones included.
    """

    def __init__(self, connection: Connection, lane: Lane, model: str, inbox: str, take: Take) -> None:
        """Set up without asking. inbox is the beginning of subjects that only this process has."""
        self._connection = connection
        self._lane = lane
        self._model = model
        self._inboxes = [_Inbox(f"{inbox}.{number}") for number in range(2)]
        self._turns_s = 0.0
        """The time from which requests use the other inbox."""
        self._take = take
        self._items_per_message = 1.0
        self.is_open = False
        self.is_lost = False
        """Whether the server has said that it has no such consumer any more: `restore` makes it again."""

    @property
    def num_asked(self) -> int:
        """Messages that were asked for and may still come."""
        now_s = time.monotonic()
        return sum(inbox.asked for inbox in self._inboxes if now_s < inbox.ends_s)

    async def open(self) -> None:
        """Make sure of the consumer, and listen for what it sends. Raises nats' errors."""
        await self.restore()
        for inbox in self._inboxes:
            inbox.subscription = await self._connection.subscribe(inbox.subject, partial(self._on_message, inbox))
        self.is_open = True

    async def close(self) -> None:
        """Ask for nothing more: the server drops the open requests. Work that is on its way is still taken."""
        self.is_open = False
        for inbox in self._inboxes:
            if inbox.subscription is not None:
                await inbox.subscription.drain()

    async def restore(self) -> None:
        """Make sure of the consumer, also after a restarted server has lost it. Open requests count no more."""
        lane = self._lane
        await self._connection.make_consumer(lane.pool, api.ConsumerConfig(
            durable_name=consumer_name(lane, self._model), filter_subject=work_subject(lane, self._model),
            ack_policy=api.AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_deliver=-1, max_ack_pending=_MAX_ACK_PENDING,
            inactive_threshold=_IDLE_S,
        ))  # fmt: skip
        self.is_lost = False
        for inbox in self._inboxes:
            inbox.asked = 0

    async def pull(self, room: int) -> None:
        """Ask for as many more messages as room, in items, still allows."""
        most = math.ceil(room / self._items_per_message)
        wanted = most - self.num_asked
        if not self.is_open or wanted <= 0 or wanted * 4 < most:  # a request for each message would double them
            return
        inbox = self._turn(time.monotonic())
        inbox.asked += wanted
        request = json.dumps({"batch": wanted, "expires": int(_EXPIRES_S * 1e9)}).encode()
        stream, name = work_stream(self._lane.pool), consumer_name(self._lane, self._model)
        await self._connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", request, inbox.subject)

    def _turn(self, now_s: float) -> _Inbox:
        """Return the inbox for a new request."""
        ends_s = now_s + _EXPIRES_S + _MARGIN_S
        if now_s >= self._turns_s:
            self._turns_s = ends_s
            self._inboxes.reverse()
            self._inboxes[0].asked = 0  # all that it was used for before has ended
        self._inboxes[0].ends_s = ends_s
        return self._inboxes[0]

    async def _on_message(self, inbox: _Inbox, message: Msg) -> None:
        if message.headers and "Status" in message.headers and not message.reply.startswith("$JS.ACK"):
            self._on_status(inbox, message.headers)
            return
        inbox.asked = max(0, inbox.asked - 1)
        num_items = await self._take(message)
        self._items_per_message += (num_items - self._items_per_message) * _SMOOTHING

    def _on_status(self, inbox: _Inbox, headers: dict[str, str]) -> None:
        """Take back the part of an ended request for which no message came."""
        left, status, text = headers.get(_PENDING, ""), headers.get("Status"), headers.get("Description", "")
        inbox.asked = max(0, inbox.asked - int(left)) if left.isdigit() else 0
        if status not in ("404", "408"):
            _log.debug("pull of %s ended: %s %s", self._model, status, text)
        self.is_lost = self.is_lost or status == _NO_RESPONDERS or text == _DELETED
