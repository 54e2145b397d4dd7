"""Simulates a cluster of 100 hosts on a real NATS: real pullers and two gateways' queues as tasks, over a stub engine.

    python -m tests.chaos.pullers [--hosts 100]

Half of the hosts are half as fast. Two API keys of weights 1 and 3 flood a gateway each. Then a fifth of the hosts dies
without a sign. The script prints what it sees and fails if an answer is lost or wrong, shares are more than a fifth off,
or a dead host's work is not elsewhere in three seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from nats.aio.msg import Msg

from sie.cluster.connection import Connection
from sie.cluster.gateway.fair_queue import Caller
from sie.cluster.gateway.host_directory import Directory, choose_lane
from sie.cluster.gateway.in_flight import InFlight
from sie.cluster.gateway.windows import Windows
from sie.cluster.gateway.work_items import RemoteReply
from sie.cluster.host import work_pull
from sie.cluster.host.item_run import Answer
from sie.cluster.host.pull_metrics import PullMetrics
from sie.cluster.host.work_pull import WorkPull
from sie.cluster.payloads import (
    VERSION,
    Beat,
    GatewayBeat,
    ModelBeat,
    beat_decoder,
    decode,
    encode,
    gateway_beat_decoder,
    results_decoder,
    taken_decoder,
)
from sie.cluster.request_forms import Piece, score_item
from sie.cluster.subjects import Lane, answer_subject, any_host, gateway_beat, host_subject
from sie.config.cluster_settings import Cluster
from sie.config.settings import Settings
from sie.shm.pages import CounterPage
from sie.values.inference import ScoreRequest
from tests.process.nats_harness import start_nats

LANE = Lane("default", "any", "any")
FAST_S, SLOW_S = 0.2, 0.4
"""What one item takes on the hosts of each half."""
TOKENS = 256
CLIENTS = 20
"""Clients of each key, for each host: more than the hosts can serve."""
SETTLE_S = 15.0
"""Both gateways begin at once, and fill the stream before they hear of each other; that work is done after this time."""
RUN_S = 15.0
DEAD_S = 3.0


class Host:
    """A real puller over an engine that answers one item at a time."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.name = f"h{number:03}"
        self.item_s = SLOW_S if number % 2 else FAST_S
        self.num_done = 0
        self._lock = asyncio.Lock()
        self._engine = SimpleNamespace(queued_tokens=0)
        self._engine.queued_on = lambda _slots: self._engine.queued_tokens
        entry = SimpleNamespace(state="loaded", workers=(0,), card=SimpleNamespace(kind="encoder"))
        worker = SimpleNamespace(slot=0, state="ready", device="cpu")
        self._process: Any = SimpleNamespace(
            settings=settings, models=SimpleNamespace(entries={"m": entry}, workers=(worker,)), engine=self._engine,
            check_accepting=lambda: None, host=self,
        )  # fmt: skip
        self.connection = Connection(settings.cluster, self.name)
        self.pull = WorkPull(
            self._process, self.connection, LANE, self.name, PullMetrics(CounterPage.create(1 << 14), {"m"})
        )

    async def run(self) -> None:
        """Beat and take work until it is cancelled."""
        await self.connection.open()
        await self.connection.join_pool(LANE.pool)
        beat_s = 0.0
        while True:
            await self.pull.tick()
            if time.monotonic() - beat_s >= 1.0:
                beat_s = time.monotonic()
                served = {"m": ModelBeat("loaded", is_served=True)}
                beat = Beat(
                    VERSION, self.name, self.name, *LANE[:3], "k", served, num_workers=1, credit=self.pull.credit
                )
                await self.connection.publish(host_subject(LANE.pool, self.name, "beat"), encode(beat))
            await asyncio.sleep(0.1)

    async def answer(self, request: ScoreRequest) -> Answer:
        """Answer an item after those before it."""
        self._engine.queued_tokens += TOKENS
        try:
            async with self._lock:
                await asyncio.sleep(self.item_s)
        finally:
            self._engine.queued_tokens -= TOKENS
        self.num_done += 1
        return Answer(memoryview(request.query.encode()[::-1]), TOKENS, 0, 0, 0, {})

    async def die(self, task: asyncio.Task[None]) -> None:
        """End as after SIGKILL: nothing is given back."""
        task.cancel()
        for running in self.pull._running.values():  # what a dead process leaves unfinished
            if running.task is not None:
                running.task.cancel()
        await self.connection._nc._close(4, do_cbs=False)  # without a farewell


class Gateway:
    """A gateway's queues, without its HTTP."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.connection = Connection(settings.cluster, name)
        self.directory = Directory()
        self._windows = Windows(self.directory, name)
        self.items = InFlight(
            self.connection, name, 100_000, window=self._windows.limit, together=self._windows.together
        )

    async def run(self) -> None:
        """Follow the hosts and the other gateway until it is cancelled."""
        await self.connection.open()
        await self.connection.join_pool(LANE.pool)
        for subject, take in (
            (any_host("beat"), self._on_beat), (gateway_beat("*"), self._on_gateway),
            (answer_subject(self.name, "*", "result"), self._on_result), (answer_subject(self.name, "*", "taken"), self._on_taken),
        ):  # fmt: skip
            await self.connection.subscribe(subject, take)
        beat_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s - beat_s >= 1.0:
                beat_s = now_s
                self._windows.own = self.items.take_backlog()
                beat = GatewayBeat(VERSION, self.name, self._windows.own)
                await self.connection.publish(gateway_beat(self.name), encode(beat))
            self._windows.renew(now_s)
            self.items.on_silent(self.directory.stale(now_s))
            self.items.expire(time.monotonic_ns())
            self.items.pump()
            await asyncio.sleep(0.1)

    async def _on_beat(self, message: Msg) -> None:
        self.directory.hear(decode(message.data, beat_decoder), time.monotonic())

    async def _on_gateway(self, message: Msg) -> None:
        self._windows.hear(decode(message.data, gateway_beat_decoder), time.monotonic())

    async def _on_result(self, message: Msg) -> None:
        for result in decode(message.data, results_decoder).items:
            self.items.on_result(result, message.subject)

    async def _on_taken(self, message: Msg) -> None:
        self.items.on_taken(decode(message.data, taken_decoder), message.subject)


class Flood:
    """Clients of one key at one gateway."""

    def __init__(self, gateway: Gateway, caller: Caller, num_clients: int) -> None:
        self._gateway = gateway
        self._caller = caller
        self.outcomes: Counter[str] = Counter()
        self.is_over = False
        self.tasks = [asyncio.create_task(self._run(number)) for number in range(num_clients)]

    async def _run(self, number: int) -> None:
        count = 0
        while not self.is_over:
            count += 1
            query = f"{self._caller.name}-{number}-{count}"
            piece = Piece(score_item(ScoreRequest(model="m", query=query, documents=["d"])))
            lanes = self._gateway.directory.lanes("m", time.monotonic())
            lane = choose_lane(lanes, self._gateway.items.by_lane)
            try:
                pending = self._gateway.items.submit(
                    lane, "score", "m", [piece], deadline_ns=time.monotonic_ns() + 60_000_000_000,
                    join=lambda results, submitted_ns: RemoteReply(memoryview(results[0].reply), 0, submitted_ns), caller=self._caller,
                )  # fmt: skip
                reply = await pending.reply()
                self.outcomes["right" if bytes(reply.view) == query.encode()[::-1] else "wrong"] += 1
            except Exception as error:  # every other outcome is reported by its name
                self.outcomes[f"{type(error).__name__}: {error}"] += 1


async def _time_until_taken(gateways: list[Gateway], dead: set[str]) -> float:
    """Return the time when no work is left that was running on these hosts: others have it."""
    items = [item for gateway in gateways for item in gateway.items._items.values() if item.taken_by in dead]
    assert items, "the hosts that died had no work"
    async with asyncio.timeout(30):
        while any(item.taken_by in dead and not item.pending.future.done() for item in items):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return time.monotonic()


async def _run_item(process: Any, _model: str, request: ScoreRequest, _deadline_ns: int) -> Answer:
    return await process.host.answer(request)


async def simulate(url: str, num_hosts: int) -> list[str]:
    """Run all, print what was seen, and return the faults."""
    settings = Settings(cluster=Cluster(nats=url))
    work_pull.run_item = _run_item
    hosts = [Host(number, settings) for number in range(num_hosts)]
    tasks = {host.name: asyncio.create_task(host.run()) for host in hosts}
    gateways = [Gateway(name, settings) for name in ("g0", "g1")]
    followers = [asyncio.create_task(gateway.run()) for gateway in gateways]
    async with asyncio.timeout(60):
        while any(len(gateway.directory.live(time.monotonic())) < num_hosts for gateway in gateways):  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # heartbeats come when they come
    clients = CLIENTS * num_hosts
    floods = [Flood(gateways[0], Caller("light", 1), clients), Flood(gateways[1], Caller("heavy", 3), clients)]
    await asyncio.sleep(SETTLE_S)
    before = [flood.outcomes["right"] for flood in floods], {host.name: host.num_done for host in hosts}
    await asyncio.sleep(RUN_S)
    light, heavy = (flood.outcomes["right"] - old for flood, old in zip(floods, before[0], strict=True))
    done = {host.name: host.num_done - before[1][host.name] for host in hosts}
    fast = sum(done[host.name] for host in hosts if host.item_s == FAST_S)
    slow = sum(done.values()) - fast
    could = RUN_S * sum(1 / host.item_s for host in hosts)
    dead, died_s = hosts[: num_hosts // 5], time.monotonic()
    for host in dead:
        await host.die(tasks[host.name])
    elsewhere_s = await _time_until_taken(gateways, {host.name for host in dead}) - died_s
    for flood in floods:
        flood.is_over = True
    async with asyncio.timeout(90):
        await asyncio.gather(*(task for flood in floods for task in flood.tasks))
    for task in (*tasks.values(), *followers):
        task.cancel()
    outcomes = floods[0].outcomes + floods[1].outcomes
    busiest, idlest = max(done.values()), min(done.values())
    print(
        f"{num_hosts} hosts, {light + heavy} answers in {RUN_S:g} s: {(light + heavy) / could:.2f} of what hosts could do"
    )
    print(f"slow hosts did {slow / fast:.2f} of the fast ones' work; a host did from {idlest} to {busiest}")
    print(f"weight 3 got {heavy / light:.2f} times the answers of weight 1")
    print(f"{len(dead)} hosts died; all work that ran there was elsewhere after {elsewhere_s:.1f} s")
    print(f"outcomes: {dict(outcomes)}")
    found = {
        "answers are lost or wrong": set(outcomes) != {"right"},
        "hosts waited for gateways": (light + heavy) / could < 0.8,
        "slow hosts do not do half": not 0.4 < slow / fast < 0.6,
        "keys do not share by weight": not 2.4 < heavy / light < 3.6,
        "a dead host's work was late": elsewhere_s > DEAD_S,
    }
    return [fault for fault, is_true in found.items() if is_true]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=100, help="number of hosts [100]")
    options = parser.parse_args()
    with start_nats() as nats:
        faults = asyncio.run(simulate(nats.url, options.hosts))
    for fault in faults:
        print(f"FAULT: {fault}")
    return len(faults)


if __name__ == "__main__":
    raise SystemExit(main())
