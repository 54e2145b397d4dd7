"""Runs the server: starts workers and frontends, watches, restarts, brokers their attachments, drains and stops.

Only effects are here. What to do is decided in `models` (loads), `restart` (when to start again) and `watch` (who
hangs); how a process is held is in `children`. No torch, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sie import control, families
from sie.catalog.spec import ModelSpec
from sie.control import Channel, ChannelClosed, Message
from sie.errors import WireError
from sie.logs import get_logger
from sie.progress import Progress
from sie.settings import Settings
from sie.shm.inflight import InflightPage
from sie.shm.pages import CounterPage
from sie.supervisor import watch
from sie.supervisor.children import Child
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.host import StartError
from sie.supervisor.models import ModelBook, Record
from sie.supervisor.notify import Notifier, watchdog_interval_s
from sie.supervisor.prepare import Preparer
from sie.supervisor.restart import RestartPolicy, plan_restart
from sie.types import ModelCard

_log = get_logger(__name__)
_TICK_S = 0.1
_CLOSE_AFTER_S = 0.5
"""How long a draining frontend keeps listening, so that keep-alive clients hear 503 and `Connection: close`."""


class Supervisor:
    """One running server. `run` returns the exit status when it has stopped and no child is left."""

    def __init__(
        self,
        settings: Settings,
        models: list[tuple[ModelSpec, bool, ModelCard | None]],
        places: list[WorkerSlot],
        num_frontends: int,
        runtime_dir: Path,
        port: int,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._port = port
        self._progress = progress
        self._book = ModelBook(settings.models.load_retry_s)
        for spec, preload, card in models:
            self._book.add(spec, preload, card)
        self._workers = [Child("worker", slot, place) for slot, place in enumerate(places)]
        self._frontends = [Child("frontend", slot, WorkerSlot("")) for slot in range(num_frontends)]
        page_bytes = settings.memory.counter_page_bytes
        self._page = CounterPage.create(page_bytes)
        self._pages = {child.name: CounterPage.create(page_bytes) for child in self._children}
        self._inflight = {
            worker.slot: InflightPage.create(settings.scheduler.max_step_items) for worker in self._workers
        }
        self._pairs: dict[tuple[int, int], int] = {}
        self._num_generations = 0
        self._broadcast_due = False
        self._was_ready = False
        self._is_stopping = False
        self._exit_status = 0
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch = watch.Watch(settings.supervisor.watchdog_s)
        self._notifier = Notifier(os.environ.get("NOTIFY_SOCKET", ""))
        self._preparer = Preparer(settings, progress)
        self._started_s = time.monotonic()
        self._started_unix_s = time.time()

    @property
    def _children(self) -> list[Child]:
        return [*self._workers, *self._frontends]

    # --- life of the server ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until a signal or an unrecoverable fault; return the exit status."""
        self._loop = asyncio.get_running_loop()
        listener = self._listen()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop_signal, number)
        self._loop.add_signal_handler(signal.SIGHUP, lambda: _log.info("SIGHUP changes nothing: restart to reload"))
        try:
            for child in self._children:
                self._start(child)
            for record in self._book.records.values():
                if record.wanted:
                    self._load(record)
            self._spawn(self._tick_forever())
            await self._stopped.wait()
        finally:
            await self._end_all_children()
            listener.close()
            await self._cancel_tasks()
            self._progress.close()
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
        return self._exit_status

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        path = self._runtime_dir / "control"
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(64)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._on_connect, listener)
        return listener

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the supervisor failed: %s", error, exc_info=error)
            self._fail(1)

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fail(self, status: int) -> None:
        self._exit_status = self._exit_status or status
        self._is_stopping = True
        self._stopped.set()

    # --- children -------------------------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        if self._is_stopping:
            return
        settings = self._settings
        launch = control.Launch(
            control_path=str(self._runtime_dir / "control"),
            supervisor_pid=os.getpid(),
            role=child.role,
            slot=child.slot,
            incarnation=child.incarnation + 1,
            host=settings.server.host,
            port=self._port,
            backlog=settings.server.backlog,
            log_format=settings.server.log_format,
            log_level=settings.server.log_level,
            device=child.place.device,
            cores=child.place.cores,
            max_large_bytes=settings.memory.max_large_bytes // len(self._children),
            started_s=self._started_unix_s,
        )
        child.start(launch, self._num_threads(child), time.monotonic())
        self._loop.add_reader(child.pidfd, self._on_death, child)

    def _num_threads(self, child: Child) -> int:
        if child.role == "frontend":
            return 1
        return self._settings.devices.threads_per_worker or max(1, len(child.place.cores))

    def _on_connect(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        pid, uid = control.peer_credentials(sock)
        if uid != os.getuid():
            _log.warning("refused a control connection of uid %d", uid)
            sock.close()
            return
        channel = Channel(sock)
        try:
            hello, fds = channel.receive(timeout_s=1.0)
        except (ChannelClosed, TimeoutError):
            channel.close()
            return
        for fd in fds:
            os.close(fd)
        child = self._child_that_says(hello)
        if child is None:
            channel.close()
            return
        child.adopt(channel, pid)
        self._loop.add_reader(channel.fileno(), self._on_readable, child)
        self._configure(child)

    def _child_that_says(self, hello: Message) -> Child | None:
        if not isinstance(hello, control.Hello):
            return None
        slots = self._workers if hello.role == "worker" else self._frontends
        child = slots[hello.slot] if hello.slot < len(slots) else None
        fits = child is not None and child.process is not None and child.incarnation == hello.incarnation
        return child if fits and child is not None and child.channel is None else None

    def _configure(self, child: Child) -> None:
        own = self._pages[child.name]
        if child.role == "worker":
            self._send(child, control.Configure(self._settings), [own.fd, self._inflight[child.slot].fd])
        else:
            others = [self._page, *(page for page in self._pages.values() if page is not own)]
            read_only = [page.read_only_fd() for page in others]
            self._send(child, control.Configure(self._settings), [own.fd, *read_only])
            for fd in read_only:
                os.close(fd)
        if child.role == "frontend":
            self._send(child, self._models_message())
        peers = self._workers if child.role == "frontend" else self._frontends
        for peer in peers:
            if peer.channel is not None:
                self._attach(*((child, peer) if child.role == "frontend" else (peer, child)))
        if child.role == "worker":
            for record in self._book.records.values():
                if record.wanted and record.card is not None:
                    self._send(child, control.Load(record.card))

    def _attach(self, frontend: Child, worker: Child) -> None:
        """Hand both ends of a fresh socketpair out; from there the two exchange their memory by themselves."""
        self._num_generations += 1
        generation = self._pairs[frontend.slot, worker.slot] = self._num_generations
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._send(frontend, control.Attach(worker.slot, generation), [ours.fileno(), worker.peer_pidfd])
            self._send(worker, control.Attach(frontend.slot, generation), [theirs.fileno(), frontend.peer_pidfd])

    def _send(self, child: Child, message: Message, fds: list[int] | None = None) -> None:
        if child.channel is None:
            return
        try:
            child.channel.send(message, fds)
        except ChannelClosed as error:
            _log.warning("%s does not read its control channel: %s", child.name, error)
            child.kill()

    def _on_readable(self, child: Child) -> None:
        assert child.channel is not None
        try:
            while child.channel is not None and (received := child.channel.try_receive()) is not None:
                message, fds = received
                for fd in fds:
                    os.close(fd)
                self._on_message(child, message)
        except ChannelClosed:
            if child.channel is not None:
                self._loop.remove_reader(child.channel.fileno())
            child.kill()

    def _on_death(self, child: Child) -> None:
        self._loop.remove_reader(child.pidfd)
        if child.channel is not None:
            self._loop.remove_reader(child.channel.fileno())
        was_ready = child.state == "ready"
        child.kill()
        status = child.reap()
        if child.role == "worker":
            self._bury_worker(child, status)
        child.state = "waiting"
        if self._is_stopping:
            child.state = "gone"
            return
        _log.warning("%s ended with status %d", child.name, status)
        self._plan_restart(child, was_ready)
        self._broadcast()

    def _bury_worker(self, worker: Child, status: int) -> None:
        """Tell the frontends what may be read a last time, and which requests the death may be the doing of."""
        page = self._inflight[worker.slot]
        suspects = page.read().entries if self._watch.blames_input(status, worker.slot) else []
        page.reset()
        self._watch.forget(worker.slot)
        self._book.forget_worker(worker.slot)
        for frontend in self._frontends:
            generation = self._pairs.pop((frontend.slot, worker.slot), None)
            if generation is not None:
                ids = tuple(entry.request_id for entry in suspects if entry.frontend == frontend.slot)
                self._send(frontend, control.WorkerDown(worker.slot, generation, ids))

    def _plan_restart(self, child: Child, was_ready: bool) -> None:
        s = self._settings.supervisor
        policy = RestartPolicy(budget=s.restart_budget, window_s=s.restart_window_s, backoff_s=s.restart_backoff_s)
        delay_s = plan_restart(policy, child.history, was_ready, time.monotonic())
        if delay_s is None:
            child.state = "gone"
            _log.error("%s failed to start %d times in a row: given up (restart_budget)", child.name, policy.budget + 1)
            siblings = self._workers if child.role == "worker" else self._frontends
            if all(sibling.state == "gone" for sibling in siblings):
                self._fail(1)
            return
        child.num_restarts += 1
        if child.role == "worker":
            labels = families.WORKER_RESTARTS.label_pairs(str(child.slot))
            self._page.counter(families.WORKER_RESTARTS.name, labels).add(1)
        self._later(delay_s, lambda: self._start(child))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        if delay_s <= 0:
            action()
        else:
            self._loop.call_later(delay_s, action)

    # --- what children say ----------------------------------------------------------------------------------------

    def _on_message(self, child: Child, message: Message) -> None:
        match message:
            case control.Ready():
                child.state = "ready"
                child.pong_s = time.monotonic()
                self._broadcast()
            case control.ModelReport():
                self._on_report(child, message)
            case control.LoadModel(model):
                record = self._book.want(model, time.monotonic())
                if record is not None:
                    self._load(record)
                    self._broadcast()
            case control.Touch(models):
                self._book.touch(models, time.monotonic())
            case control.Pong():
                child.pong_s = time.monotonic()
            case control.Quarantine():
                for frontend in self._frontends:
                    self._send(frontend, message)
            case _:
                _log.warning("%s sent an unexpected %s", child.name, type(message).__name__)

    def _on_report(self, worker: Child, report: control.ModelReport) -> None:
        if report.state == "loading" and report.progress is not None:
            self._progress.update(report.model, report.progress, report.detail)
        self._book.report(worker.slot, report, time.monotonic())
        if report.state == "loaded":
            self._progress.done(report.model, f"{worker.place.device} {report.dtype}".strip())
        elif report.state == "failed" and report.error is not None:
            self._progress.fail(report.model, report.error.message)
        self._broadcast()

    def _load(self, record: Record) -> None:
        if record.card is None:
            if not record.preparing:
                record.preparing = True
                self._spawn(self._prepare(record))
            return
        for worker in self._workers:
            self._send(worker, control.Load(record.card))

    async def _prepare(self, record: Record) -> None:
        prepared = await self._preparer.prepare(record.spec)
        record.preparing = False
        if isinstance(prepared, WireError):
            self._book.fail(record, prepared, time.monotonic())
            self._progress.fail(record.spec.id, prepared.message)
        else:
            record.card = prepared
            self._load(record)
        self._broadcast()

    # --- what everybody is told -----------------------------------------------------------------------------------

    def _broadcast(self) -> None:
        """Send the state of all models to all frontends, once for however many changes one loop turn brings."""
        if not self._broadcast_due:
            self._broadcast_due = True
            self._loop.call_soon(self._broadcast_now)

    def _broadcast_now(self) -> None:
        self._broadcast_due = False
        message = self._models_message()
        for frontend in self._frontends:
            self._send(frontend, message)
        if message.ready and not self._was_ready:
            self._announce()
        self._was_ready = self._was_ready or message.ready

    def _models_message(self) -> control.Models:
        reason = self._not_ready_reason()
        workers = tuple(
            control.WorkerEntry(
                slot=worker.slot,
                device=worker.place.device,
                pid=worker.peer_pid,
                state="ready" if worker.state == "ready" else "dead" if worker.state == "gone" else "starting",
                restarts=worker.num_restarts,
            )
            for worker in self._workers
        )
        return control.Models(self._book.entries(), not reason, reason, workers)

    def _not_ready_reason(self) -> str:
        if self._is_stopping:
            return "stopping"
        if not all(frontend.state == "ready" for frontend in self._frontends) and not self._was_ready:
            return "frontends are starting"
        if not any(worker.state == "ready" for worker in self._workers):
            return "no worker is running"
        missing = self._book.missing()
        return f"not loaded: {', '.join(missing)}" if missing else ""

    def _announce(self) -> None:
        host = self._settings.server.host
        shown = f"[{host}]" if ":" in host else host
        took_s = time.monotonic() - self._started_s
        _log.info(
            "ready on http://%s:%d after %.1f s (frontends: %d, workers: %s)",
            shown, self._port, took_s, len(self._frontends), ", ".join(w.place.device for w in self._workers),
        )  # fmt: skip
        self._notifier.send("READY=1", f"STATUS=serving on {shown}:{self._port}")

    # --- watching -------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        interval_s = watchdog_interval_s(dict(os.environ))
        petted_s = extended_s = 0.0
        while not self._is_stopping:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            late_s = self._watch.tick(now_s)
            self._watch_workers(now_s, late_s)
            self._watch_frontends(now_s, late_s)
            self._unload_idle(now_s)
            if interval_s is not None and now_s - petted_s >= interval_s:
                self._notifier.send("WATCHDOG=1")
                petted_s = now_s
            if not self._was_ready and now_s - extended_s >= 5.0:
                self._notifier.send("EXTEND_TIMEOUT_USEC=30000000", f"STATUS={self._not_ready_reason()}")
                extended_s = now_s

    def _watch_workers(self, now_s: float, late_s: float) -> None:
        for worker in self._workers:
            if worker.state == "starting" and self._is_start_overdue(worker, now_s):
                _log.error("%s did not start within start_timeout_s", worker.name)
                worker.kill()
            elif worker.state == "ready":
                verdict = self._watch.judge_worker(worker.slot, self._inflight[worker.slot].read(), now_s, late_s)
                if verdict == "abort":
                    _log.error("%s hangs: its step is over its allowance by watchdog_s; aborting it", worker.name)
                    worker.signal(signal.SIGABRT)
                elif verdict == "kill":
                    worker.kill()

    def _watch_frontends(self, now_s: float, late_s: float) -> None:
        for frontend in self._frontends:
            if frontend.state == "starting" and self._is_start_overdue(frontend, now_s):
                _log.error("%s did not start within start_timeout_s", frontend.name)
                frontend.kill()
            elif frontend.state == "ready":
                if late_s:
                    frontend.pong_s = now_s
                if now_s - frontend.pong_s > self._settings.supervisor.tick_timeout_s:
                    _log.error("%s did not answer for tick_timeout_s; killing it", frontend.name)
                    frontend.kill()
                frontend.ping_number += 1
                if frontend.ping_number % 5 == 0:
                    self._send(frontend, control.Ping(frontend.ping_number))

    def _is_start_overdue(self, child: Child, now_s: float) -> bool:
        return now_s - child.started_s > self._settings.supervisor.start_timeout_s

    def _unload_idle(self, now_s: float) -> None:
        idle_s = self._settings.models.idle_unload_s
        for record in self._book.idle(idle_s, now_s) if idle_s > 0 else []:
            self._book.release(record)
            for worker in self._workers:
                self._send(worker, control.Unload(record.spec.id))
            self._broadcast()

    # --- stopping -------------------------------------------------------------------------------------------------

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._is_stopping:
            _log.warning("%s again: stopping at once", number.name)
            for child in self._children:
                child.kill()
            return
        _log.info("%s: finishing what was accepted (at most %g s)", number.name, self._settings.server.drain_timeout_s)
        self._is_stopping = True
        self._notifier.send("STOPPING=1", "STATUS=draining")
        self._spawn(self._drain())

    async def _drain(self) -> None:
        """Refuse what is new, finish what was accepted, then let go of the children, frontends first."""
        for frontend in self._frontends:
            self._send(frontend, self._models_message())
            self._send(frontend, control.Drain())
        await asyncio.sleep(_CLOSE_AFTER_S)
        for frontend in self._frontends:
            frontend.signal(signal.SIGTERM)
        await self._until_gone(self._frontends, self._settings.server.drain_timeout_s)
        self._stopped.set()

    async def _until_gone(self, children: list[Child], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and any(child.process is not None for child in children):
            await asyncio.sleep(0.02)

    async def _end_all_children(self) -> None:
        self._is_stopping = True
        for worker in self._workers:
            worker.signal(signal.SIGTERM)
        await self._until_gone(self._workers, 2.0)
        for child in self._children:
            child.kill()
        await self._until_gone(self._children, 5.0)
        with contextlib.suppress(OSError):
            self._notifier.send("STATUS=stopped")


async def serve(start: Callable[[], Supervisor]) -> int:
    """Build the supervisor inside a running loop and run it. Raises StartError when it cannot start."""
    try:
        return await start().run()
    except OSError as error:
        raise StartError(str(error)) from error
