"""A full server's refusal reaches even a client that is still about to send its body."""

from __future__ import annotations

import threading

import msgpack

from tests.process.harness import WAIT_S, eventually, paused, start_server
from tests.process.wire import MSGPACK, connect, encode, raw_request, read_response, total

BODY = msgpack.packb({"items": [{"text": "x"}]})


def test_refusal_reaches_a_client_that_sends_its_body_late():
    """Closed with bytes unread, the connection would be reset, and the answer be lost on its way."""
    with start_server("--model", "stub/a=stub:dense=16", "--max-queued-tokens", "64", "--frontends", "1") as server:
        full = threading.Thread(target=encode, args=(server.port, "stub/a", ["x" * 256]))
        head = raw_request(
            "/v1/encode/stub/a", headers={"content-type": MSGPACK, "content-length": str(len(BODY))}, length=False
        )
        with connect(server.port) as sock:
            with paused(server.worker()):
                full.start()
                eventually(
                    lambda: total(server.port, "sie_extents_in_use", segment="request") == 1, "the queue is full"
                )
                sock.sendall(head)
                refused = read_response(sock)
                assert (refused.status, refused.code()) == (503, "QUEUE_FULL")
            full.join(WAIT_S)
            sock.sendall(BODY + head + BODY)
            assert read_response(sock).status == 200
