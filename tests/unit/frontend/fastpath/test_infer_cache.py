"""Cached infer requests are found by exactly the key they were added with, while models and limits stay the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.kserve.infer import InferCall, Wanted
from sie.frontend.fastpath.infer_cache import (
    Basis,
    CachedInfer,
    InferCache,
    cache_answer,
    header_of,
    places_in,
    read_answer,
)
from sie.shm.extent import begin_extent
from sie.values.errors import Internal
from sie.values.tensor import Tensor, TensorRequest
from sie.values.work import TensorForm, TensorReplyHeader
from sie.values.work_bytes import extent_bytes, plan_arrays

HEAD, TAIL = b'{"inputs": 1}', b"12345678"
LENGTH = str(len(HEAD))
BASIS = Basis({}, Limits())


def call_of(*sizes: int, timeout_us: int = 0, num_classes: int = 0) -> InferCall:
    inputs = [Tensor(str(index), "UINT8", (size,), memoryview(bytes(size))) for index, size in enumerate(sizes)]
    request = TensorRequest(model="m", inputs=inputs, timeout_us=timeout_us)
    return InferCall(request=request, wanted=(Wanted("y", is_binary=True, num_classes=num_classes),))


def cached_one() -> CachedInfer:
    return CachedInfer(cast("Any", None), cast("Any", None), cast("Any", None), call_of(8), (slice(13, 21),), {})


class TestRequests:
    def test_the_same_key_finds_it(self):
        cache, cached = InferCache(), cached_one()
        assert cache.find("m", LENGTH, HEAD + TAIL, *BASIS) is None
        cache.add("m", LENGTH, HEAD + TAIL, BASIS, cached)
        assert cache.find("m", LENGTH, HEAD + b"87654321", *BASIS) is cached

    @pytest.mark.parametrize(
        ("model", "length", "body"),
        [
            ("n", LENGTH, HEAD + TAIL),
            ("m", str(len(HEAD) - 1), HEAD + TAIL),
            ("m", "x", HEAD + TAIL),
            ("m", LENGTH, HEAD + TAIL[1:]),
            ("m", LENGTH, HEAD + TAIL + b"9"),
            ("m", LENGTH, HEAD.replace(b"1", b"2") + TAIL),
            ("m", LENGTH, b""),
        ],
    )
    def test_another_key_does_not(self, model: str, length: str, body: bytes):
        cache = InferCache()
        cache.add("m", LENGTH, HEAD + TAIL, BASIS, cached_one())
        assert cache.find(model, length, body, *BASIS) is None

    @pytest.mark.parametrize("other", [Basis({}, BASIS.limits), Basis(BASIS.models, Limits())])
    def test_cached_layouts_end_with_the_limits_that_they_were_checked_against(self, other: Basis):
        cache, cached = InferCache(), cached_one()
        cache.add("m", LENGTH, HEAD + TAIL, BASIS, cached_one())
        assert cache.find("m", LENGTH, HEAD + TAIL, *other) is None
        cache.add("m", LENGTH, HEAD + b"123", other, cached)
        assert cache.find("m", LENGTH, HEAD + b"123", *other) is cached
        assert cache.find("m", LENGTH, HEAD + TAIL, *other) is None
        assert cache.find("m", LENGTH, HEAD + b"123", *BASIS) is None

    def test_clients_cannot_make_it_grow_without_end(self):
        cache = InferCache()
        bodies = [HEAD + bytes(size) for size in range(1000)]
        for body in bodies:
            cache.add("m", LENGTH, body, BASIS, cached_one())
        assert cache.find("m", LENGTH, bodies[-1], *BASIS) is not None
        assert sum(cache.find("m", LENGTH, body, *BASIS) is not None for body in bodies) <= 256

    def test_nor_by_writing_one_length_in_many_ways(self):
        cache = InferCache()
        lengths = ["0" * zeros + str(len(HEAD)) for zeros in range(1000)]
        for length in lengths:
            cache.add("m", length, HEAD + TAIL, BASIS, cached_one())
        assert sum(cache.find("m", length, HEAD + TAIL, *BASIS) is not None for length in lengths) <= 256

    def test_elements_lie_back_to_back_behind_the_json(self):
        assert places_in(HEAD + TAIL, LENGTH, call_of(6, 0, 2)) == (slice(13, 19), slice(19, 19), slice(19, 21))

    @pytest.mark.parametrize(
        ("body", "call"),
        [
            (HEAD + TAIL, call_of(7)),  # an input that lies in the JSON, beside one behind it
            (HEAD + TAIL, call_of(8, timeout_us=1)),
            (HEAD + TAIL, call_of(8, num_classes=2)),
            (HEAD + bytes(5000), call_of(5000)),
        ],
    )
    def test_the_longer_way_is_for_the_rest(self, body: bytes, call: InferCall):
        length = LENGTH if len(body) < 100 else "4097"
        assert places_in(body, length, call) is None


class TestAnswers:
    def reply(self, data: bytes, *, cut: int = 0) -> Any:
        plan = plan_arrays([("times", "<i8", (3,)), ("0", "|u1", (len(data),))])
        header = msgspec.msgpack.encode(TensorReplyHeader(plan.refs, (TensorForm("y", "UINT8", (len(data),)),)))
        view = memoryview(bytearray(extent_bytes(len(header), plan.nbytes)))
        payload = begin_extent(view, header)
        payload[:24] = memoryview(b"".join(number.to_bytes(8, "little") for number in (1, 2, 3)))
        payload[64 : 64 + len(data)] = data
        return SimpleNamespace(view=view[: len(view) - cut], released=0, release=lambda: released.append(1))

    def test_an_answer_that_was_seen_is_read_and_let_go(self):
        released.clear()
        answers: dict[bytes, Any] = {}
        first = self.reply(b"abcd")
        assert read_answer(answers, first) is None
        assert not released, "whoever reads it lets it go"
        cache_answer(answers, header_of(first), b'{"y"}abcd', 5)
        assert read_answer(answers, self.reply(b"wxyz")) == (b'{"y"}wxyz', 5, (1, 2, 3))
        assert len(released) == 1

    def test_another_size_and_a_cut_reply_are_not_like_it(self):
        answers: dict[bytes, Any] = {}
        cache_answer(answers, header_of(self.reply(b"abcd")), b'{"y"}abcd', 5)
        assert read_answer(answers, self.reply(b"abcde")) is None
        assert read_answer(answers, self.reply(b"abcd", cut=1)) is None

    def test_answers_with_tensors_in_the_json_are_not_cached(self):
        answers: dict[bytes, Any] = {}
        cache_answer(answers, header_of(self.reply(b"abcd")), b'{"y": "abcd", "z": ""}', 5)
        assert not answers

    def test_a_broken_reply_is_our_fault_and_let_go(self):
        released.clear()
        reply = self.reply(b"abcd")
        reply.view = reply.view[:4]
        assert read_answer({}, reply) is None
        with pytest.raises(Internal, match="could not be read"):
            header_of(reply)
        assert len(released) == 1


released: list[int] = []
