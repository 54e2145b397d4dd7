"""C1 to C6: what dies between a gateway and its hosts costs no answer: a host, a gateway, NATS, a link, the room."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.chaos.cluster import kill
from tests.chaos.history import History, Load, open_loop
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import WAIT_S, Server, eventually, paused
from tests.process.nats_harness import (
    Nats,
    start_gateway,
    start_host,
    start_link,
    start_nats,
    start_nats_cluster,
    wait_for_hosts,
)
from tests.process.wire import encode, get

STUB = ("--model", "stub/a=stub:dense=16,latency_ms=5", "--test")
ROUNDS = int(os.environ.get("KILL_ROUNDS", pick("1", "50")))
RATE = 50
DEAD_S = 3.0
"""A dead host's work is elsewhere within this time."""


class Bed(NamedTuple):
    """What the rounds share: NATS, a host that lives, and a gateway."""

    nats: Nats
    host: Server
    front: Server


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with (
        start_nats() as nats,
        start_host(nats.url, *STUB, is_stopped=True) as host,
        start_gateway(nats.url, is_stopped=True) as front,
    ):
        wait_for_hosts(front, 1, "stub/a")
        yield Bed(nats, host, front)


class Rounds:
    """The loads of all rounds, each checked as it ends."""

    def __init__(self) -> None:
        self.rng = random.Random(SEED)
        self._histories: list[History] = []

    @contextlib.contextmanager
    def load(self, front: Server) -> Iterator[Load]:
        """Yield a load on a gateway, after a while of it; every request must be answered rightly."""
        with open_loop(front, RATE, seed=self.rng.randrange(1 << 30), probes=False) as load:
            time.sleep(0.3 + self.rng.random() * 0.5)
            yield load
        assert not load.history.failed(), load.history.outcomes()
        self._histories.append(load.history)

    def judge(self, row: Row) -> None:
        """Record what the loads saw: every request answered, rightly, and once."""
        row.equals("rounds", len(self._histories), ROUNDS)
        row.all_right("lost answers", *self._histories)
        row.equals("wrong answers", sum(history.outcomes()["wrong"] for history in self._histories), 0)
        row.at_least("requests", sum(len(history.asks) for history in self._histories), 20 * ROUNDS, "")
        row.tell("slowest answer", max(max(history.latencies_s()) for history in self._histories), "s")


def num_hosts(server: Server) -> int:
    return len(get(server.port, "/health").json()["workers"])


@pytest.mark.row("C1", "a host is killed while it runs work of a gateway; another one lives")
@pytest.mark.timeout(3600)
@pytest.mark.timing(forks=True)
def test_c1_a_killed_host_costs_no_answer(row: Row, bed: Bed):
    rounds, slowest_s = Rounds(), 0.0
    for _ in range(ROUNDS):
        with start_host(bed.nats.url, *STUB, is_stopped=True) as victim:
            wait_for_hosts(bed.front, 2, "stub/a")
            with rounds.load(bed.front) as load:
                for pid in victim.pids():
                    kill(pid)
                killed_s = time.monotonic()
                eventually(lambda: num_hosts(bed.front) == 1, "the gateway notices")
        slowest_s = max([slowest_s, *(ask.ended_s - killed_s for ask in load.history.asks if ask.due_s <= killed_s)])
    rounds.judge(row)
    row.at_most("a dead host's work is answered after", slowest_s, DEAD_S, "s")


@pytest.mark.row("C2", "a gateway is killed; another one lives")
@pytest.mark.timeout(3600)
def test_c2_a_killed_gateway_breaks_only_its_own_connections(row: Row, bed: Bed):
    rounds, num_closed = Rounds(), 0
    for _ in range(ROUNDS):
        with start_gateway(bed.nats.url, is_stopped=True) as victim:
            wait_for_hosts(victim, 1, "stub/a")
            with open_loop(victim, RATE, seed=SEED, probes=False) as doomed, rounds.load(bed.front):
                for pid in victim.pids():
                    kill(pid)
                time.sleep(0.5)
        num_closed += sum(ask.outcome == "closed" for ask in doomed.history.asks)
        left = {ask.outcome.split(":")[0] for ask in doomed.history.failed()}
        assert left <= {"closed", "refused"}, left
    eventually(lambda: not running_items(bed.front), "the host has nothing left of dead gateways")
    rounds.judge(row)
    row.tell("connections that broke", num_closed, "")


def running_items(front: Server) -> int:
    return sum(worker["queue_depth"] for worker in get(front.port, "/health").json()["workers"])


@pytest.mark.row("C3", "NATS is killed and starts again with nothing of what it held")
@pytest.mark.timeout(3600)
def test_c3_a_restart_of_nats_costs_no_answer(row: Row, bed: Bed):
    rounds = Rounds()
    for _ in range(ROUNDS):
        with rounds.load(bed.front):
            bed.nats.kill()
            time.sleep(rounds.rng.random())
            bed.nats.start()
            eventually(lambda: encode(bed.front.port, "stub/a", ["after"]).status == 200, "answers again")
    rounds.judge(row)


@pytest.mark.row("C4", "a host is cut off from NATS without a sign, and comes back; another one lives")
@pytest.mark.timeout(3600)
def test_c4_a_partition_of_a_host_costs_no_answer(row: Row, bed: Bed):
    rounds = Rounds()
    with start_link(bed.nats) as link, start_host(link.url, *STUB, is_stopped=True):
        wait_for_hosts(bed.front, 2, "stub/a")
        for _ in range(ROUNDS):
            with rounds.load(bed.front):
                link.is_cut = True
                eventually(lambda: num_hosts(bed.front) == 1, "the gateway notices")
                link.is_cut = False
                eventually(lambda: num_hosts(bed.front) == 2, "the host is back")
    rounds.judge(row)


@pytest.mark.row("C6", "the NATS server that leads the work stream of three is killed, and comes back")
@pytest.mark.timeout(3600)
def test_c6_a_killed_leader_of_nats_costs_no_answer(row: Row):
    rounds = Rounds()
    replicas = ("--stream-replicas", "3")
    with (
        start_nats_cluster() as cluster,
        start_host(cluster.url, *STUB, *replicas, is_stopped=True),
        start_gateway(cluster.url, *replicas, is_stopped=True) as front,
    ):
        eventually(lambda: encode(front.port, "stub/a", ["first"]).status == 200, "three servers have made the streams")
        for _ in range(ROUNDS):
            leader = cluster.nodes[cluster.leader("SIE_WORK_default")]
            with rounds.load(front):
                leader.kill()
                eventually(lambda: encode(front.port, "stub/a", ["after"]).status == 200, "answers again")
            leader.start()
    rounds.judge(row)


@pytest.mark.row("C5", "the stream is full: requests over its limit are refused with a time to come back")
@pytest.mark.timeout(600)
def test_c5_a_full_stream_refuses_and_recovers(row: Row):
    slow = ("--model", "stub/a=stub:dense=16,latency_ms=100", "--max-step-items", "2", "--watchdog-s", "600")
    limits = ("--stream-max-messages", "4")
    with (
        start_nats() as own,
        start_host(own.url, *slow, *limits, is_stopped=True) as host,
        start_gateway(own.url, *limits, is_stopped=True) as front,
    ):
        wait_for_hosts(front, 1, "stub/a")
        statuses: list[tuple[int, str]] = []

        def ask(number: int) -> None:
            answer = encode(front.port, "stub/a", [f"{number}"])
            statuses.append((answer.status, answer.headers.get("retry-after", "")))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
        with paused(host.worker()):  # however slowly they ask, nothing makes room
            for thread in threads:
                thread.start()
            eventually(lambda: 503 in {status for status, _ in statuses}, "a refusal")
        for thread in threads:
            thread.join(WAIT_S)
        refused = [wait for status, wait in statuses if status == 503]
        row.at_least("refused", len(refused), 1, "")
        row.equals("refused without a time", sum(not wait for wait in refused), 0)
        row.equals("answered or refused", sum(status in (200, 503) for status, _ in statuses), 60)
        row.equals("served afterwards", encode(front.port, "stub/a", ["after"]).status, 200)
