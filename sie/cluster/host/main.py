"""Runs the puller: a frontend process that joins the supervisor, takes its requests from NATS, and drains on SIGTERM.

Serves no HTTP. NATS may be away at the start or later: the host serves its local clients, and the puller comes back.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
import uvloop
from nats.aio.msg import Msg

from sie.cluster.configs import Configs
from sie.cluster.configs import decoder as configs_decoder
from sie.cluster.connection import Connection, reason_of
from sie.cluster.host.beats import BEAT_S, Beats
from sie.cluster.host.pull_metrics import PullMetrics
from sie.cluster.host.text_runs import TextRuns
from sie.cluster.host.work_pull import WorkPull
from sie.cluster.pools import Pools
from sie.cluster.pools import decoder as pools_decoder
from sie.cluster.server_clock import MEASURE_S
from sie.cluster.shared_document import SharedDocument
from sie.cluster.subjects import gateway_beat, host_subject, lane_of, wake_pattern
from sie.frontend.connect import connect
from sie.frontend.process import FrontendProcess
from sie.ipc.messages import Launch, TakeConfigs, TookConfigs
from sie.runtime import child_setup
from sie.runtime.logs import configure, get_logger
from sie.values.errors import SieError

_log = get_logger(__name__)
_TICK_S = 0.1


class Puller:
    """The parts of one puller, and what happens on each tick."""

    def __init__(self, process: FrontendProcess) -> None:
        settings = process.settings
        self._process = process
        self.host = secrets.token_hex(8)
        lane = self._lane = lane_of(
            settings.server.pool_name, settings.server.machine_profile or process.gpu_type(), settings.server.bundle
        )
        self._connection = Connection(settings.cluster, f"sie host {settings.server.name or self.host}")
        self._connection.on_connected = self._on_connected
        self._metrics = PullMetrics(process.pages[0], process.models)
        self._work = WorkPull(process, self._connection, lane, self.host, self._metrics)
        self._texts = TextRuns(process, self._connection, lane.pool)
        self._beats = Beats(process, self._connection, lane, self.host)
        self._has_joined = False
        self._beat_now = asyncio.Event()
        self._pools = SharedDocument(self._connection, "pools", pools_decoder, Pools(), lambda _: None)
        self._configs = SharedDocument(self._connection, "configs", configs_decoder, Configs(), self._on_configs)
        process.on_configs = self._on_configs_taken

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until stopping is set, then drain."""
        opening = asyncio.create_task(self._open())
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait((opening, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            return
        opening.result()
        tasks = [asyncio.create_task(work) for work in self._works()]
        done, _ = await asyncio.wait((*tasks, waiting), return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiting}:
            task.result()
        deadline_s = time.monotonic() + self._process.settings.server.drain_timeout_s
        for task in tasks[1:]:
            task.cancel()
        await self._work.drain(deadline_s)
        await self._texts.drain(deadline_s)
        tasks[0].cancel()
        await self._beat()
        await self._connection.close()

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs until the host leaves; heartbeats, which go on while it drains, are the first."""
        works: list[Coroutine[Any, Any, None]] = [self._beat_forever(), self._tick_forever(), self._pools.follow()]
        if self._process.settings.cluster.accept_configs:
            works.append(self._configs.follow())
        return works

    def _on_configs(self, shared: Configs) -> None:
        self._process.send_configs(TakeConfigs(shared.hash_of(self._lane.pool), shared.of_pool(self._lane.pool)))

    def _on_configs_taken(self, taken: TookConfigs) -> None:
        self._beats.configs = taken
        self._beat_now.set()

    async def _open(self) -> None:
        connection, pool = self._connection, self._lane.pool
        await connection.open()
        while True:
            try:
                await connection.join_pool(pool)
                break
            except SieError as error:
                _log.warning("%s", error.message)
                await self._beat()  # a gateway that hears of the pool makes its streams
                await asyncio.sleep(1.0)
        self._has_joined = True
        for kind, take in (
            ("text", self._texts.on_text), ("cancel", self._texts.on_cancel), ("count", self._texts.on_count),
            ("cards", self._on_cards), ("load", self._on_load),
        ):  # fmt: skip
            await connection.subscribe(host_subject(pool, self.host, kind), take)
        await connection.subscribe(gateway_beat("*"), self._texts.on_gateway_beat)
        await connection.subscribe(wake_pattern(), self._on_wake)
        _log.info("takes work of pool %s, machine profile %s, bundle %s as host %s", *self._lane[:3], self.host)

    async def _follow_pools(self) -> None:
        """Work for the leased pool that has this host, or for its queue pool if none has."""
        lease = self._pools.value.of_host(self.host, self._connection.clock.to_server(time.monotonic_ns()))
        if lease == self._lane.lease:
            return
        _log.info("takes work of %s now", f"pool {lease}" if lease else f"its queue pool {self._lane.pool}")
        self._lane = self._beats.lane = self._lane._replace(lease=lease)
        await self._work.move(self._lane)
        self._beat_now.set()

    async def _on_connected(self) -> None:
        self._pools.read_soon()
        self._configs.read_soon()
        await self._work.restore()
        self._beat_now.set()

    async def _on_wake(self, _message: Msg) -> None:
        self._beat_now.set()

    async def _on_cards(self, message: Msg) -> None:
        try:
            await self._connection.publish(message.reply, await self._beats.packed_cards())
        except SieError as error:
            _log.warning("the cards cannot be sent: %s", error.message)

    async def _on_load(self, message: Msg) -> None:
        """Load a model that a gateway has requests for."""
        self._process.request_load(message.data.decode(errors="replace"))

    async def _tick_forever(self) -> None:
        measured_s = time.monotonic()
        while True:
            try:
                if self._connection.is_connected:
                    await self._follow_pools()
                    await self._work.tick()
                    if time.monotonic() - measured_s > MEASURE_S:
                        measured_s = time.monotonic()
                        await self._connection.measure_clock(self._lane.pool)
                self._texts.tick()
                self._metrics.show_state(
                    num_texts=self._texts.num_running, num_refused=len(self._beats.configs.refused),
                    is_connected=self._connection.is_connected,
                )  # fmt: skip
            except (SieError, nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                _log.debug("a tick failed: %s", reason_of(error))
            await asyncio.sleep(_TICK_S)

    async def _beat_forever(self) -> None:
        """Send a heartbeat each second, and at once after a change of models or when a gateway asks."""
        while True:
            self._beat_now.clear()
            changed = self._process.models.changed
            await self._beat()
            waits = [asyncio.ensure_future(event.wait()) for event in (changed, self._beat_now)]
            await asyncio.wait(waits, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            await asyncio.sleep(0.02)  # several changes make one beat

    async def _beat(self) -> None:
        if not self._connection.is_connected:
            return
        is_draining = self._process.is_draining or self._work.is_stopping or not self._has_joined
        try:
            await self._beats.send(
                is_draining=is_draining, num_running=self._work.num_running, num_texts=self._texts.num_running,
                items_per_s=self._work.items_per_s, credit=self._work.credit,
            )  # fmt: skip
        except SieError as error:
            _log.debug("no heartbeat: %s", error.message)


async def serve(launch: Launch) -> None:
    """Serve until SIGTERM, then finish what was taken."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    process = connect(launch)(loop)
    child_setup.calm_collector()
    await Puller(process).run(stopping)
    process.close()


def main() -> int:
    """Run the puller. The launch record is the only argument."""
    child_setup.exclude_imports_from_collections()
    launch = msgspec.json.decode(sys.argv[1], type=Launch)
    child_setup.die_with_parent(launch.supervisor_pid)
    configure(launch.log_format, launch.log_level, "puller")  # type: ignore[arg-type]
    uvloop.run(serve(launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
