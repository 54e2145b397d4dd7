"""Connects a gateway's frontend process to the hosts: heartbeats in, work out, results and events back.

Holds only what is in flight. A gateway that dies takes its own clients' connections with it and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec
from nats.aio.msg import Msg

from sie.catalog.profiles import model_of
from sie.cluster.connection import Connection, reason_of
from sie.cluster.gateway.cluster_status import cluster_status
from sie.cluster.gateway.config_service import ConfigService
from sie.cluster.gateway.fair_queue import Caller
from sie.cluster.gateway.gateway_metrics import GatewayMetrics
from sie.cluster.gateway.host_directory import Directory, Host
from sie.cluster.gateway.in_flight import InFlight
from sie.cluster.gateway.key_leases import KeyLeases
from sie.cluster.gateway.pool_service import RELEASE_S, PoolService
from sie.cluster.gateway.remote_operations import RemoteEncoder, RemoteExtractor, RemoteScorer
from sie.cluster.gateway.requested_placement import Placement, Places
from sie.cluster.gateway.windows import Windows
from sie.cluster.gateway.work_items import RemotePending
from sie.cluster.large_payloads import unpack
from sie.cluster.payloads import (
    VERSION,
    Cards,
    GatewayBeat,
    beat_decoder,
    cards_decoder,
    decode,
    encode,
    gateway_beat_decoder,
    results_decoder,
    taken_decoder,
    text_frame_decoder,
)
from sie.cluster.server_clock import MEASURE_S
from sie.cluster.subjects import Lane, answer_subject, any_host, gateway_beat, host_subject, wake_pattern
from sie.frontend.engine.interface import Pending
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.routing import Route
from sie.frontend.process import FrontendProcess
from sie.runtime.logs import get_logger
from sie.values.errors import ProtocolError, SieError, Unavailable

if TYPE_CHECKING:
    from sie.cluster.gateway.text_client import TextClient

_log = get_logger(__name__)
_TICK_S: Final = 0.1
_BEAT_S: Final = 1.0
_SHOW_S: Final = 1.0
_SETTLE_S: Final = 0.3
"""How long a new gateway waits for the heartbeats that it asked for, before it says what exists."""
_READY_S: Final = 3.0
_CARDS_S: Final = 5.0
_DEAF_S: Final = 2.5
"""After a reconnect hosts have this long to be heard before they count as silent."""
_ALONE_S: Final = 1.5
"""A gateway is ready while NATS is away for no longer than this, as for a restart: its requests wait."""
_FIRST_FAULT: Final = 400
_REFUSED: Final = {"kserve": "tensors", "trtis": "tensors"}
_REFUSED_PREFIXES: Final = {
    "/v1/responses": "stored responses",
    "/v1/files": "files",
    "/v1/containers": "files",
    "/v1/skills": "skills",
    "/v1/sessions": "sessions",
    "/v1/agent": "tools of the server",
    "/v1/admin": "management of models",
    "/v1/models/load": "management of models",
    "/v1/models/unload": "management of models",
    "/v1/models/reload": "management of models",
    "/v1/models/status": "management of models",
}


class Gateway:
    """The operations of one gateway process; its `sie.frontend.remote.Remote`."""

    def __init__(self, process: FrontendProcess) -> None:
        settings = process.settings
        self._process = process
        process.models.reads_tokenizers = False
        self.name = secrets.token_hex(6)
        self._connection = Connection(settings.cluster, f"sie gateway {self.name}")
        self._connection.on_connected = self._on_connected
        self._directory = Directory()
        self._provided = {name.lower() for name in settings.cluster.provided_profiles}
        self._directory.profiles |= self._provided
        self._metrics = GatewayMetrics(process.pages[0], self._directory.profiles, process.models)
        self._windows = Windows(self._directory, self.name)
        self._in_flight = InFlight(
            self._connection, self.name, settings.cluster.max_in_flight,
            self._metrics, window=self._windows.limit, together=self._windows.together,
        )  # fmt: skip
        self.pools = PoolService(
            self._connection, self._directory, settings.cluster, lambda model: process.models.find(model) is not None,
            self._load_on,
        )  # fmt: skip
        self.configs = ConfigService(self._connection, self._directory, lambda: list(process.models.entries))
        self.places = Places(
            self._directory, settings.server.pool_name, self._in_flight.by_lane, self.pools.resolve, self._is_deaf
        )
        self.places.ask_load = self._ask_once
        self.places.retry_after_s = settings.models.loading_retry_after_s
        process.models.hosts = self.places
        parts = self._in_flight, self.places.choose, settings.limits
        self.encoder, self.scorer, self.extractor = RemoteEncoder(*parts), RemoteScorer(*parts), RemoteExtractor(*parts)
        self._leases = KeyLeases(self._connection, self.name)
        self.lease = self._leases.lease
        self._texts: TextClient | None = None
        self._asking: set[str] = set()
        self._joined: set[str] = set()
        self._silent: set[str] = set()
        self._hears_from_s = self._connected_s = time.monotonic()
        self._settled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def generator(self) -> TextClient:
        """The starter of generated answers. Its module brings a template engine: it is imported when needed."""
        if self._texts is None:
            self._texts = self._make_texts()
        return self._texts

    def _make_texts(self) -> TextClient:
        from sie.cluster.gateway.text_client import TextClient

        process = self._process
        return TextClient(
            self._connection, self.name, self.places.hosts,
            settings=process.settings.generation, meter=process.generation_metrics,
        )  # fmt: skip

    @property
    def num_pending(self) -> int:
        """Requests that are not answered."""
        return self._in_flight.num_pending + (self._texts.num_pending if self._texts is not None else 0)

    async def wait_settled(self) -> None:
        """Wait until the hosts that are there have been heard; not long, since NATS may be away."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), _READY_S)

    def _is_deaf(self) -> bool:
        """Whether hosts are not heard for want of a connection, or cannot have been heard since there is one again."""
        return not self._connection.is_connected or time.monotonic() < self._hears_from_s

    # --- checks of dispatch ---------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse a request if the gateway has just started. `check_placement` checks the room for its key."""
        if not self._settled.is_set():
            raise Unavailable("The gateway is starting", code="PROVISIONING", retry_after_s=1)

    def check_route(self, route: Route) -> None:
        """Refuse a route that only a host serves. Raises SieError 501, which names it."""
        what = _REFUSED.get(route.envelope) if route.need != "open" else None
        for prefix, named in _REFUSED_PREFIXES.items():
            if route.template == prefix or route.template.startswith(prefix + "/"):
                what = named
        if what is not None:
            text = f"A gateway does not serve {what} ({route.template}); ask a host itself"
            raise SieError(text, code="NOT_SERVED_BY_GATEWAY", http_status=501)

    def check_placement(self, exchange: Exchange) -> None:
        """Read the pool and machine profile that a request wants. Raises Unavailable PROVISIONING without a host, and Overloaded."""
        if self._settled.is_set():  # `check_open` refuses before that
            key = exchange.holder.key if exchange.holder is not None else None
            caller = Caller(key.name, key.weight) if key is not None else Caller()
            self.places.enter(exchange.headers, caller)
            self._in_flight.check_room(caller)

    def abandon(self, pending: Pending, error: SieError) -> None:
        """End a client's wait with an error."""
        if isinstance(pending, RemotePending):
            self._in_flight.abandon(pending, error)
        else:
            pending.run.give_up(error)  # type: ignore[attr-defined]  # the other kind of this package

    def _ask_once(self, model: str, placement: Placement) -> None:
        """Ask a host to load a model, unless one loads it now: of those where it has not failed the one with the most free memory.

        It is asked at most once a second for each placement.
        """
        self._process.request_load_once(f"{model} on {'/'.join(placement)}", lambda _: self._ask_load(model, placement))

    def _ask_load(self, model: str, placement: Placement) -> None:
        hosts = [host for host in self.places.candidates(model, placement) if not host.serves(model)]
        states = {host: beat.state for host in hosts if (beat := host.find(model)) is not None}
        if states and "loading" not in states.values() and self._connection.is_connected:
            chosen = min(states, key=lambda host: (states[host] == "failed", *_memory_of(host)))
            self._load_on(chosen, model_of(model))  # hosts load the model for all its profiles

    def _load_on(self, host: Host, model: str) -> None:
        self._spawn(self._connection.publish(host_subject(host.beat.pool, host.beat.host, "load"), model.encode()))

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, then follow the hosts for as long as the process runs."""
        connection = self._connection
        await connection.open()
        for subject, take in (
            (any_host("beat"), self._on_beat),
            (answer_subject(self.name, "*", "result"), self._on_results),
            (answer_subject(self.name, "*", "taken"), self._on_taken),
            (answer_subject(self.name, "*", "text"), self._on_text),
            (gateway_beat("*"), self._on_gateway_beat),
        ):
            await connection.subscribe(subject, take)
        await self._join_own_pool()
        self._spawn(self.pools.follow())
        self._spawn(self.configs.follow())
        self._spawn(connection.publish(wake_pattern(), b""))
        await asyncio.sleep(_SETTLE_S)
        self._settled.set()
        beat_s = clock_s = shown_s = 0.0
        while True:
            now_s = time.monotonic()
            if connection.is_connected and now_s - beat_s >= _BEAT_S:
                beat_s = now_s
                self._windows.own = self._in_flight.take_backlog()
                beat = encode(GatewayBeat(VERSION, self.name, self._windows.own))
                self._spawn(connection.publish(gateway_beat(self.name), beat))
                self._spawn(self._leases.tick())
                if now_s >= self._hears_from_s:
                    self._spawn(self.pools.reconcile(forgets=now_s >= self._hears_from_s + RELEASE_S))
            if connection.is_connected and now_s - clock_s >= MEASURE_S:
                clock_s = now_s
                self._spawn(self._measure_clock())
            self._follow(now_s)
            if now_s - shown_s >= _SHOW_S:
                shown_s = now_s
                self._show(now_s)
            await asyncio.sleep(_TICK_S)

    async def _join_own_pool(self) -> None:
        while True:
            try:
                await self._connection.join_pool(self.places.current().pool)
                return
            except SieError as error:
                _log.warning("%s", error.message)
                await asyncio.sleep(1.0)

    async def _measure_clock(self) -> None:
        await self._connection.measure_clock(self.places.current().pool)

    def _follow(self, now_s: float) -> None:
        """Act on hosts that fell silent or came back, and on models that came or went."""
        if self._connection.is_connected:
            self._connected_s = now_s
        else:
            self._hears_from_s = now_s + _DEAF_S  # our own silence says nothing about hosts
        if now_s >= self._hears_from_s:
            silent = self._directory.stale(now_s)
            for host in self._silent - silent:
                self._in_flight.on_returned(host)
            self._tell_of_silence(silent)
            self._in_flight.on_silent(silent - self._directory.left(silent))  # one that left has given its items back
            if self._texts is not None:
                self._texts.on_silent(silent)
            self._silent = silent
            self._directory.forget_old(now_s)
            self._rescue(now_s)
        self._windows.renew(now_s)
        self._in_flight.pump()
        self._update_models(now_s)

    def _tell_of_silence(self, silent: set[str]) -> None:
        """Log which hosts are newly silent, and which are back."""
        silent_now = silent - self._silent
        left = self._directory.left(silent_now)
        if back := self._directory.names(self._silent - silent):
            _log.info("hosts are heard again: %s", back)
        if left:
            _log.info("hosts have left: %s", self._directory.names(left))
        if lost := self._directory.names(silent_now - left):
            _log.warning("hosts fell silent: %s", lost)

    def _rescue(self, now_s: float) -> None:
        """Find other hosts for items whose lane no longer serves their model, or have the model loaded."""
        live = self._directory.live(now_s)

        def is_served(lane: Lane, model: str) -> bool:
            return any(host.lane == lane and host.serves(model) for host in live)

        for (lane, model, wanted), items in self._in_flight.waiting(is_served).items():
            placement = wanted
            if wanted.lease and not self.pools.is_leased(wanted.lease):  # its hosts are back in their queue pool
                placement = wanted._replace(lease="")
            other = self.places.find_lane(model, placement)
            if other is not None and other != lane:
                self._in_flight.move(items, other)
            elif other is None and (failure := self.places.load_failure(model, placement)) is not None:
                for item in items:
                    self._in_flight.abandon(item.pending, failure)
            elif other is None or self._directory.beating(now_s):
                self._ask_once(model, placement)

    def _update_models(self, now_s: float) -> None:
        models = self._directory.models(now_s)
        if models is not None:
            self._process.models.update(models)

    async def _on_connected(self) -> None:
        self._hears_from_s = time.monotonic() + _DEAF_S
        self.pools.read_soon()
        self.configs.read_soon()
        if self._texts is not None:
            self._texts.on_connected()
        await self._connection.publish(wake_pattern(), b"")
        await self._in_flight.publish_again()

    def expire(self, now_ns: int) -> None:
        """End overdue requests."""
        reason = None
        if not self._connection.is_connected:
            text = "The gateway has no connection to NATS; retry in 1 s"
            reason = Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1)
        self._in_flight.expire(now_ns, reason)
        if self._texts is not None:
            self._texts.expire(now_ns, reason)

    def close(self) -> None:
        """End what is left; the connection ends with the process."""
        if self._texts is not None:
            self._texts.close()
        self._in_flight.fail_all(Unavailable("The server is stopping", code="SHUTTING_DOWN", retry_after_s=1))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_spawned_end)

    def _on_spawned_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a message to the hosts failed: %s", reason_of(error))

    # --- messages -------------------------------------------------------------------------------------------------

    async def _on_beat(self, message: Msg) -> None:
        try:
            beat = decode(message.data, beat_decoder)
        except ProtocolError as error:
            _log.warning("a heartbeat is refused: %s", error)
            return
        if message.subject != host_subject(beat.pool, beat.host, "beat"):
            _log.warning("a heartbeat for another host is refused: %s", message.subject)
            return
        now_s = time.monotonic()
        has_news = self._directory.hear(beat, now_s) and not beat.is_draining  # one that is not ready does not answer
        if has_news and beat.host not in self._asking:
            self._asking.add(beat.host)
            self._spawn(self._ask_cards(beat.pool, beat.host))
        if beat.pool not in self._joined:
            self._joined.add(beat.pool)
            self._spawn(self._join(beat.pool))
        if self._texts is not None:
            self._texts.on_beat(beat.host)
        self._update_models(now_s)

    async def _join(self, pool: str) -> None:
        """Make the streams of a pool: its hosts may not."""
        try:
            await self._connection.join_pool(pool)
        except SieError:
            self._joined.discard(pool)  # again at the next heartbeat
            raise

    async def _ask_cards(self, pool: str, host: str) -> None:
        try:
            data = await self._connection.call(host_subject(pool, host, "cards"), b"", _CARDS_S)
            cards = await unpack(self._connection, pool, decode(data, cards_decoder), cards_decoder)
            self._learn(host, cards)
        except ProtocolError as error:
            _log.warning("the cards of host %s are refused: %s", host, error)
        finally:
            self._asking.discard(host)

    def _learn(self, host: str, cards: Cards) -> None:
        self._directory.learn(host, cards)
        self._update_models(time.monotonic())

    async def _on_gateway_beat(self, message: Msg) -> None:
        try:
            self._windows.hear(decode(message.data, gateway_beat_decoder), time.monotonic())
        except ProtocolError as error:
            _log.warning("a heartbeat of a gateway is refused: %s", error)

    async def _on_results(self, message: Msg) -> None:
        try:
            results = decode(message.data, results_decoder).items
        except ProtocolError as error:
            _log.error("results are refused: %s", error)
            return
        for result in results:
            self._in_flight.on_result(result, message.subject)

    async def _on_taken(self, message: Msg) -> None:
        try:
            self._in_flight.on_taken(decode(message.data, taken_decoder), message.subject)
        except ProtocolError as error:
            _log.error("a notice is refused: %s", error)

    async def _on_text(self, message: Msg) -> None:
        try:
            frame = decode(message.data, text_frame_decoder)
        except ProtocolError as error:
            _log.error("a part of an answer is refused: %s", error)
            return
        if self._texts is not None:
            self._texts.on_frame(frame, message.subject)

    # --- metrics --------------------------------------------------------------------------------------------------

    def record(
        self, exchange: Exchange, status: int, headers: list[tuple[str, str]], error: SieError | None
    ) -> list[tuple[str, str]]:
        """Count a request for inference that ends. Returns the headers as they are."""
        route = exchange.route
        if route is not None and route.label and (error is not None or status < _FIRST_FAULT):
            duration_s = (time.monotonic_ns() - exchange.began_ns) / 1e9
            self._metrics.record_end(route.label, self.places.current(), error, duration_s)
        return headers

    def _show(self, now_s: float) -> None:
        """Publish the gauges about the cluster."""
        for pool in self.pools.in_force():
            self._directory.profiles.update(pool.gpus, pool.gpu_caps)
        texts = self._texts.by_lane() if self._texts is not None else Counter[Lane]()
        self._metrics.publish(
            self._directory.statuses(now_s), self.pools.in_force(), self._in_flight.by_lane + texts,
            epoch=self.configs.epoch, is_connected=self._connection.is_connected,
        )  # fmt: skip

    # --- what is shown --------------------------------------------------------------------------------------------

    def hosts(self) -> list[Host]:
        """Return the hosts that beat."""
        return self._directory.beating(time.monotonic())

    def readiness(self) -> dict[str, Any]:
        """Return the body of `/readyz`. While NATS is away requests wait for it, and other gateways may reach it."""
        return {"status": self._status(), "healthy_workers": len(self.hosts())}

    def _status(self) -> str:
        if self._process.is_draining:
            return "stopping"
        if not self._settled.is_set():
            return "starting"
        return "disconnected" if time.monotonic() - self._connected_s > _ALONE_S else "ready"

    def status_frame(self) -> str:
        """Return a frame of `/ws/cluster-status`. Source: SIE API reference, section 14."""
        status = cluster_status(self.hosts(), self._process.models.entries.values())
        return msgspec.json.encode({"timestamp": time.time(), **status}).decode()

    def health(self) -> dict[str, Any]:
        """Return the body of `/health`. Source: SIE API reference, section 14."""
        hosts = self.hosts()
        gpus = sorted({host.lane.profile for host in hosts})
        return {
            "status": "healthy" if hosts else "degraded", "type": "gateway", "configured_gpu_types": sorted({*gpus, *self._provided}),
            "live_gpu_types": gpus, **cluster_status(hosts, self._process.models.entries.values()),
        }  # fmt: skip


def _memory_of(host: Host) -> tuple[int, int]:
    return host.beat.memory_used_bytes, host.beat.queued_tokens
