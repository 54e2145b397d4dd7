"""Values of the scheduler: items that wait, the budget of a step, and the step."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class Waiting(msgspec.Struct, eq=False):
    """One item of one request, waiting for a step.

    request is the loop's own record and opaque here; index is the item's row in it. alone: its request was running
    when a worker died, so it shares no step with others. leads: the rest of its request, which is behind it in the
    queue, needs what it gives, so no step may take one of them and leave it. likeness: it shares a step only with items
    of an equal one, with at most max_rows rows together; None: with any. turn: its place among the others of its model,
    all of which have one then.
    """

    request: Any
    index: int
    num_tokens: int
    arrival_ns: int
    deadline_ns: int
    alone: bool = False
    leads: bool = False
    likeness: object = None
    num_rows: int = 1
    max_rows: int = 1
    turn: Turn | None = None


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one step. A single item may exceed max_tokens: it then runs by itself."""

    max_tokens: int
    max_items: int
    max_age_ns: int
    """An item that waited longer goes before every shorter one."""
    window_items: int = 1024
    """Only the oldest so many items of a model are compared, which bounds the cost of a plan."""


class Step(msgspec.Struct, frozen=True):
    """What to run now: items of one model; beside them those that no longer wait.

    expired: their deadline passed. refused: the model's queue policy says so. is_own: the model decides itself what its
    step runs (it generates), and there are no items.
    """

    model: str
    items: list[Waiting]
    num_tokens: int
    expired: list[Waiting]
    refused: list[Refused] = []
    is_own: bool = False


class Turn(msgspec.Struct, frozen=True):
    """When a request's turn comes.

    Lower priorities go first. After until_ns (0: never) it is refused, or with delays goes behind the others of its
    priority. max_requests: how many of its priority may wait, 0 for any number.
    """

    priority: int
    until_ns: int = 0
    delays: bool = False
    max_requests: int = 0


class Refused(NamedTuple):
    """A request that never runs: it waited too long, or too many of its priority were there before it."""

    item: Waiting
    reason: Literal["timeout", "size"]
