"""A reload beside a change of the configuration that a cluster shares."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sie.catalog.spec import ModelSpec
from sie.config.settings import Settings
from sie.ipc import messages
from sie.supervisor import server
from sie.supervisor.configured_models import Models
from sie.supervisor.reload import Reading, Reloader
from sie.supervisor.server import Supervisor

WAIT_S = 60.0


def named(*names: str) -> Models:
    return [(ModelSpec(id=name), False, None) for name in names]


@pytest.mark.parametrize("first", ["shared", "reload"])
def test_neither_undoes_the_other(first: str, monkeypatch: pytest.MonkeyPatch):
    """Reading the files of shared models took a while, and then put the list of before in force."""
    has_begun, may_end = threading.Event(), threading.Event()

    def add_slowly(own: Models, configs: Sequence[Any], _settings: Settings) -> tuple[Models, dict[str, str]]:
        if not has_begun.is_set():
            has_begun.set()
            may_end.wait(WAIT_S)
        return [*own, *named(*configs)], {}

    monkeypatch.setattr(server, "add_configs", add_slowly)

    async def test() -> list[str]:
        in_force: list[list[str]] = []
        done = asyncio.Event()
        supervisor: Any = Supervisor.__new__(Supervisor)
        supervisor._own_models, supervisor._settings = named("own/old"), Settings()
        supervisor._shared, supervisor._reading = messages.TakeConfigs("", ()), asyncio.Lock()
        supervisor._loads = SimpleNamespace(replace=lambda models: in_force.append([one[0].id for one in models]) or ())
        supervisor._children = SimpleNamespace(send=lambda *_: None)
        systemd: Any = SimpleNamespace(reloading=lambda _: None, reloaded=lambda: None)
        reloader = Reloader(
            lambda: supervisor._with_shared(Reading(Settings(), named("own/new"))),
            lambda _plan, models: supervisor._loads.replace(models), systemd, supervisor._reading,
        )  # fmt: skip
        reloads = asyncio.create_task(reloader.run(Settings, done.set))
        steps = [reloader.request, lambda: tasks.append(asyncio.create_task(take()))]
        tasks: list[asyncio.Task[None]] = []

        async def take() -> None:
            await supervisor._take_configs(None, messages.TakeConfigs("h", ("cluster/m",)))  # type: ignore[arg-type]

        for step in steps if first == "reload" else reversed(steps):
            step()
            assert await asyncio.to_thread(has_begun.wait, WAIT_S)
            await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait_for(asyncio.gather(done.wait(), *tasks), WAIT_S)
        reloads.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reloads
        return in_force[-1]

    assert asyncio.run(test()) == ["own/new", "cluster/m"]
