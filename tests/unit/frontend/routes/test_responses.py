"""Responses in the background: their number is bounded, also for requests at the same time. Files in items that hold none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sie.config.generation_settings import Generation
from sie.config.limits import Limits
from sie.frontend.dialects.responses.request import ResponsesCall, decode_responses
from sie.frontend.routes.responses import Responses
from sie.values.errors import BadRequest, SieError, Unavailable
from sie.values.generate import GenerateEvent, GenerateUsage

BACKGROUND = {"model": "m", "input": "hi", "background": True}


class Run:
    """A run that ends when the test says so."""

    is_over = False

    def __init__(self, end: asyncio.Event) -> None:
        self._end = end

    async def gather(self) -> list[GenerateEvent]:
        await self._end.wait()
        return []

    def give_up(self, error: SieError) -> None:
        """Do nothing: the run ends with the test."""

    def usage(self) -> GenerateUsage:
        return GenerateUsage(prompt_tokens=1, completion_tokens=0)


class Texts:
    """Starts runs as the service of texts does, after a while, or refuses to."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.generator = self
        self.error: SieError | None = None

    def find(self, *_: object) -> Any:
        return SimpleNamespace(workers=[1], state="loaded", card=SimpleNamespace(id="m"))

    async def plan(self, _: object) -> None:
        return None

    async def start(self, *_: object, **__: object) -> Run:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Run(self.end)


class NoFiles:
    """Conversations without files."""

    async def prepare(self, *_: object) -> Sequence[None]:
        await asyncio.sleep(0)
        return []


class Routes:
    """The handlers, with everything behind them replaced."""

    def __init__(self, state: Path, **limits: Any) -> None:
        self.texts: Any = Texts()
        settings = SimpleNamespace(generation=Generation(**limits), server=SimpleNamespace(state_dir=str(state)))
        process: Any = SimpleNamespace(settings=settings, models=None)
        conversations: Any = NoFiles()
        self.handlers = Responses(process, self.texts, ThreadPoolExecutor(1), conversations)

    async def post(self, body: object = BACKGROUND, owner: str = "ann", max_concurrent: int | None = None) -> int:
        """Send a request, and return the status of its answer."""
        key = SimpleNamespace(max_concurrent=max_concurrent)
        exchange: Any = SimpleNamespace(
            owner=owner, holder=SimpleNamespace(key=key, spend=lambda *_: None), began_ns=0, deadline_ns=10**15
        )
        try:
            await self.handlers.create(exchange, decoded(body))
        except SieError as error:
            return error.http_status
        return 200

    async def finish(self) -> None:
        """End all runs, and wait until their responses have ended."""
        self.texts.end.set()
        tasks = [job._task for job in self.handlers._jobs.values() if job._task is not None]
        _, left = await asyncio.wait(tasks, timeout=10)
        assert not left
        self.texts.end.clear()


def decoded(body: object) -> ResponsesCall:
    return decode_responses(json.dumps(body).encode(), "application/json", Limits())


def test_requests_at_once_do_not_pass_the_limit_on_background_responses(tmp_path: Path) -> None:
    async def drive() -> None:
        routes = Routes(tmp_path, max_background_responses=2)
        owners = ["ann", "bob", "cat", "dan", "eve"]
        statuses = await asyncio.gather(*(routes.post(owner=owner) for owner in owners))
        assert statuses == [200, 200, 503, 503, 503]
        await routes.finish()
        assert await routes.post() == 200
        await routes.finish()

    asyncio.run(drive())


def test_requests_at_once_do_not_pass_the_limit_of_their_key(tmp_path: Path) -> None:
    async def drive() -> None:
        routes = Routes(tmp_path)
        posts = [routes.post(owner=owner, max_concurrent=1) for owner in ("ann", "ann", "bob", "ann")]
        assert await asyncio.gather(*posts) == [200, 429, 200, 429]
        await routes.finish()
        assert await routes.post(max_concurrent=1) == 200
        await routes.finish()

    asyncio.run(drive())


def test_background_response_that_fails_to_begin_leaves_its_place(tmp_path: Path) -> None:
    async def drive() -> None:
        routes = Routes(tmp_path, max_background_responses=1)
        routes.texts.error = Unavailable("not now")
        assert await routes.post() == 503
        assert await routes.post({**BACKGROUND, "previous_response_id": "resp_none"}) == 404
        routes.texts.error = None
        assert await routes.post() == 200
        await routes.finish()

    asyncio.run(drive())


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": []},
        {"type": "item_reference", "id": "x"},
        {"type": "function_call", "call_id": "c", "name": "f"},
    ],
)
def test_file_in_an_item_that_holds_none_is_refused_by_name(tmp_path: Path, item: dict[str, Any]) -> None:
    parts = [{"type": "summary_text", "text": "x"}, {"type": "input_file", "file_id": "file-1"}]
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}, {**item, "content": parts}]}

    async def drive() -> None:
        exchange: Any = SimpleNamespace(owner="ann", holder=None, began_ns=0, deadline_ns=10**15)
        with pytest.raises(BadRequest) as caught:
            await Routes(tmp_path).handlers.create(exchange, decoded(body))
        assert (caught.value.http_status, caught.value.extras["param"]) == (400, "input[1].content[1].type")

    asyncio.run(drive())
