"""No answer shows memory that other requests used (S35): answers are exact, and never contain another request's words."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest

from tests.process.harness import WAIT_S, Server, start_server
from tests.process.wire import MSGPACK, Client, dense_rows, encode, post_json, stub_rows, wait_no_extents

CANARY = "SECRETCANARY"
NUM_ROUNDS = 150


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Return a server whose segments are so small that every extent has been another request's."""
    with start_server(
        "--model", "stub/a=stub:dense=16,sparse=500,multivector=8,score,extract", "--frontends", "1",
        "--request-segment-bytes", str(1 << 20), "--reply-segment-bytes", str(1 << 20),
        "--large-extent-bytes", str(1 << 18),
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


def spill(server: Server, stop: threading.Event) -> None:
    """Fill the shared memory with the canary, in requests and in replies of every size."""
    rng = np.random.default_rng(5)
    with Client(server.port) as client:
        while not stop.is_set():
            texts = [f"{CANARY} " * int(n) for n in rng.integers(1, 400, rng.integers(1, 9))]
            for route in ("encode", "extract"):
                body = msgpack.packb({"items": [{"text": text} for text in texts], "params": {"labels": [CANARY]}})
                client.request("POST", f"/v1/{route}/stub/a", body, {"content-type": MSGPACK})


def test_no_answer_holds_what_others_sent(server: Server):
    stop = threading.Event()
    others = [threading.Thread(target=spill, args=(server, stop), daemon=True) for _ in range(3)]
    for thread in others:
        thread.start()
    alone = {}
    try:
        for number in range(NUM_ROUNDS):
            texts = [f"mine {number % 7} {i}" * (1 + number % 5) for i in range(1 + number % 4)]
            items = [{"text": text} for text in texts]
            dense = encode(server.port, "stub/a", texts)
            np.testing.assert_array_equal(dense_rows(dense), stub_rows(texts, 16))
            answers = [
                dense.body,
                encode(server.port, "stub/a", texts, output_types=["sparse", "multivector"], output_dtype="int8").body,
                post_json(server.port, "/v1/extract/stub/a", {"items": items, "params": {"labels": ["x"]}}).body,
                post_json(server.port, "/v1/score/stub/a", {"query": {"text": "q"}, "items": items}).body,
                post_json(server.port, "/v1/encode/stub/a", {"items": [{"text": 3}]}).body,
            ]
            assert [answer for answer in answers if CANARY.encode() in answer] == []
            found = msgpack.unpackb(encode(server.port, "stub/a", texts, output_types=["sparse", "multivector"]).body)
            vectors = [(item["sparse"], item["multivector"]) for item in found["items"]]
            assert alone.setdefault(tuple(texts), vectors) == vectors
    finally:
        stop.set()
        for thread in others:
            thread.join(WAIT_S)
