"""A host's consumers on a real NATS, which deletes those that nobody uses for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import nats.js.errors
import pytest
from nats.aio.msg import Msg

from sie.cluster.connection import Connection
from sie.cluster.host import consumer, work_pull
from sie.cluster.host.item_run import Answer
from sie.cluster.host.pull_metrics import PullMetrics
from sie.cluster.host.work_pull import WorkPull
from sie.cluster.payloads import VERSION, Work, Works, decode, encode, results_decoder
from sie.cluster.request_forms import score_item
from sie.cluster.subjects import Lane, answer_subject, consumer_name, work_stream, work_subject
from sie.config.cluster_settings import Cluster
from sie.config.settings import Settings
from sie.shm.pages import CounterPage
from sie.values.inference import ScoreRequest
from tests.process.harness import WAIT_S
from tests.process.nats_harness import Nats, start_nats

LANE = Lane("default", "any", "any")
ANSWER = answer_subject("gw", LANE.pool, "result")
BODY = memoryview(score_item(ScoreRequest(model="m", query="q", documents=["a"])))
LOADED = SimpleNamespace(state="loaded", workers=(0,), card=SimpleNamespace(kind="encoder"))


@pytest.fixture(scope="module")
def server() -> Iterator[Nats]:
    with start_nats() as running:
        yield running


class Host:
    """A puller on a real connection, whose model a test loads and unloads."""

    def __init__(self, url: str) -> None:
        settings = Settings(cluster=Cluster(nats=url, max_pulled=4))
        worker = SimpleNamespace(slot=0, state="ready", device="cpu")
        self.models = SimpleNamespace(entries={"m": LOADED}, workers=[worker])
        process = SimpleNamespace(
            settings=settings, models=self.models, check_accepting=lambda: None,
            engine=SimpleNamespace(queued_tokens=0, queued_on=lambda _slots: 0),
        )  # fmt: skip
        self.connection = Connection(settings.cluster, "host")
        metrics = PullMetrics(CounterPage.create(1 << 14), {"m"})
        self.pull = WorkPull(process, self.connection, LANE, "h1", metrics)  # type: ignore[arg-type]
        self.answered: set[str] = set()

    async def open(self) -> None:
        await self.connection.open()
        await self.connection.join_pool(LANE.pool)
        await self.connection.subscribe(ANSWER, self._on_answer)

    async def _on_answer(self, message: Msg) -> None:
        self.answered.update(result.id for result in decode(message.data, results_decoder).items)

    async def serve(self, name: str) -> None:
        """Enqueue an item, and tick until it is answered."""
        deadline_ns = self.connection.clock.to_server(1 << 62)
        work = Work(VERSION, name, ANSWER, deadline_ns, "score", "m", BODY)
        await self.connection.enqueue(LANE.pool, work_subject(LANE, "m"), encode(Works(VERSION, [work])), name)
        while name not in self.answered:
            await self.pull.tick()
            await asyncio.sleep(0.02)

    async def has_consumer(self) -> bool:
        try:
            await self.connection._js.consumer_info(work_stream(LANE.pool), consumer_name(LANE, "m"))
        except nats.js.errors.NotFoundError:
            return False
        return True

    async def unload(self) -> None:
        """Unload the model, until the server has deleted its consumer."""
        self.models.entries = {}
        while await self.has_consumer():
            await self.pull.tick()
            await asyncio.sleep(0.1)

    async def lose_consumer(self) -> None:
        with contextlib.suppress(nats.js.errors.NotFoundError):  # nobody used it for a while: this process stood still
            await self.connection._js.delete_consumer(work_stream(LANE.pool), consumer_name(LANE, "m"))


@pytest.mark.parametrize("lose", [Host.unload, Host.lose_consumer], ids=["unloaded", "deleted"])
def test_a_model_whose_consumer_the_server_deleted_gets_work_again(server: Nats, monkeypatch, lose):
    async def answer(*_: object) -> Answer:
        return Answer(memoryview(b"reply"), 3, 0, 1, 2, {})

    monkeypatch.setattr(work_pull, "run_item", answer)
    monkeypatch.setattr(consumer, "_IDLE_S", 1.0)

    async def test() -> None:
        host = Host(server.url)
        await host.open()
        try:
            async with asyncio.timeout(WAIT_S):
                await host.serve(f"{lose.__name__}-before")
                await lose(host)
                host.models.entries = {"m": LOADED}
                await host.serve(f"{lose.__name__}-after")
        finally:
            await host.connection.close()

    asyncio.run(test())
