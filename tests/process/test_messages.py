"""Anthropic's Messages over HTTP, with the unmodified client: answers, streams, counts, keys and refusals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from tests.process.harness import WAIT_S, Server, paused, start_server
from tests.process.wire import wait_no_extents

HELLO: Any = [{"role": "user", "content": "hello"}]
LONG: Any = [{"role": "user", "content": "x" * 5000}]
ECHO = "user: hello\nassistant: "
"""What the stub reads of HELLO, and answers over and over."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "m=stub:generate,max_tokens=4096", "--model", "slow=stub:generate,latency_ms=400",
        "--model", "vectors=stub:dense=8", "--default-model", "m", "--frontends", "1", "--devices", "cpu:1",
        "--keep-alive-interval-ms", "100",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as made:
        yield made


def prompt_tokens(message: Message) -> int:
    """Return the tokens of the prompt, as the client's types say that they are counted."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_message_is_answered_whole(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="default", max_tokens=8, messages=HELLO)
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.model) == (ECHO[:8], "max_tokens", "m")
    assert (prompt_tokens(message), message.usage.output_tokens) == (len(ECHO), 8)


def test_the_end_has_its_reason(client: anthropic.Anthropic) -> None:
    ended = client.messages.create(model="m", max_tokens=4000, messages=HELLO)
    assert ended.stop_reason == "end_turn"
    stopped = client.messages.create(model="m", max_tokens=99, messages=HELLO, stop_sequences=["assistant"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "assistant")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "user: hello\n"


def test_an_answer_continues_the_assistants_text(client: anthropic.Anthropic) -> None:
    begun: Any = {"model": "m", "messages": [*HELLO, {"role": "assistant", "content": "so"}]}
    message = client.messages.create(max_tokens=99, **begun)
    assert message.content[0].type == "text"
    assert message.content[0].text == f"{ECHO}so", "the stub repeats its prompt, which the beginning ends"
    assert prompt_tokens(message) == len(ECHO) + 2 == client.messages.count_tokens(**begun).input_tokens


def test_a_stream_gives_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="m", max_tokens=40, messages=HELLO, system="be brief")
    with client.messages.stream(model="m", max_tokens=40, messages=HELLO, system="be brief") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].type == whole.content[0].type == "text"
    assert final.content[0].text == whole.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert prompt_tokens(final) == prompt_tokens(whole)


def test_the_asynchronous_client_works_too(server: Server) -> None:
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as made:
            stream = await made.messages.create(model="m", max_tokens=3, messages=HELLO, stream=True)
            return [event.type async for event in stream]

    types = asyncio.run(ask())
    assert types[0] == "message_start"
    assert types[-2:] == ["message_delta", "message_stop"]


def test_a_count_is_what_the_answer_says(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"messages": HELLO, "system": "be brief", "tools": [{"name": "f", "input_schema": {}}]}
    counted = client.messages.count_tokens(model="m", **body)
    first, again = (client.messages.create(model="m", max_tokens=1, **body) for _ in range(2))
    assert counted.input_tokens == prompt_tokens(first) == prompt_tokens(again)
    assert again.usage.cache_read_input_tokens, "clients add these to the input tokens, so they must not be in both"
    cut: Any = {"model": "m", "messages": LONG, "extra_body": {"truncate_sequence": True, "max_tokens": 3}}
    assert client.messages.count_tokens(**cut).input_tokens == 4093
    assert prompt_tokens(client.messages.create(max_tokens=3, **cut)) == 4093


def test_a_ping_comes_while_nothing_else_does(server: Server) -> None:
    body = {"model": "slow", "max_tokens": 2, "messages": HELLO, "stream": True}
    with contextlib.ExitStack() as stands_still:
        stands_still.enter_context(paused(server.worker()))
        names: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
                    stands_still.close()
    assert names[0] == "ping"
    assert next(name for name in names if name != "ping") == "message_start"
    assert names[-1] == "message_stop"


def test_refusals_are_the_clients_own_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="Models that generate: m, slow"):
        client.messages.create(model="none", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError, match=r"Did you mean 'slow'\? Models that generate"):
        client.messages.create(model="slo", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="does not generate"):
        client.messages.create(model="vectors", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="'truncate_sequence'"):
        client.messages.create(model="m", max_tokens=5, messages=LONG)
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
    with pytest.raises(anthropic.BadRequestError, match="tool_use_id' is 't1'"):
        client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": [result]}])
    with pytest.raises(anthropic.BadRequestError, match="'stop_sequences' is over"):
        client.messages.create(model="m", max_tokens=5, messages=HELLO, stop_sequences=[str(n) for n in range(99)])


def test_a_thread_is_refused_in_the_form_that_its_client_knows(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="Field 'thread' is not served") as refused:
        client.beta.messages.thread(model="m", max_tokens=9).send(HELLO[0])
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    thread = client.beta.messages.thread(model="m", max_tokens=9, unsupported_request_behavior="continue_unthreaded")
    assert [thread.send(HELLO[0]).role, thread.send(HELLO[0]).role] == ["assistant"] * 2
    assert len(thread.messages) == 4


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/none", 404, "not_found_error"),
        ("POST", "/v1/messages", 400, "invalid_request_error"),
    ],
)
def test_errors_have_this_apis_shape(server: Server, method: str, path: str, status: int, kind: str) -> None:
    answer = httpx.request(method, server.url + path, content=b"{" if method == "POST" else b"", timeout=WAIT_S)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind


def test_a_client_that_leaves_ends_its_work(server: Server) -> None:
    body = {"model": "slow", "max_tokens": 500, "messages": HELLO, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=WAIT_S) as response:
        next(response.iter_lines())
    wait_no_extents(server.port)
