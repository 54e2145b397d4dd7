from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from sie.shm.large import LargeBudget
from sie.shm.space import OutboundSpace


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:sie-")


@pytest.mark.usefixtures("no_collector")
def test_closed_space_is_unmapped_at_once_though_a_dead_peer_gave_nothing_back() -> None:
    before = num_maps()
    space = OutboundSpace.create("t", 1 << 20, LargeBudget(1 << 20), large_extent_bytes=4096)
    for nbytes in (64, 8192):
        lease = space.lease(nbytes)
        assert lease is not None
        lease.hand_over(1)
    del lease
    assert num_maps() == before + 2
    space.close()
    assert num_maps() == before
