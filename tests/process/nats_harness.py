"""NATS, gateways and hosts for tests: real servers on loopback, and a link that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nats
import nats.errors
import nats.js.errors

from tests.process.harness import WAIT_S, Server, eventually, free_port, start_server
from tests.process.wire import get

NATS_SERVER = Path(sys.executable).with_name("nats-server")
NO_WAIT = ("--drain-timeout-s", "5")


class Nats:
    """One nats-server with JetStream. It keeps its port over a restart, and loses what it had in memory."""

    def __init__(self, directory: str, *flags: str) -> None:
        self.port = free_port()
        self._directory = directory
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self.log = Path(directory, "nats.log")

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        store = () if "-c" in self._flags else ("-js", "-sd", self._directory)  # a file of settings has its own
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [NATS_SERVER, "-a", "127.0.0.1", "-p", str(self.port), *store, *self._flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
        eventually(self._answers, f"NATS answers: {self.log.read_text()}")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as sock:
            return sock.recv(4) == b"INFO"
        return False

    def reload(self) -> None:
        """Have it read its file of settings again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_S)
            self._process = None


@contextlib.contextmanager
def start_nats(*flags: str) -> Iterator[Nats]:
    """Yield a running NATS server; further flags are nats-server's."""
    with tempfile.TemporaryDirectory(prefix="sie-nats-") as directory:
        nats = Nats(directory, *flags)
        nats.start()
        try:
            yield nats
        finally:
            nats.kill()


class NatsCluster:
    """Three NATS servers that keep each stream on all of them."""

    def __init__(self, directory: str) -> None:
        routes = [free_port() for _ in range(3)]
        others = ",".join(f"nats://127.0.0.1:{port}" for port in routes)
        self.nodes: dict[str, Nats] = {}
        for number, port in enumerate(routes):
            name = f"n{number}"
            folder = Path(directory, name)
            folder.mkdir()
            self.nodes[name] = Nats(
                str(folder), "-n", name, "--cluster_name", "sie", "--cluster", f"nats://127.0.0.1:{port}", "--routes", others
            )  # fmt: skip

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes.values())

    def leader(self, stream: str) -> str:
        """Return the name of the server that leads a stream, once all servers have the whole of it."""
        found: list[str] = []

        def is_whole() -> bool:
            found[:] = [asyncio.run(self._ask_leader(stream))]
            return bool(found[0])

        eventually(is_whole, f"all servers have {stream}")
        return found[0]

    async def _ask_leader(self, stream: str) -> str:
        try:
            async with asyncio.timeout(2.0):
                async with await nats.connect(self.url.split(","), allow_reconnect=False) as connection:
                    state = (await connection.jetstream(timeout=1.0).stream_info(stream)).cluster
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError):
            return ""
        replicas = (state.replicas or []) if state is not None else []
        is_whole = len(replicas) == len(self.nodes) - 1 and all(replica.current for replica in replicas)
        return (state.leader or "") if state is not None and is_whole else ""


@contextlib.contextmanager
def start_nats_cluster() -> Iterator[NatsCluster]:
    """Yield three NATS servers that have elected a leader."""
    with tempfile.TemporaryDirectory(prefix="sie-nats-") as directory:
        cluster = NatsCluster(directory)
        try:
            for node in cluster.nodes.values():
                node.start()
            yield cluster
        finally:
            for node in cluster.nodes.values():
                node.kill()


class Link:
    """A TCP link to NATS that can be cut without a sign: while it is, bytes wait on both sides."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.is_cut = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._is_over = True
        self._thread.join(WAIT_S)
        for sock in (self._listener, *(end for pair in self._pairs for end in pair)):
            sock.close()

    def _run(self) -> None:
        while not self._is_over:
            if self.is_cut:
                time.sleep(0.01)
                continue
            peers = {one: other for pair in self._pairs for one, other in (pair, pair[::-1])}
            ready, _, _ = select.select([self._listener, *peers], [], [], 0.02)
            for sock in ready:
                if sock is self._listener:
                    self._accept()
                elif sock in peers:
                    self._forward(sock, peers[sock])

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            self._pairs.append((near, socket.create_connection(("127.0.0.1", self._port), 1.0)))
        except OSError:
            near.close()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        try:
            data = one.recv(1 << 16)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for pair in [pair for pair in self._pairs if one in pair]:
            self._pairs.remove(pair)
            for end in pair:
                end.close()


@contextlib.contextmanager
def start_link(nats: Nats) -> Iterator[Link]:
    """Yield a link to NATS."""
    link = Link(nats.port)
    try:
        yield link
    finally:
        link.close()


@contextlib.contextmanager
def start_host(url: str, *flags: str, is_stopped: bool = False) -> Iterator[Server]:
    """Yield a host that takes work from NATS."""
    with start_server("--nats", url, "--frontends", "1", *NO_WAIT, *flags, is_stopped=is_stopped) as server:
        yield server


@contextlib.contextmanager
def start_gateway(url: str, *flags: str, is_stopped: bool = False) -> Iterator[Server]:
    """Yield a gateway."""
    with start_server(
        "--nats", url, "--frontends", "1", *NO_WAIT, *flags, command="gateway", is_stopped=is_stopped
    ) as server:
        yield server


def wait_for_hosts(gateway: Server, count: int, *models: str) -> None:
    """Wait until a gateway knows this many hosts, which serve these models."""

    def knows() -> bool:
        health = get(gateway.port, "/health").json()
        serving = [set(worker["loaded_models"]) for worker in health["workers"]]
        return len(serving) == count and all(set(models) <= names for names in serving)

    eventually(knows, f"{count} hosts with {models}")
