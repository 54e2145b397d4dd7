"""From typed requests to rows and back, through a real engine and a real worker loop."""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.config.limits import Limits
from sie.frontend.engine.worker_link import ShmReply
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.models.model_table import ModelTable
from sie.frontend.operations.encode import Encoder
from sie.frontend.operations.reply_reader import read_reply
from sie.ipc.messages import ModelEntry
from sie.shm.extent import write_extent
from sie.values.card import LateInteraction, ModelCard
from sie.values.errors import BadRequest, Internal
from sie.values.inference import EncodeReply, EncodeRequest
from sie.values.work import ReplyHeader
from sie.values.work_bytes import extent_bytes, plan_arrays
from sie.workers.runners.stub import StubRunner
from tests.unit.engine_rig import DEADLINE_S, Rig, SumRunner, checksum, in_rig

STUB = stub_card(parse_model_spec("stub=stub:dense=4,max_tokens=3"))


def entry_of(card: ModelCard) -> ModelEntry:
    return ModelEntry(card=card, state="loaded", workers=(0,))


class Encoding:
    """An encoder on a rig's engine, and a worker with one model."""

    def __init__(self, rig: Rig, card: ModelCard, **limits: int) -> None:
        self.rig = rig
        self.pool = ThreadPoolExecutor(1)
        self.models = ModelTable(self.pool, lambda _model: None)
        self.encoder = Encoder(rig.engine, self.models, Limits(**limits), self.pool, ImageReader(Limits(**limits), 1))
        self.entry = entry_of(card)
        self.worker = rig.start_worker()
        self.worker.build = StubRunner if card.stub else SumRunner
        self.worker.load(card.id, card)
        rig.entries[card.id] = self.entry

    async def run(self, request: EncodeRequest) -> tuple[EncodeReply, list[list[float]]]:
        """Return a request's reply, whose own rows are gone, and a copy of them."""
        began_ns = time.monotonic_ns()
        pending, took_ns = await self.encoder.start(self.entry, request, began_ns + 10**12)
        await self.rig.serve(self.worker)
        async with asyncio.timeout(DEADLINE_S):
            raw = await pending.future
        reply = read_reply(raw, self.entry, request, began_ns, took_ns)
        values = np.frombuffer(bytes(reply.values), reply.dtype).reshape(reply.num_items, reply.width).tolist()
        reply.values = memoryview(b"")
        raw.release()
        await self.rig.settle()
        return reply, values

    async def refusal(self, request: EncodeRequest) -> str:
        with pytest.raises(BadRequest) as caught:
            await self.encoder.start(self.entry, request, 1 << 62)
        return caught.value.message


def stub_row(text: str) -> list[float]:
    return [(byte - 256 * (byte > 127)) / 127 for byte in hashlib.shake_256(text.encode()).digest(4)]


def request(*texts: str, **details: Any) -> EncodeRequest:
    return EncodeRequest(model="stub", texts=list(texts), **details)


@in_rig()
async def test_texts_become_rows_in_their_order_with_counts_and_times(rig: Rig) -> None:
    encoding = Encoding(rig, STUB)
    reply, rows = await encoding.run(request("hello", "", "longer than it counts", ids=["a", None, "c"]))

    assert np.allclose(rows, [stub_row(text) for text in ("hello", "", "longer than it counts")])
    assert (reply.num_items, reply.width, reply.dims, reply.dtype) == (3, 4, 4, "<f4")
    assert (reply.ids, reply.model, reply.output_dtype) == (["a", None, "c"], "stub", "float32")
    assert reply.input_tokens == 2 + 1 + 3
    timing = reply.timing
    parts_ms = timing.queue_ms + timing.tokenization_ms + timing.inference_ms + timing.postprocessing_ms
    assert 0 < parts_ms <= timing.total_ms
    assert min(timing.tokenization_ms, timing.inference_ms, timing.postprocessing_ms) > 0


@pytest.mark.parametrize(
    ("output_dtype", "code", "width"),
    [("float16", "<f2", 4), ("int8", "|i1", 4), ("uint8", "|u1", 4), ("binary", "|u1", 1), ("ubinary", "|u1", 1)],
)
def test_reply_has_the_type_that_was_asked_for(output_dtype: str, code: str, width: int) -> None:
    @in_rig()
    async def run(rig: Rig) -> None:
        reply, _ = await Encoding(rig, STUB).run(request("x", output_dtype=output_dtype))
        assert (reply.output_dtype, reply.dtype, reply.width, reply.dims) == (output_dtype, code, width, 4)

    run()


@in_rig()
async def test_cut_vector_has_unit_length_again(rig: Rig) -> None:
    reply, rows = await Encoding(rig, STUB).run(request("hello", dimensions=2))

    cut = np.array(stub_row("hello")[:2])
    assert np.allclose(rows, [cut / np.linalg.norm(cut)])
    assert (reply.dims, reply.width) == (2, 2)


@in_rig()
async def test_normalize_option_is_the_request_s_choice(rig: Rig) -> None:
    _, rows = await Encoding(rig, STUB).run(request("hello", options={"normalize": True}))
    assert np.allclose(np.linalg.norm(rows, axis=1), 1)


@in_rig()
async def test_prompts_are_part_of_what_is_run(rig: Rig) -> None:
    _, rows = await Encoding(rig, STUB).run(request("hello", instruction="Find:"))
    assert np.allclose(rows, [stub_row("Find: hello")])


@in_rig()
async def test_reply_over_the_limit_is_refused_before_anything_is_tokenised(rig: Rig) -> None:
    encoding = Encoding(rig, STUB, max_reply_bytes=4096)
    assert "max_reply_bytes" in await encoding.refusal(request(*["x"] * 257))
    await encoding.run(request(*["x"] * 256))
    await encoding.run(request(*["x"] * 257, output_dtype="float16"))


@in_rig()
async def test_token_arrays_for_a_model_that_reads_text_are_refused(rig: Rig) -> None:
    encoding = Encoding(rig, STUB)
    assert "requires text" in await encoding.refusal(EncodeRequest(model="stub", token_lists=[[1]]))


def test_tokenised_model_gets_ids_from_the_loop_and_from_a_thread_alike(tmp_path: Path) -> None:
    """A long text is tokenised on a thread, as is a first one, whose tokenizer has to be read."""
    vocabulary = {f"w{i}": i for i in range(100)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    card = ModelCard(
        id="words", kind="encoder", dims={"dense": 4}, tokenizer_file=str(tmp_path / "t.json"), vocab_size=100
    )

    @in_rig()
    async def run(rig: Rig) -> None:
        encoding = Encoding(rig, card)
        assert encoding.models.ready_tokenizer(encoding.entry) is None
        for texts in (["w1 w2"], ["w1 w2", "w3"], ["w9 " * 5000]):
            reply, rows = await encoding.run(EncodeRequest(model="words", texts=texts))
            ids = [[vocabulary[word] for word in text.split()] for text in texts]
            assert rows == [checksum(row) for row in ids]
            assert reply.input_tokens == sum(map(len, ids))
        _, rows = await encoding.run(EncodeRequest(model="words", token_lists=[[5, 6], [7]]))
        assert rows == [checksum([5, 6]), checksum([7])]
        assert "vocabulary" in await encoding.refusal(EncodeRequest(model="words", token_lists=[[100]]))

    run()


# --- replies that are not what they should be ------------------------------------------------------------------------------


def reply_of(shape: tuple[int, ...] = (1, 4), *, name: str = "dense", cut: int = 0) -> ShmReply:
    """Return a reply extent as a worker would write it, or nearly."""
    arrays = [np.zeros(3, np.int64), np.zeros(shape, np.float32)]
    plan = plan_arrays([("times", "<i8", (3,)), (name, "<f4", shape)])
    header = msgspec.msgpack.encode(ReplyHeader(plan.refs))
    view = memoryview(bytearray(extent_bytes(len(header), plan.nbytes)))
    write_extent(view, header, plan.refs, arrays)
    pending = SimpleNamespace(submitted_ns=0, num_tokens=1)
    return ShmReply(None, pending, 0, view[: len(view) - cut])  # type: ignore[arg-type]


def test_reply_of_the_right_shape_is_read() -> None:
    assert read_reply(reply_of(), entry_of(STUB), request("x"), 0, 0).num_items == 1


@pytest.mark.parametrize(
    "reply",
    [reply_of((2, 4)), reply_of((4,)), reply_of((1, 0)), reply_of(name="sparse"), reply_of(cut=1), reply_of(cut=100)],
)
def test_reply_of_another_shape_is_an_internal_error(reply: ShmReply) -> None:
    with pytest.raises(Internal):
        read_reply(reply, entry_of(STUB), request("x"), 0, 0)


def test_reply_of_changed_bytes_is_read_or_an_internal_error() -> None:
    good = bytes(reply_of().view)
    num_refused = 0
    for position in range(4, 64):
        for value in (0, 1, 0x7F, 0x92, 0xC1, 0xFF):
            view = bytearray(good)
            view[position] = value
            reply = reply_of()
            reply.view = memoryview(view)
            try:
                read_reply(reply, entry_of(STUB), request("x"), 0, 0)
            except Internal:
                num_refused += 1
    assert num_refused > 50


class Desk:
    """Stands where the engine stands, and keeps what it was given."""

    def submit(self, header: Any, arrays: Any, num_tokens: int, _deadline_ns: int) -> Any:
        self.header, self.num_tokens = header, num_tokens


@pytest.mark.parametrize(
    ("options", "expand_to", "num_tokens"),
    [
        ({"is_query": True}, None, 8),
        ({"is_query": True, "query_max_length": 5}, 5, 5),
        ({"is_query": True, "max_seq_length": 5}, 5, 5),
        ({"is_query": True, "query_max_length": 9}, None, 8),
        ({"query_max_length": 5}, None, 20),
        ({"max_seq_length": 5}, None, 5),
    ],
)
def test_queries_are_padded_up_to_a_lower_query_limit(tmp_path, options, expand_to, num_tokens):
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    late = LateInteraction(query_length=8, expand_to=8)
    card = ModelCard(
        id="m", kind="encoder", outputs=("multivector",), dims={"multivector": 4}, tokenizer_file=str(path),
        max_sequence_length=50, late=late,
    )  # fmt: skip
    desk = Desk()

    async def encode() -> None:
        with ThreadPoolExecutor(1) as pool:
            encoder = Encoder(desk, ModelTable(pool, lambda _model: None), Limits(), pool, ImageReader(Limits(), 1))
            request = EncodeRequest(model="m", texts=["a " * 20], output_types=("multivector",), options=options)
            await encoder.start(entry_of(card), request, 1 << 62)

    asyncio.run(encode())
    assert (desk.header.expand_to, desk.num_tokens) == (expand_to, num_tokens)


@in_rig()
async def test_what_prompts_make_of_the_texts_is_bounded_as_a_body_is(rig: Rig) -> None:
    encoding = Encoding(rig, STUB, max_body_bytes=2048)
    many, long = {"doc_template": "{text}" * 100}, "x" * 30
    await encoding.run(request("x" * 10, options=many))
    assert "max_body_bytes (2048)" in await encoding.refusal(request(long, options=many))
    await encoding.run(request("x", instruction="i" * 1000))
    assert "max_body_bytes (2048)" in await encoding.refusal(request("x", "y", "z", instruction="i" * 1000))
    templated = {"doc_template": "{instruction}{instruction}{text}", "default_instruction": "d"}
    assert "max_body_bytes (2048)" in await encoding.refusal(request("x", instruction="i" * 1100, options=templated))


@pytest.mark.parametrize(
    ("details", "tokens", "skips"),
    [
        ({"options": {"doc_template": "p p p {text} behind"}}, 3, True),
        ({"options": {"query_template": "{instruction} {text}", "is_query": True}, "instruction": "p p"}, 2, True),
        ({"instruction": "p"}, 1, True),
        ({"options": {"doc_template": "p {text} p {text}"}}, 1, True),
        ({"options": {"doc_template": "p p"}}, 2, True),  # a template without a place for the text
        ({}, 2, True),
        ({"options": {"doc_template": "{text}"}}, 0, True),
        ({"instruction": "p"}, 0, False),
    ],
)
def test_tokens_of_a_prompt_are_skipped_by_a_model_that_wants_it(
    tmp_path: Path, details: dict[str, Any], tokens: int, skips: bool
) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "p": 1}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    card = ModelCard(
        id="m", kind="encoder", dims={"dense": 4}, tokenizer_file=str(tmp_path / "tokenizer.json"), skips_prompt=skips,
        prompts={"document": "p p "},
    )  # fmt: skip
    desk = Desk()

    async def encode() -> None:
        with ThreadPoolExecutor(1) as pool:
            encoder = Encoder(desk, ModelTable(pool, lambda _model: None), Limits(), pool, ImageReader(Limits(), 1))
            for _ in range(2):  # on a thread, which reads the tokenizer, and at once
                await encoder.start(entry_of(card), EncodeRequest(model="m", texts=["a a"], **details), 1 << 62)

    asyncio.run(encode())
    assert desk.header.skipped_tokens == tokens
