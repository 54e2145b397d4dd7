"""Large answers are encoded few at a time, so that they cannot pile up before they count as held."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

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
