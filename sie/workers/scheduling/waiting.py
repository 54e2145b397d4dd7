"""Defines the scheduler's values: waiting items, the budget of a step, and the step. Holds no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec


class WaitingItem(msgspec.Struct, eq=False):
    """One item of one request, or several adjacent items of it, waiting for a step.

    Several together cost as much to queue, plan and answer as one. A step that has no room for all of them takes a part.

    request is the loop's own record and opaque here; index is the (first) item's row in it. alone: its request was
    running when a worker died, so it shares no step with other requests. leads: the later items of its request need its output, so a
    step that takes one of them also takes this item. batch_key: it shares a step only with items of an equal key, with
    at most max_rows rows together; None: with any item. policy: the queue policy of its request; either all items of a
    model have one or none. is_running: earlier steps computed a part of its answer, so it goes into every step of its
    model at no cost. Several items have none of these but alone.
    """

    request: Any
    index: int
    num_tokens: int
    arrival_ns: int
    deadline_ns: int
    alone: bool = False
    leads: bool = False
    batch_key: object = None
    num_rows: int = 1
    max_rows: int = 1
    policy: RequestPolicy | None = None
    is_running: bool = False
    work_before: int = 0
    """Tokens of its model that had arrived before it; `State.add` counts them."""
    num_items: int = 1
    costs: Sequence[int] = ()
    """The tokens of each item if there are several; num_tokens is their sum."""
    part_of: WaitingItem | None = None
    """The item in the queue of which a planned step takes this part."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one step. A single item may exceed max_tokens: it then runs by itself."""

    max_tokens: int
    max_items: int
    max_age_ns: int
    """An item that has waited longer goes before all shorter items."""
    window_items: int = 1024
    """Only this many of a model's oldest items are compared, which bounds the cost of a plan."""


class Step(msgspec.Struct, frozen=True):
    """The next step: the items of one model to run, and the items that leave the queue without running.

    expired: their deadline passed. refused: their queue policy refuses them. is_own: the model plans the step itself
    (generation), and there are no items.
    """

    model: str
    items: list[WaitingItem]
    num_tokens: int
    expired: list[WaitingItem]
    refused: list[Refused] = []
    is_own: bool = False


class RequestPolicy(msgspec.Struct, frozen=True):
    """The queue policy that applies to one request.

    Lower numbers of priority go first. After until_ns (0: never) the request is refused. If delays is set, it
    moves behind the others of its priority instead. max_requests: how many of its priority may wait; 0 means no limit.
    """

    priority: int
    until_ns: int = 0
    delays: bool = False
    max_requests: int = 0


class Refused(NamedTuple):
    """A request that never runs: it waited too long, or the queue of its priority was full."""

    item: WaitingItem
    reason: Literal["timeout", "size"]
