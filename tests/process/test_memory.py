"""Too little memory, for a step or for a model, as a client meets it."""

from __future__ import annotations

import numpy as np

from tests.process.harness import eventually, start_server
from tests.process.wire import Client, dense_rows, encode, get, stub_rows, total


def test_an_item_too_large_for_the_device_is_503_and_its_neighbours_are_answered():
    texts = [f"text {i}" for i in range(20)]
    with start_server("--model", "stub/a=stub:dense=16,oom_tokens=8", "--oom-retry-after-s", "7") as server:
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", texts)), stub_rows(texts, 16))
        response = encode(server.port, "stub/a", ["x" * 36])
        assert (response.status, response.code(), response.headers["retry-after"]) == (503, "RESOURCE_EXHAUSTED", "7")
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", ["x" * 32])), stub_rows(["x" * 32], 16))
        assert total(server.port, "sie_oom_batch_splits_total", model="stub/a") >= 1
        assert total(server.port, "sie_oom_terminal_failures_total", model="stub/a") == 1
