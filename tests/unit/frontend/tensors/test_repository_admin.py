"""Loads and unloads of repository models from a dialect. A list that records messages stands for the supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.model_table import ModelTable
from sie.frontend.tensors import repository_admin
from sie.frontend.tensors.lookup import TensorTable
from sie.frontend.tensors.repository_admin import RepositoryAdmin
from sie.ipc.messages import Managed, ManageRepository, ModelEntry, Models
from sie.values.card import ModelCard
from sie.values.errors import DeadlineExceeded, Internal, ModelLoadFailed, SieError, Unavailable, WireError, to_wire
from sie.values.tensor import TensorRule


class Office:
    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.models = ModelTable(ThreadPoolExecutor(1), lambda _: None)
        self.admin = ModelAdmin(self.models, self.heard.append)
        self.repository = RepositoryAdmin(TensorTable(self.models), self.models, self.admin)

    def know(self, **states: Any) -> None:
        """Hear of the versions of model `m`, as v1='loaded', and of its reason for having none."""
        entries = [entry(name.removeprefix("v"), state) for name, state in states.items()]
        self.models.update(Models(tuple(entries), ready=True))

    def begun(self, number: int = 1, *models: str, error: WireError | None = None, has_changed: bool = False) -> None:
        """Have the supervisor answer a request; models are the hosted ids that it loads."""
        self.admin.on_begun(Managed(number, error, models or ("m/versions/1",), has_changed))

    async def begin(self, work: Any) -> asyncio.Task[Any]:
        """Start a call and return when the supervisor has heard of it."""
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        assert self.heard
        return task


def entry(version: str, state: Any) -> ModelEntry:
    rule = TensorRule(name="m", version=version if version != "none" else "", platform="", inputs=(), outputs=())
    card = ModelCard(id=f"m/versions/{version}", kind="tensor", tensor=rule)
    error = to_wire(Internal(f"version {version} is broken")) if state == "failed" else None
    return ModelEntry(card=card, state=state, error=error)


def soon(timeout_s: float = 60.0) -> int:
    return time.monotonic_ns() + int(timeout_s * 1e9)


def in_office(test: Callable[[Office], Any]) -> Callable[[], None]:
    async def main() -> None:
        await test(Office())

    def run() -> None:
        asyncio.run(main())

    return run


@in_office
async def test_a_load_ends_when_every_version_has_settled(office: Office):
    task = await office.begin(office.repository.load("m", soon()))
    assert office.heard == [ManageRepository(1, "load", "m")]
    office.know(v1="loading", v2="loaded")
    office.begun()
    await asyncio.sleep(0.01)
    assert not task.done()
    office.know(v1="loaded", v2="loaded")
    await task


@in_office
async def test_a_version_that_did_not_load_is_reported(office: Office):
    task = await office.begin(office.repository.load("m", soon()))
    office.know(v1="loaded", v2="failed")
    office.begun(1, "m/versions/1", "m/versions/2")
    with pytest.raises(ModelLoadFailed) as error:
        await task
    assert error.value.http_status == 400
    assert error.value.message == ("load failed for model 'm': version 2 is at UNAVAILABLE state: version 2 is broken")


@in_office
async def test_a_version_that_serves_outdated_files_is_reported(office: Office):
    task = await office.begin(office.repository.load("m", soon()))
    renewed = msgspec.structs.replace(entry("1", "loaded"), reloading=True)
    office.models.update(Models((renewed,), ready=True))
    office.begun()
    await asyncio.sleep(0.01)
    assert not task.done()
    error = to_wire(Internal("version 1 is broken"))
    office.models.update(
        Models((msgspec.structs.replace(renewed, reloading=False, is_outdated=True, error=error),), ready=True)
    )
    with pytest.raises(ModelLoadFailed, match="version 1 is broken"):
        await task


@in_office
async def test_a_model_without_a_version_says_why(office: Office):
    task = await office.begin(office.repository.load("m", soon()))
    office.know(none="failed")
    office.begun(1, "m/versions/none")
    with pytest.raises(ModelLoadFailed, match="failed to load 'm', version none is broken"):
        await task


@in_office
async def test_what_the_supervisor_refuses_is_passed_on(office: Office):
    for call in (office.repository.load, office.repository.unload):
        office.heard.clear()
        task = await office.begin(call("m", soon()))
        office.begun(office.heard[0].number, error=to_wire(Unavailable("not allowed", code="NOT_ALLOWED")))
        with pytest.raises(Unavailable, match="not allowed"):
            await task


@in_office
async def test_every_wait_ends_at_its_deadline(office: Office):
    task = await office.begin(office.repository.unload("m", soon(0.01)))
    with pytest.raises(SieError, match="did not answer in time"):
        await task
    office.heard.clear()
    deadline_ns = soon()
    with pytest.MonkeyPatch.context() as patch:  # the supervisor answers just before the deadline
        clock = SimpleNamespace(monotonic_ns=lambda: deadline_ns - 20_000_000)
        patch.setattr(repository_admin, "time", clock)
        task = await office.begin(office.repository.load("m", deadline_ns))
        office.know(v1="loading")
        office.begun(2)
        with pytest.raises(DeadlineExceeded, match="it continues to load"):
            await task


@in_office
async def test_an_unload_ends_when_the_versions_are_gone(office: Office):
    task = await office.begin(office.repository.unload("m", soon()))
    office.know(v1="unloading")
    office.begun()
    await asyncio.sleep(0.01)
    assert not task.done()
    office.know(v1="available")
    await task


@in_office
async def test_an_unload_does_not_wait_long_for_requests_that_run(office: Office):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository_admin, "_UNLOADING_NS", 10_000_000)
        task = await office.begin(office.repository.unload("m", soon()))
        office.know(v1="unloading")
        office.begun()
        async with asyncio.timeout(30):
            await task


@in_office
async def test_a_load_that_an_unload_overtakes_is_no_success(office: Office):
    task = await office.begin(office.repository.load("m", soon()))
    office.know(v1="loading")
    office.begun()
    await asyncio.sleep(0.01)
    gone = msgspec.structs.replace(entry("1", "available"), dismissed=True)
    office.models.update(Models((gone,), ready=True))
    with pytest.raises(ModelLoadFailed, match="version 1 is at UNAVAILABLE state: unloaded"):
        await task


@in_office
async def test_a_load_of_a_model_that_is_removed_meanwhile_is_no_success(office: Office):
    task = await office.begin(office.repository.load("m", soon()))
    office.know()
    office.begun()
    with pytest.raises(ModelLoadFailed, match="removed from the model repository"):
        await task


@in_office
async def test_a_reload_waits_for_all_models(office: Office):
    task = await office.begin(office.repository.reload(soon()))
    assert office.heard == [ManageRepository(1, "reload")]
    office.know(v1="unloading", v2="loading")
    office.begun(1, "m/versions/2", has_changed=True)
    await asyncio.sleep(0.01)
    assert not task.done()
    office.know(v2="loaded")
    assert await task is True


@in_office
async def test_a_reload_names_the_models_that_failed(office: Office):
    office.know(v1="failed", v2="failed", v3="loaded")
    task = await office.begin(office.repository.reload(soon()))
    office.begun(1, "m/versions/2", "m/versions/3")
    with pytest.raises(ModelLoadFailed) as error:
        await task
    assert error.value.http_status == 400
    assert "version 2 is broken" in error.value.message
    assert "version 1" not in error.value.message
