from __future__ import annotations

from sie.frontend.access.rates import TokenBucket

S = 1_000_000_000


def take(bucket, num, now_ns):
    return sum(bucket.try_take(now_ns) for _ in range(num))


def test_burst_is_a_minutes_worth_and_then_the_rate():
    bucket = TokenBucket(60, 100 * S)
    assert take(bucket, 100, 100 * S) == 60
    assert bucket.remaining(100 * S) == 0
    assert bucket.wait_s(100 * S) == 1.0
    assert take(bucket, 5, 100 * S + S - 1) == 0
    assert take(bucket, 5, 101 * S) == 1
    assert take(bucket, 20, 111 * S) == 10


def test_no_minute_lets_through_more_than_a_burst_and_the_rate():
    bucket = TokenBucket(60, 0)
    let_in = [t for t in range(0, 300 * S, S // 7) if bucket.try_take(t)]
    assert 60 + 298 <= len(let_in) <= 60 + 300


def test_idle_time_fills_it_no_further_than_full():
    bucket = TokenBucket(5, 0)
    assert bucket.remaining(10**6 * S) == 5
    assert take(bucket, 100, 10**6 * S) == 5
    assert bucket.full_in_s(10**6 * S) == 60.0


def test_what_is_used_elsewhere_is_not_there_but_leaves_no_debt():
    bucket = TokenBucket(10, 0)
    bucket.charge(4, 0)
    assert bucket.remaining(0) == 6
    bucket.charge(1000, 0)
    assert (bucket.remaining(0), bucket.wait_s(0)) == (0, 6.0)


def test_one_a_minute():
    bucket = TokenBucket(1, 0)
    assert take(bucket, 3, 0) == 1
    assert take(bucket, 3, 60 * S) == 1
