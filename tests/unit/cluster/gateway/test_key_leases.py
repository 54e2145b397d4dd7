"""Limits of API keys over several gateways: together they admit what one would, and lose nothing to each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.cluster.gateway import key_leases
from sie.cluster.gateway.key_leases import KeyLeases, KeyUse
from sie.frontend.access.gate import Access
from sie.ipc.messages import Keys
from sie.shm.pages import CounterPage
from sie.values.api_key import ApiKey, digest_of
from sie.values.errors import RateLimited
from tests.unit.cluster.fakes import FakeConnection
from tests.unit.cluster.test_shared_document import Store

S = 1_000_000_000


class Clock:
    ns = 1000 * S


class Cluster:
    """Gateways that share a key, each with its own access and leases, or frontends of one that see each other's counts."""

    def __init__(self, num_gateways: int, *, are_frontends: bool = False, **limits: int) -> None:
        self.connection = FakeConnection()
        self.store = Store()
        self.connection.read_key, self.connection.write_key = self.store.read_key, self.store.write_key  # type: ignore[attr-defined]
        key = ApiKey(name="a", digest=digest_of("secret"), scopes=("infer",), **limits)
        pages = [CounterPage.create(1 << 16) for _ in range(num_gateways)]
        others = [[page for page in pages if page is not own and are_frontends] for own in pages]
        self.accesses = [
            Access([own, *other], lambda _: None, now_ns=lambda: Clock.ns)
            for own, other in zip(pages, others, strict=True)
        ]
        self.leases = [KeyLeases(self.connection, f"gw{number}") for number in range(num_gateways)]  # type: ignore[arg-type]
        self.holders: list[Any] = []
        for access in self.accesses:
            access.replace(Keys((key,), b"s" * 32))
            self.holders.append(access.identify({"x-api-key": "secret"}, "infer"))

    async def ask(self, gateway: int) -> bool:
        """Return whether a gateway admits a request."""
        holder = self.holders[gateway]
        await self.leases[gateway].lease(holder)
        try:
            self.accesses[gateway].begin(holder)
        except RateLimited as error:
            return not error.retry_after_s
        return True

    async def flood(self, num_requests: int, *gateways: int) -> int:
        """Return how many of as many requests at each gateway at once are admitted."""
        asked = [self.ask(gateway) for _ in range(num_requests) for gateway in gateways]
        return sum(await asyncio.gather(*asked))

    async def drain(self, *gateways: int) -> int:
        """Return how many requests are admitted until there is none left, in a second."""
        admitted = 0
        for _ in range(16):
            admitted += await self.flood(400, *gateways)
            Clock.ns += S // 16
        return admitted

    def spend(self, gateway: int, num_tokens: int) -> list[tuple[str, str]]:
        exchange: Any = SimpleNamespace(
            holder=self.holders[gateway], input_tokens=num_tokens, output_tokens=0, route=None
        )
        return self.accesses[gateway].record(exchange, 200, [], None)

    def ends_ns(self) -> list[int]:
        """Return until when the requests under way count, by the document."""
        assert self.store.data is not None
        return [end_ns for _, end_ns in msgspec.msgpack.decode(self.store.data, type=KeyUse).running.values()]

    async def second(self) -> None:
        Clock.ns += S
        for leases in self.leases:
            await leases.tick()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: Clock.ns)
    monkeypatch.setattr(
        key_leases, "_WAIT_S", 60.0
    )  # in real time: the bucket is always there, though a test may pause


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(body())


@pytest.mark.parametrize("per_minute", [1, 10, 600])
def test_four_gateways_admit_a_minute_of_requests_however_they_come(per_minute: int):
    async def test() -> None:
        some = Cluster(4, requests_per_minute=per_minute)
        admitted = 0
        for _ in range(600):  # more than it takes until the bucket is empty, without a whole second passing
            admitted += await some.flood(4, 0, 1, 2, 3)
            Clock.ns += S // 1000
        assert per_minute * 0.9 <= admitted <= per_minute * 1.01 + 1

    run(test)


def test_a_rate_goes_to_the_gateway_that_needs_it_and_is_whole_over_time():
    async def test() -> None:
        some = Cluster(2, requests_per_minute=600)
        await some.drain(0, 1)
        admitted = [0, 0]
        for _ in range(30):
            await some.second()
            for _ in range(10):
                Clock.ns += S // 100
                admitted[1] += await some.flood(10, 1)
        assert admitted[1] >= 0.9 * 30 * 1.1 * 10
        assert sum(admitted) <= 30 * 1.1 * 10 * 1.05 + 20

    run(test)


def test_what_a_gateway_leased_and_did_not_use_is_given_back():
    async def test() -> None:
        some = Cluster(2, requests_per_minute=100)
        await some.ask(0)
        for _ in range(50):
            Clock.ns += 1000
            await some.ask(0)
        held = some.holders[0].lease.num_requests
        await some.second()
        assert (some.holders[0].lease.num_requests, held > 0) == (0, True)
        assert await some.drain(1) >= 47

    run(test)


def test_concurrent_requests_are_counted_over_gateways_and_those_of_a_dead_one_end():
    async def test() -> None:
        some = Cluster(2, max_concurrent=6)
        num_first = 0
        for _ in range(20):
            Clock.ns += S // 10
            num_first += await some.ask(0)
        assert num_first == 6
        assert not await some.ask(1)
        for _ in range(2):
            some.holders[0].end()
        await some.second()
        got = 0
        for _ in range(10):
            Clock.ns += S // 10
            got += await some.ask(1)
        assert got == 2
        Clock.ns += 4 * S  # the first gateway says nothing more
        assert await some.ask(1)

    run(test)


def test_tokens_that_one_gateway_spent_hold_for_the_others_within_a_second():
    async def test() -> None:
        some = Cluster(2, tokens_per_minute=1000)
        assert await some.ask(0)
        headers = dict(some.spend(0, 990))
        assert int(headers["x-ratelimit-remaining-tokens"]) == 10
        some.spend(0, 20)
        assert not await some.ask(0)
        assert not await some.ask(1), "the first ask told of what was spent"

    run(test)


def test_without_nats_each_gateway_counts_by_itself():
    async def test() -> None:
        some = Cluster(2, requests_per_minute=2)
        some.connection.is_connected = False
        assert await some.flood(5, 0, 1) == 4
        away = Cluster(1, requests_per_minute=2)
        away.store.is_away = True
        assert await away.flood(5, 0) == 2

    run(test)


def test_without_nats_nothing_counts_again_that_frontends_spent_under_their_leases():
    async def test() -> None:
        some = Cluster(2, are_frontends=True, tokens_per_minute=600)
        for _ in range(300):
            assert await some.ask(0)
            assert await some.ask(1)
            some.spend(1, 5)  # half of the rate
            await some.second()
        some.connection.is_connected = False
        assert await some.ask(0)
        some.spend(1, 1000)
        assert not await some.ask(0)

    run(test)


@pytest.mark.parametrize("per_minute", [2, 10, 600])
def test_a_burst_within_a_rate_is_admitted(per_minute: int):
    """A gateway got half of what was left, and refused the rest for a moment."""

    async def test() -> None:
        assert await Cluster(1, requests_per_minute=per_minute).flood(per_minute, 0) == per_minute

    run(test)


@pytest.mark.parametrize("is_running", [True, False])
def test_giving_back_refuses_nobody(is_running: bool):
    async def test() -> None:
        some = Cluster(1, max_concurrent=10)
        assert await some.ask(0)
        if not is_running:
            some.holders[0].end()
        await some.second()
        Clock.ns += S // 50
        assert await some.ask(0)

    run(test)


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute", "max_concurrent"])
def test_a_clock_of_nats_that_steps_back_locks_nobody_out(limit: str):
    async def test() -> None:
        some = Cluster(2, **{limit: 600})
        assert await some.ask(0)
        some.spend(0, 10)
        await some.second()
        clock = some.connection.clock
        before_ns = clock.to_server(Clock.ns)
        clock.forget()
        clock.measure(Clock.ns, Clock.ns, before_ns - 3600 * S)
        admitted = 0
        for _ in range(10):
            await some.second()
            admitted += await some.ask(1)
            some.spend(1, 1)
        assert admitted == 10
        assert all(end_ns < clock.to_server(Clock.ns) + 10 * S for end_ns in some.ends_ns())

    run(test)


def test_those_who_wait_for_a_nats_that_hangs_do_not_ask_one_after_another(monkeypatch: pytest.MonkeyPatch):
    async def test() -> None:
        some = Cluster(1, requests_per_minute=600)
        asked = 0

        async def hang(*_: Any) -> Any:
            nonlocal asked
            asked += 1
            Clock.ns += S
            await asyncio.sleep(600)

        some.connection.read_key = some.connection.write_key = hang  # type: ignore[attr-defined]
        monkeypatch.setattr(key_leases, "_WAIT_S", 0.05)
        assert await some.flood(8, 0) == 8
        assert asked == 1

    run(test)


def test_a_key_without_limits_asks_nobody():
    async def test() -> None:
        some = Cluster(1)
        assert await some.ask(0)
        assert some.store.data is None

    run(test)
