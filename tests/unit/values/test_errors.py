"""Errors that repeat a client's value."""

from __future__ import annotations

import time

import pytest

from sie.values.errors import BadRequest, Internal

LONG = "n" * 20_000


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            f"Model '{LONG}' was not found. Did you mean 'y'?",
            f"Model '{LONG[:200]}...' was not found. Did you mean 'y'?",
        ),
        (f"Unknown field `{LONG}` - at `$.x`", f"Unknown field `{LONG[:200]}...` - at `$.x`"),
        (f"Unknown type {'it ' + LONG!r}. Valid: ['a', 'b']", f"Unknown type 'it {LONG[:197]}...'. Valid: ['a', 'b']"),
        (f"the model's {'word ' * 100}of its clients' own", f"the model's {'word ' * 100}of its clients' own"),
        (f"{LONG} is unknown", f"{LONG[:750]}...{LONG[:239]} is unknown"),
    ],
)
def test_a_long_quotation_is_cut_and_the_rest_is_kept(message: str, shown: str) -> None:
    assert BadRequest(message).message == shown
    assert str(BadRequest(shown)) == shown, "an error keeps its text on the way between processes"


def test_no_text_is_too_long_for_the_search() -> None:
    for hostile in ("'" * 10**6, "'a" * 10**6, "' " * 10**6, "`'\"" * 10**6):
        assert len(BadRequest(hostile).message) < 1100


@pytest.mark.parametrize("marks", ["'a ", " 'a", "`a 'a \"a "])
def test_marks_that_open_nothing_cost_little(marks: str) -> None:
    hostile = marks * 600 + "end"
    took_s: list[float] = []
    for _ in range(5):
        began_s = time.process_time()
        BadRequest(hostile)
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.005, "an event loop waits for it"


def test_our_own_faults_are_told_in_full() -> None:
    assert Internal(LONG).message == LONG
