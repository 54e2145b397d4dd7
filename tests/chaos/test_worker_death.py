"""F3, F4, F8: when a worker dies, answers are late but not lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.cluster import MODEL, Leaks, cluster, kill, logged
from tests.chaos.history import History, open_loop, quantile
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import Server, eventually
from tests.process.wire import encode

QUIET_S = pick(1.0, 5.0)
WARM_KILLS = 4
"""After so many, every thread and buffer that a death needs is there; growth counts from then on."""


def kill_one(server: Server, victim: int) -> float:
    """Kill a worker; return when. Its successor serves when this returns."""
    num_lines, killed_s = len(server.output.lines), time.monotonic()
    kill(victim)
    eventually(lambda: logged(server, "loaded: cpu", num_lines), "a successor that serves")
    return killed_s


class Survivors:
    """The processes that no kill of a worker ends, and what they use now."""

    def __init__(self, server: Server) -> None:
        self.pids = [*server.pids("supervisor"), *server.frontends()]
        self._used = [_usage(pid) for pid in self.pids]

    def gained_threads(self) -> int:
        """Return how many threads they have more than then."""
        return sum(_usage(pid)[0] - threads for pid, (threads, _) in zip(self.pids, self._used, strict=True))

    def gained_mib(self) -> float:
        """Return the resident memory that the one that grew most has gained."""
        return max(_usage(pid)[1] - used for pid, (_, used) in zip(self.pids, self._used, strict=True)) / (1 << 20)


def _usage(pid: int) -> tuple[int, int]:
    """Return a process's threads and resident bytes."""
    process = psutil.Process(pid)
    return process.num_threads(), process.memory_info().rss


def added_p99_s(history: History, first_fault_s: float) -> float:
    """Return by how much the 99th percentile is over that of the time before the first fault."""
    before = history.latencies_s(ask for ask in history.asks if ask.due_s < first_fault_s - 0.5)
    after = history.latencies_s(ask for ask in history.asks if ask.due_s >= first_fault_s - 0.5)
    return quantile(after, 0.99) - quantile(before, 0.99)


@pytest.mark.row("F3", "a worker is killed while it runs a batch; another one lives")
@pytest.mark.timeout(1200)
@pytest.mark.timing
def test_f3_kills_of_one_of_two_workers_cost_no_answer(row: Row):
    rng = random.Random(SEED)
    faults_s: list[float] = []
    with cluster(stub="latency_ms=5") as server:
        leaks = Leaks(server)
        with open_loop(server, 100, seed=SEED) as load:
            time.sleep(QUIET_S)
            for number in range(pick(20, 200)):
                if number == WARM_KILLS:
                    survivors = Survivors(server)
                time.sleep(rng.random() * 0.1)
                faults_s.append(kill_one(server, rng.choice(server.pids("worker"))))
        history = load.history
        leaks.check()
        assert survivors.pids == Survivors(server).pids
        # A frontend's pools start a second thread when two requests first meet in them; a leak has one for each kill.
        row.at_most("threads that survivors gained", survivors.gained_threads(), 4.0, "", slack=1.0)
        row.at_most("memory that a survivor gained", survivors.gained_mib(), 8.0, "MiB", slack=1.0)
    row.equals("kills", len(faults_s), pick(20, 200))
    row.at_least("requests", len(history.asks), pick(200, 5000), "")  # the faster the recoveries, the fewer
    row.all_right("failed requests", history)
    row.equals("wrong answers", history.outcomes()["wrong"], 0)
    row.at_most("p99 added", added_p99_s(history, faults_s[0]), 1.0, "s")
    began_s = history.asks[0].due_s
    row.plot(
        "latency of each request; lines are kills",
        [(ask.due_s - began_s, ask.took_s * 1e3) for ask in history.asks],
        [fault_s - began_s for fault_s in faults_s],
        ("s", "ms"),
    )


@pytest.mark.row("F3", "workers are killed whenever, also while both are starting")
@pytest.mark.timeout(600)
def test_f3_kills_at_any_moment_cost_no_answer(row: Row):
    rng = random.Random(SEED)
    kills = pick(6, 100)
    with cluster(stub="latency_ms=5") as server, open_loop(server, 100, seed=SEED) as load:
        for _ in range(kills):
            time.sleep(rng.random() * 1.5)
            eventually(lambda: server.pids("worker"), "somebody to kill")
            for victim in server.pids("worker")[: rng.randint(1, 2)]:
                kill(victim)
    row.equals("rounds", kills, kills)
    row.all_right("failed requests", load.history)
    row.tell("slowest answer", max(load.history.latencies_s()), "s")


@pytest.mark.row("F4", "the only worker is killed")
@pytest.mark.timeout(1200)
@pytest.mark.timing
def test_f4_the_only_worker_is_back_within_two_seconds(row: Row):
    """Nearly all of a recovery is the start of an interpreter and its imports: 0.2 s of a core, if it gets one.

    Where other programs take the cores, the start waits with everybody else. The kernel counts that wait, so it is told
    apart from time of ours.
    """
    num_kills = pick(5, 200)
    faults_s: list[float] = []
    waits_s: list[float] = []
    with cluster(workers=1) as server:
        leaks = Leaks(server)
        with open_loop(server, 100, seed=SEED) as load:
            for _ in range(num_kills):
                time.sleep(0.3)
                faults_s.append(kill_one(server, server.worker()))
                waits_s.append(waited_s(server.worker()))
                assert encode(server.port, MODEL, ["back"]).status == 200  # however busy the machine, it has recovered
        history = load.history
        leaks.check()
    recoveries_s = [recovery_s(history, fault_s) for fault_s in faults_s]
    own_s = [took_s - wait_s for took_s, wait_s in zip(recoveries_s, waits_s, strict=True)]
    slowest = recoveries_s.index(max(recoveries_s))
    row.equals("kills", len(faults_s), num_kills)
    row.all_right("failed requests", history)
    row.at_most("kill to first good answer, less waits for a core", max(own_s), 2.0, "s", slack=2.0)
    row.tell("slowest kill to first good answer", recoveries_s[slowest], "s")
    row.tell("of it, the new worker waited for a core", waits_s[slowest], "s")
    row.tell("median kill to first good answer", quantile(sorted(recoveries_s), 0.5), "s")
    began_s = history.asks[0].due_s
    row.plot(
        "kill to first good answer",
        [(fault_s - began_s, took_s * 1e3) for fault_s, took_s in zip(faults_s, recoveries_s, strict=True)],
        [],
        ("s", "ms"),
    )


def recovery_s(history: History, fault_s: float) -> float:
    """Return the seconds from a kill to the first right answer to a request that was due after it."""
    return min(ask.ended_s for ask in history.asks if ask.outcome == "right" and ask.due_s >= fault_s) - fault_s


def waited_s(pid: int) -> float:
    """Return how long the main thread of a process could have run and had no core. Source: sched-stats of the kernel."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
