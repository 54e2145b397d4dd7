"""Makes the parts of a frontend process, and runs them by the supervisor's messages and a clock. Serves no protocol itself.

Everything runs on the event loop, except the constructor and `start`, which `sie.frontend.connect` calls before it runs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sie.agents.paths import socket_path
from sie.agents.store import has_store
from sie.config.sections import Memory
from sie.config.settings import Settings
from sie.frontend.access.gate import open_access
from sie.frontend.access.host_check import open_host_check
from sie.frontend.engine.attaching import Attaching
from sie.frontend.engine.disconnects import ClientWatch
from sie.frontend.engine.engine import ShmEngine
from sie.frontend.http.body import BodyReader, body_limits
from sie.frontend.http.cors import Cors
from sie.frontend.http.held_bytes import HeldBytes
from sie.frontend.http.listeners import limit_unread_time, steer_to, stop_steering, until_accepting
from sie.frontend.http.response import Headers
from sie.frontend.http.unread import UnreadAnswers
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.models.adapter_lookup import AdapterTable
from sie.frontend.models.admin import ModelAdmin
from sie.frontend.models.model_table import ModelTable
from sie.frontend.operations.encode import Encoder
from sie.frontend.operations.extraction.extract import Extractor
from sie.frontend.operations.interface import EncodeOperation, ExtractOperation, ScoreOperation
from sie.frontend.operations.score import Scorer
from sie.frontend.retirement import Leaving
from sie.frontend.supervisor_link import SupervisorLink
from sie.frontend.telemetry.access_log import AccessLog
from sie.frontend.telemetry.generation_metrics import GenerationMetrics
from sie.frontend.telemetry.metrics import FrontendMetrics
from sie.frontend.telemetry.process_status import ProcessStatus
from sie.frontend.tensors.encoded_images import TensorImages
from sie.frontend.tensors.infer import Tensors
from sie.frontend.tensors.regions import Regions
from sie.frontend.tensors.text_models import TextTensors, Watch
from sie.ipc import messages
from sie.ipc.channel import Channel
from sie.ipc.messages import Launch, Models
from sie.runtime.logs import get_logger, set_level
from sie.shm.large import LargeBudget
from sie.shm.pages import CounterPage
from sie.shm.space import OutboundSpace
from sie.values.errors import BadRequest, SieError, Unavailable

if TYPE_CHECKING:
    from sie.agents.channel import AgentClient
    from sie.agents.store.store import Store
    from sie.frontend.generation.interface import TextStarter
    from sie.frontend.http.exchange import Exchange
    from sie.frontend.remote import Remote
    from sie.frontend.telemetry.tracing import RequestTracing

Recorder = Callable[[Any, int, Headers, SieError | None], Headers]
"""Records a request that ends, from (exchange, status, headers, error). Returns the headers of the response."""

MakeRemote = Callable[["FrontendProcess"], "Remote"]

_log = get_logger(__name__)
_TICK_S: Final = 0.02
_MAX_TOUCH_S: Final = 1.0
_MS_PER_DAY: Final = 86_400_000
_MS_DIGITS: Final = 12
_MAX_ENCODED: Final = 2
"""Large answers at a time that are encoded, or encoded and not yet counted as held. Else a late loop would let them pile up."""
_HTTP: Final = ("http", "gateway")
"""The protocols of processes behind Granian."""


class FrontendProcess:
    """The state and services that all handlers of one process share."""

    def __init__(
        self, launch: Launch, settings: Settings, channel: Channel, pages: list[CounterPage],
        loop: asyncio.AbstractEventLoop, *, make_remote: MakeRemote | None = None,
        needs_cores: Callable[[int], bool] = lambda _slot: False,
    ) -> None:  # fmt: skip
        """make_remote makes the operations of a process without workers; needs_cores is an argument of `ShmEngine`."""
        self.settings = settings
        self.pages = pages
        self.is_draining = False
        self.closes_connections = False
        """Whether each response closes its connection."""
        self.certificates: messages.Certificates | None = None
        """The certificates in force after a renewal, or None; for gRPC."""
        self.on_configs: Callable[[messages.TookConfigs], None] = lambda _: None
        """Called when the supervisor has taken over the cluster's configuration."""
        self._launch = launch
        self._loop = loop
        self._supervisor = SupervisorLink(channel, self._on_message)
        self._pool = ThreadPoolExecutor(2, "tokenize")
        self.decode_pool = ThreadPoolExecutor(2, "decode")
        """Threads for large bodies of all dialects."""
        self.encoding = asyncio.Semaphore(_MAX_ENCODED)
        """Held from before an answer is encoded on a thread until it is handed to its client's connection."""
        send = self._supervisor.send
        self.models = self._make_models(settings.models.loading_retry_after_s)
        self.adapters = AdapterTable(self.models, send)
        self.admin = ModelAdmin(self.models, send)
        self._space = _request_space(launch, settings.memory)
        self.engine = ShmEngine(
            settings, self._space, self.models.hosted, send,
            streams_together=launch.streams_together, needs_cores=needs_cores,
        )  # fmt: skip
        self.remote = make_remote(self) if make_remote is not None else None
        """The operations on other hosts, of a process without workers; None where the engine runs them."""
        self._clients = ClientWatch(self.remote or self.engine)
        self.metrics = FrontendMetrics(pages[0], self.models)
        # A client of gRPC that leaves cancels the task of its call, which ends its work.
        self.watch_client: Watch = self._clients.add if launch.protocol in _HTTP else lambda _pending, _protocol: None
        self._images = ImageReader(settings.limits, settings.server.image_threads)
        self._set_operations(settings)
        self.tensors = self._make_tensors()
        self._set_held_bytes(settings)
        self.generation_metrics = GenerationMetrics(pages[0], self.models)
        self.access = open_access(settings.access, pages, self.metrics.record_auth_failure, self.unread.settle)
        self.host_check = open_host_check(settings, launch)
        self.cors = Cors(settings.access.cors_origins) if settings.access.cors_origins else None
        self.status = self._make_status()
        self.tracing = _start_tracing(settings, launch)
        self._derive(settings)
        self.requests: set[asyncio.Task[None]] = set()
        """The tasks that serve requests."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving = self._make_leaving()
        self._attaching = Attaching(
            loop, self._space, settings.memory.ring_capacity, self.engine.attach, self._supervisor.send
        )

    def _set_operations(self, settings: Settings) -> None:
        self.encoder: EncodeOperation
        self.scorer: ScoreOperation
        self.extractor: ExtractOperation
        if self.remote is not None:
            self.encoder, self.scorer, self.extractor = self.remote.encoder, self.remote.scorer, self.remote.extractor
            return
        self.encoder = Encoder(self.engine, self.models, settings.limits, self._pool, self._images)
        self.scorer = Scorer(self.engine, self.models, settings.limits, self._pool)
        self.extractor = Extractor(self.engine, self.models, settings.limits, self._pool, self._images)

    def _set_held_bytes(self, settings: Settings) -> None:
        """Set what reads bodies and counts unread answers; both count towards the bytes held for clients."""
        self.held = HeldBytes(settings.limits.max_held_bytes, self.metrics.record_held_cut)
        self.count_held: Callable[[], int] = lambda: self.held.num_bytes
        """Returns the bytes held for clients; a process that serves no HTTP replaces it."""
        self.bodies = BodyReader(*body_limits(settings.limits), held=self.held)
        self.text_bodies = self.bodies.with_limit(settings.generation, "max_generation_body_bytes")
        self.unread = UnreadAnswers(self.held, self._loop)

    def _make_models(self, wait_s: int) -> ModelTable:
        models = ModelTable(self._pool, self.request_load, loading_retry_after_s=wait_s)
        models.on_stall = lambda seconds: self._supervisor.send(messages.Silence(seconds))
        return models

    @property
    def num_pending(self) -> int:
        """Number of requests that are not answered, here or elsewhere."""
        return self.remote.num_pending if self.remote is not None else self.engine.num_pending

    def _make_tensors(self) -> Tensors:
        """Return the service of tensor requests on this process's operations and threads."""
        texts = TextTensors(
            self.encoder, self.scorer, lambda: self.generator,
            limits=lambda: self.settings.limits, watch=self.watch_client,
        )  # fmt: skip
        return Tensors(
            self.engine, self.models, self.admin, self._pool,
            texts=texts, images=TensorImages(self._images, limits=lambda: self.settings.limits),
            watch=self.watch_client, decode_pool=self.decode_pool, encoding=self.encoding,
            served=self.metrics.record_last_inference, regions=Regions(Path(self._launch.control_path).parent / "regions", lambda: self.settings.limits),
        )  # fmt: skip

    def _make_leaving(self) -> Leaving:
        return Leaving(
            lambda: not (self.requests or self.num_pending), self._turn_away, self.settings.server.drain_timeout_s,
            in_granian=self._launch.protocol in _HTTP,
        )  # fmt: skip

    def _make_status(self) -> ProcessStatus:
        return ProcessStatus(
            self.settings, self._launch, self.pages, self.models,
            access=self.access, is_draining=lambda: self.is_draining, check_open=(self.remote or self.engine).check_open,
            publish_watchers=self.metrics.set_watchers,
            cluster_frame=self.remote.status_frame if self.remote is not None else None,
        )  # fmt: skip

    @functools.cached_property
    def generator(self) -> TextStarter:
        """The starter of requests to generate. It is imported with the first such request."""
        if self.remote is not None:
            return self.remote.generator
        from sie.frontend.generation.start import Generator

        return Generator(self.engine, self.models, self.settings.generation, self.generation_metrics)

    @functools.cached_property
    def agents(self) -> AgentClient:
        """The connection to the agent process."""
        from sie.agents.channel import AgentClient

        return AgentClient(self.settings.agents.agent_socket or socket_path(self._launch.control_path))

    @functools.cached_property
    def store(self) -> Store:
        """The files, skills and sessions of clients. It is imported with the first request that needs it."""
        from sie.agents.store.store import Store

        store = Store(self.settings.store_dir, self.settings.store)
        self._spawn(store.run_reaper())
        return store

    @property
    def is_ready(self) -> bool:
        """Whether `/readyz` is green."""
        if self.remote is not None:
            return self.remote.readiness()["status"] == "ready"
        return self.status.is_ready

    @property
    def not_ready_reason(self) -> str:
        """Why `/readyz` is not green."""
        if self.remote is not None:
            return self.remote.readiness()["status"]
        return "stopping" if self.is_draining else self.models.reason

    @property
    def uptime_s(self) -> float:
        """Seconds since the server started, on a monotonic clock."""
        return self.status.uptime_s

    def _derive(self, settings: Settings) -> None:
        """Compute the state that depends on settings which a reload may change."""
        self.settings = settings
        self.models.default = settings.models.default_model
        self._timeout_ns = int(settings.limits.request_timeout_s * 1e9)
        # Well within idle_unload_s, or a model would be unloaded while it is in use.
        self._touch_s = min(_MAX_TOUCH_S, settings.models.idle_unload_s / 4) or _MAX_TOUCH_S
        self.access_log = AccessLog(settings.server.access_log) if settings.server.access_log else None
        self.recorders: tuple[Recorder, ...] = tuple(
            part.record
            for part in (self.access, self.cors, self.remote, self.tracing, self.access_log)
            if part is not None
        )
        """Called for every request that ends. Traces come before the access log, whose lines name the trace."""

    def _reconfigure(self, settings: Settings) -> None:
        """Apply reloaded settings. Requests under way keep the limits they began with."""
        self._derive(settings)
        for part in (self.engine, self.encoder, self.scorer, self.extractor):
            part.reconfigure(settings.limits)
        self.bodies.reconfigure(*body_limits(settings.limits))
        self.held.max_bytes = settings.limits.max_held_bytes
        self._limit_unread_time()
        set_level(settings.server.log_level)

    # --- checks for handlers --------------------------------------------------------------------------------------

    def timeout_ns(self, header: str | None) -> int:
        """Return a request's time limit; `X-SIE-Timeout-Ms` may only lower the setting. Raises BadRequest."""
        if header is None:
            return self._timeout_ns
        if not (
            header.isascii() and header.isdigit() and len(header) <= _MS_DIGITS and 1 <= int(header) <= _MS_PER_DAY
        ):
            raise BadRequest("Header 'X-SIE-Timeout-Ms' must be a whole number of milliseconds, at least 1")
        return min(self._timeout_ns, int(header) * 1_000_000)

    def check_accepting(self) -> None:
        """Refuse a request before its body is read if the server takes no more. Raises Unavailable or Overloaded."""
        if self.is_draining:
            raise Unavailable("The server is stopping", code="SHUTTING_DOWN", retry_after_s=1)
        (self.remote or self.engine).check_open()

    def check_placement(self, exchange: Exchange) -> None:
        """Check where a request wants to run. Source: SIE API reference, sections 12 and 15. Raises SieErrors."""
        if self.remote is not None:
            self.remote.check_placement(exchange)
        else:
            self.check_machine_profile(exchange.headers.get("x-sie-machine-profile"))

    def check_machine_profile(self, wanted: str | None) -> None:
        """Raise BadRequest for a request that wants another machine profile than this host's."""
        wanted = (wanted or "").strip()
        if not wanted:
            return
        own = self.settings.server.machine_profile or self.gpu_type()
        if not own or wanted.lower() != own.lower():
            has = f"This server's machine profile is {own!r}" if own else "This server has no machine profile"
            raise BadRequest(
                f"{has}, and the request wants {wanted!r}",
                extras={"requested_profile": wanted, "worker_identity": own},
            )

    def gpu_type(self) -> str:
        """Return the type of this host's GPU, or an empty text."""
        labels = (label for page in self.pages for record in page.records() for label in record.labels)
        return next((value for key, value in labels if key == "gpu_type"), "")

    # --- the supervisor -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to listen to the supervisor. Called before the event loop runs."""
        self._supervisor.start(self._loop)
        self._loop.call_soon(lambda: self._spawn(self._run_clock()))
        self._loop.call_soon(lambda: self._spawn(self._report_ready()))
        if self._launch.protocol == "http" and has_store(self.settings.store_dir):
            self._loop.call_soon(lambda: self.store)  # else what expired would stay until a client asks for something
        if self.remote is not None:
            remote = self.remote
            self._loop.call_soon(lambda: self._spawn(remote.run()))

    def close(self) -> None:
        """Release the resources of the process. Called when no request is under way."""
        self.status.close()
        if self.remote is not None:
            self.remote.close()
        if self.tracing is not None:
            self.tracing.close()
        self._supervisor.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._images.close()
        if "generator" in vars(self):
            self.generator.close()
        if "agents" in vars(self):
            self.agents.close()

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_spawned_end)

    def _on_spawned_end(self, task: asyncio.Task[Any]) -> None:
        """Forget a task. If it failed, end the process: without it there are no deadlines, or it never serves."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a task of this process failed; ending it", exc_info=error)
            os._exit(1)

    def request_load(self, model: str) -> None:
        """Ask for a load, at most once a second for each model."""
        self.request_load_once(model, self._supervisor.ask_load)

    def request_load_once(self, model: str, ask: Callable[[str], None]) -> None:
        """Call ask with a model, unless a load of it was asked for within the last second."""
        self._supervisor.ask_once(model, ask)

    def send_configs(self, shared: messages.TakeConfigs) -> None:
        """Have the supervisor take over the cluster's configuration; `on_configs` follows."""
        self._supervisor.send(shared)

    def _on_message(self, message: messages.Message, fds: list[int]) -> None:
        match message:
            case Models() if self.remote is not None:
                pass  # its models are those of its hosts
            case Models():
                self.models.update(message)
                self.engine.place_held()
                self.engine.fail_held()
            case messages.LoadProgress():
                self.models.set_progress(message)
            case messages.Attach(slot, generation):
                self._attaching.begin(slot, generation, fds)
            case messages.WorkerDown(slot, generation, suspects):
                self._attaching.end(generation)
                self.engine.fail_over(slot, generation, suspects)
                self.engine.place_held()
            case messages.WorkerLate(slot, generation, is_late, running):
                self.engine.set_late(slot, generation, running, is_late=is_late)
            case messages.Quarantine(digest):
                self.engine.quarantine(digest)
            case messages.Configure(settings):
                self._reconfigure(settings)
            case messages.Managed():
                self.admin.on_begun(message)
            case messages.Keys() if self.access is not None:
                self.access.replace(message)
            case messages.History(points):
                self.status.extend_history(points)
            case messages.Ping(number):
                self._supervisor.send(messages.Pong(number))
            case messages.Certificates():
                self.certificates = message
            case messages.TookConfigs():
                self.on_configs(message)
            case messages.Retire(newest):
                if newest is not None:
                    steer_to(newest)
                self._turn_away()
            case messages.Drain():
                self.is_draining = True
                self.models.announce()
                self._turn_away()
            case messages.Finish():
                self._leaving.begin()
            case _:
                _log.warning("unexpected control message %s", type(message).__name__)

    def _turn_away(self) -> None:
        """Close connections after their next response, so that clients connect to another process."""
        self.closes_connections = True
        self.status.close()

    async def _report_ready(self) -> None:
        """Tell the supervisor when our listener answers."""
        if self._launch.listen_fd < 0 and self._launch.protocol != "nats":  # else the supervisor already listens
            await until_accepting(self._launch.host, self._launch.port)
            stop_steering()  # the frontend that we replace steered connections away from itself
        self._limit_unread_time()
        if self.remote is not None:
            await self.remote.wait_settled()
        self._supervisor.send(messages.Ready())

    def _limit_unread_time(self) -> None:
        if self._launch.protocol in _HTTP:  # the gRPC transport has a limit of its own
            limit_unread_time(self.settings.limits.unread_timeout_s)

    # --- the clock ------------------------------------------------------------------------------------------------

    async def _run_clock(self) -> None:
        """On every tick, handle deadlines, stalled bodies, clients that left and event-loop lag; rarely, the rest."""
        touched_s = time.monotonic()
        while True:
            due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now_ns = time.monotonic_ns()
            self.metrics.record_loop_lag(max(0.0, now_ns / 1e9 - due_s))
            self.metrics.set_extents_in_use(self.engine.num_extents)
            self.engine.expire(now_ns)
            if self.remote is not None:
                self.remote.expire(now_ns)
            self.bodies.end_stalled(now_ns)
            self.unread.tick(now_ns)
            self.held.tick()
            self.metrics.set_held_bytes(self.count_held())
            self._clients.tick(now_ns)
            self._leaving.tick(now_ns / 1e9)
            if now_ns / 1e9 - touched_s >= self._touch_s:
                touched_s = now_ns / 1e9
                if used := self.models.take_used():
                    self._supervisor.send(messages.Touch(used, self.adapters.take_used()))


def _request_space(launch: Launch, memory: Memory) -> OutboundSpace:
    """Return the memory for this process's requests to workers."""
    budget = LargeBudget(launch.max_large_bytes)
    return OutboundSpace.create(
        "request", memory.request_segment_bytes, budget, large_extent_bytes=memory.large_extent_bytes
    )


def _start_tracing(settings: Settings, launch: Launch) -> RequestTracing | None:
    """Return the writer of traces, or None. OpenTelemetry is imported only if tracing is enabled."""
    if not settings.tracing.enabled:
        return None
    from sie.frontend.telemetry.tracing import RequestTracing

    return RequestTracing(settings.tracing, launch)
