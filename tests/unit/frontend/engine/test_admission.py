from __future__ import annotations

import pytest

from sie.frontend.engine.admission import check_queue, overloaded, retry_after_s
from sie.values.errors import Overloaded


@pytest.mark.parametrize(
    ("queued", "rate", "seconds"),
    [
        (0, 100.0, 1),
        (100, 100.0, 1),
        (101, 100.0, 2),
        (5000, 100.0, 50),
        (6001, 100.0, 60),
        (1 << 40, 1.0, 60),
        (10, 0.0, 1),
    ],
)
def test_retry_after_is_when_the_queue_will_be_empty(queued, rate, seconds):
    assert retry_after_s(queued, rate) == seconds


@pytest.mark.parametrize(("queued", "num_tokens"), [(0, 1), (0, 1000), (99, 1), (60, 40)])
def test_request_that_fits_or_finds_nothing_before_it_may_enter(queued, num_tokens):
    check_queue(queued, num_tokens, 100, 10.0)


@pytest.mark.parametrize(("queued", "num_tokens"), [(100, 1), (60, 41), (1, 100)])
def test_request_over_the_limit_has_retry_after(queued, num_tokens):
    with pytest.raises(Overloaded) as caught:
        check_queue(queued, num_tokens, 100, 10.0)
    assert caught.value.retry_after_s == retry_after_s(queued, 10.0)
    assert (caught.value.code, caught.value.http_status, caught.value.retryable) == ("QUEUE_FULL", 503, True)


def test_refusal_names_its_reason_and_its_delay():
    error = overloaded("the ring is full", 50, 10.0)
    assert "the ring is full" in error.message
    assert "5 s" in error.message
