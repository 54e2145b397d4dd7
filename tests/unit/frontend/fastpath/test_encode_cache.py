"""What is known of requests for one text: by model, only while models and limits are the same, and only for plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.config.limits import Limits
from sie.frontend.fastpath.encode_cache import KnownTexts, learn_row, read_row
from sie.ipc.messages import ModelEntry
from sie.shm.extent import extent_bytes, plan_arrays, write_extent
from sie.shm.extent_headers import ReplyHeader
from sie.values.encode import EncodeRequest

ENTRY = ModelEntry(card=stub_card(parse_model_spec("m=stub:dense=4")), state="loaded", workers=(0,))
WORDS = ("m", "float32", None, None, ("dense",))
LIMITS = Limits()


def request(**details: Any) -> EncodeRequest:
    return EncodeRequest(
        **{"model": "m", "texts": ["x"], "output_types": ("dense",), "output_dtype": "float32"} | details
    )


def known_by(models: object) -> KnownTexts:
    knowns = KnownTexts()
    knowns.learn(models, LIMITS, ENTRY, request(), WORDS)
    return knowns


def test_a_model_is_known_until_any_model_or_limit_changes():
    models: dict[str, object] = {}
    knowns = known_by(models)
    known = knowns.find("m", models, LIMITS)
    assert known is not None
    assert known.request_of("another") == request(texts=["another"])
    assert knowns.find("n", models, LIMITS) is None
    assert knowns.find("m", {}, LIMITS) is None, "equal, but not the same"
    assert knowns.find("m", models, Limits()) is None
    others: dict[str, object] = {}
    knowns.learn(others, LIMITS, ENTRY, request(model="n"), WORDS)
    assert knowns.find("m", others, LIMITS) is None
    assert knowns.find("n", others, LIMITS) is not None


@pytest.mark.parametrize(
    "details",
    [{"options": {"normalize": True}}, {"instruction": "i"}, {"output_types": ("sparse",)}, {"images": {0: []}}],
)
def test_what_a_profile_adds_is_not_kept(details: dict[str, Any]):
    knowns, models = KnownTexts(), object()
    knowns.learn(models, LIMITS, ENTRY, request(**details), WORDS)
    assert knowns.find("m", models, LIMITS) is None


def reply_of(values: list[float], *, name: str = "dense", cut: int = 0) -> Any:
    arrays = [np.array([1, 2, 3]), np.array([values], np.float32)]
    plan = plan_arrays([("times", "<i8", (3,)), (name, "<f4", (1, len(values)))])
    header = msgspec.msgpack.encode(ReplyHeader(plan.refs))
    view = memoryview(bytearray(extent_bytes(len(header), plan.nbytes)))
    write_extent(view, header, plan.refs, arrays)
    return SimpleNamespace(view=view[: len(view) - cut])


def test_a_row_is_read_by_the_header_of_its_reply():
    models = object()
    known = known_by(models).find("m", models, LIMITS)
    assert known is not None
    first = reply_of([0, 1, 2, 3])
    assert read_row(known, first) is None
    learn_row(known, first, b"before")
    found = read_row(known, reply_of([4, 5, 6, 7]))
    assert found is not None
    assert (found.before, np.frombuffer(found.row, "<f4").tolist(), found.times) == (b"before", [4, 5, 6, 7], (1, 2, 3))
    for other in (reply_of([4, 5]), reply_of([4, 5, 6, 7], name="sparse"), reply_of([4, 5, 6, 7], cut=1)):
        assert read_row(known, other) is None
    broken = reply_of([4, 5, 6, 7])
    broken.view = broken.view[:4]
    assert read_row(known, broken) is None
