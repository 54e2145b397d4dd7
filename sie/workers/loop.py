"""Runs the worker: drain what came, plan a step, run it, reply. The only file of the worker with effects on rings.

One thread. It waits in epoll only when nothing waits for a step, and nothing in it waits for a peer.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Collection

from sie.config.settings import Settings
from sie.ipc import messages
from sie.ipc.channel import Channel, ChannelClosedError
from sie.ipc.messages import Load, Stage, Unload, Unstage
from sie.runtime import failpoints
from sie.runtime.child_setup import calm_collector
from sie.runtime.logs import get_logger, set_level
from sie.shm.inflight import InflightPage
from sie.shm.large import LargeBudget
from sie.shm.layout import RELEASE, SUBMIT, Descriptor, ProtocolError
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal, SieError, Unavailable
from sie.workers.generation.engines import Generators
from sie.workers.loading.adapters import AdapterHost
from sie.workers.loading.hosting import Host
from sie.workers.model_api import Runner
from sie.workers.operations import by_operation, forward, refusal, row_layout, waiting_items
from sie.workers.recovery import Recovery
from sie.workers.requests.frontend_link import FrontendLink
from sie.workers.requests.joining import Joining
from sie.workers.requests.reply_writer import NEVER_FITS, ReplyWriter
from sie.workers.requests.request import Request, send_error
from sie.workers.scheduling.ceilings import Ceiling, drop_outgrown
from sie.workers.scheduling.pace import Pace
from sie.workers.scheduling.scheduler import State, plan_step
from sie.workers.scheduling.waiting import Budget, Step, Waiting
from sie.workers.telemetry import WorkerMetrics

_log = get_logger(__name__)
_IDLE_WAIT_S = 0.2
_CREDIT_WAIT_S = 0.005
_BEAT_NS = 200_000_000
_TEND_NS = 1_000_000_000
_IDLE_ALLOWED_NS = 350_000_000
"""How long a turn without a step may take: over the idle wait, and so little that a hang is found within watchdog_s + 0.5 s."""


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
        read_memory: Callable[[], messages.MemoryReport] | None = None,
        ceiling: Ceiling | None = None,
    ) -> None:
        """Report what read_memory returns once a second, if it is given; ceiling is that of every model at first."""
        self._first_ceiling = ceiling
        self._tell_loaded = on_loaded
        self._read_memory = read_memory
        self._channel = channel
        self._host = host
        self._adapters = AdapterHost(host, channel.send, metrics.set_adapters)
        self._page = page
        self._metrics = metrics
        self._budget = budget
        self._state = State()
        self._parked: dict[str, list[Waiting]] = {}
        """Items by model that no reply memory could be found for; not in the queues, where they would block others."""
        self._replies = ReplyWriter(settings)
        self._recovery = Recovery(
            self._attempt,
            ceilings=self._state.ceilings,
            metrics=metrics,
            retry_after_s=settings.limits.oom_retry_after_s,
            ask_for_memory=lambda model: channel.send(messages.MemoryShort(model)),
        )
        self._links: dict[int, FrontendLink] = {}
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._joining = Joining(settings, large, watch=self._watch, unwatch=self._unwatch, on_link=self._welcome)
        self._generators = Generators(
            settings, device=host.device, state=self._state, metrics=metrics, max_suspects=page.max_entries,
            announce=self._announce, ask_for_memory=self._recovery.ask_for_memory,
        )  # fmt: skip
        self._pace = Pace(self._state.max_tokens, int(settings.scheduler.max_step_ms * 1e6))
        # On a busy machine a step on a CPU takes longer however small it is: there its processor time counts.
        self._busy_ns = time.thread_time_ns if host.device == "cpu" else time.monotonic_ns
        self._num_steps = self._beat_ns = self._tended_ns = 0
        self._watch(channel.fileno(), self._on_control)
        self._watch(host.event_fd, self._on_loaded)
        self._watch(self._adapters.event_fd, self._adapters.collect)
        self._watch(self._generators.event_fd, self._generators.collect)

    def run(self) -> None:
        """Serve until the supervisor closes the control channel."""
        try:
            while True:
                self.turn(_IDLE_WAIT_S)
        except ChannelClosedError:
            _log.debug("the supervisor closed the control channel")

    def turn(self, wait_s: float) -> None:
        """Take in what came and run one step; wait at most wait_s for news while there is nothing to run.

        Raises ChannelClosedError when the supervisor has gone.
        """
        self._poll(0.0 if self._state else self._idle_wait_s(wait_s))
        if self._replies:
            self._replies.retry(time.monotonic_ns(), self._may_get_memory)
        if self._parked and not self._may_get_memory():
            self._unpark()  # what held the room was cancelled, so that no release tells of it
        now_ns = time.monotonic_ns()
        if now_ns - self._beat_ns > _BEAT_NS:
            self._beat(now_ns)
        if now_ns - self._tended_ns > _TEND_NS:
            self._tend(now_ns)
        if self._generators.engines:
            self._generators.tend(now_ns)
        step = plan_step(self._state, self._budget, now_ns)
        if step is not None and step.is_own:
            self._generators.step(step.model)
            self._beat(time.monotonic_ns())
        elif step is not None:
            self._state.remove(step)
            self._apply(step)
        self._settle()

    def _beat(self, now_ns: int) -> None:
        """Say that the loop turns: between steps, too, a worker that stands still must be found."""
        self._beat_ns = now_ns
        self._page.write(self._num_steps, now_ns, _IDLE_ALLOWED_NS, "idle")

    def _tend(self, now_ns: int) -> None:
        """Do what is due about once a second."""
        self._tended_ns = now_ns
        drop_outgrown(self._state.ceilings, self._budget.max_tokens, now_ns)
        for link in self._links.values():
            link.retry()  # a lease that ended here, without a release, may have made room
        if self._read_memory is not None:
            self._channel.send(self._read_memory())

    # --- what comes in --------------------------------------------------------------------------------------------

    def _idle_wait_s(self, wait_s: float) -> float:
        """Return how long to wait for news; replies without credit or room are tried again soon."""
        num_unsent = sum([not link.flush() for link in self._links.values()])
        is_unsent = num_unsent or self._replies or self._generators.is_unsent
        return min(wait_s, _CREDIT_WAIT_S) if is_unsent else wait_s

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # closing it has taken it out already
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
                case messages.Attach():
                    self._leave(message.peer_slot)
                    self._joining.add(message, fds)
                case Load() | Unload() | Stage() | Unstage():
                    self._host.apply(message)
                case messages.Configure(settings):
                    set_level(settings.server.log_level)  # nothing else here changes while the worker runs
                case messages.LoadAdapter() | messages.UnloadAdapter():
                    self._adapters.apply(message)
                case _:
                    for fd in fds:
                        os.close(fd)
                    _log.warning("unexpected control message %s", type(message).__name__)

    def _on_loaded(self) -> None:
        for hosted in self._host.collect():
            card, runner = hosted.card, hosted.runner
            assert runner is not None
            if self._first_ceiling is not None:
                self._state.ceilings[card.id] = self._first_ceiling
            self._metrics.set_model(card.id, self._host.device, loaded=True, memory_bytes=runner.memory_bytes)
            self._generators.add(runner)
            self._tell_loaded(card)
            calm_collector()
            self._tended_ns = 0

    def _leave(self, slot: int) -> None:
        """Forget whoever has this slot."""
        link = self._links.get(slot)
        if link is not None:
            self._detach(link)

    def _welcome(self, link: FrontendLink) -> None:
        self._links[link.slot] = link
        self._watch(link.attachment.bell_fd, lambda: self._on_bell(link))
        self._watch(link.attachment.sock_fd, lambda: self._on_socket(link))
        self._watch(link.attachment.pidfd, lambda: self._detach(link))

    def _detach(self, link: FrontendLink) -> None:
        """Forget a frontend that is dead: its queued work never runs, its memory is unmapped."""
        for fd in (link.attachment.bell_fd, link.attachment.sock_fd, link.attachment.pidfd):
            self._unwatch(fd)
        self._unpark()  # and what is left behind may find room in memory that now is free
        for item in self._state.drop_where(lambda request: request.link is link):
            item.request.drop()
        self._replies.drop(link)
        self._generators.drop(link)
        if self._links.get(link.slot) is link:
            del self._links[link.slot]
        link.close()

    def _on_socket(self, link: FrontendLink) -> None:
        """Read a large segment's announcement; at the end of file stop using the peer until its pidfd speaks."""
        try:
            if not link.attachment.read_socket():
                self._unwatch(link.attachment.sock_fd)
        except ProtocolError as error:
            self._accuse(link, error)

    def _on_bell(self, link: FrontendLink) -> None:
        try:
            for descriptor in link.attachment.drain():
                if descriptor.kind == SUBMIT:
                    self._accept(link, descriptor)
                elif descriptor.kind == RELEASE:
                    link.release(descriptor)
                    if self._parked:
                        self._unpark()
                else:
                    raise ProtocolError(f"a frontend sent kind {descriptor.kind}")
            link.flush()
            link.check()
        except ProtocolError as error:
            self._accuse(link, error)

    def _accuse(self, link: FrontendLink, error: ProtocolError) -> None:
        _log.error("frontend-%d broke the protocol: %s", link.slot, error)
        self._detach(link)
        self._channel.send(messages.PeerFault(link.slot))

    def _accept(self, link: FrontendLink, descriptor: Descriptor) -> None:
        try:
            request = Request(link, descriptor)
        except ProtocolError as error:
            _log.error("a request of frontend-%d cannot be read: %s", link.slot, error)
            send_error(link, descriptor.request_id, Internal("the request did not reach the worker whole"))
            return
        model = request.header.model
        runner = self._host.runner(model)
        if runner is None:
            error = Unavailable(f"Model '{model}' is not loaded", code="MODEL_NOT_LOADED")
            send_error(link, request.request_id, error)
            return
        if request.header.lora and (error := self._adapters.refusal(model, request.header.lora)) is not None:
            send_error(link, request.request_id, error)
            return
        now_ns = time.monotonic_ns()
        if request.header.operation == "generate":
            self._generators.accept(request, runner, now_ns)
            return
        for item in waiting_items(request, runner.card, now_ns):
            self._state.add(model, item)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _apply(self, step: Step) -> None:
        for item in step.expired:
            if not item.request.ended:
                item.request.cancel()
        for refused in step.refused:
            if not refused.item.request.ended:
                refused.item.request.fail(refusal(refused))
        hosted = self._host.models[step.model]
        runner = hosted.runner
        assert runner is not None
        now_ns = time.monotonic_ns()
        for item in step.items:  # before others look for room: these may leave some
            if not item.request.ended and item.request.is_cancelled:
                item.request.cancel()
        items = [item for item in step.items if self._may_run(item.request, hosted.card, now_ns)]
        if len(items) < len(step.items):
            blocked = [item for item in step.items if not item.request.ended and not item.request.has_started]
            if blocked:
                self._park(step.model, blocked)
        self._send_replies()  # of those that do not run
        for same in by_operation(items):
            self._run(runner, hosted.card, same)

    def _may_run(self, request: Request, card: ModelCard, now_ns: int) -> bool:
        if request.ended:
            return False
        if request.has_started:
            return True
        try:
            code, width = row_layout(request.header, card)
        except SieError as error:
            request.fail(error)
            return False
        return self._replies.try_start(request, code, width, now_ns)

    def _may_get_memory(self) -> bool:
        """Tell whether a frontend still has a reply that it will give back."""
        return any(link.num_leased for link in self._links.values())

    def _park(self, model: str, items: list[Waiting]) -> None:
        """Set items aside until a reply extent is released; without one that could be, there will never be room.

        What follows an item that leads goes with it: it must not find room while that one is away.
        """
        if self._may_get_memory():
            led = {id(item.request) for item in items if item.leads}
            followers = self._state.drop_where(lambda request: id(request) in led) if led else []
            self._parked.setdefault(model, []).extend((*items, *followers))
            return
        for request in {id(item.request): item.request for item in items}.values():
            request.fail(BadRequest(NEVER_FITS))

    def _unpark(self) -> None:
        """Let parked items compete again, ahead of what came after them."""
        parked, self._parked = self._parked, {}
        for model, items in parked.items():
            self._state.requeue(model, items)

    def _run(self, runner: Runner, card: ModelCard, items: list[Waiting]) -> None:
        num_tokens = sum([item.num_tokens for item in items])
        started_ns, started_busy_ns = time.monotonic_ns(), self._busy_ns()
        try:
            self._forward(runner, card, items, num_tokens)
        except Exception as error:
            self._recovery.recover(runner, card, items, error)
        # Not when an error ends the worker: the page then says what it was running.
        ended_ns = time.monotonic_ns()
        self._beat(ended_ns)
        self._measure(card, items, num_tokens, ended_ns - started_ns)
        self._pace.adapt(card.id, num_tokens, self._busy_ns() - started_busy_ns)

    def _attempt(self, runner: Runner, card: ModelCard, items: list[Waiting]) -> None:
        """Run items of a failed step once more; raises what the runner raises."""
        self._forward(runner, card, items, sum(item.num_tokens for item in items))

    def _forward(self, runner: Runner, card: ModelCard, items: list[Waiting], num_tokens: int) -> None:
        """Run one forward pass and answer it; raises what the runner raises."""
        running = {id(item.request): item.request.inflight_entry for item in items}
        started_ns = self._announce(self._pace.allowed_ns(card.id, num_tokens), running.values(), num_tokens)
        outputs = forward(runner, items)
        self._replies.put(card, items, outputs, time.monotonic_ns() - started_ns)
        self._send_replies()

    def _send_replies(self) -> None:
        """Send what was answered, with one bell for each frontend; the rest is tried again when idle."""
        for link in self._links.values():
            link.flush()

    def _announce(self, allowed_ns: int, running: Collection[tuple[int, int]], num_tokens: int = 0) -> int:
        """Say what is about to run, for how long at most, and whom to blame for it; return the time."""
        self._num_steps += 1
        started_ns = time.monotonic_ns()
        self._page.write(self._num_steps, started_ns, allowed_ns, "step", running, num_tokens=num_tokens)
        failpoints.reach("worker.before_step")
        return started_ns

    def _measure(self, card: ModelCard, items: list[Waiting], num_tokens: int, took_ns: int) -> None:
        self._state.charge(card.id, took_ns)
        num_rows = len(items) if card.tensor is None else sum(item.num_rows for item in items)
        self._metrics.observe_step(took_ns / 1e9, num_tokens)
        self._metrics.observe_batch(card.id, num_rows, num_tokens, took_ns / 1e9)
        self._pace.record(card.id, num_tokens, took_ns)

    def _settle(self) -> None:
        """Send what is left, free the models that are to go and that nothing waits for, and publish what is in use."""
        self._send_replies()
        for model in self._host.unloading():
            if not (model in self._state.queues or model in self._parked or self._generators.is_busy(model)):
                self._host.finish_unload(model)
                self._tended_ns = 0  # what is free now matters to loads that wait
                self._metrics.set_model(model, self._host.device, loaded=False, memory_bytes=0)
                self._adapters.forget(model)
                self._generators.forget(model)
        self._adapters.settle(lambda model: (*self._state.queues.get(model, ()), *self._parked.get(model, ())))
        self._metrics.set_queue_depths(self._state.queues)
        self._metrics.set_extents_in_use(sum([link.num_leased for link in self._links.values()]))
