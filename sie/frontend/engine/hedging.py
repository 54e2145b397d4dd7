"""Copies requests of a late worker, so that another worker may answer first. Never submits, and never chooses a worker.

A request and its copy share one future, so the first answer counts. Each has its own extent, whose lease ends with its
own worker's terminal descriptor or death. When the future is done, both are cancelled.
"""

from __future__ import annotations

import msgspec

from sie.frontend.engine.worker_link import ShmPending
from sie.shm.extent import set_cancelled
from sie.shm.layout import FLAG_ALONE
from sie.shm.pool import Lease


def may_run_twice(pending: ShmPending) -> bool:
    """Return whether a second worker may run this request at the same time.

    A stream may not: its tokens come from one worker. A request whose worker died in a step with it may not either: if
    the input is to blame, it would hang one more worker.
    """
    return pending.stream is None and pending.rival is None and not pending.num_deaths and not pending.future.done()


def make_copy(pending: ShmPending, request_id: int, lease: Lease, *, is_suspect: bool) -> ShmPending:
    """Return a copy of a request in this lease, which has room for it. is_suspect: the copy runs alone in its step."""
    lease.view[: pending.length] = pending.lease.view[: pending.length]
    flags = pending.flags | (FLAG_ALONE if is_suspect else 0)
    return msgspec.structs.replace(pending, request_id=request_id, lease=lease, link=None, flags=flags)


def pair(first: ShmPending, second: ShmPending) -> None:
    """Make two submitted requests rivals: when their shared future is done, those still at a worker are cancelled."""
    first.rival, second.rival = second, first

    def cancel_both(_future: object) -> None:
        for one in (first, second):
            unpair(one)
            if one.is_at_worker:
                set_cancelled(one.lease.view)

    first.future.add_done_callback(cancel_both)


def unpair(pending: ShmPending) -> ShmPending | None:
    """Return the rival of a request, and remove the link between the two."""
    rival, pending.rival = pending.rival, None
    if rival is not None:
        rival.rival = None
    return rival
