"""Runs the worker: drain what came, plan a step, run it, reply. The only file of the worker with effects on rings.

One thread. It waits in epoll only when nothing waits for a step, and nothing in it waits for a peer.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie import control
from sie.control import Channel, ChannelClosedError
from sie.errors import Internal, SieError, Unavailable
from sie.logs import get_logger
from sie.settings import Settings
from sie.shm.inflight import InflightPage
from sie.shm.large import LargeBudget
from sie.shm.layout import RELEASE, SUBMIT, Descriptor, ProtocolError
from sie.types import ModelCard, WorkHeader
from sie.workers.hosting import Host
from sie.workers.links import FrontendLink
from sie.workers.requests import Request, send_error
from sie.workers.runners import Runner
from sie.workers.runners.quantise import check_scores, finish_rows, output_layout
from sie.workers.scheduler import Budget, State, Step, Waiting, plan_step
from sie.workers.telemetry import WorkerMetrics

_log = get_logger(__name__)
_IDLE_WAIT_S = 1.0
_CREDIT_WAIT_S = 0.005
_SLACK = 10
"""A step may take this many times as long as its tokens usually do before the watchdog's time starts."""
_FIRST_TOKEN_NS = 2_000_000
_MIN_ALLOWED_NS = 1_000_000_000


class Loop:
    """The step loop of one worker."""

    def __init__(
        self,
        settings: Settings,
        *,
        channel: Channel,
        host: Host,
        page: InflightPage,
        metrics: WorkerMetrics,
        budget: Budget,
        large: LargeBudget,
        on_loaded: Callable[[ModelCard], None],
    ) -> None:
        self._settings = settings
        self._large = large
        self._tell_loaded = on_loaded
        self._channel = channel
        self._host = host
        self._page = page
        self._metrics = metrics
        self._budget = budget
        self._state = State()
        self._links: dict[int, FrontendLink] = {}
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._ns_per_token = float(_FIRST_TOKEN_NS)
        self._num_steps = 0
        self._watch(channel.fileno(), self._on_control)
        self._watch(host.event_fd, self._on_loaded)

    def run(self) -> None:
        """Serve until the supervisor closes the control channel."""
        try:
            while True:
                self._poll(0.0 if self._state else self._idle_wait_s())
                step = plan_step(self._state, self._budget, time.monotonic_ns())
                if step is not None:
                    self._state.remove(step)
                    self._apply(step)
                if not self._state:
                    self._settle()
        except ChannelClosedError:
            _log.debug("the supervisor closed the control channel")

    # --- what comes in --------------------------------------------------------------------------------------------

    def _idle_wait_s(self) -> float:
        """Return how long to wait for news; replies without credit are tried again soon."""
        return _IDLE_WAIT_S if all(link.flush() for link in self._links.values()) else _CREDIT_WAIT_S

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _poll(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s):
            handler = self._handlers.get(fd)  # an earlier handler of this round may have closed it
            if handler is not None:
                handler()

    def _on_control(self) -> None:
        while (received := self._channel.try_receive()) is not None:
            message, fds = received
            match message:
                case control.Attach():
                    self._attach(message, fds)
                case control.Load(card):
                    self._host.load(card)
                case control.Unload(model):
                    self._host.start_unload(model)
                case _:
                    for fd in fds:
                        os.close(fd)
                    _log.warning("unexpected control message %s", type(message).__name__)

    def _on_loaded(self) -> None:
        for hosted in self._host.collect():
            card, runner = hosted.card, hosted.runner
            assert runner is not None
            self._metrics.set_model(card.id, self._host.device, loaded=True, memory_bytes=runner.memory_bytes)
            self._tell_loaded(card)

    def _attach(self, message: control.Attach, fds: list[int]) -> None:
        old = self._links.get(message.peer_slot)
        if old is not None:
            self._detach(old)
        try:
            link = FrontendLink(message, fds, self._settings, self._large)
        except (OSError, ProtocolError) as error:
            _log.warning("frontend-%d did not attach: %s", message.peer_slot, error)
            return
        self._links[link.slot] = link
        self._watch(link.attachment.bell_fd, lambda: self._on_bell(link))
        self._watch(link.attachment.sock_fd, lambda: self._on_socket(link))
        self._watch(link.attachment.pidfd, lambda: self._detach(link))

    def _detach(self, link: FrontendLink) -> None:
        """Forget a frontend that is dead: its queued work never runs, its memory is unmapped."""
        for fd in (link.attachment.bell_fd, link.attachment.sock_fd, link.attachment.pidfd):
            self._unwatch(fd)
        for item in self._state.drop_where(lambda request: request.link is link):
            item.request.drop()
        if self._links.get(link.slot) is link:
            del self._links[link.slot]
        link.close()

    def _on_socket(self, link: FrontendLink) -> None:
        """Read a large segment's announcement; at the end of file stop using the peer until its pidfd speaks."""
        if not link.attachment.read_socket():
            self._unwatch(link.attachment.sock_fd)

    def _on_bell(self, link: FrontendLink) -> None:
        try:
            for descriptor in link.attachment.drain():
                if descriptor.kind == SUBMIT:
                    self._accept(link, descriptor)
                elif descriptor.kind == RELEASE:
                    link.release(descriptor)
                else:
                    raise ProtocolError(f"a frontend sent kind {descriptor.kind}")
        except ProtocolError as error:
            _log.error("frontend-%d broke the protocol: %s", link.slot, error)
            self._detach(link)

    def _accept(self, link: FrontendLink, descriptor: Descriptor) -> None:
        try:
            request = Request(link, descriptor)
        except ProtocolError as error:
            _log.error("a request of frontend-%d cannot be read: %s", link.slot, error)
            send_error(link, descriptor.request_id, Internal("the request did not reach the worker whole"))
            return
        model = request.header.model
        if self._host.runner(model) is None:
            error = Unavailable(f"Model '{model}' is not loaded", code="MODEL_NOT_LOADED")
            send_error(link, request.request_id, error)
            return
        now_ns = time.monotonic_ns()
        for index, cost in enumerate(request.costs):
            item = Waiting(request, index, cost, now_ns, request.deadline_ns, request.is_alone)
            self._state.add(model, item)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _apply(self, step: Step) -> None:
        for item in step.expired:
            if not item.request.ended:
                item.request.cancel()
        hosted = self._host.models[step.model]
        runner = hosted.runner
        assert runner is not None
        now_ns = time.monotonic_ns()
        items = [item for item in step.items if self._may_run(item.request, hosted.card, now_ns)]
        blocked = [item for item in step.items if not item.request.ended and not item.request.has_started]
        if blocked:
            self._state.put_back(step.model, blocked)
            if not items:
                self._poll(0.001)  # every frontend of these items holds all its reply memory: its release wakes us
        for same in _by_operation(items):
            self._run(runner, hosted.card, same)

    def _may_run(self, request: Request, card: ModelCard, now_ns: int) -> bool:
        if request.ended:
            return False
        if request.is_cancelled:
            request.cancel()
            return False
        if request.has_started:
            return True
        header = request.header
        try:
            code, width = _row_layout(header, card)
        except SieError as error:
            request.fail(error)
            return False
        return request.try_start(code, width, now_ns)

    def _run(self, runner: Runner, card: ModelCard, items: list[Waiting]) -> None:
        num_tokens = sum(item.num_tokens for item in items)
        self._num_steps += 1
        running = {id(item.request): item.request.inflight_entry for item in items}
        started_ns = time.monotonic_ns()
        allowed_ns = int(_MIN_ALLOWED_NS + _SLACK * self._ns_per_token * num_tokens)
        self._page.write(self._num_steps, started_ns, allowed_ns, "step", running.values())
        try:
            rows = _forward(runner, items)
            ran_ns = time.monotonic_ns()
            self._finish(card, items, rows, ran_ns - started_ns)
        except Exception as error:
            self._recover(runner, card, items, error)
        finally:
            ended_ns = time.monotonic_ns()
            self._page.write(self._num_steps, ended_ns, 0, "idle")
        self._measure(card.id, items, num_tokens, ended_ns - started_ns)

    def _finish(self, card: ModelCard, items: list[Waiting], rows: NDArray[np.float32], ran_ns: int) -> None:
        """Turn rows into what each request asked for, all requests that want the same at once."""
        if items[0].request.header.operation == "score":
            check_scores(card.id, rows)
            self._put(items, list(range(len(items))), rows, ran_ns, 0)
            return
        groups: dict[tuple[bool | None, int | None, str], list[int]] = {}
        for row, item in enumerate(items):
            header = item.request.header
            groups.setdefault((header.normalize, header.truncate_dim, header.output_dtype), []).append(row)
        for (normalize, truncate_dim, output_dtype), members in groups.items():
            began_ns = time.monotonic_ns()
            finished = finish_rows(
                rows if len(members) == len(items) else rows[members],
                normalize=card.normalize if normalize is None else normalize,
                truncate_dim=truncate_dim,
                output_dtype=output_dtype,
            )
            took_ns = time.monotonic_ns() - began_ns
            self._put(items, members, finished, ran_ns, took_ns)

    def _put(
        self, items: list[Waiting], members: list[int], finished: NDArray[np.generic], ran_ns: int, took_ns: int
    ) -> None:
        data = finished.data.cast("B")
        row_bytes = len(data) // len(members)
        touched: dict[int, Request] = {}
        for place, row in enumerate(members):
            request = items[row].request
            request.put_row(items[row].index, data[place * row_bytes : (place + 1) * row_bytes])
            touched[id(request)] = request
        for request in touched.values():
            request.inference_ns += ran_ns
            request.postprocessing_ns += took_ns
            if request.num_left == 0:
                request.answer()

    def _recover(self, runner: Runner, card: ModelCard, items: list[Waiting], error: Exception) -> None:
        """Answer a failed step: alone, a request gets the error; together, each is tried by itself."""
        requests = {id(item.request): item.request for item in items}
        alive = [request for request in requests.values() if not request.ended]
        if len(alive) <= 1:
            if not isinstance(error, SieError):
                _log.error("a step of %s failed", card.id, exc_info=error)
                during = "scoring" if items[0].request.header.operation == "score" else "encoding"
                error = Internal(f"internal error during {during}")
            for request in alive:
                request.fail(error)
            return
        for request in alive:
            own = [item for item in items if item.request is request]
            try:
                began_ns = time.monotonic_ns()
                rows = _forward(runner, own)
                self._finish(card, own, rows, time.monotonic_ns() - began_ns)
            except Exception as own_error:
                self._recover(runner, card, own, own_error)

    def _measure(self, model: str, items: list[Waiting], num_tokens: int, took_ns: int) -> None:
        self._metrics.observe_step(took_ns / 1e9, num_tokens)
        self._metrics.observe_batch(model, len(items), num_tokens)
        queue = self._state.queues.get(model)
        self._metrics.set_queue_depth(model, len(queue) if queue else 0)
        if num_tokens:
            self._ns_per_token += 0.1 * (took_ns / num_tokens - self._ns_per_token)

    def _settle(self) -> None:
        """Do what only makes sense when nothing waits: free models that are to go, publish what is in use."""
        for model in self._host.unloading():
            self._host.finish_unload(model)
            self._metrics.set_model(model, self._host.device, loaded=False, memory_bytes=0)
        self._metrics.set_extents_in_use(sum(link.num_leased for link in self._links.values()))


def _row_layout(header: WorkHeader, card: ModelCard) -> tuple[str, int]:
    """Return dtype code and width of a request's rows. Raises BadRequest as `output_layout` does."""
    if header.operation == "score":
        return "<f4", 1
    return output_layout(card.dims["dense"], header.truncate_dim, header.output_dtype)


def _by_operation(items: list[Waiting]) -> list[list[Waiting]]:
    """Part a step's items where a model both encodes and scores: each operation is a forward pass of its own."""
    groups: dict[str, list[Waiting]] = {}
    for item in items:
        groups.setdefault(item.request.header.operation, []).append(item)
    return list(groups.values())


def _forward(runner: Any, items: list[Waiting]) -> NDArray[np.float32]:
    inputs = [item.request.inputs[item.index] for item in items]
    if items[0].request.header.operation == "score":
        return runner.run_pairs(inputs)
    return runner.run_tokens(inputs) if runner.takes == "tokens" else runner.run_texts(inputs)
