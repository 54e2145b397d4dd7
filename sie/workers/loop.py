"""Runs the worker's step loop: drain requests, plan a step, run it, reply. No other file of a worker drains a ring.

It has one thread. It waits in epoll only if no item waits for a step, and it never waits for a peer.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from sie.config.settings import Settings
from sie.ipc import messages
from sie.ipc.channel import Channel, ChannelClosedError
from sie.ipc.messages import Load, Stage, Unload, Unstage
from sie.runtime.child_setup import calm_collector
from sie.runtime.logs import get_logger, set_level
from sie.shm.inflight import InflightPage
from sie.shm.large import LargeBudget
from sie.shm.layout import RELEASE, SUBMIT, Descriptor, ProtocolError
from sie.values.card import ModelCard
from sie.values.errors import Internal, SieError, Unavailable
from sie.workers.device.faults import WornError
from sie.workers.device.memory import is_worn
from sie.workers.generation.engines import Generators
from sie.workers.loading.adapters import AdapterHost
from sie.workers.loading.hosting import Host
from sie.workers.operations import by_operation, fit_reply, refusal, waiting_items
from sie.workers.requests.frontend_link import FrontendLink
from sie.workers.requests.joining import Joining
from sie.workers.requests.reply_writer import ReplyWriter
from sie.workers.requests.worker_request import Request, read_request, send_error
from sie.workers.scheduling.ceilings import Ceiling, drop_outgrown
from sie.workers.scheduling.scheduler import State, plan_step
from sie.workers.scheduling.waiting import Budget, Step, WaitingItem
from sie.workers.scheduling.waiting_queue import count_items
from sie.workers.steps import Steps
from sie.workers.telemetry import WorkerMetrics
from sie.workers.tensor_statistics import TensorStatistics

_log = get_logger(__name__)
_IDLE_WAIT_S = 0.2
_CREDIT_WAIT_S = 0.005
_HEARTBEAT_NS = 200_000_000
_PERIODIC_NS = 1_000_000_000


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
        set_needed: Callable[[bool], None] = lambda _needed: None,
    ) -> None:
        """read_memory, if given, is called and reported once a second; ceiling is the first one of every model.

        set_needed is told whether this worker needs its cores, around each wait for events.
        """
        self._set_needed = set_needed
        self._first_ceiling = ceiling
        self._tell_loaded = on_loaded
        self._read_memory = read_memory
        self._channel = channel
        self._host = host
        self._adapters = AdapterHost(host, channel.send, metrics.set_adapters)
        self._metrics = metrics
        self._tensors = TensorStatistics(metrics.page)
        self._budget = budget
        self._state = State()
        self._parked: dict[str, list[WaitingItem]] = {}
        """Items by model whose replies found no memory. They are not in the queues, where they would block others."""
        self._replies = ReplyWriter(settings)
        self._steps = Steps(
            settings, page=page, state=self._state, replies=self._replies, metrics=metrics, tensors=self._tensors,
            is_cpu=host.device == "cpu", flush=self._send_replies, ask_for_memory=self._ask_for_memory,
        )  # fmt: skip
        self._links: dict[int, FrontendLink] = {}
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._joining = Joining(settings, large, watch=self._watch, unwatch=self._unwatch, on_link=self._attach)
        self._generators = Generators(
            settings, device=host.device, state=self._state, metrics=metrics, max_suspects=page.max_entries,
            announce=self._steps.announce, ask_for_memory=self._ask_for_memory,
        )  # fmt: skip
        self._heartbeat_ns = self._periodic_ns = 0
        self._watch(channel.fileno(), self._on_control)
        self._watch(host.event_fd, self._on_loaded)
        self._watch(self._adapters.event_fd, self._adapters.collect)
        self._watch(self._generators.event_fd, self._generators.collect)

    def run(self) -> None:
        """Serve until the supervisor closes the control channel. Raises DeviceLostError, WornError."""
        try:
            while True:
                self.run_once(_IDLE_WAIT_S)
        except ChannelClosedError:
            _log.debug("the supervisor closed the control channel")

    def run_once(self, wait_s: float) -> None:
        """Handle events and run one step. Wait at most wait_s for events while no step can run.

        Raises ChannelClosedError if the supervisor is gone.
        """
        if self._state or self._steps.begun_model is not None:
            self._poll(0.0)
        else:
            self._wait(self._idle_wait_s(wait_s))
        if self._replies:
            self._replies.retry(time.monotonic_ns(), self._may_get_memory)
        if self._parked and not self._may_get_memory():
            self._unpark()  # a cancel freed the memory, so no release announces it
        now_ns = time.monotonic_ns()
        if now_ns - self._heartbeat_ns > _HEARTBEAT_NS:
            self._publish_heartbeat(now_ns)
        if now_ns - self._periodic_ns > _PERIODIC_NS:
            self._run_periodic(now_ns)
        if self._generators.engines:
            self._generators.tend(now_ns)
        step = plan_step(self._state, self._budget, now_ns)
        if self._steps.begun_model is not None and not self._is_full(step):
            self._steps.settle()  # what arrives until then joins the next step
        elif step is None:
            pass
        elif step.is_own:
            self._generators.step(step.model)
            self._publish_heartbeat(time.monotonic_ns())
        else:
            self._generators.settle()
            self._state.remove(step)
            self._apply(step)
        self._finish_iteration()

    def _is_full(self, step: Step | None) -> bool:
        """Return whether a step leaves items waiting: more items would not make it larger."""
        if step is None or step.is_own:
            return False
        num_leaving = count_items(step.items) + count_items(step.expired) + len(step.refused)
        return num_leaving < len(self._state.queues[step.model])

    def _publish_heartbeat(self, now_ns: int) -> None:
        self._heartbeat_ns = now_ns
        self._steps.publish(now_ns, self._generators.under_way)

    def _run_periodic(self, now_ns: int) -> None:
        """Do the work that is due once a second."""
        self._periodic_ns = now_ns
        drop_outgrown(self._state.ceilings, self._budget.max_tokens, now_ns)
        for link in self._links.values():
            link.retry()  # a lease that ended here without a release may have freed memory
        self._joining.retry()
        if self._read_memory is not None:
            self._channel.send(self._read_memory())
        if is_worn() and self._is_idle():
            raise WornError

    def _is_idle(self) -> bool:
        """Return whether nothing would be lost or repeated if the worker ended now."""
        is_busy = self._state or self._parked or self._replies or self._host.is_loading or self._steps.begun_model
        return not is_busy and not any(map(self._generators.is_busy, self._generators.engines))

    # --- events ---------------------------------------------------------------------------------------------------

    def _idle_wait_s(self, wait_s: float) -> float:
        """Return how long to wait for events; replies without credit or memory are retried soon."""
        num_unsent = sum([not link.flush() for link in self._links.values()])
        is_unsent = num_unsent or self._replies or self._generators.is_unsent
        return min(wait_s, _CREDIT_WAIT_S) if is_unsent else wait_s

    def _wait(self, wait_s: float) -> None:
        """Wait for events, and lend this worker's cores in the meantime. A load beside the loop needs them."""
        if self._host.is_loading:
            self._poll(wait_s)
            return
        self._set_needed(False)
        events = self._epoll.poll(wait_s)
        self._set_needed(True)
        self._handle(events)

    def _watch(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        """Stop watching. ORDER: before fd is closed, which does not end its events while others have the same pidfd."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _poll(self, timeout_s: float) -> None:
        self._handle(self._epoll.poll(timeout_s))

    def _handle(self, events: list[tuple[int, int]]) -> None:
        # A handler may close a descriptor of this round and open another one, which gets the same number.
        for fd, handler in [(fd, self._handlers.get(fd)) for fd, _ in events]:
            if handler is not None and self._handlers.get(fd) is handler:
                handler()

    def _on_control(self) -> None:
        while (received := self._channel.try_receive()) is not None:
            message, fds = received
            match message:
                case messages.Attach():
                    self._detach_slot(message.peer_slot)
                    self._joining.add(message, fds)
                case Load() | Unload() | Stage() | Unstage():
                    self._host.apply(message)
                case messages.Configure(settings):
                    set_level(settings.server.log_level)  # the other settings here are fixed while the worker runs
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
            self._metrics.set_model(
                card.id, self._host.device,
                loaded=True, memory_bytes=runner.memory_bytes, fallbacks=hosted.fallbacks,
            )  # fmt: skip
            self._generators.add(runner)
            self._tell_loaded(card)
            calm_collector()
            self._periodic_ns = 0

    def _detach_slot(self, slot: int) -> None:
        """Detach the frontend in this slot, if there is one."""
        link = self._links.get(slot)
        if link is not None:
            self._detach(link)

    def _attach(self, link: FrontendLink) -> None:
        self._links[link.slot] = link
        self._watch(link.attachment.bell_fd, lambda: self._on_bell(link))
        self._watch(link.attachment.sock_fd, lambda: self._on_socket(link))
        self._watch(link.attachment.pidfd, lambda: self._detach(link))

    def _detach(self, link: FrontendLink) -> None:
        """Drop a dead frontend: its queued work never runs, and its memory is unmapped."""
        self._steps.settle()  # a step under way writes its rows to that memory
        for fd in (link.attachment.bell_fd, link.attachment.sock_fd, link.attachment.pidfd):
            self._unwatch(fd)
        self._unpark()  # the other parked items may find the memory that is now free
        for item in self._state.drop_where(lambda request: request.link is link):
            item.request.drop()
        self._replies.drop(link)
        self._generators.drop(link)
        if self._links.get(link.slot) is link:
            del self._links[link.slot]
        link.close()

    def _on_socket(self, link: FrontendLink) -> None:
        """Read the announcement of a large segment. At end of file, stop reading until the pidfd reports a death."""
        try:
            if not link.attachment.read_socket():
                self._unwatch(link.attachment.sock_fd)
        except ProtocolError as error:
            self._report_fault(link, error)

    def _on_bell(self, link: FrontendLink) -> None:
        try:
            now_ns = time.monotonic_ns()
            released: list[int] = []
            for descriptor in link.attachment.drain():
                if descriptor.kind == SUBMIT:
                    self._accept(link, descriptor, now_ns)
                elif descriptor.kind == RELEASE:
                    released.append(descriptor.offset)
                else:
                    raise ProtocolError(f"a frontend sent kind {descriptor.kind}")
            if released:
                link.release(released)
                if self._parked:
                    self._unpark()
            link.flush()
            link.check()
        except ProtocolError as error:
            self._report_fault(link, error)

    def _report_fault(self, link: FrontendLink, error: ProtocolError) -> None:
        _log.error("frontend-%d broke the protocol: %s", link.slot, error)
        self._detach(link)
        self._channel.send(messages.PeerFault(link.slot))

    def _accept(self, link: FrontendLink, descriptor: Descriptor, now_ns: int) -> None:
        try:
            request = read_request(link, descriptor)
        except ProtocolError as error:
            _log.error("a request of frontend-%d cannot be read: %s", link.slot, error)
            send_error(link, descriptor.request_id, Internal("the request reached the worker incomplete"))
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
                self._tensors.observe_failure(step.model, refused.item, time.monotonic_ns())
        hosted = self._host.models[step.model]
        runner = hosted.runner
        assert runner is not None
        for item in step.items:  # before others look for memory: a cancel may free some
            if not item.request.ended and item.request.is_cancelled:
                item.request.cancel()
        items, blocked = self._reserve(step.items, hosted.card)
        if blocked:
            self._park(step.model, blocked)
        self._send_replies()  # the replies to items that do not run
        for same in by_operation(items):
            self._steps.run(runner, hosted.card, same)

    def _reserve(self, items: list[WaitingItem], card: ModelCard) -> tuple[list[WaitingItem], list[WaitingItem]]:
        """Return the items that may run, and those whose replies find no memory now. Others end here."""
        now_ns = time.monotonic_ns()
        ready: list[WaitingItem] = []
        blocked: list[WaitingItem] = []
        for item in items:
            request: Request = item.request
            if request.ended:
                continue
            try:
                is_ready = request.may_run or self._replies.try_reserve(request, fit_reply(request, card), now_ns)
            except SieError as error:
                request.fail(error)
                continue
            (ready if is_ready else blocked).append(item)
        return ready, blocked

    def _may_get_memory(self) -> bool:
        """Return whether a frontend still holds a reply that it will release."""
        return any(link.num_leased for link in self._links.values())

    def _park(self, model: str, items: list[WaitingItem]) -> None:
        """Set items aside until a reply extent is released. If none will be, their requests fail.

        With a leading item, the items that need its output are parked too: they must not run before it.
        """
        if self._may_get_memory():
            led = {id(item.request) for item in items if item.leads}
            followers = self._state.drop_where(lambda request: id(request) in led) if led else []
            self._parked.setdefault(model, []).extend((*items, *followers))
            return
        for request in {id(item.request): item.request for item in items}.values():
            request.fail(request.lack_of_memory())

    def _unpark(self) -> None:
        """Return parked items to the front of their queues."""
        parked, self._parked = self._parked, {}
        for model, items in parked.items():
            self._state.requeue(model, items)

    def _send_replies(self) -> None:
        """Send the queued replies, with one doorbell for each frontend. Unsent ones are retried when idle."""
        for link in self._links.values():
            link.flush()

    def _ask_for_memory(self, model: str) -> None:
        self._channel.send(messages.MemoryShort(model))

    def _finish_iteration(self) -> None:
        """Send remaining replies, free unloading models without work, and publish metrics."""
        self._send_replies()
        for model in self._host.unloading():
            is_used = model in self._state.queues or model in self._parked or model == self._steps.begun_model
            if not (is_used or self._generators.is_busy(model)):
                self._adapters.forget(model)  # these two refer to its memory, which `finish_unload` frees
                self._generators.forget(model)
                self._host.finish_unload(model)
                self._periodic_ns = 0  # report the free memory soon: loads may wait for it
                self._metrics.set_model(model, self._host.device, loaded=False, memory_bytes=0)
        self._adapters.settle(lambda model: (*self._state.queues.get(model, ()), *self._parked.get(model, ())))
        self._metrics.set_queue_depths(self._state.queues)
        self._metrics.set_extents_in_use(sum([link.num_leased for link in self._links.values()]))
