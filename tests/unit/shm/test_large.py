from __future__ import annotations

from collections.abc import Callable

from sie.shm.large import MAX_IDLE, LargeBudget, LargePool
from sie.shm.layout import SEGMENT_SHIFT
from sie.shm.pool import Lease

PAGE = 4096


def _pool(max_pages: int) -> tuple[LargePool, LargeBudget, list[int]]:
    retired: list[int] = []
    budget = LargeBudget(max_pages * PAGE)
    return LargePool("t", budget, retired.append), budget, retired


def _must_lease(pool: LargePool, nbytes: int) -> Lease:
    lease = pool.lease(nbytes)
    assert lease is not None
    return lease


def _number(lease: Lease) -> int:
    return lease.address >> SEGMENT_SHIFT


def test_large_lease_has_a_segment_of_its_own_of_its_size() -> None:
    pool, budget, _ = _pool(10)
    first, second = _must_lease(pool, PAGE + 1), _must_lease(pool, PAGE)

    assert (first.nbytes, second.nbytes) == (2 * PAGE, PAGE)
    assert 0 not in (_number(first), _number(second))
    assert _number(first) != _number(second)
    assert budget.used_bytes == 3 * PAGE
    pool.close()


def test_lease_over_the_budget_returns_none() -> None:
    pool, budget, _ = _pool(2)
    _must_lease(pool, PAGE)

    assert pool.lease(2 * PAGE) is None
    assert budget.used_bytes == PAGE
    pool.close()


def test_ended_segment_is_used_again() -> None:
    pool, budget, retired = _pool(2)
    number = _number(lease := _must_lease(pool, 2 * PAGE))
    lease.end()

    assert _number(_must_lease(pool, PAGE)) == number
    assert budget.used_bytes == 2 * PAGE
    assert retired == []
    pool.close()


def test_idle_segment_that_does_not_fit_makes_room() -> None:
    pool, budget, retired = _pool(4)
    small = _must_lease(pool, PAGE)
    small.end()

    assert _must_lease(pool, 4 * PAGE).nbytes == 4 * PAGE
    assert retired == [_number(small)]
    assert budget.used_bytes == 4 * PAGE
    pool.close()


def test_idle_segment_of_another_pool_makes_room() -> None:
    pool, budget, retired = _pool(2)
    other = LargePool("o", budget, lambda _number: None)
    _must_lease(pool, 2 * PAGE).end()

    assert other.lease(2 * PAGE) is not None
    assert len(retired) == 1
    pool.close()
    other.close()


def test_few_ended_segments_are_kept() -> None:
    pool, budget, retired = _pool(100)
    leases = [_must_lease(pool, PAGE) for _ in range(MAX_IDLE + 2)]
    for lease in leases:
        lease.end()

    assert retired == [_number(lease) for lease in leases[:2]]
    assert budget.used_bytes == MAX_IDLE * PAGE
    pool.close()


def test_number_of_a_retired_segment_is_not_used_again_soon() -> None:
    pool, _, retired = _pool(1)
    numbers = []
    for pages in (1, 1):
        lease = _must_lease(pool, pages * PAGE)
        numbers.append(_number(lease))
        lease.end()
        pool.retire_oldest()

    assert numbers[0] != numbers[1]
    assert retired == numbers
    pool.close()


def test_memory_that_cannot_be_had_is_refunded() -> None:
    pool, budget, _ = _pool(1 << 60)

    assert pool.lease(1 << 62) is None
    assert budget.used_bytes == 0
    pool.close()


def test_closed_pool_leaves_nothing_open(num_fds: Callable[[], int]) -> None:
    before = num_fds()
    pool, budget, _ = _pool(10)
    _must_lease(pool, PAGE)
    _must_lease(pool, PAGE).end()
    pool.close()

    assert num_fds() == before
    assert budget.used_bytes == 0
