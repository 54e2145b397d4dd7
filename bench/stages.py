"""Times each stage of one encode request and of one tensor request in this process, to explain the cost of a hop.

A stage is the function that the server calls there, with the arguments of a request of one text. What no function of
ours does (HTTP, the event loop, the kernel) is the rest of what a whole process spends.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from bench.shm import open_ring
from sie.catalog.cards import make_card
from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec, parse_model_spec
from sie.config.limits import Limits
from sie.frontend.dialects.kserve.infer import InferCall, decode_infer, encode_infer
from sie.frontend.dialects.native.encode import decode_encode
from sie.frontend.dialects.native.encode_reply import encode_reply
from sie.frontend.engine.request_layout import lay_out, lay_out_text
from sie.frontend.fastpath.infer_cache import (
    Basis,
    CachedAnswer,
    CachedInfer,
    InferCache,
    cache_answer,
    places_in,
    read_answer,
)
from sie.frontend.inputs.stub_texts import encode_stub_text
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.resolve import resolve_encode
from sie.frontend.telemetry.metrics import FrontendMetrics
from sie.shm.extent import begin_extent, write_extent, write_parts
from sie.shm.large import LargeBudget
from sie.shm.layout import SUBMIT
from sie.shm.pages import CounterPage
from sie.shm.space import OutboundSpace
from sie.values.inference import EncodeReply, Timing
from sie.values.tensor import TensorReply
from sie.values.work import TensorForm, TensorReplyHeader, WorkHeader
from sie.values.work_bytes import extent_bytes, plan_arrays, split_extent
from sie.workers.requests.readers import reader_of
from sie.workers.scheduling.scheduler import State, plan_step
from sie.workers.scheduling.waiting import Budget, WaitingItem

Side = Literal["frontend", "tensors", "worker", "model"]
_BLOCKS = 200
_CALLS = 50
_DIM = 384
_SEGMENT_BYTES = 4 << 20
_CAPACITY: Final = 1024
_FAR_NS = 1 << 62
_NUM_VALUES: Final = 16
_BOUNDS: Final = struct.Struct("<2i")


class Stage(NamedTuple):
    """One function on the path."""

    side: Side
    """Which process calls it; `tensors` for what a frontend does of tensors instead, `model` for what a stub does without."""
    name: str
    call: Callable[[], object]


class Timed(NamedTuple):
    """How long a stage takes, over many short blocks, so that a busy neighbour shows in p99 and not in p50."""

    stage: Stage
    p50_us: float
    p99_us: float


def time_stages(text: str, model_directory: str) -> list[Timed]:
    """Return every stage in the order of a request; model_directory has the tokenizer of the stage `model`."""
    stages = itertools.chain(
        _frontend_stages(text), _tensor_stages(), _model_stages(text, model_directory), _worker_stages()
    )
    return [_timed(stage) for stage in stages]


def _frontend_stages(text: str) -> Iterator[Stage]:
    limits = Limits()
    card = make_card(parse_model_spec(f"stub/echo=stub:dense={_DIM}"), "")
    value = {"items": [{"text": text}]}
    msgpack, json = msgspec.msgpack.encode(value), msgspec.json.encode(value)
    request = decode_encode(msgpack, True, card.id, limits)
    yield Stage("frontend", "decode a msgpack body", partial(decode_encode, msgpack, True, card.id, limits))
    yield Stage("frontend", "decode a JSON body", partial(decode_encode, json, False, card.id, limits))
    yield Stage("frontend", "judge it against its model", partial(resolve_encode, request, card))
    yield Stage("frontend", "count a stub's tokens", partial(encode_stub_text, card, [text]))
    data, cost = encode_stub_text(card, [text])
    parts = [_BOUNDS.pack(0, cost), data, _BOUNDS.pack(0, len(data))]
    space = OutboundSpace.create("bench", _SEGMENT_BYTES, LargeBudget(0))

    def lease_and_write() -> None:
        layout = lay_out_text((card.id, "float32", None, None, ("dense",)), cost, len(data))
        lease = space.lease(layout.nbytes)
        assert lease is not None
        write_parts(lease.view, layout.head, layout.places, parts)
        lease.end()

    yield Stage("frontend", "lay out, lease and write the extent", lease_and_write)
    yield from _ring_stages()
    rows = memoryview(((np.arange(_DIM, dtype="<f4") - _DIM / 2) / np.float32(127)).tobytes()).cast("B", (1, 4 * _DIM))
    reply = EncodeReply(
        model=card.id, ids=[], num_items=1, values=rows, dtype="<f4",
        width=_DIM, dims=_DIM, output_dtype="float32", input_tokens=12, timing=Timing(total_ms=1.5),
    )  # fmt: skip
    yield Stage("frontend", "encode a msgpack reply", partial(encode_reply, reply, True))
    yield Stage("frontend", "encode a JSON reply", partial(encode_reply, reply, False))
    yield from _count_stages()
    space.close()


def _count_stages() -> Iterator[Stage]:
    page = CounterPage.create(1 << 16)
    metrics = FrontendMetrics(page, {"stub/echo"})
    timing = Timing(total_ms=1.5, queue_ms=0.5, tokenization_ms=0.1, inference_ms=0.5)
    counted = ("POST", "/v1/encode/{model}", "encode", "stub/echo", 200, 0.0015, 80, timing)
    yield Stage("frontend", "count a request that was served", partial(metrics.record_served, *counted))
    page.close()


def _tensor_stages() -> Iterator[Stage]:
    """Both forms of a small tensor in KServe v2, of a stub that answers with its inputs."""
    limits, rule = Limits(), make_card(parse_model_spec("identity=stub:tensor"), "").tensor
    assert rule is not None
    values = np.arange(_NUM_VALUES, dtype="<f4")
    form = {"name": "INPUT0", "shape": [_NUM_VALUES], "datatype": "FP32"}
    json = msgspec.json.encode({"inputs": [{**form, "data": values.tolist()}]})
    sizes = {"parameters": {"binary_data_size": values.nbytes}}
    wanted = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    head = msgspec.json.encode({"inputs": [{**form, **sizes}], "outputs": wanted})
    calls = [
        ("a JSON", partial(decode_infer, json, None, "identity", rule, limits)),
        ("a binary", partial(decode_infer, head + values.tobytes(), str(len(head)), "identity", rule, limits)),
    ]
    for name, decode in calls:
        yield Stage("tensors", f"decode {name} request", decode)
        (tensor,) = decode().request.inputs
        reply = TensorReply(
            model="identity", outputs=[msgspec.structs.replace(tensor, name="OUTPUT0")], timing=Timing()
        )
        yield Stage("tensors", f"encode {name} reply", partial(encode_infer, decode(), reply, rule))
    yield from _cached_stages(head, values.tobytes(), decode())


def _cached_stages(head: bytes, data: bytes, call: InferCall) -> Iterator[Stage]:
    """Yield the stages that replace decoding and encoding for a cached binary request."""
    cache, body, length, models, limits = InferCache(), head + data, str(len(head)), object(), Limits()
    places = places_in(body, length, call)
    assert places is not None
    nobody: Any = None
    cache.add("identity", length, body, Basis(models, limits), CachedInfer(nobody, nobody, nobody, call, places, {}))
    form = TensorForm("OUTPUT0", "FP32", (_NUM_VALUES,))
    plan = plan_arrays([("times", "<i8", (3,)), ("0", "|u1", (len(data),))])
    header = msgspec.msgpack.encode(TensorReplyHeader(plan.refs, (form,)))
    view = memoryview(bytearray(extent_bytes(len(header), plan.nbytes)))
    begin_extent(view, header)
    raw: Any = SimpleNamespace(view=view, release=lambda: None)
    answers: dict[bytes, CachedAnswer] = {}
    cache_answer(answers, header, bytes(150 + len(data)), 150)

    def find() -> object:
        found = cache.find("identity", length, body, models, limits)
        assert found is not None
        return [memoryview(body)[place] for place in found.places]

    yield Stage("tensors", "find a binary request in the cache", find)
    yield Stage("tensors", "read its reply with a cached layout", partial(read_answer, answers, raw))


def _ring_stages() -> Iterator[Stage]:
    """Push and drain one descriptor: both ends of a ring, of which each process has one in each direction."""
    producer, consumer = open_ring(_CAPACITY)

    def push_and_drain() -> None:
        producer.push(SUBMIT, 0, 1, 1, 0, 64, 0, 0, 0, 1)
        consumer.drain()

    yield Stage("frontend", "push a descriptor, and drain one", push_and_drain)
    consumer.close()
    producer.close()


def _model_stages(text: str, directory: str) -> Iterator[Stage]:
    tokenizer = Tokenizer.load(read_card(ModelSpec(id="model", directory=directory), directory))
    yield Stage("model", "tokenise the text", partial(tokenizer.encode_texts, [text]))
    yield Stage("model", "tokenise 32 texts, for each", lambda: tokenizer.encode_texts([text] * 32))


def _worker_stages() -> Iterator[Stage]:
    space = OutboundSpace.create("bench", _SEGMENT_BYTES, LargeBudget(0))
    arrays = [("cu_seqlens", np.array([0, 12], np.int32)), ("token_ids", np.arange(12, dtype=np.int32))]
    header = WorkHeader("stub/echo", "encode", 1, ())
    layout = lay_out(header, arrays)
    lease = space.lease(layout.nbytes)
    assert lease is not None
    length = write_extent(lease.view, layout.header, layout.refs, [array for _, array in arrays])
    read = reader_of(header, {ref.name: ref for ref in layout.refs})
    assert read is not None

    def read_request() -> None:
        _, payload = split_extent(lease.view[:length])
        read(payload)

    yield Stage("worker", "read a request's extent", read_request)
    state, budget = State(), Budget(max_tokens=1024, max_items=1024, max_age_ns=_FAR_NS)
    item = WaitingItem(request=None, index=0, num_tokens=12, arrival_ns=0, deadline_ns=_FAR_NS)

    def plan() -> None:
        state.add("stub/echo", item)
        step = plan_step(state, budget, 0)
        assert step is not None
        state.remove(step)

    yield Stage("worker", "queue an item, plan a step of it", plan)
    space.close()


def _timed(stage: Stage) -> Timed:
    per_call = 32 if stage.name.startswith("tokenise 32") else 1
    times_us: list[float] = []
    for _ in range(_BLOCKS):
        began_ns = time.perf_counter_ns()
        for _ in range(_CALLS // per_call + 1):
            stage.call()
        times_us.append((time.perf_counter_ns() - began_ns) / 1e3 / (_CALLS // per_call + 1) / per_call)
    p50_us, p99_us = np.percentile(times_us, (50, 99)).tolist()
    return Timed(stage, p50_us, p99_us)


def rows_of(timed: Sequence[Timed]) -> list[list[str]]:
    """Return the stages as rows of a table: process, stage, p50 and p99 in microseconds."""
    return [[one.stage.side, one.stage.name, f"{one.p50_us:.2f}", f"{one.p99_us:.2f}"] for one in timed]
