"""F60: handshakes that are broken, cut or never begun end by themselves, and cost other clients little."""

from __future__ import annotations

import http.client
import random
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.cluster import MODEL, cluster
from tests.chaos.history import quantile
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import Server, eventually, free_port
from tests.process.test_renewal import client_hello, issue, trusting

_HELLO = client_hello()
FORMS = {
    "nothing": b"",
    "a part": _HELLO[: len(_HELLO) // 2],
    "one byte": _HELLO[:1],
    "no more than a hello": _HELLO,
    "bytes at random": random.Random(SEED).randbytes(2000),
    "plain HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a record longer than any": b"\x16\x03\x01\xff\xff" + bytes(100),
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
}


def num_files(server: Server) -> int:
    return sum(psutil.Process(pid).num_fds() for pid in server.pids("frontend"))


def ask(server: Server) -> float:
    """Return how long a request on a connection of its own took, in seconds."""
    began_s = time.monotonic()
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=10, context=trusting())
    connection.request("POST", f"/v1/encode/{MODEL}", b'{"items":[{"text":"x"}]}', {"content-type": "application/json"})
    assert connection.getresponse().status == 200
    connection.close()
    return time.monotonic() - began_s


@pytest.mark.row("F60", "hundreds of TLS handshakes are broken, cut or never begun")
@pytest.mark.timing(forks=True)
def test_f60_broken_handshakes_end_and_harm_no_other_client(row: Row, tmp_path: Path):
    issue(tmp_path, "own")
    grpc_port = free_port()
    with cluster(
        "--tls-cert", str(tmp_path / "own.pem"), "--tls-key", str(tmp_path / "own.key"), "--grpc-port", str(grpc_port),
        frontends=1, workers=1, is_warm=False,
    ) as server:  # fmt: skip
        ask(server)
        before, kept = num_files(server), list[socket.socket]()
        for data in [*FORMS.values()] * pick(25, 200):
            for port in (server.port, grpc_port):
                kept.append(socket.create_connection(("127.0.0.1", port), 10))
                kept[-1].sendall(data)
        times_s = [ask(server) for _ in range(pick(20, 200))]
        if pick(False, True):  # it takes the time limit of a handshake
            eventually(lambda: num_files(server) <= before, "every handshake to end, though its client stays", 30.0)
        for sock in kept:
            sock.close()
        eventually(lambda: num_files(server) <= before, "no descriptor more")
        row.equals("handshakes", len(kept), 2 * len(FORMS) * pick(25, 200))
        row.at_most("p99 beside them", quantile(times_s, 0.99), 0.5, "s", slack=4.0)
