"""C1 to C5: what dies between a gateway and its hosts costs no answer: a host, a gateway, NATS, a link, the room."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator

import pytest

from tests.chaos.cluster import kill
from tests.chaos.history import History, open_loop
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import Server, eventually
from tests.process.nats_harness import Nats, start_gateway, start_host, start_link, start_nats, wait_for_hosts
from tests.process.wire import encode, get

STUB = ("--model", "stub/a=stub:dense=16,latency_ms=5", "--test")
ROUNDS = int(os.environ.get("KILL_ROUNDS", pick("1", "50")))
RATE = 50
DEAD_S = 3.0
"""A dead host's work is elsewhere within this time."""


@pytest.fixture(scope="module")
def nats() -> Iterator[Nats]:
    with start_nats() as running:
        yield running


@contextlib.contextmanager
def hosts(*urls: str) -> Iterator[list[Server]]:
    """Yield a host for each address of NATS; a test may kill them."""
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(start_host(url, *STUB, is_stopped=True)) for url in urls]
        yield servers


@contextlib.contextmanager
def gateway(nats: Nats, num_hosts: int) -> Iterator[Server]:
    with start_gateway(nats.url, is_stopped=True) as running:
        wait_for_hosts(running, num_hosts, "stub/a")
        yield running


def judge(row: Row, history: History, rounds: int) -> None:
    """Record what a load saw: every request answered, rightly, and once."""
    row.equals("rounds", rounds, ROUNDS)
    row.equals("lost answers", len(history.failed()), 0)
    row.equals("wrong answers", history.outcomes()["wrong"], 0)
    row.at_least("requests", len(history.asks), RATE, "")
    row.tell("slowest answer", max(history.latencies_s()), "s")


def num_hosts(server: Server) -> int:
    return len(get(server.port, "/health").json()["workers"])


@pytest.mark.row("C1", "a host is killed while it runs work of a gateway; another one lives")
@pytest.mark.timeout(3600)
def test_c1_a_killed_host_costs_no_answer(row: Row, nats: Nats):
    rng, slowest_s, rounds = random.Random(SEED), 0.0, 0
    with hosts(nats.url) as _, gateway(nats, 1) as front:
        for _ in range(ROUNDS):
            with start_host(nats.url, *STUB, is_stopped=True) as victim:
                wait_for_hosts(front, 2, "stub/a")
                with open_loop(front, RATE, seed=rng.randrange(1 << 30), probes=False) as load:
                    time.sleep(0.3 + rng.random() * 0.5)
                    for pid in victim.pids():
                        kill(pid)
                    killed_s = time.monotonic()
                    eventually(lambda: num_hosts(front) == 1, "the gateway notices")
            rounds += 1
            after = [ask.ended_s - killed_s for ask in load.history.asks if ask.due_s <= killed_s]
            slowest_s = max([slowest_s, *after])
            assert not load.history.failed(), load.history.outcomes()
    judge(row, load.history, rounds)
    row.at_most("a dead host's work is answered after", slowest_s, DEAD_S, "s")


@pytest.mark.row("C2", "a gateway is killed; another one lives")
@pytest.mark.timeout(3600)
def test_c2_a_killed_gateway_breaks_only_its_own_connections(row: Row, nats: Nats):
    rng, rounds, num_closed = random.Random(SEED), 0, 0
    with hosts(nats.url) as (host,), gateway(nats, 1) as front:
        for _ in range(ROUNDS):
            with (
                gateway(nats, 1) as victim,
                open_loop(front, RATE, seed=rng.randrange(1 << 30), probes=False) as load,
                open_loop(victim, RATE, seed=rng.randrange(1 << 30), probes=False) as doomed,
            ):
                time.sleep(0.3 + rng.random() * 0.5)
                for pid in victim.pids():
                    kill(pid)
                time.sleep(0.5)
            rounds += 1
            num_closed += sum(ask.outcome == "closed" for ask in doomed.history.asks)
            assert not load.history.failed(), load.history.outcomes()
            left = {ask.outcome.split(":")[0] for ask in doomed.history.failed()}
            assert left <= {"closed", "refused"}, left
        eventually(lambda: not running_items(front), "the host has nothing left of dead gateways")
        assert host.process.poll() is None
    judge(row, load.history, rounds)
    row.tell("connections that broke", num_closed, "")


def running_items(front: Server) -> int:
    return sum(worker["queue_depth"] for worker in get(front.port, "/health").json()["workers"])


@pytest.mark.row("C3", "NATS is killed and starts again with nothing of what it held")
@pytest.mark.timeout(3600)
def test_c3_a_restart_of_nats_costs_no_answer(row: Row):
    rng, rounds = random.Random(SEED), 0
    with start_nats() as own, hosts(own.url) as _, gateway(own, 1) as front:
        for _ in range(ROUNDS):
            with open_loop(front, RATE, seed=rng.randrange(1 << 30), probes=False) as load:
                time.sleep(0.3 + rng.random() * 0.5)
                own.kill()
                time.sleep(rng.random())
                own.start()
                eventually(lambda: encode(front.port, "stub/a", ["after"]).status == 200, "answers again")
            rounds += 1
            assert not load.history.failed(), load.history.outcomes()
    judge(row, load.history, rounds)


@pytest.mark.row("C4", "a host is cut off from NATS without a sign, and comes back; another one lives")
@pytest.mark.timeout(3600)
def test_c4_a_partition_of_a_host_costs_no_answer(row: Row, nats: Nats):
    rng, rounds = random.Random(SEED), 0
    with start_link(nats) as link, hosts(nats.url, link.url) as _, gateway(nats, 2) as front:
        for _ in range(ROUNDS):
            with open_loop(front, RATE, seed=rng.randrange(1 << 30), probes=False) as load:
                time.sleep(0.3 + rng.random() * 0.5)
                link.is_cut = True
                eventually(lambda: num_hosts(front) == 1, "the gateway notices")
                link.is_cut = False
                eventually(lambda: num_hosts(front) == 2, "the host is back")
            rounds += 1
            assert not load.history.failed(), load.history.outcomes()
    judge(row, load.history, rounds)


@pytest.mark.row("C5", "the stream is full: requests over its limit are refused with a time to come back")
@pytest.mark.timeout(600)
def test_c5_a_full_stream_refuses_and_recovers(row: Row):
    slow = ("--model", "stub/a=stub:dense=16,latency_ms=100", "--max-step-items", "2")
    limits = ("--stream-max-messages", "20", "--max-pulled", "4")
    with (
        start_nats() as own,
        start_host(own.url, *slow, *limits, is_stopped=True),
        start_gateway(own.url, *limits, is_stopped=True) as front,
    ):
        wait_for_hosts(front, 1, "stub/a")
        statuses: list[tuple[int, str]] = []

        def ask(number: int) -> None:
            answer = encode(front.port, "stub/a", [f"{number}"])
            statuses.append((answer.status, answer.headers.get("retry-after", "")))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        refused = [wait for status, wait in statuses if status == 503]
        row.at_least("refused", len(refused), 1, "")
        row.equals("refused without a time", sum(not wait for wait in refused), 0)
        row.equals("answered or refused", sum(status in (200, 503) for status, _ in statuses), 60)
        row.equals("served afterwards", encode(front.port, "stub/a", ["after"]).status, 200)
