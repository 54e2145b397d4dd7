"""One frontend process without HTTP: what its handlers ask, and what the supervisor tells it."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.config.sections import Memory
from sie.config.settings import Settings
from sie.frontend import supervisor_link
from sie.frontend.http.exchange import Exchange
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.kserve import KServe
from sie.ipc import messages as control_messages
from sie.ipc.channel import Channel
from sie.ipc.messages import Launch, ModelEntry, Models
from sie.shm.attach import Attachment
from sie.shm.large import LargeBudget
from sie.shm.pages import CounterPage
from sie.shm.space import OutboundSpace
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, SieError
from tests.unit.engine_rig import MIB

LAUNCH = Launch(control_path="", supervisor_pid=1, role="frontend", slot=0, incarnation=1)


class Desk:
    """A frontend process and the supervisor's end of its channel."""

    def __init__(self, **sections: dict[str, Any]) -> None:
        memory = Memory(request_segment_bytes=MIB, reply_segment_bytes=MIB, large_extent_bytes=MIB, ring_capacity=8)
        settings = Settings(memory=memory)
        for name, changes in sections.items():
            section = msgspec.structs.replace(getattr(settings, name), **changes)
            settings = msgspec.structs.replace(settings, **{name: section})
        self.supervisor, self.channel = (
            Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        pages = [CounterPage.create(1 << 16)]
        self.process = FrontendProcess(LAUNCH, settings, self.channel, pages, asyncio.get_running_loop())

    def tell(self, message: Any, fds: list[int] | None = None) -> None:
        """Let the process hear a message, as its event loop would."""
        self.supervisor.send(message, fds)
        self.process._supervisor.read()

    def heard(self) -> list[Any]:
        messages = []
        while (received := self.supervisor.try_receive()) is not None:
            messages.append(received[0])
        return messages


def at_desk(**sections: dict[str, Any]) -> Callable[[Callable[[Desk], Any]], Callable[[], None]]:
    def decorate(test: Callable[[Desk], Any]) -> Callable[[], None]:
        async def main() -> None:
            desk = Desk(**sections)
            try:
                await test(desk)
            finally:
                desk.process.close()
                desk.supervisor.close()

        def run() -> None:
            asyncio.run(main())

        return run

    return decorate


def models(*names: str, ready: bool = True, outputs: tuple[str, ...] = ("dense",)) -> Models:
    cards = [ModelCard(id=name, kind="encoder", outputs=outputs, dims={"dense": 4}) for name in names]
    return Models(tuple(ModelEntry(card=card, state="loaded", workers=(0,)) for card in cards), ready=ready)


def count_open() -> int:
    """Count this process's descriptors, after those that earlier tests left behind have closed."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # iterdir holds a descriptor of its own meanwhile


@at_desk(limits={"request_timeout_s": 2.0})
async def test_timeout_header_may_only_lower_the_setting(desk: Desk) -> None:
    timeout_ns = desk.process.timeout_ns
    assert timeout_ns(None) == 2_000_000_000
    assert timeout_ns("1") == 1_000_000
    assert timeout_ns("1999") == 1_999_000_000
    assert timeout_ns("86400000") == 2_000_000_000


@pytest.mark.parametrize(
    "header", ["", "0", "-5", "1.5", "1e3", " 1", "soon", "\u0661", "86400001", "9" * 5000, "000000000001" + "0" * 5000]
)
def test_timeout_that_is_no_time_is_refused(header: str) -> None:
    @at_desk()
    async def run(desk: Desk) -> None:
        with pytest.raises(BadRequest, match="X-SIE-Timeout-Ms"):
            desk.process.timeout_ns(header)

    run()


@at_desk(server={"machine_profile": "L4"})
async def test_request_for_another_machine_is_refused_with_both_names(desk: Desk) -> None:
    desk.process.check_machine_profile(None)
    desk.process.check_machine_profile("l4")
    with pytest.raises(BadRequest) as caught:
        desk.process.check_machine_profile("H100")
    assert caught.value.extras == {"requested_profile": "H100", "worker_identity": "L4"}


@at_desk()
async def test_request_for_a_machine_is_refused_by_one_without_a_profile(desk: Desk) -> None:
    with pytest.raises(BadRequest, match="has no machine profile, and the request wants 'H100'"):
        desk.process.check_machine_profile("H100")


@at_desk()
async def test_default_is_the_only_able_model(desk: Desk) -> None:
    desk.tell(models("only"))
    assert desk.process.models.resolve_default("default", "dense") == "only"
    assert desk.process.models.resolve_default("named", "dense") == "named"
    desk.tell(models("a", "b"))
    with pytest.raises(SieError, match="a, b") as caught:
        desk.process.models.resolve_default("default", "dense")
    assert caught.value.http_status == 404
    desk.tell(models("default", "b"))
    assert desk.process.models.resolve_default("default", "dense") == "default", "a model may have that name"


@at_desk(models={"default_model": "b"})
async def test_default_of_the_settings_comes_first(desk: Desk) -> None:
    desk.tell(models("a", "b"))
    assert desk.process.models.resolve_default("default", "dense") == "b"


# --- the supervisor ------------------------------------------------------------------------------------------------------


@at_desk()
async def test_ping_is_answered_with_its_number(desk: Desk) -> None:
    desk.tell(control_messages.Ping(17))
    assert desk.heard() == [control_messages.Pong(17)]


@at_desk()
async def test_process_is_ready_as_the_supervisor_says_until_it_drains(desk: Desk) -> None:
    assert not desk.process.is_ready
    desk.tell(models("m", ready=True))
    assert desk.process.is_ready
    desk.tell(models("m", ready=False))
    assert not desk.process.is_ready
    desk.tell(models("m", ready=True))
    desk.tell(control_messages.Drain())
    assert not desk.process.is_ready


@at_desk()
async def test_kserve_says_why_the_server_is_not_ready(desk: Desk) -> None:
    routes, exchange = KServe(desk.process), Exchange(SimpleNamespace(headers={}), None, 0)
    desk.tell(Models((), ready=False, reason="not loaded: m"))
    assert (await routes.ready(exchange)).body == b'{"error":"Server not ready: not loaded: m"}'
    desk.tell(control_messages.Drain())
    assert (await routes.ready(exchange)).body == b'{"error":"Server not ready: stopping"}'


@at_desk()
async def test_same_load_is_asked_for_at_most_once_a_second(desk: Desk) -> None:
    now_s = 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor_link, "time", SimpleNamespace(monotonic=lambda: now_s))
        for model in ("m", "m", "n", "m"):
            desk.process.request_load(model)
        assert desk.heard() == [control_messages.LoadModel("m"), control_messages.LoadModel("n")]
        now_s += 1.5
        desk.process.request_load("m")
        assert desk.heard() == [control_messages.LoadModel("m")]


@at_desk()
async def test_attachment_is_used_when_the_worker_has_answered(desk: Desk) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    desk.tell(control_messages.Attach(0, 5), [ends[0].fileno(), pidfd])
    ends[0].close()
    assert desk.process.engine._links == {}
    space = OutboundSpace.create("reply", MIB, LargeBudget(0))
    worker = Attachment.connect(ends[1], pidfd, 5, space, 8, timeout_s=60)
    for _ in range(4):
        await asyncio.sleep(0)
    assert list(desk.process.engine._links) == [0]
    desk.tell(control_messages.WorkerDown(0, 5, ()))
    assert desk.process.engine._links == {}
    worker.close()
    space.close()


@at_desk()
async def test_worker_that_dies_before_it_answered_leaves_nothing_behind(desk: Desk) -> None:
    before = count_open()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    desk.tell(control_messages.Attach(0, 5), [ends[0].fileno(), pidfd])
    os.close(pidfd)
    for end in ends:
        end.close()
    desk.tell(control_messages.WorkerDown(0, 5, ()))

    assert count_open() == before
    await asyncio.sleep(0)
    assert desk.process.engine._links == {}


# --- reloading --------------------------------------------------------------------------------------------------------


@at_desk()
async def test_reloaded_settings_hold_for_what_comes_next(desk: Desk) -> None:
    assert desk.process.access_log is None
    settings = desk.process.settings
    limits = msgspec.structs.replace(settings.limits, request_timeout_s=2.0, max_queued_tokens=1)
    server = msgspec.structs.replace(settings.server, access_log=0.5)
    desk.tell(control_messages.Configure(msgspec.structs.replace(settings, limits=limits, server=server)))
    assert desk.process.timeout_ns(None) == 2_000_000_000
    assert desk.process.settings.limits.max_queued_tokens == 1
    assert desk.process.access_log is not None


@at_desk()
async def test_a_refused_reload_is_in_the_status(desk: Desk) -> None:
    desk.tell(Models((), ready=True, config_error="sie.toml: [limits] max_itemz: unknown key"))
    assert (
        msgspec.json.decode(desk.process.status._frame())["config_error"] == "sie.toml: [limits] max_itemz: unknown key"
    )
    desk.tell(Models((), ready=True))
    assert msgspec.json.decode(desk.process.status._frame())["config_error"] is None
