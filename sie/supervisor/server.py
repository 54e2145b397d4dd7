"""Runs the server from start to stop: connects the other parts, watches for hangs, drains on SIGTERM.

It only performs effects. `model_registry` decides on loads, `restart` on restarts, and `hang_detector` on hangs and suspects.
No torch, no HTTP.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from sie.config.reloadable import Plan
from sie.config.settings import Settings
from sie.ipc import messages
from sie.ipc.exit_statuses import CONFIG_STATUS, DEVICE_LOST_STATUS, WORN_STATUS
from sie.ipc.messages import Message
from sie.runtime.logs import get_logger, set_level
from sie.runtime.progress import Progress
from sie.shm.inflight import InflightStatus
from sie.supervisor.adapter_loads import AdapterLoads
from sie.supervisor.card_helper import Preparer
from sie.supervisor.certificates import CertificateFiles
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.supervisor.configured_models import Models
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.history import LoadHistory
from sie.supervisor.key_file import POLL_S, KeyFileWatch
from sie.supervisor.listen import Listener
from sie.supervisor.loads import Loads
from sie.supervisor.model_registry import ModelRegistry, is_refused
from sie.supervisor.notify import open_reporter
from sie.supervisor.reload import Reading, Reloader
from sie.supervisor.renewal import Renewal
from sie.supervisor.repair_watch import RepairWatch
from sie.supervisor.repositories import Repositories
from sie.supervisor.shared_configs import add_configs
from sie.supervisor.state_broadcast import StateBroadcast
from sie.supervisor.watchdog import Watchdog
from sie.values.card import AdapterSpec
from sie.values.errors import WireError

_log = get_logger(__name__)
_TICK_S = 0.1
_MAX_PING_S = 0.5
_CLOSE_AFTER_S = 0.5
"""How long a draining frontend keeps listening, so that keep-alive clients get 503 and `Connection: close`."""
_REPAIR_S = 1.0
"""After this time a worker whose attachment has ended is dead, or lives."""
_WORKER_STOP_S = 2.0
_KILL_S = 5.0
_STOP_MARGIN_S = 5.0


class Supervisor:
    """One running server. Create it inside a running event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        models: Models,
        adapters: list[AdapterSpec],
        places: list[WorkerSlot],
        num_frontends: int,
        runtime_dir: Path,
        listener: Listener,
        grpc_listener: Listener | None = None,
        progress: Progress,
        reread: Callable[[], Reading],
        key_file: KeyFileWatch | None = None,
        certificates: CertificateFiles | None = None,
        is_gateway: bool = False,
    ) -> None:
        """`reread` returns the settings and models that a start would read now. It raises SettingsError or StartError."""
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._listener = listener
        self._grpc_listener = grpc_listener
        self._progress = progress
        self._registry = _registry(settings, models)
        self._key_file = key_file
        self._started_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        grpc = (grpc_listener.address, grpc_listener.port) if grpc_listener is not None else None
        num_children = len(places) + num_frontends + (grpc is not None) + bool(settings.cluster.nats)
        self._children = Children(settings, places, num_frontends, self._launch(num_children), self,
                          grpc=grpc, certificates=certificates, is_gateway=is_gateway,
                          has_template=_needs_template(settings, models, places))  # fmt: skip
        self._state = StateBroadcast(self._registry, self._children, self._not_ready_reason, self._announce)
        self._adapters = AdapterLoads(settings, adapters, self._children, self._state.broadcast,
                                      progress=progress, spawn=self._spawn)  # fmt: skip
        self._state.bind_adapters(self._adapters.entries)
        progress.on_step = self._send_progress
        preparer = Preparer(settings, progress)
        self._loads = Loads(settings, self._registry, self._children, self._state,
                            progress=progress, spawn=self._spawn, preparer=preparer)  # fmt: skip
        self._loads.bind_lost_causes(self._on_lost_causes)
        self._repair_watch = RepairWatch(self._registry, self._loads.retry_repaired)
        self._repositories = Repositories(settings, self._registry, self._children, self._state, self._loads,
                                          preparer=preparer, spawn=self._spawn)  # fmt: skip
        self._history = LoadHistory()
        self._watchdog = Watchdog(settings.supervisor, self._children)
        self._systemd = open_reporter(dict(os.environ))
        self._own_models = models
        self._shared = messages.TakeConfigs("", ())
        """The configuration that the cluster shares, as its puller told last."""
        self._reading = asyncio.Lock()
        """Held from before a list of models is read until it is in force: one read beside it would be undone."""
        self._reloader = Reloader(lambda: self._with_shared(reread()), self._apply, self._systemd, self._reading)
        self._renewal = None if certificates is None else Renewal(
            certificates, self._children, on_problem=self._state.set_tls_error, timeouts_s=self._timeouts_s
        )  # fmt: skip
        self._exit_status = 0
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until a signal or a fatal error. Return the exit status after all children have ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop_signal, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)
        try:
            if self._key_file is not None:
                self._children.set_keys(self._key_file.message)
                self._spawn(self._watch_keys(self._key_file))
            if self._renewal is not None:
                self._spawn(self._renewal.run())
            self._children.open()
            self._loads.start()
            self._repositories.start()
            self._spawn(self._tick_forever())
            self._spawn(self._repair_watch.run())
            self._spawn(self._reloader.run(lambda: self._settings, self._on_reloaded))
            await self._stopped.wait()
        finally:
            await self._end_all_children()
            self._children.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._progress.close()
            _log.info("stopped")
        return self._exit_status

    def _launch(self, num_children: int) -> messages.Launch:
        server = self._settings.server
        share = self._settings.memory.max_large_bytes // num_children
        if self._settings.limits.max_body_bytes > max(share, self._settings.memory.large_extent_bytes):
            _log.warning(
                "max_large_bytes gives each of %d processes %d bytes: larger requests are refused, though max_body_bytes is %d",
                num_children, share, self._settings.limits.max_body_bytes,
            )  # fmt: skip
        return messages.Launch(
            control_path=str(self._runtime_dir / "control"),
            supervisor_pid=os.getpid(),
            role="worker",
            slot=0,
            incarnation=0,
            host=self._listener.address,
            port=self._listener.port,
            listen_fd=self._listener.fd,
            backlog=server.backlog,
            log_format=server.log_format,
            log_level=server.log_level,
            max_large_bytes=share,
            started_s=self._started_s,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the supervisor failed: %s", error, exc_info=error)
            self._fail()

    def _on_lost_causes(self, errors: list[WireError]) -> None:
        """Stop a server that would never be ready, unless a cluster or a repository can give it models to serve."""
        is_strict = self._settings.models.strict_readiness
        has_others = self._settings.cluster.nats or (self._settings.models.repositories and not is_strict)
        if has_others or self._children.is_draining or self._children.is_stopping:
            return
        reasons = "; ".join(error.message for error in errors)
        is_partial = len(errors) < len(self._registry.records)
        what = "no model can be served"
        if is_partial:
            what = "not every model can be served (strict_readiness = false serves the others)"
        _log.error("%s: stopping: %s", what, reasons)
        self._systemd.set_status(f"stopped: {what}: {reasons}")
        will_fail_again = any if is_strict else all
        self._fail(CONFIG_STATUS if will_fail_again(map(is_refused, errors)) else 1)

    def _fail(self, status: int = 1) -> None:
        self._exit_status = status
        self._children.is_stopping = True
        self._stopped.set()

    # --- events of the children ------------------------------------------------------------------------------------

    def on_joined(self, child: Child) -> None:
        """Send a new child the current state."""
        self._loads.greet(child)
        if child.role == "frontend":
            self._children.send(child, messages.History(self._history.points))

    def on_message(self, child: Child, message: Message) -> None:
        """Handle a child's message."""
        match message:
            case messages.Ready():
                self._children.set_ready(child)
                self._state.broadcast()
            case messages.ModelReport():
                self._adapters.on_model(child, message)
                self._loads.report(child, message)
            case messages.AdapterReport():
                self._adapters.report(child, message)
            case messages.WantAdapter(model, adapter):
                self._adapters.want(model, adapter)
            case messages.LoadModel(model):
                self._loads.want(model)
            case messages.Manage(number, action, model):
                self._loads.manage(action, model)
                self._children.send(child, self._state.message())
                self._children.send(child, messages.Managed(number))
            case messages.ManageRepository():
                self._repositories.manage(child, message)
            case messages.TakeConfigs():
                self._spawn(self._take_configs(child, message))
            case messages.MemoryReport() | messages.MemoryShort() | messages.Staged():
                self._loads.on_worker_message(child, message)
            case messages.Detached(slot, generation):
                self._loop.call_later(_REPAIR_S, self._children.attachments.repair, child, slot, generation)
            case messages.PeerFault():
                self._children.kill_peer(child, message.slot)
            case messages.Touch(models, adapters):
                self._loads.touch(models)
                self._adapters.touch(adapters)
            case messages.Pong():
                child.pong_s = max(child.pong_s, time.monotonic())  # an announced stall may still lie ahead
            case messages.Silence(seconds):
                child.pong_s = time.monotonic() + seconds
                if child.role == "worker":
                    self._watchdog.hangs.excuse(child.slot, child.pong_s)
            case messages.Quarantine():
                # The sender comes last: it answers its client when this message comes back.
                self._children.send_all(
                    sorted(self._children.frontends, key=lambda frontend: frontend is child), message
                )
            case _:
                _log.warning("%s sent an unexpected %s", child.name, type(message).__name__)

    def _send_progress(self, model: str, fraction: float | None, stage: str, worker: str) -> None:
        self._children.send_all(self._children.frontends, messages.LoadProgress(model, fraction, stage, worker))

    def on_worker_death(
        self, worker: Child, status: int, running: InflightStatus, *, was_oom_killed: bool
    ) -> tuple[tuple[int, int], ...]:
        """Forget the worker's models. Return its running requests as suspects if their input may be the cause."""
        is_suspect = self._watchdog.hangs.blames_input(status, worker.slot, was_oom_killed=was_oom_killed)
        self._watchdog.hangs.forget(worker.slot)
        is_lost = status == DEVICE_LOST_STATUS
        blames_load = is_suspect and not is_lost and status != WORN_STATUS
        self._loads.forget_worker(worker.slot, blame=blames_load, is_lost=is_lost)
        self._adapters.forget_worker(worker.slot)
        return tuple((entry.frontend, entry.request_id) for entry in running.entries) if is_suspect else ()

    def on_changed(self) -> None:
        """Send the new state to all frontends."""
        self._state.broadcast()

    def on_given_up(self, role: messages.Role) -> None:
        """Stop the server: without any worker or any frontend it cannot serve. Without agents it can."""
        if role == "agent":
            return
        _log.error("no %s can be started: stopping", role)
        self._fail()

    def _not_ready_reason(self) -> str:
        if self._children.is_draining or self._children.is_stopping:
            return "stopping"
        if not self._state.was_ready and not self._children.are_frontends_ready:
            return "frontends are starting"
        workers = self._children.workers
        if workers and not any(worker.state == "ready" for worker in workers):
            return "no worker is running"
        if self._repositories.is_reading:
            return "the model repositories are being read"
        return ""

    def _announce(self) -> None:
        workers = ", ".join(worker.place.device for worker in self._children.workers)
        took_s = time.monotonic() - self._started_s
        _log.info(
            "ready on %s%s after %.1f s (frontends: %d, workers: %s)",
            self._listener.url,
            f" and {self._grpc_listener.url}" if self._grpc_listener is not None else "",
            took_s,
            self._children.num_http_frontends,
            workers,
        )
        self._systemd.ready(self._status(time.monotonic()))

    def _status(self, now_s: float) -> str:
        """Return the status line for `systemctl status`."""
        is_reachable = any(frontend.state == "ready" for frontend in self._children.frontends)
        reason = self._state.reason() or ("" if is_reachable else "no frontend is running")
        if not self._state.was_ready:
            return f"starting: {reason}"
        state = f"not ready: {reason}" if reason else f"serving on {self._listener.url}"
        failed = f"; failed: {', '.join(self._registry.left_out())}" if self._registry.left_out() else ""
        hung = self._watchdog.hung(now_s, self._systemd.grace_s)
        hangs = f"; not answering: {', '.join(hung)}" if hung else ""
        lost = [worker.place.device for worker in self._children.workers if worker.state == "lost"]
        gone = f"; devices lost: {', '.join(lost)}" if lost else ""
        kept = f"; settings not reloaded: {self._reloader.error}" if self._reloader.error else ""
        problem = self._key_file.message.problem if self._key_file is not None else ""
        keys = f"; API keys not reloaded: {problem}" if problem else ""
        tls = f"; certificate not renewed: {self._state.tls_error}" if self._state.tls_error else ""
        return f"{state}, models loaded: {self._state.num_loaded}{failed}{hangs}{gone}{kept}{keys}{tls}"

    # --- reloading ------------------------------------------------------------------------------------------------

    def _on_reload_signal(self) -> None:
        if not self._children.is_draining:
            self._reloader.request()
            if self._renewal is not None:
                self._renewal.request()

    def _timeouts_s(self) -> tuple[float, float]:
        return self._settings.supervisor.start_timeout_s, self._settings.server.drain_timeout_s

    def _apply(self, plan: Plan, models: Models) -> tuple[str, ...]:
        """Apply the settings that a running server can change. Return the changes of models that it cannot."""
        self._settings = plan.settings
        set_level(plan.settings.server.log_level)
        self._watchdog.reconfigure(plan.settings.supervisor)
        self._children.reconfigure(plan.settings)
        self._loads.reconfigure(plan.settings)
        self._adapters.reconfigure(plan.settings)
        return self._loads.replace(models)

    def _with_shared(self, own: Reading) -> Reading:
        """Return what a start would read, and what the cluster shares. Blocks."""
        self._own_models = own.models
        return Reading(own.settings, add_configs(own.models, self._shared.configs, own.settings)[0])

    async def _take_configs(self, child: Child, message: messages.TakeConfigs) -> None:
        """Make the cluster's models and profiles those of this host, and tell the puller when they are."""
        self._shared = message
        async with self._reading:
            if self._shared is not message:
                return  # a later message is under way
            models, refused = await asyncio.to_thread(add_configs, self._own_models, message.configs, self._settings)
            left = self._loads.replace(models)
        for model, reason in refused.items():
            _log.warning("the cluster's configuration of %s is refused: %s", model, reason)
        if left:
            _log.warning("a restart is needed for: %s", ", ".join(left))
        self._children.send(child, messages.TookConfigs(message.hash, refused))

    def _on_reloaded(self) -> None:
        self._children.page.count_reload(is_refused=bool(self._reloader.error))
        self._state.set_config_error(self._reloader.error)
        self._systemd.set_status(self._status(time.monotonic()))

    # --- watching -------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        self._watchdog.start(time.monotonic())
        pinged_s = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self._children.oom_kills.tick(now_s)
            self._watchdog.tick(now_s)
            self._loads.tick(now_s)
            self._adapters.tick(now_s)
            if (point := self._history.tick(now_s, self._children.pages)) is not None:
                self._children.send_all(self._children.frontends, messages.History((point,)))
            if now_s - pinged_s >= min(_MAX_PING_S, self._settings.supervisor.tick_timeout_s / 4):
                pinged = [*self._children.frontends, *self._children.agents]
                self._children.send_all(pinged, messages.Ping(int(now_s * 1e3)))
                pinged_s = now_s
                # The same time as for the watchdog below, which is not fed for a process that is said not to answer.
                self._systemd.set_status(self._status(now_s))
            if not self._watchdog.hung(now_s, self._systemd.grace_s):
                self._systemd.feed_watchdog(now_s)
            if not self._state.was_ready and self._state.is_progressing():
                self._systemd.extend_timeout(now_s)

    async def _watch_keys(self, key_file: KeyFileWatch) -> None:
        """Apply changes of the API key file. It is read on a thread, because the disk may be slow."""
        while True:
            await asyncio.sleep(POLL_S)
            if await asyncio.to_thread(key_file.poll):
                self._children.set_keys(key_file.message)

    # --- stopping -------------------------------------------------------------------------------------------------

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._children.is_draining:
            _log.warning("%s again: stopping at once", number.name)
            self._children.is_stopping = True
            for child in self._children.all:
                child.kill()
            return
        self._children.is_draining = True
        _log.info("%s: finishing accepted requests (at most %g s)", number.name, self._settings.server.drain_timeout_s)
        longest_s = _CLOSE_AFTER_S + self._settings.server.drain_timeout_s + _WORKER_STOP_S + _KILL_S
        self._systemd.stopping("stopping: finishing accepted requests", longest_s + _STOP_MARGIN_S)
        self._spawn(self._drain())

    async def _drain(self) -> None:
        """Refuse new requests, finish accepted ones, then stop the children, frontends first."""
        frontends = self._children.frontends
        self._children.send_all(frontends, messages.Drain())
        await asyncio.sleep(_CLOSE_AFTER_S)
        self._listener.stop_listening()
        self._children.send_all(frontends, messages.Finish())
        for frontend in frontends:
            frontend.finish()
        await self._children.until_gone(frontends, self._settings.server.drain_timeout_s)
        self._stopped.set()

    async def _end_all_children(self) -> None:
        self._children.is_stopping = True
        ending = [*self._children.workers, *self._children.agents]
        for child in ending:
            child.signal(signal.SIGTERM)
        await self._children.until_gone(ending, _WORKER_STOP_S)
        for child in self._children.all:
            child.kill()
        await self._children.until_gone(self._children.all, _KILL_S)


def _registry(settings: Settings, models: Models) -> ModelRegistry:
    registry = ModelRegistry(settings.models.load_retry_s, is_strict=settings.models.strict_readiness)
    for spec, preload, card in models:
        registry.add(spec, preload, card, is_pinned=spec.id in settings.models.pinned)
    return registry


def _needs_template(settings: Settings, models: Models, places: list[WorkerSlot]) -> bool:
    """Return whether to fork the workers: all are on CPUs, and readiness waits for a model that needs torch."""
    has_weights = any(preload and spec.stub is None and spec.tensor is None for spec, preload, _ in models)
    return settings.devices.fork_workers and has_weights and {place.device for place in places} == {"cpu"}
