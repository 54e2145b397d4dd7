"""C7 to C9: a cluster with twice the work that its hosts can do: goodput, refusals, slow hosts, and turns of API keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.chaos.history import History, open_loop
from tests.chaos.ledger import SEED, Row, pick
from tests.chaos.test_overload import goodput
from tests.process.harness import Server, eventually
from tests.process.keys import bearer, entry, write_keys
from tests.process.nats_harness import start_gateway, start_host, start_nats, wait_for_hosts
from tests.process.wire import Client, total

TOKENS = 10
FAST_US, SLOW_US = 1000, 2000
"""What a token takes on two hosts: a request of ten takes 10 ms on one and 20 ms on the other."""
PEAK_RATE = 1e6 / TOKENS / FAST_US + 1e6 / TOKENS / SLOW_US
TIMEOUT_S = 4.0
LIGHT, HEAVY, FEW = (f"sie_test-{name}-0123456789abcdef" for name in ("light", "heavy", "few"))
RATE = 40


class Bed(NamedTuple):
    """Two hosts, one at half the speed of the other, and three gateways: one without keys, two with the same."""

    fast: Server
    slow: Server
    fronts: tuple[Server, Server, Server]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    keys = write_keys(
        tmp_path_factory.mktemp("keys") / "keys.toml",
        entry("light", LIGHT, ["infer"]),
        entry("heavy", HEAVY, ["infer"], weight=3),
        entry("few", FEW, ["infer"], requests_per_minute=RATE),
    )

    def stub(per_token_us: int) -> tuple[str, ...]:
        return "--model", f"stub/a=stub:dense=16,per_token_us={per_token_us}", "--max-step-tokens", "50", "--test"

    limits = ("--request-timeout-s", str(TIMEOUT_S))
    with (
        start_nats() as nats,
        start_host(nats.url, *stub(FAST_US), is_stopped=True) as fast,
        start_host(nats.url, *stub(SLOW_US), is_stopped=True) as slow,
        start_gateway(nats.url, *limits, is_stopped=True) as open_front,
        start_gateway(nats.url, *limits, "--api-keys", str(keys), is_stopped=True) as first,
        start_gateway(nats.url, *limits, "--api-keys", str(keys), is_stopped=True) as second,
    ):
        wait_for_hosts(open_front, 2, "stub/a")
        for front in (first, second):
            eventually(lambda front=front: ask(front, LIGHT, "x") == 200, "the gateway serves")
        yield Bed(fast, slow, (open_front, first, second))


def ask(front: Server, key: str, text: str) -> int:
    with Client(front.port) as client:
        return client.encode("stub/a", [text], bearer(key)).status


def items(host: Server) -> float:
    return total(host.port, "sie_worker_items_total", outcome="answered")


@pytest.mark.row("C7", "twice the work that two hosts can do, one of them at half the speed of the other")
@pytest.mark.timeout(300)
@pytest.mark.timing(alone=True, forks=True)
def test_c7_twice_the_capacity_costs_no_goodput_and_a_slow_host_gets_less(row: Row, bed: Bed):
    histories: dict[float, History] = {}
    for factor in (0.95, 2.0):
        before = items(bed.fast), items(bed.slow)
        with open_loop(
            bed.fronts[0], factor * PEAK_RATE, seed=SEED, max_items=1, num_chars=4 * TOKENS, timeout_s=TIMEOUT_S,
            probes=False,
        ) as load:  # fmt: skip
            time.sleep(pick(6.0, 20.0))
        histories[factor] = load.history
    fast, slow = items(bed.fast) - before[0], items(bed.slow) - before[1]
    failed = histories[2.0].failed()
    row.tell("peak goodput", goodput(histories[0.95]), "/s")
    row.tell("goodput at twice the capacity", goodput(histories[2.0]), "/s")
    row.at_least("goodput at twice the capacity", goodput(histories[2.0]) / goodput(histories[0.95]), 0.95, "of the peak", slack=1.5)  # fmt: skip
    refused = [item for item in failed if item.outcome == "503 QUEUE_FULL"]
    assert {item.outcome for item in failed} <= {"503 QUEUE_FULL", "504 DEADLINE_EXCEEDED"}, histories[2.0].outcomes()
    row.tell("outcomes that were no refusal", len(failed) - len(refused), "")
    row.equals("refusals without a time", sum(not item.retry_after_s for item in refused), 0)
    row.at_least("refused", len(refused), 1, "")
    row.at_least("share of the slow host", slow / fast, 0.4, "of the fast one's", slack=1.3)
    row.at_most("share of the slow host", slow / fast, 0.6, "of the fast one's", slack=1.3)


class Flood:
    """Clients that ask a gateway with one key without pause, for as long as the answers take."""

    def __init__(self, front: Server, key: str, num_clients: int) -> None:
        self.num_answers = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(front, key)) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, front: Server, key: str) -> None:
        with Client(front.port) as client:
            while not self._stop.is_set():
                if client.encode("stub/a", ["x" * 4 * TOKENS], bearer(key)).status == 200:
                    self.num_answers += 1
                else:
                    self._stop.wait(0.1)

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30.0)


@pytest.mark.row("C8", "two API keys of weights 1 and 3 flood a gateway each, and the same gateway")
@pytest.mark.timeout(400)
@pytest.mark.timing(alone=True, forks=True)
@pytest.mark.parametrize("is_shared", [True, False], ids=["one gateway", "two gateways"])
def test_c8_keys_share_the_hosts_by_their_weights(row: Row, bed: Bed, is_shared: bool):
    _, first, second = bed.fronts
    floods = [Flood(first, LIGHT, 40), Flood(first if is_shared else second, HEAVY, 40)]
    try:
        time.sleep(pick(2.0, 4.0))  # heartbeats tell the gateways of each other's keys
        before = [flood.num_answers for flood in floods]
        time.sleep(pick(4.0, 10.0))
        light, heavy = (flood.num_answers - old for flood, old in zip(floods, before, strict=True))
    finally:
        for flood in floods:
            flood.stop()
        for flood in floods:
            flood.join()
    row.tell("answers", light + heavy, "")
    row.at_least("weight 3 to weight 1", heavy / light, 2.4, "times", slack=1.3)
    row.at_most("weight 3 to weight 1", heavy / light, 3.6, "times", slack=1.3)


@pytest.mark.row("C9", "clients of one API key ask two gateways at once for more than its limits")
@pytest.mark.timeout(400)
@pytest.mark.timing(forks=True)
def test_c9_two_gateways_admit_what_one_would(row: Row, bed: Bed):
    statuses: list[int] = []
    began_s = time.monotonic()
    threads = [
        threading.Thread(target=lambda front=front: statuses.extend(ask(front, FEW, "x") for _ in range(RATE)))
        for front in bed.fronts[1:] * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    allowed = RATE + RATE / 60 * (time.monotonic() - began_s)
    row.equals("answered or refused", sum(status in (200, 429) for status in statuses), 4 * RATE)
    row.at_most("admitted", statuses.count(200) / allowed, 1.1, "of the rate")
    row.at_least("admitted", statuses.count(200) / allowed, 0.8, "of the rate", slack=1.3)
