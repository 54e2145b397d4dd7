"""Streams of every dialect beside each other and the rest of a server: deaths, other models, slow readers, shares."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.keys import BOTH, INFER, bearer, write_keys
from tests.process.wire import encode, raw_request, total, wait_no_extents

HELLO = [{"role": "user", "content": "hello"}]
LONG = {"stream": True, "ignore_eos": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "slow", "messages": HELLO, "max_tokens": 3000, **LONG},
    "/v1/completions": {"model": "slow", "prompt": "hello", "max_tokens": 3000, **LONG},
    "/v1/messages": {"model": "slow", "messages": HELLO, "max_tokens": 3000, **LONG},
    "/v1/responses": {"model": "slow", "input": "hello", "max_output_tokens": 3000, "store": False, **LONG},
    "/v1/generate/slow": {"prompt": "hello" * 300, "max_new_tokens": 1400, "stream": True},
    "/v2/models/slow/generate_stream": {"text_input": "hello", "max_tokens": 3000, "ignore_eos": True},
}
"""A stream of each dialect, of a model of 30 ms a step."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "m=stub:generate,max_tokens=4096", "--model", "slow=stub:generate,max_tokens=4096,latency_ms=30",
        "--model", "texts=stub:dense=8,latency_ms=30", "--default-model", "m", "--frontends", "1", "--devices", "cpu:1",
        "--max-sequences", str(len(STREAMS)), "--keep-alive-interval-ms", "200",
        "--max-step-items", "16",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml")
    with start_server(
        "--model", "m=stub:generate,max_tokens=4096", "--frontends", "1", "--devices", "cpu:1", "--api-keys", str(keys)
    ) as running:
        yield running


class Reader:
    """Takes a stream on a thread of its own; `text` is what came so far."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.text = ""
        self.status = 0
        self.is_over = False
        self._ask = server.url + path, body
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        url, body = self._ask
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece
        self.is_over = True

    def events(self) -> list[str]:
        """Return the blocks of a stream that ended, without its comments and pings."""
        self._thread.join(WAIT_S)
        assert self.is_over, "the connection broke, or goes on"
        assert self.text.endswith("\n\n")
        blocks = self.text.split("\n\n")[:-1]
        return [block for block in blocks if not block.startswith((":", "event: ping"))]


def running(server: Server, model: str = "slow", name: str = "sie_sequences_running") -> float:
    return total(server.port, name, model=model)


def data(block: str) -> Any:
    return json.loads(block.partition("data: ")[2])


def test_a_worker_s_death_ends_every_dialect_s_stream_by_its_name_and_keeps_what_waits(server: Server) -> None:
    readers = {path: Reader(server, path, body) for path, body in STREAMS.items()}
    eventually(lambda: running(server) == len(STREAMS), "not all of them run")
    eventually(lambda: all("data: " in reader.text for reader in readers.values()), "not all have begun")
    body = {**STREAMS["/v1/messages"], "max_tokens": 3}
    waiting = Reader(server, "/v1/messages", body)
    eventually(lambda: running(server, name="sie_sequences_waiting") == 1, "the last one does not wait")
    server.kill_worker()
    ends = {path: reader.events() for path, reader in readers.items()}

    for path in ("/v1/chat/completions", "/v1/completions"):
        assert data(ends[path][-2])["error"]["code"] == "worker_lost"
        assert ends[path][-1] == "data: [DONE]"
    last = ends["/v1/messages"][-1]
    assert last.startswith("event: error\n")
    assert data(last)["error"]["type"] == "api_error"
    assert "worker_lost" in data(last)["error"]["message"]
    *_, error, failed = ends["/v1/responses"]
    assert (data(error)["type"], data(error)["code"]) == ("error", "worker_lost")
    assert data(failed)["type"] == "response.failed"
    chunk = data(ends["/v1/generate/slow"][-2])
    assert (chunk["done"], chunk["finish_reason"], chunk["error"]["code"]) == (True, "error", "WORKER_LOST")
    assert ends["/v1/generate/slow"][-1] == "data: [DONE]"
    assert "worker_lost" in data(ends["/v2/models/slow/generate_stream"][-1])["error"]

    held = waiting.events()
    assert [data(block)["type"] for block in held[-2:]] == ["message_delta", "message_stop"]
    assert data(held[-2])["usage"]["output_tokens"] == 3
    wait_no_extents(server.port)


def test_keys_share_no_cached_prompt_and_a_key_shares_its_own(keyed_server: Server) -> None:
    prompt = "a prompt of some blocks, " * 10

    def cached(key: str) -> tuple[int, int]:
        """Return the cached tokens that Messages and chat tell of."""
        with anthropic.Anthropic(base_url=keyed_server.url, api_key=key, max_retries=0) as client:
            message = client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": prompt}])
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        answer = httpx.post(
            f"{keyed_server.url}/v1/chat/completions", json=body, headers=bearer(key), timeout=WAIT_S
        ).json()
        held = message.usage.cache_read_input_tokens or 0
        assert message.usage.input_tokens + held == answer["usage"]["prompt_tokens"]
        return held, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    whole_blocks = len(f"user: {prompt}\nassistant: ") // 32 * 32
    assert cached(INFER) == (0, whole_blocks)
    assert cached(BOTH) == (0, whole_blocks)
    assert cached(INFER) == (whole_blocks, whole_blocks)


def test_a_reader_that_takes_nothing_slows_nobody(server: Server) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20, **LONG}).encode()
    headers = {"content-type": "application/json"}
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(raw_request("/v1/chat/completions", body, headers))
        eventually(lambda: running(server, "m", "sie_generated_tokens_total") > 100, "it does not run")
        other = Reader(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 50, **LONG})
        assert other.events()[-1] == "data: [DONE]"
    eventually(lambda: running(server, "m") == 0, "the work of a client that left still runs")


@pytest.mark.timing(forks=True)
def test_texts_and_streams_share_a_worker_s_time(server: Server) -> None:
    """Where each asks for more than there is, each gets its part."""

    def busy() -> dict[str, float]:
        return {name: running(server, name, "sie_model_busy_seconds_total") for name in ("slow", "texts")}

    def keep_encoding() -> None:
        while not stop.is_set():
            # Sixteen steps of them, so that the queue is never empty, however busy the machine is.
            assert encode(server.port, "texts", ["text"] * 256).status == 200

    stop = threading.Event()
    threads = [threading.Thread(target=keep_encoding) for _ in range(3)]
    with httpx.stream("POST", server.url + "/v1/messages", json=STREAMS["/v1/messages"], timeout=WAIT_S) as response:
        for thread in threads:
            thread.start()
        lines = response.iter_lines()  # whose end would be the connection's
        assert any("message_start" in line for line in lines)
        try:
            before = busy()
            eventually(lambda: sum(busy().values()) - sum(before.values()) > 1.5, "a second and a half of work")
            took = {name: value - before[name] for name, value in busy().items()}
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
    assert 1 / 3 < took["slow"] / took["texts"] < 3, took
    eventually(lambda: running(server) == 0, "the work of a client that left still runs")


def test_every_answer_says_what_anthropic_s_client_calls_it(keyed_server: Server) -> None:
    with anthropic.Anthropic(base_url=keyed_server.url, api_key=INFER, max_retries=0) as client:
        message = client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        assert (message._request_id or "").startswith("req_")
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.messages.create(model="none", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        assert (refused.value.request_id or "").startswith("req_")
    with anthropic.Anthropic(base_url=keyed_server.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}])
        assert refused.value.request_id == refused.value.response.headers["x-request-id"]
    answer = httpx.get(
        f"{keyed_server.url}/v1/messages", headers={"x-request-id": "mine", **bearer(INFER)}, timeout=WAIT_S
    )
    assert (answer.status_code, answer.headers["request-id"], answer.headers["x-request-id"]) == (405, "mine", "mine")
