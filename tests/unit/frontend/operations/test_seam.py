"""Operations and dialects run on any engine: here on one whose answers are functions of this process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sie.config.generation_settings import Generation
from sie.config.limits import Limits
from sie.frontend.dialects.native import encode, encode_reply, extract, score
from sie.frontend.dialects.openai import completions
from sie.frontend.engine.interface import Engine
from sie.frontend.generation.generation_run import Run
from sie.frontend.generation.start import Generator
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.models.model_table import ModelTable
from sie.frontend.operations.encode import Encoder
from sie.frontend.operations.extraction.extract import Extractor, read_extractions
from sie.frontend.operations.reply_reader import read_reply
from sie.frontend.operations.resolve import resolve_encode, resolve_score
from sie.frontend.operations.resolve_extract import resolve_extract
from sie.frontend.operations.score import Scorer, read_scores
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard, StubOptions
from sie.values.errors import ClientGone, Overloaded, SieError
from sie.values.extract import Classification, Extraction, StubExtract
from sie.values.generate import GenerateRule, GenerateTask, TokenRecord
from sie.values.work import WorkHeader
from tests.unit.frontend.engine.local_engine import LocalEngine

CARDS = {
    "encoder": ModelCard(id="m", kind="encoder", outputs=("dense",), dims={"dense": 2}, stub=StubOptions()),
    "scorer": ModelCard(id="m", kind="cross-encoder", outputs=("score",), stub=StubOptions()),
    "extractor": ModelCard(id="m", kind="extractor", outputs=("extract",), extract=StubExtract(), stub=StubOptions()),
    "generator": ModelCard(
        id="m", kind="generator", outputs=("generate",), vocab_size=257,
        generate=GenerateRule(context_length=100, eos_token_ids=(256,)),
    ),
}  # fmt: skip
FAR_NS = 1 << 62
DEADLINE_S = 30.0


def answer(header: WorkHeader, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Answer each item with the size of its text in bytes."""
    bounds = arrays["text_offsets"]
    texts = [arrays["text"][start:end].tobytes() for start, end in itertools.pairwise(bounds)]
    if header.model == "m" and b"too much" in texts:
        raise Overloaded("the answer is no")
    sizes = np.array([[len(text), number] for number, text in enumerate(texts)], np.float32)
    if header.operation == "encode":
        return {"dense": sizes}
    if header.operation == "score":
        return {"score": sizes[:, :1]}
    found = [msgspec.msgpack.encode(Extraction(classifications=[Classification(text.decode(), 1.0)])) for text in texts]
    ends = np.cumsum([0, *map(len, found)]).astype(np.int32)
    return {"extract_offsets": ends, "extract": np.frombuffer(b"".join(found), np.uint8)}


def spell(task: GenerateTask, prompt: list[int]) -> Iterator[TokenRecord]:
    """Generate the prompt backwards, a token at a time."""
    for index, token in enumerate(reversed(prompt)):
        yield TokenRecord(0, 0, index, (token,), "stop" if index + 1 == min(len(prompt), task.max_tokens) else "")


class Desk:
    """The operations of a frontend on a local engine."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        engine: Engine = LocalEngine(answer, spell)
        self.local = engine
        limits, table = Limits(), ModelTable(pool, lambda _model: None)
        images = ImageReader(limits, 1)
        self.limits = limits
        self.encoder = Encoder(engine, table, limits, pool, images)
        self.scorer = Scorer(engine, table, limits, pool)
        self.extractor = Extractor(engine, table, limits, pool, images)
        self.generator = Generator(engine, table, Generation(), self)

    def record_first_token(self, model: str, elapsed_s: float) -> None: ...
    def record_next_token(self, model: str, gap_s: float) -> None: ...

    async def encode(self, *texts: str) -> dict[str, Any]:
        entry = entry_of("encoder")
        request = encode.decode_encode(body_of(items=[{"text": text} for text in texts]), False, "m", self.limits)
        request = resolve_encode(request, entry.card)
        started = await self.encoder.start(entry, request, FAR_NS)
        raw = await started.pending.reply()
        try:
            return json.loads(encode_reply.encode_reply(read_reply(raw, entry, request, 0, 0), False))
        finally:
            raw.release()

    async def score(self, query: str, *documents: str) -> dict[str, Any]:
        entry = entry_of("scorer")
        body = body_of(query={"text": query}, items=[{"text": text} for text in documents])
        request = resolve_score(score.decode_score(body, False, "m", self.limits), entry.card)
        started = await self.scorer.start(entry, request, FAR_NS)
        raw = await started.pending.reply()
        try:
            return json.loads(score.encode_scores(request, read_scores(raw, request, 0, 0), False))
        finally:
            raw.release()

    async def extract(self, *texts: str) -> dict[str, Any]:
        entry = entry_of("extractor")
        body = body_of(items=[{"text": text} for text in texts])
        request = resolve_extract(extract.decode_extract(body, False, "m", self.limits), entry.card)
        submitted = await self.extractor.start(entry, request, FAR_NS)
        raw = await submitted.pending.reply()
        try:
            found = read_extractions(raw, submitted, request, 0, self.limits.max_reply_bytes)
            return json.loads(extract.encode_extractions(request, found, False))
        finally:
            raw.release()

    async def complete(self, prompt: str, **fields: Any) -> tuple[Run, completions.CompletionsWriter]:
        body = body_of(model="m", prompt=prompt, stream=True, **fields)
        request, shown = completions.decode_completions(body, "application/json", self.limits)
        run = await self.generator.start(entry_of("generator"), request, FAR_NS)
        return run, completions.CompletionsWriter(shown, "m", [])


def entry_of(kind: str) -> ModelEntry:
    return ModelEntry(card=CARDS[kind], state="loaded", workers=(0,))


def body_of(**fields: Any) -> bytes:
    return msgspec.json.encode(fields)


@asynccontextmanager
async def open_desk() -> AsyncIterator[Desk]:
    """Yield a desk; at the end every reply must have been released."""
    with ThreadPoolExecutor(1) as pool:
        desk = Desk(pool)
        async with asyncio.timeout(DEADLINE_S):
            yield desk
            for _ in range(5):
                await asyncio.sleep(0)
        desk.generator.close()
        gc.collect()
        assert desk.local.num_held == 0, "every reply was released"


def on_desk(test: Any) -> Any:
    async def main() -> None:
        async with open_desk() as desk:
            await test(desk)

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@on_desk
async def test_encode(desk: Desk) -> None:
    for texts in (["abc"], ["abc", "defgh"]):  # the first goes with a layout, the second with arrays
        answered = await desk.encode(*texts)
        rows = [item["dense"]["values"] for item in answered["items"]]
        assert [values[0] for values in rows] == [len(text) for text in texts]


@on_desk
async def test_score(desk: Desk) -> None:
    answered = await desk.score("query", "a", "a longer one")
    assert [found["item_id"] for found in answered["scores"]] == ["item-1", "item-0"]


@on_desk
async def test_extract(desk: Desk) -> None:
    answered = await desk.extract("one", "two")
    assert [item["classifications"][0]["label"] for item in answered["items"]] == ["one", "two"]


@on_desk
async def test_an_error_of_the_engine_reaches_the_caller(desk: Desk) -> None:
    with pytest.raises(Overloaded, match="the answer is no"):
        await desk.encode("too much")


@on_desk
async def test_a_stream(desk: Desk) -> None:
    run, writer = await desk.complete("abc")
    written = b""
    while not run.is_over:
        written += writer.write(await run.wait(DEADLINE_S))
    lines = [line.removeprefix("data: ") for line in written.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line)["choices"] for line in lines[:-1]]
    assert "".join(choices[0]["text"] for choices in chunks if choices) == "cba"
    assert chunks[-1][0]["finish_reason"] == "stop"


@on_desk
async def test_a_stream_that_found_its_stop_string_asks_for_no_more(desk: Desk) -> None:
    run, _ = await desk.complete("abcdefgh" * 10, stop=["gf"], max_tokens=80)
    reply = await run.whole()
    assert reply.choices[0].text == "h"
    for _ in range(20):
        await asyncio.sleep(0)
    assert desk.local.num_records < 8


@on_desk
async def test_a_client_that_leaves_cancels_its_request_and_its_stream(desk: Desk) -> None:
    desk.local.gate.clear()
    waiting = asyncio.ensure_future(desk.encode("abc"))
    run, _ = await desk.complete("abc")
    for _ in range(3):
        await asyncio.sleep(0)
    waiting.cancel()
    run.give_up(ClientGone("the client left"))
    desk.local.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(SieError, match="the client left"):
        await run.whole()
    assert desk.local.num_records == 0


@on_desk
async def test_a_reply_that_comes_in_the_turn_of_a_cancellation_is_released(desk: Desk) -> None:
    waiting = asyncio.ensure_future(desk.encode("abc"))
    for _ in range(20):
        await asyncio.sleep(0)
        if desk.local.num_held:
            break
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
