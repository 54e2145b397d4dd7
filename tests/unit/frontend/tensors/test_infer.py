"""Tensor requests from a dialect to a real session and back, on the rig's engine and step loops."""

from __future__ import annotations

import asyncio
import functools
import io
import re
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper
from PIL import Image

from sie.catalog.spec import ModelSpec, TensorSource, parse_model_spec
from sie.catalog.stub import stub_card
from sie.catalog.tensor_rule import read_tensor_card
from sie.config.limits import Limits
from sie.frontend.http.exchange import Exchange
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.model_table import ModelTable
from sie.frontend.operations.encode import Encoder
from sie.frontend.operations.score import Scorer
from sie.frontend.tensors.encoded_images import TensorImages
from sie.frontend.tensors.held_reply import HeldReply
from sie.frontend.tensors.infer import Tensors
from sie.frontend.tensors.regions import Regions
from sie.frontend.tensors.text_models import TextTensors
from sie.ipc import messages
from sie.ipc.messages import ModelEntry
from sie.values.bytes_tensor import frame_elements, split_elements
from sie.values.card import ModelCard, StubOptions
from sie.values.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    ModelLoadFailed,
    NotFound,
    ResourceExhausted,
    Unavailable,
    to_wire,
)
from sie.values.inference import Timing
from sie.values.tensor import DATATYPES, Tensor, TensorReply, TensorRequest, TensorRule
from sie.workers.runners.exported import load_exported
from sie.workers.runners.onnx import RunLimit, load_onnx
from sie.workers.runners.stub import StubRunner
from tests import onnx_models
from tests.unit.engine_rig import DEADLINE_S, FAR_NS, Rig, Worker

_NUMPY = {np.dtype(code): name for name, code in DATATYPES.items() if name not in ("BF16", "BYTES", "UINT8")}
_NUMPY[np.dtype("|u1")] = "UINT8"


def build(card: ModelCard, limit_s: float = 30.0) -> Any:
    """Return a card's runner, as a worker of the CPU builds it."""
    if card.tensor is not None and card.tensor.platform == "pytorch_exported":
        return load_exported(card, "cpu", lambda *_: None)
    return StubRunner(card) if card.stub else load_onnx(card, "cpu", 1, lambda *_: None, RunLimit(limit_s))


def _no_generator() -> NoReturn:
    raise AssertionError("no model here generates")


JOINED = "dynamic_batching { }"
"""A configuration that lets requests run together."""


class Office:
    """A rig whose workers have tensor models, and a frontend's way to them."""

    def __init__(self, tmp_path: Path, limits: Limits | None = None, **memory: int) -> None:
        self.rig = Rig(**{"max_large_bytes": 64 << 20, **memory})
        self._repository = tmp_path
        self._pool = ThreadPoolExecutor(1)
        self.asked: list[str] = []
        self.models = ModelTable(self._pool, self.asked.append)
        self.sent: list[Any] = []
        self.admin = ModelAdmin(self.models, self.sent.append)
        limits = limits or Limits()
        images = ImageReader(limits, 1)
        encoder = Encoder(self.rig.engine, self.models, limits, self._pool, images)
        texts = TextTensors(
            encoder, Scorer(self.rig.engine, self.models, limits, self._pool), _no_generator,
            limits=lambda: limits, watch=lambda *_: None,
        )  # fmt: skip
        self.tensors = Tensors(
            self.rig.engine, self.models, self.admin, self._pool,
            texts=texts, images=TensorImages(images, lambda: limits), watch=lambda *_: None,
            decode_pool=self._pool, encoding=asyncio.Semaphore(2), served=lambda _: None, regions=Regions(Path("/nowhere"), lambda: limits),
        )  # fmt: skip
        self.table = self.tensors.table
        self.worker = self.start_worker()

    def start_worker(self) -> Worker:
        worker = self.rig.start_worker(attach=False)
        worker.build = build
        self.rig.attach(worker)
        return worker

    def add(self, name: str, content: bytes, config: str = "", *, probes: bool = False) -> ModelCard:
        """Write a model, load it and return its card."""
        onnx_models.write(self._repository, name, content, config=config)
        source = TensorSource(
            repository=str(self._repository), name=name, version="1", default_max_batch_size=16, probes_batching=probes
        )
        return self.load(read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source)))

    def add_program(self, module: torch.nn.Module, args: Any, config: str = "", **shapes: Any) -> ModelCard:
        """Export a module as a model `m`; shapes name the dimensions of its arguments that may have any size."""
        folder = self._repository / "m" / "1"
        folder.mkdir(parents=True)
        (self._repository / "m" / "config.pbtxt").write_text(config)
        torch.export.save(torch.export.export(module, args, **shapes), folder / "model.pt2")
        source = TensorSource(repository=str(self._repository), name="m", version="1", default_max_batch_size=16)
        return self.load(read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source)))

    def stub(self, options: str = "tensor") -> ModelCard:
        return self.load(stub_card(parse_model_spec(f"stub=stub:{options}")))

    def load(self, card: ModelCard) -> ModelCard:
        self.worker.load(card.id, card)
        self.know(ModelEntry(card=card, state="loaded", workers=(self.worker.slot,)))
        return card

    def know(self, *entries: ModelEntry) -> None:
        """Hear of these models from the supervisor, beside those known."""
        self.rig.entries.update({entry.card.id: entry for entry in entries})
        self.models.update(messages.Models(tuple(self.rig.entries.values()), ready=True))

    def ask(self, name: str, arrays: dict[str, Any], **request: Any) -> asyncio.Task[dict[str, Any]]:
        """Submit a request; the task's result is each output as an array (BYTES: elements and shape)."""
        return asyncio.ensure_future(self._ask(name, arrays, request))

    async def _ask(self, name: str, arrays: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        inputs = [value if isinstance(value, Tensor) else tensor(key, value) for key, value in arrays.items()]
        exchange = Exchange(SimpleNamespace(headers={}), None, time.monotonic_ns())
        exchange.deadline_ns = request.pop("deadline_ns", FAR_NS)
        wanted = TensorRequest(model=self.table.resolve(name).card.id, inputs=inputs, **request)
        with await self.tensors.infer(wanted, exchange) as reply:
            assert reply.timing.total_ms >= reply.timing.inference_ms
            return {output.name: array(output) for output in reply.outputs}

    async def answer(self, *tasks: asyncio.Task[Any]) -> list[Any]:
        """Turn the worker until all are done; return results and errors."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not all(task.done() for task in tasks):
            assert time.monotonic() < deadline_s, "no answer in time"
            await self.rig.settle()
            for worker in self.rig.workers:
                if not worker.is_dead:
                    worker.turn()
        return [task.exception() or task.result() for task in tasks]

    @property
    def num_steps(self) -> int:
        return self.worker.loop._steps._num_steps

    def close(self) -> None:
        self.rig.close()
        self._pool.shutdown()


def tensor(name: str, values: Any) -> Tensor:
    return Tensor(name, _NUMPY[values.dtype], values.shape, memoryview(values.tobytes()))


def strings(name: str, elements: list[bytes], shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, "BYTES", shape, memoryview(frame_elements(elements)))


def array(output: Tensor) -> Any:
    if output.datatype == "BYTES":
        return split_elements(output.data), output.shape
    return np.frombuffer(bytes(output.data), DATATYPES[output.datatype]).reshape(output.shape)


def in_office(**options: Any) -> Callable[[Callable[[Office], Awaitable[None]]], Callable[[Path], None]]:
    def decorate(test: Callable[[Office], Awaitable[None]]) -> Callable[[Path], None]:
        async def main(tmp_path: Path) -> None:
            office = Office(tmp_path, **options)
            try:
                await test(office)
                await office.rig.settle()
                office.rig.assert_all_given_back()
            finally:
                office.close()

        def run(tmp_path: Path) -> None:
            asyncio.run(main(tmp_path))

        return run

    return decorate


def rows(n: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 3)).astype(np.float32), "a": rng.normal(size=(n, 2)).astype(np.float32)}


def affine(arrays: dict[str, Any]) -> Any:
    return arrays["x"] @ np.arange(6, dtype=np.float32).reshape(3, 2) + arrays["a"]


@in_office()
async def test_requests_that_wait_together_run_as_one_and_are_cut_apart(office: Office):
    office.add("m", onnx_models.affine(), JOINED)
    asked = [rows(n, seed=n) for n in (1, 3, 2, 4)]
    answers = await office.answer(*[office.ask("m", arrays) for arrays in asked])
    for arrays, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer["y"], affine(arrays), rtol=1e-5)
    assert office.num_steps == 1


@in_office()
async def test_a_batch_is_never_over_the_models_own_limit(office: Office):
    office.add("m", onnx_models.affine(), "max_batch_size: 4")
    asked = [rows(n, seed=n) for n in (3, 2, 1, 4)]
    answers = await office.answer(*[office.ask("m", arrays) for arrays in asked])
    for arrays, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer["y"], affine(arrays), rtol=1e-5)
    assert office.num_steps == 3  # 3 + 1, 2, 4


@in_office()
async def test_only_requests_of_one_shape_and_one_wish_share_a_step(office: Office):
    office.add("m", onnx_models.identity(shape=("n", "w")), JOINED)
    asked = [np.full(shape, index, np.float32) for index, shape in enumerate([(1, 2), (2, 2), (1, 3)])]
    tasks = [office.ask("m", {"x": values}) for values in asked]
    answers = await office.answer(*tasks, office.ask("m", {"x": asked[0]}, outputs=("y",)))
    for values, answer in zip([*asked, asked[0]], answers, strict=True):
        np.testing.assert_array_equal(answer["y"], values)
    assert office.num_steps == 3


@pytest.mark.parametrize("dimension", ["seq_length", "batch"])
@pytest.mark.parametrize("config", ["", "version_policy { all { } }"])
def test_requests_run_alone_unless_the_configuration_asks_to_join_them(dimension: str, config: str, tmp_path: Path):
    """Nothing in the file of a softmax over rows tells that they depend on each other."""
    in_office()(lambda office: _assert_alone(office, dimension, config))(tmp_path)


async def _assert_alone(office: Office, dimension: str, config: str) -> None:
    office.add("m", onnx_models.softmax_over_rows(dimension), config)
    asked = [np.arange(2 * n, dtype=np.float32).reshape(n, 2) for n in (1, 2, 2)]
    answers = await office.answer(*[office.ask("m", {"x": values}) for values in asked])
    for values, answer in zip(asked, answers, strict=True):
        exponents = np.exp(values - values.max(axis=0))
        np.testing.assert_allclose(answer["y"], exponents / exponents.sum(axis=0), rtol=1e-5)
    assert office.num_steps == 3


@in_office()
async def test_a_probe_joins_requests_to_a_model_that_treats_each_row_alone(office: Office):
    office.add("m", onnx_models.affine(), probes=True)
    asked = [rows(n, seed=n) for n in (1, 3, 2)]
    answers = await office.answer(*[office.ask("m", arrays) for arrays in asked])
    for arrays, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer["y"], affine(arrays), rtol=1e-5)
    assert office.num_steps == 1


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_a_probe_takes_numbers_of_every_type_and_any_size(datatype: str, tmp_path: Path):
    @in_office()
    async def run(office: Office) -> None:
        office.add("m", onnx_models.identity(datatype, ("n", "w", 3)), probes=True)
        values = np.zeros((1, 2, 3), DATATYPES[datatype])
        asked = [Tensor("x", datatype, (1, 2, 3), memoryview(values.tobytes())) for _ in range(2)]
        await office.answer(*[office.ask("m", {"x": value}) for value in asked])
        assert office.num_steps == 1

    run(tmp_path)


def mean_over_rows() -> bytes:
    """Return a model that takes the rows' mean from each, as a normalisation that was left in training does."""
    axes = onnx_models.numpy_helper.from_array(np.array([0]), "axes")
    nodes = [
        onnx_models.helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1),
        onnx_models.helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    inputs, outputs = ([onnx_models.value(name, "FP32", ("n", 2))] for name in "xy")
    return onnx_models.model(nodes, inputs, outputs, [axes])


def fixed_rows() -> bytes:
    """Return a model that says it takes any number of rows, and takes three alone."""
    shape = onnx_models.numpy_helper.from_array(np.array([3, 2]), "s")
    nodes = [onnx_models.helper.make_node("Reshape", ["x", "s"], ["y"])]
    inputs, outputs = ([onnx_models.value(name, "FP32", ("n", 2))] for name in "xy")
    return onnx_models.model(nodes, inputs, outputs, [shape])


@pytest.mark.parametrize(
    "content",
    [onnx_models.softmax_over_rows("batch"), mean_over_rows(), fixed_rows(), onnx_models.identity("BYTES")],
    ids=["softmax", "mean", "fixed", "strings"],
)
def test_a_probe_leaves_requests_apart_where_rows_meet_or_cannot_be_tried(content: bytes, tmp_path: Path):
    @in_office()
    async def run(office: Office) -> None:
        card = office.add("m", content, probes=True)
        rule = office.worker.runners[card.id].card.tensor
        assert (rule.probes_batching, rule.joins_requests) == (True, False)

    run(tmp_path)


@in_office()
async def test_what_is_known_of_a_form_ends_with_the_rule_that_it_was_judged_by(office: Office):
    card = office.add("m", onnx_models.affine())
    await office.answer(office.ask("m", rows(2)))
    narrower = msgspec.structs.replace(card, tensor=msgspec.structs.replace(card.tensor, max_batch_size=1))
    office.know(ModelEntry(card=narrower, state="loaded", workers=(office.worker.slot,)))
    for _ in range(2):
        (error,) = await office.answer(office.ask("m", rows(2)))
        assert isinstance(error, BadRequest)
        assert "batch-size must be <= 1" in error.message


@in_office()
async def test_requests_of_one_form_are_judged_by_their_own_bytes(office: Office):
    office.stub()
    (answer,) = await office.answer(office.ask("stub", {"INPUT0": strings("INPUT0", [b"ab", b"c"], (2,))}))
    assert answer["OUTPUT0"] == ([b"ab", b"c"], (2,))
    cut = Tensor("INPUT0", "BYTES", (2,), memoryview(b"\2\0\0\0ab\2\0\0\0c"))
    (error,) = await office.answer(office.ask("stub", {"INPUT0": cut}))
    assert isinstance(error, BadRequest)
    assert "incomplete string" in error.message


@in_office()
async def test_run_without_an_end_is_ended_and_the_next_one_gets_no_more_time(
    office: Office,
):
    office.worker.build = functools.partial(build, limit_s=0.1)
    model, pace = office.add("m", onnx_models.endless()).id, office.worker.loop._steps._pace
    allowed_ns = pace.allowed_ns(model, 1)
    for _ in range(2):
        [error] = await office.answer(office.ask("m", {"x": np.ones(1, np.float32)}))
        assert isinstance(error, DeadlineExceeded)
        assert "did not end" in error.message
    assert pace.allowed_ns(model, 1) == allowed_ns


@in_office()
async def test_tensors_larger_than_memory_are_errors_and_the_next_request_is_answered(office: Office):
    office.add("m", onnx_models.filled())
    for shape in ([2**40], [2**31, 2**31], [2**62, 4], [-5]):
        [error] = await office.answer(office.ask("m", {"x": np.array(shape)}))
        assert isinstance(error, BadRequest | ResourceExhausted)
    [answer] = await office.answer(office.ask("m", {"x": np.array([3])}))
    assert answer["y"].size == 1


@in_office()
async def test_inputs_may_come_in_any_order(office: Office):
    office.add("m", onnx_models.affine(), JOINED)
    arrays = rows(2)
    backwards = {"a": arrays["a"], "x": arrays["x"]}
    for answer in await office.answer(office.ask("m", arrays), office.ask("m", backwards)):
        np.testing.assert_allclose(answer["y"], affine(arrays), rtol=1e-5)
    assert office.num_steps == 1


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in ("BYTES", "BF16")])
def test_every_number_comes_back_as_it_was(tmp_path: Path, datatype: str):
    values = np.array([[0, 1], [1, 0]], DATATYPES[datatype])

    @in_office()
    async def run(office: Office) -> None:
        office.add("m", onnx_models.identity(datatype))
        (answer,) = await office.answer(
            office.ask("m", {"x": Tensor("x", datatype, (2, 2), memoryview(values.tobytes()))})
        )
        np.testing.assert_array_equal(answer["y"], values)
        assert answer["y"].dtype == values.dtype

    run(tmp_path)


@in_office()
async def test_bf16_crosses_as_its_bits(office: Office):
    office.add("m", onnx_models.identity("BF16"), JOINED)
    bits = np.array([[0x3F80, 0x4049]], np.uint16)  # 1 and about pi
    asked = [Tensor("x", "BF16", (1, 2), memoryview((bits + index).tobytes())) for index in range(2)]
    answers = await office.answer(*[office.ask("m", {"x": value}) for value in asked])
    for index, answer in enumerate(answers):
        np.testing.assert_array_equal(answer["y"], bits + index)
    assert office.num_steps == 1


def test_a_model_that_takes_strings_beside_bf16_does_not_load(tmp_path: Path):
    """onnxruntime has no way to give it both: every request failed."""
    values = [("x", "y", "BF16"), ("s", "t", "BYTES")]
    content = onnx_models.model(
        [helper.make_node("Identity", [given], [back]) for given, back, _ in values],
        [onnx_models.value(given, datatype, ("n",)) for given, _, datatype in values],
        [onnx_models.value(back, datatype, ("n",)) for _, back, datatype in values],
    )
    onnx_models.write(tmp_path, "m", content)
    source = TensorSource(repository=str(tmp_path), name="m", version="1")
    card = read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source))
    with pytest.raises(ModelLoadFailed, match="does not take BYTES in a model that has BF16"):
        build(card)


@in_office()
async def test_strings_go_both_ways(office: Office):
    office.add("m", onnx_models.identity("BYTES"), JOINED)
    one = strings("x", ["é\0".encode(), b""], (1, 2))
    two = strings("x", [b"a", b"b" * 1000, b"", "\U0001f600".encode()], (2, 2))
    first, second = await office.answer(office.ask("m", {"x": one}), office.ask("m", {"x": two}))
    assert first["y"] == (["é\0".encode(), b""], (1, 2))
    assert second["y"] == ([b"a", b"b" * 1000, b"", "\U0001f600".encode()], (2, 2))
    assert office.num_steps == 1


@in_office()
async def test_a_text_model_refuses_bytes_that_are_not_utf_8(office: Office):
    office.add("m", onnx_models.identity("BYTES"), JOINED)
    bad, good = await office.answer(
        office.ask("m", {"x": strings("x", [b"\xff", b""], (1, 2))}),
        office.ask("m", {"x": strings("x", [b"a", b"b"], (1, 2))}),
    )
    assert isinstance(bad, BadRequest)
    assert "not UTF-8" in bad.message
    assert good["y"] == ([b"a", b"b"], (1, 2))


@in_office()
async def test_what_the_model_rejects_is_the_clients_fault_and_its_neighbours_are_answered(office: Office):
    office.add("m", onnx_models.lookup(), JOINED)
    good, bad, also_good = await office.answer(*[office.ask("m", {"i": np.array([i])}) for i in (1, 9, 2)])
    np.testing.assert_array_equal(good["y"], [[0, 1, 0, 0]])
    np.testing.assert_array_equal(also_good["y"], [[0, 0, 1, 0]])
    assert isinstance(bad, BadRequest)
    assert bad.message.startswith("Model 'm' rejects these inputs: ")
    assert "must be within the inclusive range" in bad.message


@in_office()
async def test_a_model_that_mixes_its_rows_up_is_run_request_by_request(office: Office):
    nodes = [onnx_models.helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    content = onnx_models.model(
        nodes, [onnx_models.value("x", "FP32", ("n", 1))], [onnx_models.value("y", "FP32", ("m", 1))]
    )
    office.add("m", content, JOINED)
    asked = [np.full((1, 1), value, np.float32) for value in (1, 2)]
    answers = await office.answer(*[office.ask("m", {"x": values}) for values in asked])
    assert [answer["y"].tolist() for answer in answers] == [[[1], [1]], [[2], [2]]]


@in_office()
async def test_only_wanted_outputs_come_in_the_order_in_which_they_were_named(office: Office):
    nodes = [onnx_models.helper.make_node("Split", ["x"], ["p", "q", "r"], axis=1, num_outputs=3)]
    outputs = [onnx_models.value(name, "FP32", ("n", 1)) for name in ("p", "q", "r")]
    office.add("m", onnx_models.model(nodes, [onnx_models.value("x", "FP32", ("n", 3))], outputs))
    values = np.array([[1, 2, 3]], np.float32)
    some, every = await office.answer(
        office.ask("m", {"x": values}, outputs=("r", "p", "r")), office.ask("m", {"x": values})
    )
    assert [(name, value.tolist()) for name, value in some.items()] == [("r", [[3]]), ("p", [[1]])]
    assert list(every) == ["p", "q", "r"]


@in_office()
async def test_a_stub_returns_its_inputs(office: Office):
    office.stub()
    nothing = np.empty((0, 3, 0), np.float32)
    deep = np.arange(2, dtype=np.int64).reshape((1,) * 20 + (2,) + (1,) * 11)
    first, second = await office.answer(
        office.ask("stub", {"INPUT0": nothing, "INPUT3": deep}, outputs=("OUTPUT3", "OUTPUT0")),
        office.ask("stub", {"INPUT0": strings("INPUT0", [b"\xff\0", b""], (2,))}),
    )
    assert list(first) == ["OUTPUT3", "OUTPUT0"]
    np.testing.assert_array_equal(first["OUTPUT3"], deep)
    assert first["OUTPUT0"].shape == (0, 3, 0)
    assert second["OUTPUT0"] == ([b"\xff\0", b""], (2,))
    assert office.num_steps == 1


@in_office(request_segment_bytes=1 << 20, reply_segment_bytes=1 << 20)
async def test_a_tensor_larger_than_the_segments_crosses_in_memory_of_its_own(office: Office):
    office.stub()
    large = np.arange(2 << 20, dtype=np.int32)
    (answer,) = await office.answer(office.ask("stub", {"INPUT0": large}))
    np.testing.assert_array_equal(answer["OUTPUT0"], large)


@in_office(request_segment_bytes=4 << 20, reply_segment_bytes=1 << 20)
async def test_replies_without_room_wait_for_those_before_them(office: Office):
    office.stub()
    asked = [np.full(100_000, value, np.float32) for value in range(6)]
    answers = await office.answer(*[office.ask("stub", {"INPUT0": values}) for values in asked])
    for values, answer in zip(asked, answers, strict=True):
        np.testing.assert_array_equal(answer["OUTPUT0"], values)
    assert office.num_steps == 3  # two fit the token budget, and nothing was run again
    assert office.worker.loop._replies._kept.used_bytes == 0


@in_office()
async def test_a_reply_over_its_limit_is_refused_and_others_are_not(office: Office):
    limit = office.worker.loop._replies._max_reply_bytes
    office.worker.loop._replies._max_reply_bytes = 4096
    office.stub()
    big, small = await office.answer(
        office.ask("stub", {"INPUT0": np.zeros(1025, np.float32)}),
        office.ask("stub", {"INPUT0": np.zeros(1024, np.float32)}),
    )
    assert limit == Limits().max_reply_bytes
    assert isinstance(big, BadRequest)
    assert "over max_reply_bytes (4096)" in big.message
    assert small["OUTPUT0"].shape == (1024,)


@in_office(limits=Limits(max_tensor_strings=3))
async def test_many_strings_are_counted_on_a_thread_and_refused(office: Office):
    office.stub()
    long = strings("INPUT0", [b"x" * (1 << 19)] * 4, (4,))
    (refused,) = await office.answer(office.ask("stub", {"INPUT0": long}))
    assert isinstance(refused, BadRequest)
    assert "over max_tensor_strings" in refused.message


@in_office()
async def test_the_clients_own_timeout_is_obeyed(office: Office):
    office.stub()
    task = office.ask("stub", {"INPUT0": np.zeros(1, np.float32)}, timeout_us=1)
    await office.rig.settle()
    office.rig.engine.expire(time.monotonic_ns())
    (late,) = await office.answer(task)
    assert isinstance(late, DeadlineExceeded)


@in_office()
async def test_a_dead_workers_requests_are_answered_by_another_from_the_same_bytes(office: Office):
    card = office.stub()
    task = office.ask("stub", {"INPUT0": np.arange(5, dtype=np.float32)})
    await office.rig.settle()
    spare = office.start_worker()
    spare.load(card.id, card)
    office.worker.is_dead = True
    office.know(ModelEntry(card=card, state="loaded", workers=(spare.slot,)))
    office.rig.engine.fail_over(office.worker.slot, office.worker.generation, ())
    office.rig.engine.place_held()
    (answer,) = await office.answer(task)
    np.testing.assert_array_equal(answer["OUTPUT0"], np.arange(5))


@in_office()
async def test_a_step_without_memory_is_tried_in_smaller_ones(office: Office):
    office.stub("tensor,oom_tokens=3")
    small, large = np.zeros(256, np.float32), np.zeros(4096, np.float32)
    answers = await office.answer(*[office.ask("stub", {"INPUT0": values}) for values in (small, large, small)])
    assert isinstance(answers[1], ResourceExhausted)
    assert [answers[index]["OUTPUT0"].shape for index in (0, 2)] == [(256,), (256,)]


@in_office()
async def test_models_are_found_by_name_and_version(office: Office):
    card = office.stub()
    rule = card.tensor
    assert rule is not None

    def version(number: str, state: Any, **entry: Any) -> ModelEntry:
        own = msgspec.structs.replace(rule, name="m", version=number, platform="onnxruntime_onnx")
        return ModelEntry(card=ModelCard(id=f"m/versions/{number}", kind="tensor", tensor=own), state=state, **entry)

    error = to_wire(Internal("no such operator"))
    office.know(version("2", "loaded", workers=(0,)), version("10", "failed", error=error), version("9", "loading"))
    assert office.table.names == ["stub", "m"]
    assert list(office.table.versions("m")) == ["2", "9", "10"]
    assert office.table.resolve("m").card.id == "m/versions/2"
    assert office.table.resolve("m", "10").state == "failed"
    assert office.table.resolve("m", "002").card.id == "m/versions/2"
    for name, number, text in (
        ("nope", "", "Request for unknown model: 'nope' is not found"),
        ("m", "3", "Request for unknown model: 'm' version 3 is not found"),
        ("m", "x" * 5, "Request for unknown model: 'm' version xxxxx is not found"),
    ):
        with pytest.raises(NotFound) as missing:
            office.table.resolve(name, number)
        assert missing.value.message == text
    with pytest.raises(Unavailable, match="'m' version 9 is loading") as loading:
        office.tensors.serving("m/versions/9")
    assert loading.value.retry_after_s == 5
    with pytest.raises(ModelLoadFailed, match="no such operator"):
        office.tensors.serving("m/versions/10")
    office.know(version("2", "available"), version("9", "available"), version("10", "available"))
    with pytest.raises(NotFound, match="Request for unknown model: 'm' has no available versions"):
        office.table.resolve("m")
    with pytest.raises(NotFound, match="Request for unknown model: 'm' version 9 is not loaded"):
        office.tensors.serving("m/versions/9")
    assert office.asked == []  # a request never loads a repository's model


@in_office()
async def test_the_first_request_to_a_text_model_that_is_not_loaded_starts_its_load(office: Office):
    card = office.stub("dense=4")
    office.know(ModelEntry(card=card, state="available"))
    with pytest.raises(Unavailable, match="Model 'stub' is loading; retry in 5 s"):
        await office.tensors.wait_serving("stub", "", FAR_NS)
    assert office.asked == ["stub"]
    office.know(ModelEntry(card=card, state="unloading"))
    with pytest.raises(Unavailable, match="Model 'stub' is unloading"):
        await office.tensors.wait_serving("stub", "", FAR_NS)


class Module(torch.nn.Module):
    """Changes its input in place, as programs may, and gives a dict of two."""

    def forward(self, x, a):
        return {"y": x.add_(a.float() @ torch.ones(2, 3)), "rows": a.to(torch.bfloat16)}


BATCH = torch.export.Dim("batch")
ANY_BATCH = {"dynamic_shapes": {"x": {0: BATCH}, "a": {0: BATCH}}}


@in_office()
async def test_a_program_of_torch_runs_requests_together_where_its_configuration_allows(office: Office):
    office.add_program(Module(), (torch.ones(2, 3), torch.ones(2, 2)), "max_batch_size: 4", **ANY_BATCH)
    asked = [rows(n, seed=n) for n in (1, 2, 3)]
    answers = await office.answer(*[office.ask("m", arrays, outputs=("rows", "y")) for arrays in asked])
    for arrays, answer in zip(asked, answers, strict=True):
        assert list(answer) == ["rows", "y"]
        np.testing.assert_allclose(answer["y"], arrays["x"] + arrays["a"].sum(1, keepdims=True), rtol=1e-4, atol=1e-5)
        expected = torch.from_numpy(arrays["a"]).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(answer["rows"], expected)
    assert office.num_steps == 2


@in_office()
async def test_a_program_of_torch_runs_alone_without_a_configuration(office: Office):
    card = office.add_program(Module(), (torch.ones(2, 3), torch.ones(2, 2)), **ANY_BATCH)
    assert card.tensor is not None
    assert card.tensor.max_batch_size == 0
    good, bad = await office.answer(office.ask("m", rows(2)), office.ask("m", {**rows(2), "a": rows(3)["a"]}))
    assert good["y"].shape == (2, 3)
    assert isinstance(bad, BadRequest)
    assert bad.message.startswith("Model 'm' rejects these inputs: Expected input at")
    assert office.num_steps == 2


@in_office()
async def test_outputs_without_names_are_numbered(office: Office):
    class Pair(torch.nn.Module):
        def forward(self, x):
            return x > 0, (x[0], x.sum())

    office.add_program(Pair(), (torch.ones(2, 3),))
    (answer,) = await office.answer(office.ask("m", {"x": np.eye(2, 3, dtype=np.float32)}))
    assert {name: value.tolist() for name, value in answer.items()} == {
        "output_0": [[True, False, False], [False, True, False]], "output_1": [1, 0, 0], "output_2": 2,
    }  # fmt: skip


@in_office()
async def test_a_model_of_texts_is_a_model_of_tensors(office: Office):
    card = office.stub("dense=16,score")
    entry = office.table.resolve("stub", "1")
    rule = entry.card.tensor
    assert rule is not None
    assert entry.card.id == "stub"
    assert [(spec.name, spec.datatype, spec.shape) for spec in (*rule.inputs, *rule.outputs)] == [
        ("text", "BYTES", (-1,)), ("dense", "FP32", (-1, 16)),
    ]  # fmt: skip
    texts = ["a text", "", "Ünïcode" * 50]
    (answer,) = await office.answer(
        office.ask("stub", {"text": strings("text", [text.encode() for text in texts], (3,))}, outputs=("dense",))
    )
    np.testing.assert_array_equal(answer["dense"], StubRunner(card).run_texts([text.encode() for text in texts]))


@in_office()
async def test_a_model_that_only_scores_takes_a_query_and_documents(office: Office):
    card = msgspec.structs.replace(office.stub("dense=16,score"), outputs=("score",))
    office.load(card)
    query = strings("query", [b"q"], (1,))
    (answer,) = await office.answer(
        office.ask("stub", {"query": query, "documents": strings("documents", [b"one", b"two"], (2,))})
    )
    pairs = [struct.pack("<I", 1) + b"q" + document for document in (b"one", b"two")]
    np.testing.assert_array_equal(answer["score"], StubRunner(card).run_pairs(pairs)[:, 0])


@pytest.mark.parametrize(
    ("elements", "limits", "message"),
    [
        ([], {}, "input 'text' holds no text"),
        ([b"a", b"\xff"], {}, "input 'text' holds an element that is not UTF-8"),
        ([b"a"] * 3, {"max_items": 2}, "input 'text' holds 3 texts, but may hold at most 2"),
        ([b"aaaa"], {"max_item_text_bytes": 3}, r"input 'text' holds a text of over max_item_text_bytes \(3\)"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(tmp_path: Path, elements: list[bytes], limits: Any, message: str):
    @in_office(limits=Limits(**limits))
    async def run(office: Office) -> None:
        office.stub("dense=16")
        (refused,) = await office.answer(office.ask("stub", {"text": strings("text", elements, (len(elements),))}))
        assert isinstance(refused, BadRequest)
        assert re.fullmatch(message, refused.message)

    run(tmp_path)


@in_office()
async def test_a_cold_model_of_texts_begins_to_load(office: Office):
    office.know(ModelEntry(card=stub_card(parse_model_spec("cold=stub:dense=16")), state="available"))
    with pytest.raises(Unavailable, match="Model 'cold' is loading"):
        office.tensors.serving("cold")
    assert office.asked == ["cold"]


def test_a_stub_of_tensors_has_no_other_options():
    assert parse_model_spec("s=stub:tensor,latency_ms=1").stub == StubOptions(tensor=True, latency_ms=1)
    with pytest.raises(BadRequest, match="a stub that takes tensors has no option 'dense'"):
        parse_model_spec("s=stub:tensor,dense=8")


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("det", {"x": (1, 3, 64, 96)}),
        ("rec", {"x": (2, 3, 48, 80)}),
        ("cls", {"x": (2, 3, 48, 192)}),
        ("rampart", {"input_ids": (2, 16), "attention_mask": (2, 16), "token_type_ids": (2, 16)}),
    ],
)
def test_real_models_answer_as_onnxruntime_alone_and_batched(tmp_path: Path, name: str, shapes: dict[str, Any]):
    path = onnx_models.real_model(name)
    rng = np.random.default_rng(1)

    def feed() -> dict[str, Any]:
        if "x" in shapes:
            return {"x": rng.normal(size=shapes["x"]).astype(np.float32)}
        return {key: rng.integers(0, 2 if key != "input_ids" else 1000, shape) for key, shape in shapes.items()}

    @in_office(request_segment_bytes=8 << 20, reply_segment_bytes=16 << 20, large_extent_bytes=4 << 20)
    async def run(office: Office) -> None:
        office.add(name, path.read_bytes(), JOINED)
        session = onnxruntime.InferenceSession(str(path))
        feeds = [feed() for _ in range(3)]
        (alone,) = await office.answer(office.ask(name, feeds[0]))
        batched = await office.answer(*[office.ask(name, arrays) for arrays in feeds])
        assert office.num_steps == 2
        for arrays, answer in zip([feeds[0], *feeds], [alone, *batched], strict=True):
            expected = session.run(None, arrays)[0]
            (got,) = answer.values()
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    run(tmp_path)


@in_office()
async def test_a_model_with_a_state_is_run_alone(office: Office):
    path = onnx_models.real_model("vad")
    office.add("vad", path.read_bytes())
    session = onnxruntime.InferenceSession(str(path))
    rng = np.random.default_rng(2)
    feeds = [
        {"input": rng.normal(size=(1, 512)).astype(np.float32), "state": np.zeros((2, 1, 128), np.float32),
         "sr": np.array(16000)}
        for _ in range(2)
    ]  # fmt: skip
    answers = await office.answer(*[office.ask("vad", arrays) for arrays in feeds])
    assert office.num_steps == 2
    for arrays, answer in zip(feeds, answers, strict=True):
        for got, expected in zip(answer.values(), session.run(None, arrays), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


# --- priorities and queue policies ------------------------------------------------------------------------------------

PRIORITIES = "max_batch_size: 1 dynamic_batching { priority_levels: 3 default_priority_level: 2 %s }"


@in_office()
async def test_requests_run_in_the_order_of_their_priorities(office: Office):
    office.add("m", onnx_models.identity(), PRIORITIES % "")
    done: list[int] = []
    tasks: list[asyncio.Task[Any]] = []
    for priority in (3, 0, 1, 9, 1):
        tasks.append(office.ask("m", {"x": np.zeros((1, 2), np.float32)}, priority=priority))
        tasks[-1].add_done_callback(lambda _, priority=priority: done.append(priority))
    await office.rig.settle()  # all of them are there before the first step
    await office.answer(*tasks)
    assert done == [1, 1, 0, 9, 3]


@in_office()
async def test_a_queue_policy_refuses_what_waited_too_long_and_what_is_too_much(office: Office):
    office.add("m", onnx_models.identity(), PRIORITIES % "default_queue_policy { default_timeout_microseconds: 1 }")
    (found,) = await office.answer(office.ask("m", {"x": np.zeros((1, 2), np.float32)}))
    assert isinstance(found, Unavailable)
    assert (found.message, found.http_status) == ("Request timeout expired", 503)
    office.add("m2", onnx_models.identity(), PRIORITIES % "default_queue_policy { max_queue_size: 2 }")
    asked = [office.ask("m2", {"x": np.zeros((1, 2), np.float32)}) for _ in range(4)]
    await office.rig.settle()
    answers = await office.answer(*asked)
    assert [getattr(found, "message", "") for found in answers] == ["", "", *["Exceeds maximum queue size"] * 2]


@in_office()
async def test_a_timeout_is_the_queues_own_where_there_is_a_policy(office: Office):
    policy = "default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: %s }"
    office.add("m", onnx_models.identity(), PRIORITIES % (policy % "false"))
    (found,) = await office.answer(office.ask("m", {"x": np.zeros((1, 2), np.float32)}, timeout_us=1))
    assert found["y"].shape == (1, 2)
    office.add("m2", onnx_models.identity(), PRIORITIES % (policy % "true"))
    (found,) = await office.answer(office.ask("m2", {"x": np.zeros((1, 2), np.float32)}, timeout_us=1))
    assert isinstance(found, Unavailable)


# --- models that are loaded anew --------------------------------------------------------------------------------------


def gone(_entry: ModelEntry) -> Unavailable:
    return Unavailable("Model 'm' is not loaded", code="MODEL_NOT_LOADED")


@in_office()
async def test_a_request_waits_for_a_model_that_is_loaded_anew_until_its_deadline(office: Office):
    card = office.add("m", onnx_models.identity())

    async def run(entry: ModelEntry) -> str:
        return entry.state

    office.know(ModelEntry(card=card, state="unloading", reloading=True))
    waiting = asyncio.ensure_future(office.tensors.serve("m", "", FAR_NS, run))
    await office.rig.settle()
    assert not waiting.done()
    with pytest.raises(Unavailable, match="'m' is loading") as caught:
        await office.tensors.serve("m", "1", time.monotonic_ns() + 20_000_000, run)
    assert caught.value.http_status == 503
    office.know(ModelEntry(card=card, state="loaded", workers=(office.worker.slot,)))
    assert await waiting == "loaded"


@in_office()
async def test_a_request_that_met_its_model_on_its_way_out_asks_again(office: Office):
    card = office.add("m", onnx_models.identity())
    asked: list[ModelEntry] = []

    async def run(entry: ModelEntry) -> str:
        asked.append(entry)
        if len(asked) == 1:
            raise gone(entry)
        return "served"

    task = asyncio.ensure_future(office.tensors.serve("m", "", FAR_NS, run))
    await office.rig.settle()
    assert (len(asked), task.done()) == (1, False), "it waits for word of what its model has become"
    office.know(ModelEntry(card=card, state="unloading", reloading=True))
    await office.rig.settle()
    assert len(asked) == 1
    office.know(ModelEntry(card=card, state="loaded", workers=(office.worker.slot,)))
    assert await task == "served"


@in_office()
async def test_a_model_that_was_unloaded_is_not_waited_for(office: Office):
    card = office.add("m", onnx_models.identity())

    async def run(entry: ModelEntry) -> str:
        raise gone(entry)

    task = asyncio.ensure_future(office.tensors.serve("m", "1", FAR_NS, run))
    await office.rig.settle()
    office.know(ModelEntry(card=card, state="unloading"))
    with pytest.raises(Unavailable, match="is not loaded"):
        await task
    office.know(ModelEntry(card=card, state="available"))
    with pytest.raises(NotFound, match="no available versions"):
        await office.tensors.serve("m", "", FAR_NS, run)
    office.know(ModelEntry(card=card, state="loaded", workers=(office.worker.slot,)))
    with pytest.raises(Unavailable, match="is not loaded"):
        await office.tensors.serve("m", "", time.monotonic_ns() + 20_000_000, run)


# --- images -----------------------------------------------------------------------------------------------------------


@in_office()
async def test_encoded_images_are_what_the_model_takes(office: Office):
    office.add("m", onnx_models.identity(shape=("n", 3, 8, 6)))
    values = np.random.default_rng(2).integers(0, 256, (2, 8, 6, 3), np.uint8)
    files: list[bytes] = []
    for one in values:
        file = io.BytesIO()
        Image.fromarray(one).save(file, "PNG")
        files.append(file.getvalue())
    (found,) = await office.answer(office.ask("m", {"x": strings("x", files, (2,))}))
    np.testing.assert_array_equal(found["y"], np.moveaxis(values[..., ::-1], 3, 1))
    (found,) = await office.answer(office.ask("m", {"x": strings("x", [b"none"], (1,))}))
    assert isinstance(found, BadRequest)


@pytest.mark.parametrize(
    ("num_classes", "is_batched", "leaves"), [(4, True, False), (16, True, True), (16, False, False)]
)
def test_answer_with_many_classes_is_written_on_a_thread(num_classes: int, is_batched: bool, leaves: bool):
    """TRTIS wrote 16,000 classes on the event loop in 1.3 s, because their elements have less than 64 KiB."""

    @in_office()
    async def main(office: Office) -> None:
        rule = TensorRule(name="m", version="1", platform="stub", inputs=(), outputs=(), max_batch_size=8 * is_batched)
        output = tensor("y", np.zeros((8, 100), np.float32))
        timing = Timing(queue_ms=0, tokenization_ms=0, inference_ms=0, postprocessing_ms=0, total_ms=0)
        held = HeldReply(TensorReply(model="m", outputs=[output], timing=timing))
        exchange = Exchange(SimpleNamespace(headers={}), None, 0)
        thread = await office.tensors.encoded(exchange, held, rule, lambda *_: threading.get_ident(), num_classes)
        assert (thread != threading.get_ident()) == leaves

    main(Path())
