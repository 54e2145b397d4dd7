"""A stub fails exactly as its options say, and only on the texts that they name."""

from __future__ import annotations

import numpy as np
import pytest

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.workers.device.faults import DeviceLostError
from sie.workers.runners.stub import StubRunner


def runner(options: str) -> StubRunner:
    return StubRunner(stub_card(parse_model_spec(f"a=stub:dense=4,{options}")))


def test_a_load_fails():
    with pytest.raises(OSError, match="fail=load"):
        runner("fail=load")


def test_values_that_are_not_finite_are_those_of_the_named_texts():
    rows = runner("fail=nan,fail_on=bad").run_texts([b"good", b"a bad one", b"fine"])
    assert np.isnan(rows).any(axis=1).tolist() == [False, True, False]
    assert np.isnan(runner("fail=nan,score").run_pairs([b"x"])).all()


@pytest.mark.parametrize(("fail", "error", "words"), [
    ("oom", MemoryError, "no memory"), ("sticky", DeviceLostError, "CUDA error: device-side assert triggered"),
])  # fmt: skip
def test_a_step_fails_when_it_holds_the_named_text(fail, error, words):
    stub = runner(f"fail={fail},fail_on=bad")
    assert stub.run_texts([b"good"]).shape == (1, 4)
    with pytest.raises(error, match=words):
        stub.run_texts([b"good", b"bad"])
    with pytest.raises(error, match=words):
        runner(f"fail={fail}").run_texts([b"any"])
