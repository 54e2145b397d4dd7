"""Responses in the background: their number is bounded, also for requests at the same time. Files in items that hold none."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sie.config.generation_settings import Generation
from sie.config.limits import Limits
from sie.frontend.dialects.responses.reply import ResponseRecord
from sie.frontend.dialects.responses.request import ResponsesCall, decode_responses
from sie.frontend.responses.events import EventRows
from sie.frontend.responses.response_store import Kept, ResponseFile
from sie.frontend.routes.responses import Responses
from sie.values.errors import BadRequest, SieError, Unavailable
from sie.values.generate import Ended, GenerateEvent, GenerateUsage, TextDelta

BACKGROUND = {"model": "m", "input": "hi", "background": True}


class Run:
    """A run that ends when the test says so."""

    is_over = False

    def __init__(self, end: asyncio.Event) -> None:
        self._end = end

    async def gather(self) -> list[GenerateEvent]:
        await self._end.wait()
        return [Ended(self.usage())]

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

    async def show(self, response_id: str, owner: str = "ann") -> dict[str, Any]:
        """Return the stored state of a response."""
        exchange: Any = SimpleNamespace(model=response_id, owner=owner, scope=SimpleNamespace(query_string=""))
        answer: Any = await self.handlers.show(exchange)
        return json.loads(answer[1])

    async def finish(self) -> None:
        """End all runs, and wait until their responses have ended."""
        self.texts.end.set()
        tasks = [job._task for job in self.handlers._jobs.values() if job._task is not None]
        _, left = await asyncio.wait(tasks, timeout=60)
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


def test_response_that_ends_while_nothing_can_be_stored_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drive() -> None:
        routes = Routes(tmp_path)
        assert await routes.post() == 200
        (response_id,) = routes.handlers._jobs

        def full(*_: object) -> bool:
            raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(ResponseFile, "update", full)
            await routes.finish()
            assert (await routes.show(response_id))["status"] == "completed", "its own process knows better"
            assert await routes.post({**BACKGROUND, "previous_response_id": response_id}) == 200
            await routes.finish()
        watcher = routes.handlers._watcher
        assert watcher is not None
        await asyncio.wait_for(watcher, 60)
        assert (await routes.show(response_id))["status"] == "completed"

    asyncio.run(drive())


def test_stream_whose_last_events_were_lost_is_cut_when_its_state_is_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise sqlite3.OperationalError("database or disk is full")

    async def drive() -> None:
        routes = Routes(tmp_path)
        handlers = routes.handlers
        record = ResponseRecord(
            "resp_1", 1, decoded({**BACKGROUND, "background": False, "stream": True}), "m", max_kept_bytes=1 << 20
        )
        kept = Kept(id=record.id, status=record.status, body=record.to_json(), stream=record.stream_form)
        await handlers._store.do(lambda file: file.add("ann", kept))
        record.apply([TextDelta(0, "one")], 1)
        await handlers._update(record)
        first = await handlers._store.do(lambda file: file.follow(record.id, "ann", -1))
        assert first is not None
        assert (first.stream, bool(first.events)) == ("kept", True)
        record.apply([TextDelta(0, "two"), Ended(GenerateUsage(prompt_tokens=1, completion_tokens=2))], 2)
        with monkeypatch.context() as patch:
            patch.setattr(EventRows, "add", full)
            await handlers._update(record)
        await handlers._keep_late()
        last = await handlers._store.do(lambda file: file.follow(record.id, "ann", len(first.events) - 1))
        assert last is not None
        assert (last.status, last.stream, last.events) == ("completed", "cut", [])

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
