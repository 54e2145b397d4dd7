"""A renewed certificate: used while requests continue, refused when it is broken, and reported."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Self

import pytest

from tests.process.harness import WAIT_S, Server, eventually, free_port, start_server
from tests.process.nats_harness import start_gateway, start_nats
from tests.process.notify_socket import ServiceManager
from tests.process.test_listen import openssl
from tests.process.wire import raw_request

STUB = ("--model", "stub/a=stub:dense=16,latency_ms=5")
_LINGER_S = 1.5
"""A retiring frontend tells clients for longer than that with their answers to connect anew."""
UPGRADE = {
    "connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates")


def issue(home: Path, name: str) -> None:
    """Write a certificate of its own for localhost, and its key."""
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key",
        "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost",
        cwd=home,
    )  # fmt: skip


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("certificates")
    for name in ("old", "new"):
        issue(home, name)
    return home


@pytest.fixture
def served(issued: Path, tmp_path: Path) -> Path:
    """Return a directory whose `tls.pem` and `tls.key` are the old ones."""
    put(issued, tmp_path, "old")
    return tmp_path


def put(issued: Path, served: Path, name: str) -> None:
    for kind in ("pem", "key"):
        shutil.copyfile(issued / f"{name}.{kind}", served / f"next.{kind}")
        (served / f"next.{kind}").replace(served / f"tls.{kind}")


def flags(served: Path) -> tuple[str, ...]:
    return (*STUB, "--tls-cert", str(served / "tls.pem"), "--tls-key", str(served / "tls.key"))


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def shown(port: int) -> bytes:
    """Return the certificate that a new connection is shown, DER.

    By hand: Python leaves an SSLSocket open whose peer resets it before the handshake.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = trusting().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        while (certificate := try_handshake(session)) is None:
            sock.sendall(outgoing.read())
            received = sock.recv(65536)
            if not received:
                raise ConnectionResetError("closed during the handshake")
            incoming.write(received)
    return certificate


def try_handshake(session: ssl.SSLObject) -> bytes | None:
    try:
        session.do_handshake()
    except ssl.SSLWantReadError:
        return None
    return session.getpeercert(binary_form=True)


def told(server: Server) -> str | None:
    """Return what `/ws/status` says is wrong with the certificate.

    By hand: a client of threads writes while it reads, which an SSLSocket of OpenSSL is not made for.
    """
    with (
        socket.create_connection(("127.0.0.1", server.port), WAIT_S) as plain,
        trusting().wrap_socket(plain, server_hostname="localhost") as sock,
        sock.makefile("rb") as stream,
    ):
        sock.sendall(raw_request("/ws/status", headers=UPGRADE, method="GET", length=False))
        assert b" 101 " in stream.readline()
        while stream.readline() != b"\r\n":
            pass
        _, short = stream.read(2)
        length = {126: 2, 127: 8}.get(short, 0)
        return json.loads(stream.read(int.from_bytes(stream.read(length), "big") if length else short))["tls_error"]


def der(issued: Path, name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((issued / f"{name}.pem").read_text())


class Clients:
    """Clients that ask all the time; counts what they see.

    They open a new connection when an answer says so, or for each request if keep_alive is False. A retiring frontend
    closes a connection that was idle for two seconds, as it is where this process stood still: that is no failure.
    """

    def __init__(self, port: int, num_clients: int, *, keep_alive: bool = True) -> None:
        self.outcomes: Counter[str] = Counter()
        self._port = port
        self._keep_alive = keep_alive
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def _ask(self) -> None:
        context = trusting()
        connection = http.client.HTTPSConnection("localhost", self._port, timeout=WAIT_S, context=context)
        body = json.dumps({"items": [{"text": "x"}]})
        asked_s = 0.0
        while not self._stop.wait(0.01):
            is_kept = connection.sock is not None
            before_s, asked_s = asked_s, time.monotonic()
            try:
                connection.request("POST", "/v1/encode/stub/a", body, {"content-type": "application/json"})
                asked_s = time.monotonic()
                response = connection.getresponse()
                response.read()
                self.outcomes[str(response.status)] += 1
                if response.headers.get("connection") == "close":
                    self.outcomes["told to connect anew"] += 1
                if not self._keep_alive:
                    connection.close()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not is_kept or asked_s - before_s < _LINGER_S:
                    self.outcomes[type(error).__name__] += 1
        connection.close()


def test_renewed_certificate_is_taken_over_and_no_request_fails(issued, served):
    grpc_port = free_port()
    with start_server(*flags(served), "--frontends", "2", "--grpc-port", str(grpc_port)) as server:
        before, grpc = set(server.frontends()), server.pids("grpc")
        assert shown(server.port) == shown(grpc_port) == der(issued, "old")
        with Clients(server.port, 4) as clients:
            put(issued, served, "new")
            server.log_line("certificate renewed")
        assert all(shown(server.port) == der(issued, "new") for _ in range(20))
        assert shown(grpc_port) == der(issued, "new")
        assert server.pids("grpc") == grpc  # gRPC asks for the certificate before each handshake
        eventually(lambda: len(after := set(server.frontends())) == 2 and not before & after, "two others")
        assert server.complaints() == []
    assert clients.outcomes.pop("told to connect anew")
    assert set(clients.outcomes) == {"200"}, clients.outcomes


class Flood:
    """Connections that are opened as fast as they can be: some at once closed, some idle, some in a handshake that stops."""

    def __init__(self, port: int, num_threads: int, num_open: int) -> None:
        self.num_opened = 0
        self._port = port
        self._num_open = num_open
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._open, daemon=True) for _ in range(num_threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _open(self) -> None:
        hello = client_hello()
        kept: deque[socket.socket] = deque()
        while not self._stop.wait(0.002):
            try:
                sock = socket.create_connection(("127.0.0.1", self._port), WAIT_S)
                kept.append(sock)
                sock.sendall((b"", hello[: len(hello) // 2], hello)[self.num_opened % 3])
            except OSError:  # the flood itself may be turned away
                continue
            finally:
                self.num_opened += 1
                if len(kept) > self._num_open:
                    kept.popleft().close()
        for sock in kept:
            sock.close()


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    assert try_handshake(trusting().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")) is None
    return outgoing.read()


def count_fds(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_renewal_under_a_flood_of_connections_ends_and_breaks_no_request(issued, served):
    """Granian sees no signal while connections arrive, so they go to another frontend from two seconds before it."""
    with start_server(*flags(served), "--frontends", "1") as server:
        [supervisor] = server.pids("supervisor")
        num_fds = count_fds(supervisor)
        with Flood(server.port, 1, 100) as flood, Clients(server.port, 3, keep_alive=False) as clients:
            eventually(lambda: flood.num_opened > 500, "a flood")
            put(issued, served, "new")
            server.log_line("certificate renewed")
        assert all(shown(server.port) == der(issued, "new") for _ in range(20))
        assert clients.outcomes.pop("200")
        assert set(clients.outcomes) <= {"told to connect anew"}, clients.outcomes
        eventually(lambda: len(server.frontends()) == 1, "no frontend more")
        eventually(lambda: count_fds(supervisor) <= num_fds, "no descriptor more")


def test_a_gateway_takes_a_renewed_certificate(issued, served):
    """The log said that every frontend serves with it, and each served with the old one until the next start."""
    with start_nats() as nats, start_gateway(nats.url, *flags(served)[len(STUB) :]) as gateway:
        assert shown(gateway.port) == der(issued, "old")
        put(issued, served, "new")
        gateway.log_line("certificate renewed", WAIT_S)
        assert all(shown(gateway.port) == der(issued, "new") for _ in range(10))


def test_broken_certificate_changes_nothing_and_is_reported(issued, served):
    with ServiceManager() as manager, start_server(*flags(served), env=manager.env) as server:
        assert told(server) is None
        shutil.copyfile(issued / "new.pem", served / "tls.pem")  # and the key is still the old one
        server.process.send_signal(signal.SIGHUP)
        server.log_line("the certificate in force stays: tls_cert, tls_key")
        eventually(lambda: "tls_cert" in (told(server) or ""), "it says so")
        assert manager.wait_for("STATUS", "certificate not renewed")
        (frontend,) = server.frontends()
        os.kill(frontend, signal.SIGKILL)
        eventually(lambda: frontend not in server.frontends(), "its end")
        eventually(lambda: can_connect(server), "its successor")
        assert shown(server.port) == der(issued, "old")  # read from what is in force, not from the broken files
        shutil.copyfile(issued / "new.key", served / "tls.key")
        server.log_line("certificate renewed")
        assert shown(server.port) == der(issued, "new")
        assert told(server) is None


def can_connect(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return bool(shown(server.port))
    return False


def test_stop_in_the_middle_of_a_renewal_is_a_stop(issued, served):
    with start_server(*flags(served), "--frontends", "2") as server:
        before = set(server.frontends())
        put(issued, served, "new")
        eventually(lambda: set(server.frontends()) - before, "the stand-in")
        server.stop()
