"""The supervisor's work on model repositories. A list of names stands for the children, two answers for the prepare
helper.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from sie.catalog.spec import ModelSpec, RepositoryModel
from sie.config.settings import Settings
from sie.ipc import messages
from sie.ipc.messages import ManageRepository, ModelReport
from sie.runtime.progress import Progress
from sie.supervisor.loads import Loads
from sie.supervisor.model_registry import ModelRegistry
from sie.supervisor.repositories import Repositories
from sie.supervisor.state_broadcast import StateBroadcast
from sie.values.card import ModelCard
from sie.values.errors import Internal, WireError, from_wire, to_wire
from tests.unit.supervisor.test_loads import FakeChildren


class Office:
    """A server whose repository holds `found`; `broken` are hosted ids whose card cannot be made."""

    def __init__(self, control: Any = "none") -> None:
        defaults = Settings()
        models = msgspec.structs.replace(defaults.models, repositories=("/repository",), repository_control=control)
        settings = msgspec.structs.replace(defaults, models=models)
        self.found: list[RepositoryModel] | WireError = [model("a"), model("b", "1", "2")]
        self.broken: set[str] = set()
        self.looked_for: list[str] = []
        self.children = FakeChildren()
        self.registry = ModelRegistry(30.0)
        self.tasks: list[asyncio.Task[None]] = []
        preparer: Any = SimpleNamespace(prepare=self._prepare, find_models=self._find_models)
        children: Any = self.children
        state = StateBroadcast(self.registry, children, str, lambda: None)
        progress = Progress(io.StringIO(), "json")
        self.loads = Loads(settings, self.registry, children, state,
                           progress=progress, spawn=self._spawn, preparer=preparer)  # fmt: skip
        self.repositories = Repositories(settings, self.registry, children, state, self.loads,
                                         preparer=preparer, spawn=self._spawn)  # fmt: skip

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def _prepare(self, spec: ModelSpec) -> ModelCard | WireError:
        if spec.id in self.broken:
            return to_wire(Internal(f"{spec.id} is broken", extras={"error_class": "CONFIG"}))
        return ModelCard(id=spec.id, kind="tensor", directory=str(spec.tensor))

    async def _find_models(self, _directories: Any, only: str = "") -> list[RepositoryModel] | WireError:
        self.looked_for.append(only)
        if isinstance(self.found, WireError):
            return self.found
        return [found for found in self.found if only in ("", found.name)]

    async def settle(self) -> list[Any]:
        """Let everything happen; return what workers were told."""
        while self.tasks:
            await asyncio.gather(*[self.tasks.pop() for _ in range(len(self.tasks))])
            await asyncio.sleep(0)
        self.heard = self.children.take()
        return [_short(message) for name, message in self.heard if name == "worker-0"]

    async def manage(self, action: Any, name: str) -> list[Any]:
        """Ask as an administrator; return what workers were told. `error` is what the answer said."""
        self.repositories.manage(self.children.frontends[0], ManageRepository(7, action, name))
        told = await self.settle()
        (answer,) = [message for _, message in self.heard if isinstance(message, messages.Managed)]
        assert answer.number == 7
        self.error = from_wire(answer.error).message if answer.error else ""
        return told

    def report(self, model_id: str, state: Any) -> None:
        for worker in self.children.workers:
            self.loads.report(worker, ModelReport(model_id, state))

    def loaded(self, *model_ids: str) -> None:
        for model_id in model_ids:
            self.report(model_id, "loaded")
        self.children.take()

    def staged(self, model_id: str, reason: str = "", *, slots: tuple[int, ...] = (0, 1)) -> None:
        """Let these workers answer the latest `Stage` of a model."""
        number = max(
            message.number for _, message in self.heard
            if isinstance(message, messages.Stage) and message.card.id == model_id
        )  # fmt: skip
        error = to_wire(Internal(reason, extras={"error_class": "CONFIG"})) if reason else None
        for slot in slots:
            self.loads.on_worker_message(self.children.workers[slot], messages.Staged(number, model_id, error))

    def entry(self, model_id: str) -> messages.ModelEntry:
        return next(entry for entry in self.registry.entries() if entry.card.id == model_id)

    def directory(self, model_id: str) -> str:
        return self.entry(model_id).card.directory

    @property
    def states(self) -> dict[str, str]:
        return {entry.card.id: entry.state for entry in self.registry.entries()}


def _short(message: Any) -> Any:
    if isinstance(message, messages.Load):
        return ("load", message.card.id)
    if isinstance(message, messages.Stage):
        return ("stage", message.card.id)
    if isinstance(message, messages.Unstage):
        return ("unstage", message.model)
    return ("unload", message.model)


def model(name: str, *versions: str, stamp: str = "", reason: str = "") -> RepositoryModel:
    versions = versions or (() if reason else ("1",))
    return RepositoryModel(
        name=name, repository="/repository", versions=versions, stamps=tuple(stamp for _ in versions), reason=reason
    )


def in_office(**options: Any) -> Callable[[Callable[[Office], Any]], Callable[[], None]]:
    def decorate(test: Callable[[Office], Any]) -> Callable[[], None]:
        async def main() -> None:
            office = Office(**options)
            office.repositories.start()
            assert office.repositories.is_reading
            await test(office)

        def run() -> None:
            asyncio.run(main())

        return run

    return decorate


@in_office()
async def test_all_models_are_loaded_at_the_start_and_readiness_waits_for_them(office: Office):
    assert sorted(await office.settle()) == [
        ("load", "a/versions/1"), ("load", "b/versions/1"), ("load", "b/versions/2"),
    ]  # fmt: skip
    assert not office.repositories.is_reading
    assert not office.registry.is_ready()
    office.loaded("a/versions/1", "b/versions/1", "b/versions/2")
    assert office.registry.is_ready()


@in_office()
async def test_a_model_that_fails_says_why_and_leaves_the_others_and_readiness_alone(office: Office):
    office.broken = {"b/versions/2"}
    await office.settle()
    office.loaded("a/versions/1", "b/versions/1")
    assert office.states == {"a/versions/1": "loaded", "b/versions/1": "loaded", "b/versions/2": "failed"}
    assert office.registry.is_ready()


@in_office()
async def test_a_model_without_versions_is_known_with_its_reason(office: Office):
    office.found = [model("a"), model("e", reason="it has no version to serve")]
    await office.settle()
    office.loaded("a/versions/1")
    assert office.states["e/versions"] == "failed"
    entry = office.registry.entries()[1]
    assert entry.card.tensor is not None
    assert (entry.card.tensor.name, entry.card.tensor.version) == ("e", "")
    assert entry.error is not None
    assert entry.error.message == "it has no version to serve"
    assert office.registry.is_ready()


@in_office()
async def test_a_repository_that_cannot_be_read_keeps_no_server_from_serving(office: Office):
    office.found = to_wire(Internal("no permission"))
    assert await office.settle() == []
    assert not office.repositories.is_reading
    assert office.registry.is_ready()


@in_office()
async def test_requests_load_no_model_of_a_repository(office: Office):
    await office.settle()
    office.loaded("a/versions/1", "b/versions/1", "b/versions/2")
    await office.settle()
    office.loads.manage("unload", "a/versions/1")
    office.report("a/versions/1", "available")
    await office.settle()
    office.loads.want("a/versions/1")
    assert await office.settle() == []


@in_office()
async def test_nothing_is_loaded_on_request_unless_control_is_explicit(office: Office):
    await office.settle()
    for action in ("load", "unload"):
        assert await office.manage(action, "a") == []
        assert office.error == "explicit model load / unload is not allowed if polling is enabled"


@in_office(control="explicit")
async def test_explicit_control_loads_what_it_is_asked_to(office: Office):
    assert await office.settle() == []
    assert office.registry.is_ready()
    assert set(office.states.values()) == {"available"}
    assert sorted(await office.manage("load", "b")) == [("load", "b/versions/1"), ("load", "b/versions/2")]
    office.loaded("b/versions/1", "b/versions/2")
    assert await office.manage("load", "b") == []  # nothing has changed
    assert office.error == ""
    assert sorted(await office.manage("unload", "b")) == [("unload", "b/versions/1"), ("unload", "b/versions/2")]
    assert await office.manage("unload", "nope") == []
    assert office.error == ""
    assert office.looked_for == ["", "b", "b"]


@in_office(control="explicit")
async def test_a_load_of_an_unknown_model_says_so(office: Office):
    await office.settle()
    assert await office.manage("load", "nope") == []
    assert office.error == "failed to load 'nope', failed to poll from model repository"


@in_office(control="explicit")
async def test_an_empty_name_matches_no_models(office: Office):
    await office.settle()
    await office.manage("load", "a")
    office.loaded("a/versions/1")
    assert await office.manage("load", "") == []
    assert office.error == "failed to load '', failed to poll from model repository"
    assert (await office.manage("unload", ""), office.error) == ([], "")
    assert office.states["a/versions/1"] == "loaded"


@in_office(control="explicit")
async def test_a_load_reads_the_model_anew(office: Office):
    await office.settle()
    await office.manage("load", "b")
    office.loaded("b/versions/1", "b/versions/2")
    office.found = [model("b", "2", "3", stamp="new")]
    told = await office.manage("load", "b")
    assert sorted(told) == [("load", "b/versions/3"), ("stage", "b/versions/2")]
    assert office.directory("b/versions/2").count("new") == 0
    office.staged("b/versions/2")
    assert await office.settle() == [("unload", "b/versions/2")]
    office.report("b/versions/2", "available")
    office.loads.tick(0.0)
    assert await office.settle() == [("load", "b/versions/2")]
    assert "new" in office.directory("b/versions/2")
    office.report("b/versions/3", "loaded")
    assert await office.settle() == []  # version 1 answers until all of the others can
    office.report("b/versions/2", "loaded")
    assert await office.settle() == [("unload", "b/versions/1")]
    office.report("b/versions/1", "available")
    assert await office.settle() == []


@in_office(control="explicit")
async def test_a_version_stays_when_what_was_to_take_its_place_cannot_be_loaded(office: Office):
    await office.settle()
    await office.manage("load", "a")
    office.loaded("a/versions/1")
    office.found, office.broken = [model("a", "2")], {"a/versions/2"}
    assert await office.manage("load", "a") == []
    assert office.states["a/versions/1"] == "loaded"
    assert office.states["a/versions/2"] == "failed"
    office.broken = set()
    assert await office.manage("load", "a") == [("load", "a/versions/2")]
    office.report("a/versions/2", "loaded")
    assert await office.settle() == [("unload", "a/versions/1")]


@in_office(control="explicit")
async def test_an_unload_also_unloads_versions_that_wait_for_their_successor(office: Office):
    await office.settle()
    await office.manage("load", "a")
    office.loaded("a/versions/1")
    office.found = [model("a", "2")]
    await office.manage("load", "a")
    assert sorted(await office.manage("unload", "a")) == [("unload", "a/versions/1"), ("unload", "a/versions/2")]
    office.report("a/versions/2", "available")
    assert await office.settle() == []


@in_office()
async def test_a_reload_takes_over_what_changed_in_the_repositories(office: Office):
    await office.settle()
    office.loaded("a/versions/1", "b/versions/1", "b/versions/2")
    office.found = [model("b", "1", "2"), model("c")]
    assert await office.manage("reload", "") == [("unload", "a/versions/1"), ("load", "c/versions/1")]
    assert office.error == ""
    assert list(office.states) == ["b/versions/1", "b/versions/2", "c/versions/1"]
    assert await office.manage("reload", "") == []
    office.found = to_wire(Internal("no permission"))
    assert await office.manage("reload", "") == []
    assert office.error == "no permission"


@in_office(control="explicit")
async def test_a_reload_loads_nothing_new_under_explicit_control(office: Office):
    await office.settle()
    await office.manage("load", "a")
    office.loaded("a/versions/1")
    office.found = [model("a", "2"), model("b", "1", "2"), model("c")]
    assert await office.manage("reload", "") == [("load", "a/versions/2")]
    assert office.states["c/versions/1"] == "available"


@in_office(control="explicit")
async def test_a_new_model_is_found_when_it_is_asked_for(office: Office):
    office.found = []
    await office.settle()
    office.found = [model("c")]
    assert await office.manage("load", "c") == [("load", "c/versions/1")]


@in_office(control="explicit")
async def test_a_model_that_had_no_version_is_mended(office: Office):
    office.found = [model("e", reason="it has no version to serve")]
    await office.settle()
    office.found = [model("e")]
    assert await office.manage("load", "e") == [("load", "e/versions/1")]
    assert list(office.states) == ["e/versions/1"]


A = "a/versions/1"


async def replaced(office: Office) -> list[Any]:
    """Have `a` loaded, and replace its files in place; return what workers were told."""
    await office.settle()
    await office.manage("load", "a")
    office.loaded(A)
    office.found = [model("a", stamp="new")]
    return await office.manage("load", "a")


def is_as_it_was(office: Office) -> bool:
    entry = office.entry(A)
    return (entry.state, entry.workers, "new" in entry.card.directory) == ("loaded", (0, 1), False)


@in_office(control="explicit")
async def test_a_successor_is_staged_beside_the_serving_copy_and_then_replaces_it(office: Office):
    assert await replaced(office) == [("stage", A)]
    assert is_as_it_was(office)
    assert office.entry(A).reloading
    office.staged(A, slots=(0,))
    staged = office.heard
    assert await office.settle() == []
    assert is_as_it_was(office)
    office.heard = staged
    office.staged(A, slots=(1,))
    assert await office.settle() == [("unload", A)]
    office.report(A, "available")
    office.loads.tick(0.0)
    assert await office.settle() == [("load", A)]
    office.loaded(A)
    entry = office.entry(A)
    assert (entry.state, entry.reloading, entry.is_outdated, entry.error) == ("loaded", False, False, None)
    assert "new" in entry.card.directory


@in_office(control="explicit")
async def test_a_successor_that_cannot_be_prepared_leaves_the_model_as_it_is(office: Office):
    await office.settle()
    await office.manage("load", "a")
    office.loaded(A)
    office.found, office.broken = [model("a", stamp="new")], {A}
    assert await office.manage("load", "a") == []
    assert is_as_it_was(office)
    entry = office.entry(A)
    assert entry.error is not None
    assert (entry.is_outdated, entry.reloading, entry.error.message) == (True, False, f"{A} is broken")


@in_office(control="explicit")
async def test_a_successor_that_one_worker_cannot_load_leaves_the_model_as_it_is_everywhere(office: Office):
    await replaced(office)
    staged = office.heard
    office.staged(A, slots=(0,))
    office.staged(A, "no memory", slots=(1,))
    assert await office.settle() == [("unstage", A)]
    assert is_as_it_was(office)
    assert office.entry(A).is_outdated
    office.heard = staged
    office.staged(A)  # of the one that was given up
    assert await office.settle() == []
    assert await office.manage("load", "a") == [("stage", A)]  # unchanged, and tried again
    office.staged(A)
    assert await office.settle() == [("unload", A)]


@in_office(control="explicit")
async def test_a_newer_file_cancels_a_staged_reload(office: Office):
    await replaced(office)
    first = office.heard
    office.found = [model("a", stamp="newer")]
    assert await office.manage("load", "a") == [("unstage", A), ("stage", A)]
    second, office.heard = office.heard, first
    office.staged(A)
    assert await office.settle() == []
    office.heard = second
    office.staged(A)
    assert await office.settle() == [("unload", A)]


@in_office(control="explicit")
async def test_an_unload_cancels_a_staged_reload(office: Office):
    await replaced(office)
    assert await office.manage("unload", "a") == [("unstage", A), ("unload", A)]
    office.report(A, "available")
    assert office.states[A] == "available"
    assert not office.entry(A).reloading


@in_office()
async def test_what_is_gone_from_its_repository_is_not_staged_on(office: Office):
    await office.settle()
    office.loaded(A)
    office.found = [model("a", stamp="new")]
    assert ("stage", A) in await office.manage("reload", "")
    office.found = []
    told = await office.manage("reload", "")
    assert ("unstage", A) in told
    assert ("unload", A) in told
    assert A not in office.states


@in_office(control="explicit")
async def test_a_successor_that_kills_a_worker_is_given_up(office: Office):
    await replaced(office)
    office.staged(A, slots=(1,))
    office.loads.forget_worker(0, blame=True)
    assert await office.settle() == [("unstage", A)]
    entry = office.entry(A)
    assert (entry.state, entry.workers, entry.is_outdated) == ("loaded", (1,), True)


@in_office(control="explicit")
async def test_a_worker_killed_from_outside_does_not_hold_up_a_successor(office: Office):
    await replaced(office)
    office.staged(A, slots=(1,))
    office.loads.forget_worker(0, blame=False)
    assert await office.settle() == [("unload", A)]


@in_office(control="explicit")
async def test_a_worker_that_starts_while_the_files_are_bad_does_not_load_them_as_what_they_were(office: Office):
    await office.settle()
    await office.manage("load", "a")
    office.loaded(A)
    office.found, office.broken = [model("a", stamp="new")], {A}
    await office.manage("load", "a")
    office.loads.forget_worker(0, blame=False)
    office.loads.greet(office.children.workers[0])
    assert await office.settle() == []
    assert office.entry(A).workers == (1,)
    office.loads.forget_worker(1, blame=False)  # nobody has it any more, and the files are what they are
    office.loads.greet(office.children.workers[1])
    assert await office.settle() == []
    entry = office.entry(A)
    assert entry.error is not None
    assert (entry.state, entry.recovering, entry.error.message) == ("failed", False, f"{A} is broken")


@in_office(control="explicit")
async def test_a_successor_that_takes_too_long_is_given_up_with_its_worker(office: Office):
    killed: list[int] = []
    for worker in office.children.workers:
        worker.kill = lambda slot=worker.slot: killed.append(slot)  # type: ignore[method-assign]
    await replaced(office)
    office.staged(A, slots=(1,))
    office.loads.tick(time.monotonic() + 800.0)
    assert killed == []
    office.loads.tick(time.monotonic() + 1000.0)
    assert killed == [0]
    assert ("unstage", A) in await office.settle()
    assert office.entry(A).is_outdated
