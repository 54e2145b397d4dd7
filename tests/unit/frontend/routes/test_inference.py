"""Large answers are encoded few at a time, so that they cannot pile up before they count as held."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from sie.config.settings import Settings
from sie.frontend.routes import inference as routes
from sie.frontend.routes.inference import Inference

CODEC: Any = SimpleNamespace(
    operation="score", encode=None, is_quick=lambda _shown, _msgpack: False, has_msgpack=False, has_timing=False,
    has_ids=False,
)  # fmt: skip
EXCHANGE: Any = SimpleNamespace(headers={})
REPLY: Any = (None, None, SimpleNamespace(timing=None))


class Threads(Executor):
    """Threads that end a piece of work when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.begun.append(Future())
        return self.begun[-1]


async def run_others() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_answer_is_encoded_only_when_another_was_taken() -> None:
    async def drive() -> list[bytes]:
        threads = Threads()
        process: Any = SimpleNamespace(models=None, decode_pool=threads, encoding=asyncio.Semaphore(2))
        inference = Inference(process, ())
        answers = [inference.answer(CODEC, EXCHANGE, REPLY, None, is_large=True) for _ in range(5)]
        tasks = [asyncio.ensure_future(answer) for answer in answers]  # type: ignore[arg-type]
        for number in range(5):
            await run_others()
            assert len(threads.begun) == min(number + 2, 5)
            threads.begun[number].set_result(b"%d" % number)
        return [(await task).body for task in tasks]

    assert asyncio.run(drive()) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(
    ("operation", "body_bytes", "repeats", "is_large"),
    [
        ("score", 10, True, False), ("score", 70_000, False, False), ("score", 70_000, True, True),
        ("extract", 10, True, False), ("extract", 70_000, True, True),
    ],
)  # fmt: skip
def test_an_answer_that_may_repeat_a_large_body_is_encoded_on_a_thread(
    operation: str, body_bytes: int, repeats: bool, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = SimpleNamespace(**{**vars(CODEC), "operation": operation, "is_quick": lambda _shown, _msgpack: not repeats})
    codec.encode = lambda *_: threading.current_thread().name.encode()
    for name in ("read_scores", "read_extractions"):
        monkeypatch.setattr(routes, name, lambda *_: SimpleNamespace(timing=None, input_tokens=1, num_chars=0))

    async def drive(*_: Any) -> Any:
        raw = SimpleNamespace(view=b"", release=lambda: None)
        return None, SimpleNamespace(tokenization_ns=0), raw

    async def run(pool: Executor) -> bytes:
        process: Any = SimpleNamespace(
            models=None,
            decode_pool=pool,
            encoding=asyncio.Semaphore(2),
            scorer=None,
            extractor=None,
            settings=Settings(),
        )
        inference: Any = Inference(process, ())
        inference._drive = drive
        exchange: Any = SimpleNamespace(headers={}, body_bytes=body_bytes, began_ns=0)
        request = SimpleNamespace(texts=[], documents=[], cuts=(), metadata=None)
        return (await inference.run(codec, exchange, None, request)).body

    with ThreadPoolExecutor(1, "encode") as pool:
        assert asyncio.run(run(pool)).startswith(b"encode") == is_large
