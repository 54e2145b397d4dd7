"""The fast path submits or passes on each request; each gets one answer and releases its key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sie.frontend.dialects.native.dialect import ENCODE
from sie.frontend.fastpath.dispatch import FastPath, TrySubmit, Work
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import Response
from sie.values.errors import BadRequest, RateLimited, SieError, Unavailable

DEADLINE_S = 60.0
ANSWER = Response(200, [], b"answer")


class Holder:
    """A key, and how many of its requests are under way."""

    def __init__(self) -> None:
        self.num_running = 0

    def end(self) -> None:
        self.num_running -= 1


class Access:
    """Lets everybody in, or nobody."""

    def __init__(self, error: SieError | None = None) -> None:
        self.holder = Holder()
        self._error = error

    def admit(self, exchange: Exchange, _need: str) -> None:
        exchange.holder = cast("Any", self.holder)
        if self._error is not None:
            raise self._error
        self.holder.num_running += 1


class Desk:
    """A fast path with one route and the test's submitter, and the error boundary behind it."""

    def __init__(self, try_submit: TrySubmit | None = None, access: Access | None = None) -> None:
        self.access = access
        self.answers: asyncio.Queue[Response | Exception | str] = asyncio.Queue()
        process = cast("Any", SimpleNamespace(access=access, host_check=None, requests=set()))
        self.fast_path = FastPath(self, process, {ENCODE: try_submit} if try_submit is not None else {})

    async def serve(self, exchange: Exchange) -> None:
        assert exchange.route is None, "the task finds it"
        self.answers.put_nowait("served")
        if exchange.holder is not None:
            exchange.holder.end()

    async def guard(self, exchange: Exchange, work: Awaitable[None]) -> None:
        try:
            await work
        except SieError as error:
            self.fail(exchange, error)

    def fail(self, _exchange: Exchange, error: Exception) -> None:
        self.answers.put_nowait(error)

    def respond(self, _exchange: Exchange, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.answers.put_nowait(Response(status, headers, body))

    async def take(self, method: str = "POST", path: str = "/v1/encode/m", *, is_there: bool = True) -> Any:
        scope = SimpleNamespace(path=path, method=method, headers={}, proto="http")
        exchange = Exchange(scope, None, 0)
        exchange.body = cast("Any", SimpleNamespace(done=lambda: is_there))
        self.fast_path.take(exchange)
        answer = await self.answers.get()
        await asyncio.sleep(0)  # what ends behind the answer
        assert self.answers.empty(), "one request, one answer"
        if self.access is not None:
            assert self.access.holder.num_running == 0
        return answer


def run(make: Callable[[], Desk], expected: object, **request: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            assert await make().take(**request) == expected

    asyncio.run(main())


def submitting(reply: object, answer: object = ANSWER, retry: object = None) -> TrySubmit:
    """Return a submitter whose worker answers with reply: a value, or an error."""

    def try_submit(_exchange: Exchange) -> Work:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

        def make(_reply: object) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer() if callable(answer) else answer

        return cast("Work", SimpleNamespace(pending=SimpleNamespace(future=future), answer=make, retry=retry))

    return try_submit


async def later() -> Response:
    await asyncio.sleep(0)
    return ANSWER


async def fails() -> Response:
    await asyncio.sleep(0)
    raise GONE


GONE = Unavailable("gone")
FAULT = BadRequest("a fault")


def refuse(_exchange: Exchange) -> Work:
    raise FAULT


@pytest.mark.parametrize("access", [None, Access()])
@pytest.mark.parametrize(
    ("try_submit", "expected"),
    [
        (submitting("reply"), ANSWER),
        (submitting("reply", later), ANSWER),
        (submitting("reply", fails), GONE),
        (submitting("reply", FAULT), FAULT),
        (submitting(FAULT), FAULT),
        (submitting(GONE, retry=lambda _error: later()), ANSWER),
        (submitting(GONE, retry=lambda _error: fails()), GONE),
        (refuse, FAULT),
        (lambda _exchange: None, "served"),
    ],
)
def test_every_request_is_answered_once_and_leaves_its_key(try_submit, expected, access):
    run(lambda: Desk(try_submit, access), expected)


@pytest.mark.parametrize(
    "request_",
    [{"method": "GET"}, {"path": "/v1/score/m"}, {"path": "/nowhere"}, {"is_there": False}],
)
def test_requests_outside_the_fast_path_are_served_by_a_task(request_):
    run(lambda: Desk(refuse), "served", **request_)


def test_request_that_its_key_does_not_allow_submits_nothing():
    error = RateLimited("too many", retry_after_s=1)
    run(lambda: Desk(refuse, Access(error)), error)


def test_what_a_request_apart_sets_is_not_seen_by_the_next():
    seen: list[str] = []
    placement: ContextVar[str] = ContextVar("placement", default="none")

    def submit(_exchange: Exchange) -> Work | None:
        seen.append(placement.get())
        placement.set("bench")
        raise BadRequest("no")

    async def test() -> None:
        desk = Desk(submit)
        scope = SimpleNamespace(path="/v1/encode/m", method="POST", headers={}, proto="http")
        for _ in range(2):
            exchange = Exchange(scope, None, 0)
            exchange.body = cast("Any", SimpleNamespace(done=lambda: True))
            desk.fast_path.take_in_own_context(exchange)

    asyncio.run(test())
    assert seen == ["none", "none"]
