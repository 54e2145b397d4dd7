from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.large import LargeBudget
from sie.shm.space import OutboundSpace


@pytest.fixture
def num_fds() -> Callable[[], int]:
    """Count the descriptors that this process has open, after what only a caught traceback still holds has gone."""

    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    return count


class Pair(NamedTuple):
    """Both sides of one attachment, in one process."""

    frontend: Attachment
    requests: OutboundSpace
    worker: Attachment
    replies: OutboundSpace

    def close(self) -> None:
        for part in self:
            part.close()


def attached_pair(*, capacity: int = 8, max_large_bytes: int = 0) -> Pair:
    """Attach two spaces of 4 KiB; payloads over 2 KiB are large."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    budget = LargeBudget(max_large_bytes)
    requests, replies = (OutboundSpace.create(name, 4096, budget, large_extent_bytes=2048) for name in "fw")
    pending = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), 7, requests, capacity)
    worker = Attachment.connect(ends[1], os.pidfd_open(os.getpid()), 7, replies, capacity, timeout_s=60)
    frontend = pending.try_finish()
    assert frontend is not None
    return Pair(frontend, requests, worker, replies)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = attached_pair(max_large_bytes=1 << 20)
    yield made
    made.close()
