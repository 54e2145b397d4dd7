"""For any actions of administrators on a repository, each call reports its result, and no error removes a serving
model.

The supervisor's side, two workers' hosts and a frontend's side are the real ones. Files, helper processes and channels are
not: messages and ends of loads come in an order that is drawn.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sie.catalog.files import refuse
from sie.catalog.spec import ModelSpec, RepositoryModel
from sie.config.settings import Settings
from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.model_table import ModelTable
from sie.frontend.tensors.lookup import TensorTable
from sie.frontend.tensors.repository_admin import RepositoryAdmin
from sie.frontend.tensors.states import reason_of
from sie.ipc import messages
from sie.runtime.progress import Progress
from sie.supervisor.child import Child
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.loads import Loads
from sie.supervisor.model_registry import ModelRegistry
from sie.supervisor.repositories import Repositories
from sie.supervisor.state_broadcast import StateBroadcast
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed, SieError, WireError, to_wire
from sie.values.tensor import TensorRule
from sie.workers.loading import hosting
from sie.workers.loading.states import LoadState
from tests.unit.workers.loading.stepped_host import SteppedHost

NAMES = ("a", "b")
UNREADABLE, UNLOADABLE = 1, 2
"""Versions whose file cannot be read, and whose file a worker cannot load; all other numbers are good files."""
names = st.sampled_from(NAMES)
seeds = st.integers(0, 1 << 16)


class Files(msgspec.Struct):
    """One model's directory: the number of each version's file, and whether its configuration is broken."""

    versions: dict[str, int] = {}
    serves_all: bool = False
    is_broken: bool = False

    @property
    def chosen(self) -> list[str]:
        newest = sorted(self.versions, key=int)
        return [] if self.is_broken else newest if self.serves_all else newest[-1:]


def build(card: ModelCard, _progress: Any, _room: Any) -> Any:
    if card.revision == str(UNLOADABLE):
        raise refuse(card.id, "it cannot be loaded", "CONFIG")
    return SimpleNamespace(memory_bytes=0, dtype="")


class World:
    """One server: what is on disk, its processes, and all that is on its way between them."""

    def __init__(self, control: Any) -> None:
        defaults = Settings()
        models = msgspec.structs.replace(defaults.models, repositories=("/repository",), repository_control=control)
        settings = msgspec.structs.replace(defaults, models=models)
        self.disk: dict[str, Files] = {}
        self.random = random.Random(0)
        self.helpers: list[asyncio.Future[None]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.workers = [Child("worker", slot, WorkerSlot("cpu")) for slot in range(2)]
        for worker in self.workers:
            worker.channel = object()  # type: ignore[assignment]  # connected, and more is not asked
        self.frontends = [Child("frontend", 0, WorkerSlot(""))]
        self.to_child: dict[str, deque[Any]] = {child.name: deque() for child in (*self.workers, *self.frontends)}
        self.to_supervisor: dict[str, deque[Any]] = {name: deque() for name in self.to_child}
        self.hosts = [SteppedHost("cpu", build, self.to_supervisor[worker.name].append) for worker in self.workers]
        registry = ModelRegistry(1e6)  # no load is tried again by itself
        preparer: Any = SimpleNamespace(prepare=self._prepare, find_models=self._find_models)
        children: Any = self
        self.page = self
        state = StateBroadcast(registry, children, str, lambda: None)
        progress = Progress(io.StringIO(), "json")
        self.loads = Loads(settings, registry, children, state,
                           progress=progress, spawn=self._spawn, preparer=preparer)  # fmt: skip
        self.repositories = Repositories(settings, registry, children, state, self.loads,
                                         preparer=preparer, spawn=self._spawn)  # fmt: skip
        self.table = ModelTable(ThreadPoolExecutor(1), lambda _: None)
        self.tensors = TensorTable(self.table)
        self.model_admin = ModelAdmin(self.table, self.to_supervisor["frontend-0"].append)
        self.admin = RepositoryAdmin(self.tensors, self.table, self.model_admin)

    # --- as `Children` ---

    def send(self, child: Child, message: Any, _fds: Any = None) -> None:
        self.to_child[child.name].append(message)

    def send_all(self, children: list[Child], message: Any) -> None:
        for child in children:
            self.send(child, message)

    def count(self, *_labels: Any) -> None:
        raise AssertionError("nothing is evicted here")

    def show_failed(self, model: str, *, has_failed: bool) -> None:
        pass

    # --- helper processes ---

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def _take_time(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self.helpers.append(turn)
        await turn

    async def _find_models(self, _directories: Any, only: str = "") -> list[RepositoryModel]:
        await self._take_time()
        found = [self._found(name) for name in sorted(self.disk) if only in ("", name)]
        await self._take_time()
        return found

    def _found(self, name: str) -> RepositoryModel:
        files = self.disk[name]
        stamps = tuple(f"{files.serves_all} {files.versions[version]}" for version in files.chosen)
        reason = f"{name}: bad configuration" if files.is_broken else "" if stamps else f"{name}: no version to serve"
        return RepositoryModel(
            name=name, repository="/repository", versions=tuple(files.chosen), stamps=stamps, reason=reason
        )

    async def _prepare(self, spec: ModelSpec) -> ModelCard | WireError:
        await self._take_time()
        source = spec.tensor
        assert source is not None
        files = self.disk.get(source.name, Files())
        number = files.versions.get(source.version, UNREADABLE)
        await self._take_time()
        if files.is_broken or number == UNREADABLE:
            return to_wire(refuse(spec.id, "it cannot be read", "CONFIG"))
        rule = TensorRule(name=source.name, version=source.version, platform="", inputs=(), outputs=())
        return ModelCard(id=spec.id, kind="tensor", inputs=("tensor",), outputs=(), tensor=rule, revision=str(number))

    # --- what happens ---

    def _moves(self) -> list[Callable[[], Any]]:
        """Return all that may happen next."""
        moves: list[Callable[[], Any]] = [
            lambda name=name: self._deliver(name) for name, queue in self.to_child.items() if queue
        ]
        moves += [lambda name=name: self._collect(name) for name, queue in self.to_supervisor.items() if queue]
        moves += [host.step for host in self.hosts if host.has_work]
        return moves + [self._answer_helper] * bool(self.helpers)

    def _answer_helper(self) -> None:
        self.helpers.pop(self.random.randrange(len(self.helpers))).set_result(None)

    def _deliver(self, name: str) -> None:
        message = self.to_child[name].popleft()
        if name.startswith("worker"):
            self.hosts[int(name[-1])].apply(message)
        elif isinstance(message, messages.Models):
            self.table.update(message)
        else:
            self.model_admin.on_begun(message)

    def _collect(self, name: str) -> None:
        message = self.to_supervisor[name].popleft()
        if isinstance(message, messages.ManageRepository):
            self.repositories.manage(self.frontends[0], message)
        elif isinstance(message, messages.Staged):
            self.loads.on_worker_message(self.workers[int(name[-1])], message)
        else:
            self.loads.report(self.workers[int(name[-1])], message)

    async def settle(self) -> None:
        """Let all of it happen, in an order of the seed's."""
        num_quiet = num_moves = 0
        while num_quiet < 12:
            await asyncio.sleep(0)
            num_moves += 1
            assert num_moves < 2000, "it never comes to rest"
            moves = self._moves()
            if moves:
                num_quiet = 0
                self.random.choice(moves)()
            else:
                num_quiet += 1
                self.loads.tick(time.monotonic())
        for task in self.tasks:
            assert task.done()
            task.result()
        self.tasks.clear()

    async def ask(self, *calls: Callable[[int], Awaitable[Any]]) -> list[str]:
        """Make calls at once, let everything happen, and return the reason of each one's failure or an empty text."""
        deadline_ns = time.monotonic_ns() + 60_000_000_000
        asked = [asyncio.ensure_future(call(deadline_ns)) for call in calls]
        await asyncio.sleep(0)
        await self.settle()
        assert all(task.done() for task in asked), "a call is never answered"
        return [_reason(task) for task in asked]

    def kill(self, slot: int) -> None:
        """Kill a worker and start its successor."""
        worker = self.workers[slot]
        os.close(self.hosts[slot].event_fd)
        self.hosts[slot] = SteppedHost("cpu", build, self.to_supervisor[worker.name].append)
        self.to_child[worker.name].clear()
        self.to_supervisor[worker.name].clear()
        self.loads.forget_worker(slot, blame=False)
        self.loads.greet(worker)

    def served(self, name: str) -> dict[str, int]:
        """Return the number of the file that each serving version of a model was loaded from."""
        served: dict[str, int] = {}
        for version, entry in self.tensors.versions(name).items():
            if entry.state != "loaded":
                continue
            for slot in entry.workers:
                hosted = self.hosts[slot].models[entry.card.id]
                assert hosted.state is LoadState.LOADED
                assert hosted.card.revision == entry.card.revision
            served[version] = int(entry.card.revision or 0)
        return served

    def close(self) -> None:
        for host in self.hosts:
            os.close(host.event_fd)


def _reason(task: asyncio.Future[Any]) -> str:
    error = task.exception()
    if error is None:
        return ""
    assert isinstance(error, SieError), repr(error)
    assert error.message
    if isinstance(error, ModelLoadFailed):
        assert error.http_status == 400
    return error.message


class RepositoryMachine(RuleBasedStateMachine):
    """`serving` is what each model has to serve, by version the number of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(hosting, "free_model", lambda: None)  # which takes longer than all else here

    @initialize(control=st.sampled_from(["explicit", "explicit", "none"]))
    def start(self, control: Any) -> None:
        self.world = World(control)
        self.is_explicit = control == "explicit"
        self.serving: dict[str, dict[str, int]] = {}
        self.numbers = iter(range(10, 1000))
        self.world.disk = {"a": Files({"1": next(self.numbers)}), "b": Files({"1": next(self.numbers)})}
        self.run(self._start())
        if not self.is_explicit:
            self.serving = {name: self.world.served(name) for name in NAMES}

    async def _start(self) -> None:
        self.world.repositories.start()
        await self.world.settle()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    # --- the disk -----------------------------------------------------------------------------------------------------

    @rule(name=names, version=st.sampled_from("123"), fault=st.sampled_from([0, 0, 0, UNREADABLE, UNLOADABLE]))
    def replace(self, name: str, version: str, fault: int) -> None:
        self.write(name, version, fault)

    def write(self, name: str, version: str, fault: int) -> None:
        self.world.disk.setdefault(name, Files()).versions[version] = fault or next(self.numbers)

    @rule(name=names, version=st.sampled_from("0123"))
    def delete(self, name: str, version: str) -> None:
        """Delete a version, or the model."""
        if version == "0":
            self.world.disk.pop(name, None)
        elif name in self.world.disk:
            self.world.disk[name].versions.pop(version, None)

    @rule(name=names, change=st.sampled_from(["break", "mend", "policy"]))
    def configure(self, name: str, change: str) -> None:
        files = self.world.disk.setdefault(name, Files())
        files.is_broken = change == "break" or (change == "policy" and files.is_broken)
        files.serves_all = files.serves_all != (change == "policy")

    # --- calls --------------------------------------------------------------------------------------------------------

    @rule(name=names, seed=seeds, file=st.sampled_from([None, 0, UNREADABLE, UNLOADABLE]))
    def load(self, name: str, seed: int, file: int | None) -> None:
        self.world.random.seed(seed)
        if file is not None:
            self.write(name, "1", file)
        (reason,) = self.run(self.world.ask(lambda deadline_ns: self.world.admin.load(name, deadline_ns)))
        if not self.is_explicit:
            assert reason == "explicit model load / unload is not allowed if polling is enabled"
            return
        if name not in self.world.disk:
            assert "failed to poll from model repository" in reason
            event("load of what is not there")
            return
        faults = self._expect_load(name)
        assert bool(reason) == bool(faults), (reason, faults)
        assert all(fault in reason for fault in faults), (reason, faults)
        event(f"load: {'failed' if faults else 'done'}")

    @rule(name=names, seed=seeds)
    def unload(self, name: str, seed: int) -> None:
        self.world.random.seed(seed)
        (reason,) = self.run(self.world.ask(lambda deadline_ns: self.world.admin.unload(name, deadline_ns)))
        if self.is_explicit:
            assert reason == ""
            self.serving.pop(name, None)
        else:
            assert "not allowed" in reason

    @rule(seed=seeds)
    def reload(self, seed: int) -> None:
        self.world.random.seed(seed)
        (reason,) = self.run(self.world.ask(self.world.admin.reload))
        for name in self.serving.keys() - self.world.disk.keys():
            del self.serving[name]
        wanted = [name for name in self.world.disk if not self.is_explicit or self.serving.get(name)]
        faults = [fault for name in wanted for fault in self._expect_load(name)]
        assert bool(reason) == bool(faults), (reason, faults)
        assert all(fault in reason for fault in faults), (reason, faults)
        event(f"reload: {'failed' if faults else 'done'}")

    def _expect_load(self, name: str) -> list[str]:
        """Change `serving` as a load has to. Return what the reason of its failure tells."""
        files, before = self.world.disk[name], self.serving.get(name, {})
        if not files.chosen:
            if before:
                event("a fault of the directory beside a model that serves")
            return [f"{name}: {'bad configuration' if files.is_broken else 'no version to serve'}"]
        bad = [version for version in files.chosen if files.versions[version] in (UNREADABLE, UNLOADABLE)]
        good = {version: files.versions[version] for version in files.chosen if version not in bad}
        kept = {version: before[version] for version in bad if version in before}
        if kept:
            event("a fault of a file beside the version that it replaces")
        stays = good or kept  # or else what serves has no successor
        self.serving[name] = {**({} if stays else before), **kept, **good}
        return [f"version {version} is at UNAVAILABLE state" for version in bad]

    @rule(name=names, seed=seeds, also=st.sampled_from(["load", "unload", "reload"]), breaks=st.booleans())
    def two_at_once(self, name: str, seed: int, also: str, breaks: bool) -> None:
        """Load while something else is asked: both are answered, and an unload that comes last wins."""
        world, admin = self.world, self.world.admin
        world.random.seed(seed)

        async def second(deadline_ns: int) -> None:
            if breaks and name in world.disk:
                world.disk[name].is_broken = True
            await (admin.reload(deadline_ns) if also == "reload" else getattr(admin, also)(name, deadline_ns))

        before = world.served(name)
        self.run(world.ask(lambda deadline_ns: admin.load(name, deadline_ns), second))
        served = world.served(name)
        if self.is_explicit and also == "unload":
            assert not served
        elif name in world.disk:
            assert served or not before
        self.serving = {one: world.served(one) for one in NAMES}

    @rule(slot=st.integers(0, 1), seed=seeds)
    def kill_a_worker(self, slot: int, seed: int) -> None:
        """A worker dies and is back: what served serves, from the same files or from newer ones.

        Only a version whose files are bad by now is lost with the last worker that has it.
        """
        world = self.world
        world.random.seed(seed)
        kept = [
            entry.card.id for name in NAMES for entry in world.tensors.versions(name).values()
            if entry.state == "loaded" and not (entry.is_outdated and entry.workers == (slot,))
        ]  # fmt: skip

        async def die() -> None:
            world.kill(slot)
            await world.settle()

        self.run(die())
        assert [model for model in kept if world.table.entries[model].state != "loaded"] == []
        self.serving = {name: world.served(name) for name in NAMES}

    # --- what holds always --------------------------------------------------------------------------------------------

    @invariant()
    def what_serves_is_what_should(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in NAMES:
            assert self.world.served(name) == self.serving.get(name, {}), name

    @invariant()
    def nothing_is_on_its_way_and_what_is_told_is_so(self) -> None:
        if not hasattr(self, "world"):
            return
        tensors = self.world.tensors
        for name in tensors.names:
            served = self.serving.get(name, {})
            for entry in tensors.listed(name):
                assert entry.state in ("loaded", "failed", "available"), entry.state
                assert not entry.reloading
                assert entry.state != "failed" or reason_of(entry)
            if served:
                entry = tensors.resolve(name)
                assert tensors.shown_versions(entry) == sorted(served, key=int)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()
        self.loop.close()
        self.patch.undo()


TestRepositories = RepositoryMachine.TestCase
TestRepositories.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
