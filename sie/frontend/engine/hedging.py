"""Copies requests of a late worker, so that another worker may answer first. Must never submit or decide where to.

A request and its copy share one future, so the first answer counts. Each has its own extent, whose lease ends with its
own worker's terminal descriptor or death. When the future is done, both are cancelled.
"""

from __future__ import annotations

import msgspec

from sie.frontend.engine.worker_link import Pending
from sie.shm.extent import set_cancelled
from sie.shm.layout import FLAG_ALONE
from sie.shm.pool import Lease


def may_run_twice(pending: Pending) -> bool:
    """Tell whether a second worker may run this request meanwhile.

    A stream may not: its tokens come from one worker. Neither may a request whose worker died in a step with it: if the
    input is to blame, it would hold one more worker.
    """
    return pending.stream is None and pending.rival is None and not pending.num_strikes and not pending.future.done()


def make_copy(pending: Pending, request_id: int, lease: Lease, *, is_suspect: bool) -> Pending:
    """Return a copy of a request in this lease, of at least its length. is_suspect: it runs alone in its step."""
    lease.view[: pending.length] = pending.lease.view[: pending.length]
    flags = pending.flags | (FLAG_ALONE if is_suspect else 0)
    return msgspec.structs.replace(pending, request_id=request_id, lease=lease, link=None, flags=flags)


def pair(first: Pending, second: Pending) -> None:
    """Make two submitted requests rivals: what ends their future cancels whichever is still at its worker."""
    first.rival, second.rival = second, first

    def cancel_both(_future: object) -> None:
        for one in (first, second):
            part(one)
            if one.is_at_worker:
                set_cancelled(one.lease.view)

    first.future.add_done_callback(cancel_both)


def part(pending: Pending) -> Pending | None:
    """Return the rival of a request, and let the two know nothing of each other any more."""
    rival, pending.rival = pending.rival, None
    if rival is not None:
        rival.rival = None
    return rival
