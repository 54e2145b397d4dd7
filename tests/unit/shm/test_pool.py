from __future__ import annotations

import pytest

from sie.shm.layout import ProtocolError
from sie.shm.pool import MAX_STACKED, ExtentPool, Lease, end_released


def _pool(nbytes: int = 4096) -> ExtentPool:
    return ExtentPool(memoryview(bytearray(nbytes)))


def _must_lease(pool: ExtentPool, nbytes: int) -> Lease:
    lease = pool.lease(nbytes)
    assert lease is not None
    return lease


@pytest.mark.parametrize("nbytes", [0, 1, 64, 65, 1000, 2048, 2049, 3000])
def test_lease_is_aligned_large_enough_and_little_larger(nbytes: int) -> None:
    lease = _must_lease(_pool(), nbytes)

    assert lease.address % 64 == 0
    assert nbytes <= lease.nbytes == len(lease.view) <= max(64, nbytes * 17 // 16 + 64)


def test_exhausted_pool_returns_none_until_a_lease_ends() -> None:
    pool = _pool(256)
    leases = [_must_lease(pool, 64) for _ in range(4)]

    assert pool.lease(1) is None
    leases[2].end()
    assert _must_lease(pool, 1).address == leases[2].address


def test_neighbours_that_ended_serve_a_larger_lease() -> None:
    pool = _pool(1024)
    leases = [_must_lease(pool, 64) for _ in range(16)]
    for lease in leases[::2] + leases[1::2]:
        lease.end()

    assert _must_lease(pool, 1024).nbytes == 1024


def test_ending_more_extents_than_are_stacked_loses_none() -> None:
    pool = _pool(64 * 2 * MAX_STACKED)
    leases = [_must_lease(pool, 64) for _ in range(2 * MAX_STACKED)]
    for lease in leases:
        lease.end()

    assert pool.free_bytes == pool.nbytes
    assert _must_lease(pool, pool.nbytes).nbytes == pool.nbytes


def test_when_the_stacks_are_full_only_extents_of_other_sizes_are_merged() -> None:
    pool = _pool(64 * 4 * MAX_STACKED)
    small = [_must_lease(pool, 64) for _ in range(MAX_STACKED)]
    large = [_must_lease(pool, 128) for _ in range(4)]
    for lease in (*small, *large):
        lease.end()

    assert _must_lease(pool, 128).address == large[-1].address
    assert _must_lease(pool, 64 * MAX_STACKED).address == small[0].address, "in one block again"


def test_second_end_is_an_assertion_error() -> None:
    lease = _must_lease(_pool(), 64)
    lease.end()

    with pytest.raises(AssertionError, match="ended before"):
        lease.end()


def test_write_after_the_end_fails() -> None:
    lease = _must_lease(_pool(), 64)
    lease.end()

    with pytest.raises(TypeError):
        lease.view[0] = 1


def test_lease_can_be_handed_over_once_and_only_before_its_end() -> None:
    pool = _pool()
    lease = _must_lease(pool, 64)
    lease.hand_over(1)
    with pytest.raises(AssertionError):
        lease.hand_over(2)
    lease.end()
    with pytest.raises(AssertionError):
        lease.hand_over(3)


def test_early_exit_ends_a_lease() -> None:
    pool = _pool()
    with pytest.raises(KeyError), _must_lease(pool, 64):
        raise KeyError

    assert pool.num_leased == 0
    assert pool.free_bytes == pool.nbytes


def test_lease_that_was_handed_over_outlives_its_block() -> None:
    pool = _pool()
    with _must_lease(pool, 64) as lease:
        lease.hand_over(5)

    assert pool.num_leased == 1
    assert pool.handed_over == {lease.address: lease}
    assert lease.request_id == 5


def test_lease_ended_inside_its_block_is_not_ended_again() -> None:
    pool = _pool()
    with _must_lease(pool, 64) as lease:
        lease.end()

    assert pool.num_leased == 0


def test_release_ends_the_lease_at_its_address() -> None:
    pool = _pool()
    lease = _must_lease(pool, 64)
    lease.hand_over(5)

    assert end_released(pool, lease.address) is lease
    assert pool.num_leased == 0


def test_release_of_an_extent_that_was_not_handed_over_is_a_protocol_error() -> None:
    pool = _pool()
    lease = _must_lease(pool, 64)
    lease.hand_over(5)
    fresh = _must_lease(pool, 64)
    end_released(pool, lease.address)

    for address in (lease.address, fresh.address, 1, 1 << 60):
        with pytest.raises(ProtocolError, match="not handed over"):
            end_released(pool, address)


@pytest.mark.parametrize("nbytes", [0, 63, 100])
def test_memory_that_is_no_multiple_of_64_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        _pool(nbytes)
