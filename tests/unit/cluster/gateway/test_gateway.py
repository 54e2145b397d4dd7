"""What a gateway does about heartbeats: for items that wait, for profiles of a model, and for answers that nobody began."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.cluster.gateway import gateway as module
from sie.cluster.gateway import remote_run
from sie.cluster.gateway.fair_queue import EVERYBODY
from sie.cluster.gateway.gateway import Gateway
from sie.cluster.gateway.host_directory import STALE_S
from sie.cluster.gateway.work_items import Item, RemoteReply
from sie.cluster.payloads import VERSION, Beat, Cards, ModelBeat, Taken, encode
from sie.cluster.request_forms import Piece
from sie.cluster.subjects import answer_subject, host_subject
from sie.config.settings import Settings
from sie.ipc.messages import ModelEntry
from sie.shm.pages import CounterPage
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed, SieError, Unavailable, to_wire
from sie.values.generate import GenerateRequest, GenerateRule
from tests.unit.cluster.fakes import FakeConnection

MODELS = ("org/m", "org/m:short")


class Bench:
    """A gateway on a fake connection, with two hosts of different machine profiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection = FakeConnection()
        monkeypatch.setattr(module, "Connection", lambda *_: self.connection)
        models = SimpleNamespace(entries={}, find=lambda _model: None, update=lambda _models: None)
        process = SimpleNamespace(
            settings=Settings(), models=models, pages=[CounterPage.create(1 << 16)],
            request_load_once=lambda model, ask: ask(model), generation_metrics=None,
        )  # fmt: skip
        self.gateway = Gateway(process)  # type: ignore[arg-type]

    def beat(self, *, is_served: bool) -> None:
        beat = ModelBeat("loaded" if is_served else "available", is_served=is_served)
        for host, profile in (("h1", "l4"), ("h2", "a100")):
            self.gateway._directory.hear(
                Beat(VERSION, host, host, "default", profile, "any", "k", {"org/m": beat}), time.monotonic()
            )
            card = ModelCard(id="org/m", kind="stub", profiles={"default": {}, "short": {}})
            self.gateway._directory.learn(host, Cards(VERSION, "k", [ModelEntry(card=card, state="available")]))

    def submit(self, model: str) -> Item:
        lane, placement = self.gateway.places.choose(model)
        pending = self.gateway._in_flight.submit(
            lane, "encode", model, [Piece(b"x")], deadline_ns=time.monotonic_ns() + 60_000_000_000,
            join=lambda _results, submitted_ns: RemoteReply(memoryview(b""), 0, submitted_ns), placement=placement,
        )  # fmt: skip
        return pending.items[0]

    async def follow(self) -> None:
        """Run ten ticks of the gateway, past the time for which it keeps a choice of hosts."""
        for _ in range(10):
            self.gateway.places._known_until_s = 0.0
            self.gateway._follow(time.monotonic())
            await turns()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def ask(bench: Bench, model: str) -> None:
    """Ask for a model as a request does that finds it in some state."""
    entry = ModelEntry(card=ModelCard(id=model, kind="stub"), state="available")
    with contextlib.suppress(SieError):
        bench.gateway.places.check_serving(entry)


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(60):
            bench = Bench(monkeypatch)
            bench.gateway._hears_from_s = 0.0
            bench.beat(is_served=True)
            bench.gateway.places.enter({}, EVERYBODY)
            await test(bench)

    asyncio.run(body())


def test_silent_hosts_are_told_by_name_and_those_that_leave_or_return_as_such(monkeypatch, caplog):
    async def test(bench: Bench) -> None:
        directory = bench.gateway._directory
        leaving = msgspec.structs.replace(directory._hosts["h2"].beat, is_draining=True)
        directory.hear(leaving, time.monotonic())
        for host in directory._hosts.values():
            host.seen_s -= STALE_S
        await bench.follow()
        directory.hear(directory._hosts["h1"].beat, time.monotonic())
        await bench.follow()

    caplog.set_level("INFO")
    run(monkeypatch, test)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("hosts")]
    assert said == ["hosts have left: h2 (h2)", "hosts fell silent: h1 (h1)", "hosts are heard again: h1 (h1)"]


@pytest.mark.parametrize("model", MODELS)
def test_an_item_stays_in_a_lane_that_serves_its_model(monkeypatch, model):
    async def test(bench: Bench) -> None:
        item = bench.submit(model)
        lane = item.lane
        await bench.follow()
        assert item.parcel is not None
        assert (item.lane, item.parcel.name) == (lane, f"{bench.gateway.name}-1")

    run(monkeypatch, test)


@pytest.mark.parametrize("model", MODELS)
def test_hosts_that_serve_a_model_are_not_asked_to_load_it(monkeypatch, model):
    async def test(bench: Bench) -> None:
        bench.beat(is_served=False)
        ask(bench, model)
        await turns()
        bench.beat(is_served=True)
        ask(bench, model)
        await turns()
        loads = [subject for subject, _ in bench.connection.published if subject.endswith(".load")]
        assert len(loads) == 1, "only while none served it"

    run(monkeypatch, test)


@pytest.mark.parametrize(
    ("first", "second", "asked"),
    [
        ("available", "failed", "h1"),
        ("failed", "available", "h2"),
        ("failed", "failed", "h1"),
        ("available", "loading", ""),
    ],
)
def test_a_host_where_a_load_failed_is_asked_last_and_none_while_another_loads(monkeypatch, first, second, asked):
    async def test(bench: Bench) -> None:
        for host, profile, state in (("h1", "l4", first), ("h2", "a100", second)):
            models = {"org/m": ModelBeat(state, is_served=False)}
            beat = Beat(VERSION, host, host, "default", profile, "any", "k", models)
            bench.gateway._directory.hear(beat, time.monotonic())
        ask(bench, "org/m:short")
        await turns()
        loads = [subject.split(".")[4] for subject, _ in bench.connection.published if subject.endswith(".load")]
        assert loads == ([asked] if asked else [])

    run(monkeypatch, test)


def say(bench: Bench, host: str, profile: str, beat: ModelBeat) -> None:
    """Have a host beat with the state of its model."""
    one = Beat(VERSION, host, host, "default", profile, "any", "k", {"org/m": beat})
    bench.gateway._directory.hear(one, time.monotonic())


@pytest.mark.parametrize("find", ["choose", "hosts"])
def test_a_model_that_is_loaded_elsewhere_is_loaded_where_a_client_wants_it(monkeypatch, find):
    async def test(bench: Bench) -> None:
        say(bench, "h2", "a100", ModelBeat("available", is_served=False))
        bench.gateway.places.enter({"x-sie-machine-profile": "a100"}, EVERYBODY)
        with pytest.raises(Unavailable, match="is loading"):
            getattr(bench.gateway.places, find)("org/m")
        await turns()
        loads = [subject.split(".")[4] for subject, _ in bench.connection.published if subject.endswith(".load")]
        assert loads == ["h2"]
        say(bench, "h2", "a100", ModelBeat("failed", is_served=False, error=to_wire(ModelLoadFailed("no memory"))))
        with pytest.raises(ModelLoadFailed, match="no memory"):
            getattr(bench.gateway.places, find)("org/m")

    run(monkeypatch, test)


@pytest.mark.parametrize("kind", ["stub", "generator"])
def test_a_model_is_served_where_a_client_wants_it_or_is_said_to_be_loading(monkeypatch, kind):
    async def test(bench: Bench) -> None:
        bench.gateway.places.enter({"x-sie-machine-profile": "a100"}, EVERYBODY)
        entry = ModelEntry(card=ModelCard(id="org/m", kind=kind), state="loaded", workers=(0,))
        for beat, is_served in (
            (ModelBeat("loaded", is_served=True), True),
            (ModelBeat("available", is_served=False), False),
            (ModelBeat("loaded", is_served=False, is_coming_back=True), True),
        ):
            say(bench, "h2", "a100", beat)
            bench.gateway.places._known_until_s = 0.0
            with contextlib.nullcontext() if is_served else pytest.raises(Unavailable, match="retry in 5 s"):
                bench.gateway.places.check_serving(entry)

    run(monkeypatch, test)


def test_a_cold_model_is_still_loading_while_nats_is_away(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.beat(is_served=False)
        bench.connection.is_connected = False
        for host in bench.gateway._directory._hosts.values():
            host.seen_s -= STALE_S
        with pytest.raises(Unavailable, match="is loading"):
            bench.gateway.places.choose("org/m")

    run(monkeypatch, test)


def test_items_end_where_their_model_fails_on_all_hosts(monkeypatch):
    async def test(bench: Bench) -> None:
        item = bench.submit("org/m")
        failed = ModelBeat("failed", is_served=False, error=to_wire(ModelLoadFailed("device lost")))
        say(bench, "h1", "l4", failed)
        say(bench, "h2", "a100", ModelBeat("available", is_served=False))
        await bench.follow()
        assert not item.pending.future.done(), "another host may load it"
        say(bench, "h2", "a100", failed)
        await bench.follow()
        with pytest.raises(ModelLoadFailed, match="device lost"):
            await item.pending.reply()

    run(monkeypatch, test)


def test_hosts_that_leave_one_after_another_do_not_convict_an_item(monkeypatch):
    async def test(bench: Bench) -> None:
        item, directory = bench.submit("org/m"), bench.gateway._directory
        for host in ("h3", "h4", "h5"):
            leaving = msgspec.structs.replace(directory._hosts["h1"].beat, host=host, is_draining=True)
            directory.hear(leaving, time.monotonic() - STALE_S)
            taken = Taken(VERSION, host, [item.work.id])
            bench.gateway._in_flight.on_taken(taken, answer_subject(bench.gateway.name, "default", "taken"))
            await bench.follow()
        assert not item.pending.future.done()

    run(monkeypatch, test)


def test_a_request_to_generate_waits_while_nats_is_away(monkeypatch):
    async def test(bench: Bench) -> None:
        for host in bench.gateway._directory._hosts.values():
            host.seen_s -= STALE_S
        with pytest.raises(Unavailable):
            bench.gateway.places.hosts("org/m")
        bench.connection.is_connected = False
        assert {host.beat.host for host in bench.gateway.places.hosts("org/m")} == {"h1", "h2"}
        bench.connection.is_connected = True
        await bench.gateway._on_connected()
        assert len(bench.gateway.places.hosts("org/m")) == 2, "hosts connect again, too"

    run(monkeypatch, test)


def test_a_heartbeat_has_a_lost_request_to_generate_sent_again(monkeypatch):
    monkeypatch.setattr(remote_run, "_PATIENCE_NS", 0)
    card = ModelCard(id="org/m", kind="generator", generate=GenerateRule(context_length=100))

    async def test(bench: Bench) -> None:
        request, deadline_ns = GenerateRequest(model="org/m", texts=["a"]), time.monotonic_ns() + 60_000_000_000
        entry = ModelEntry(card=card, state="loaded")
        starting = asyncio.create_task(bench.gateway.generator.start(entry, request, deadline_ns))
        await turns()
        ((subject, data),) = [sent for sent in bench.connection.published if sent[0].endswith(".text")]
        host = subject.split(".")[4]
        profile = {"h1": "l4", "h2": "a100"}[host]
        beat = Beat(VERSION, host, host, "default", profile, "any", "k", {"org/m": ModelBeat("loaded", is_served=True)})
        message = SimpleNamespace(data=encode(beat), subject=host_subject("default", host, "beat"))
        await bench.gateway._on_beat(message)  # type: ignore[arg-type]
        await turns()
        assert [sent for sent in bench.connection.published if sent[0].endswith(".text")] == [(subject, data)] * 2
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting

    run(monkeypatch, test)
