"""Text generation over HTTP, with the unmodified openai client: answers, streams, refusals, deaths and departures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import huggingface_hub
import openai
import pytest

from tests.process.harness import WAIT_S, Server, eventually, paused, start_server
from tests.process.wire import get, post_json, samples, total, wait_no_extents

CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"
AS_JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]
ECHO = "user: hello\nassistant: "
"""What the stub reads of HELLO, and answers over and over."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "m=stub:generate,max_tokens=4096", "--model", "slow=stub:generate,latency_ms=30",
        "--model", "vectors=stub:dense=8", "--default-model", "m", "--frontends", "1", "--devices", "cpu:1",
        "--keep-alive-interval-ms", "100", "--stream-backlog-bytes", "65536", "--test",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def events(server: Server, path: str, body: dict[str, Any]) -> list[str]:
    """Return the blocks of a stream, as they came."""
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=WAIT_S) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        return response.read().decode().split("\n\n")[:-1]


def chunks(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    *blocks, last = [block for block in events(server, path, body) if not block.startswith(":")]
    assert last == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"model": "slow", "messages": HELLO, "max_tokens": 99, "stream": True}),
        ("/v1/generate/slow", {"prompt": "hello" * 99, "max_new_tokens": 99, "stream": True}),
        ("/v2/models/slow/generate_stream", {"text_input": "hello" * 99, "parameters": {"max_tokens": 99}}),
    ],
)
def test_body_does_not_count_as_held_while_its_answer_streams(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    body = bytes(4 << 20).replace(b"\0", b" ") + json.dumps(fields).encode()
    with httpx.stream("POST", server.url + path, content=body, headers=AS_JSON, timeout=WAIT_S) as response:
        assert response.status_code == 200
        next(response.iter_bytes())
        assert total(server.port, "sie_held_bytes") < 1 << 20


# --- answers ----------------------------------------------------------------------------------------------------------


def test_chat_is_answered_whole(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="default", messages=HELLO, max_tokens=8, n=2, seed=1)
    assert [choice.message.content for choice in reply.choices] == [ECHO[:8], ECHO[1:9]]
    assert {choice.finish_reason for choice in reply.choices} == {"length"}
    assert (reply.model, reply.object, reply.id[:9]) == ("m", "chat.completion", "chatcmpl-")
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (
        len(ECHO),
        16,
        len(ECHO) + 16,
    )
    assert reply.usage.model_extra is not None
    assert reply.usage.model_extra["total_time_sec"] > 0
    assert reply.choices[0].message.role == "assistant"


def test_answer_ends_where_the_model_ends_it(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="m", messages=HELLO).choices
    assert (choice.message.content, choice.finish_reason) == (ECHO, "stop")
    (longer,) = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=50, extra_body={"ignore_eos": True}
    ).choices
    assert (longer.message.content, longer.finish_reason) == ((ECHO * 3)[:50], "length")


def test_stop_string_over_several_tokens_is_no_part_of_the_answer(client: openai.OpenAI) -> None:
    for stop in ("hello", ["none of it", "hello"]):
        (choice,) = client.chat.completions.create(model="m", messages=HELLO, stop=stop).choices
        assert (choice.message.content, choice.finish_reason) == ("user: ", "stop")
    shown = client.chat.completions.create(model="m", messages=HELLO, stop="hello", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in shown) == "user: "


@pytest.mark.parametrize("asked", [False, True])
def test_stream_has_the_chunks_that_clients_know(server: Server, asked: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "n": 2, "stream_options": {"include_usage": asked}}
    got = chunks(server, CHAT, body)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in got}) == 1
    opening = [(choice["index"], choice["delta"]["role"]) for choice in got[0]["choices"]]
    assert opening == [(0, "assistant"), (1, "assistant")]
    assert not any("role" in choice["delta"] for chunk in got[1:] for choice in chunk["choices"])
    texts = {0: "", 1: ""}
    ends: dict[int, str] = {}
    for chunk in got:
        for choice in chunk["choices"]:
            assert choice["index"] not in ends, "nothing of a choice comes behind its end"
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    assert texts == {0: ECHO[:4], 1: ECHO[1:5]}
    assert ends == {0: "length", 1: "length"}
    with_usage = [number for number, chunk in enumerate(got) if chunk["usage"]]
    assert with_usage == [len(got) - 1]
    assert (got[-1]["choices"] == []) is asked
    assert got[-1]["usage"]["completion_tokens"] == 8


UNUSUAL = "a\u2028b\u2029c\x85d"
"""Characters at which httpx, and so huggingface_hub and LiteLLM, end a line."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": UNUSUAL, "stream": True}),
        (TEXTS, {"prompt": UNUSUAL, "stream": True}),
        ("/v1/messages", {"max_tokens": 99, "messages": [{"role": "user", "content": UNUSUAL}], "stream": True}),
        ("/v1/responses", {"input": UNUSUAL, "stream": True}),
        ("/v1/generate/m", {"max_new_tokens": 99, "prompt": UNUSUAL, "stream": True}),
        ("/v2/models/m/generate_stream", {"text_input": UNUSUAL}),
    ],
)
def test_a_line_of_a_stream_holds_a_whole_event(server: Server, path: str, body: dict[str, Any]) -> None:
    with httpx.stream("POST", server.url + path, json=body, timeout=WAIT_S) as response:
        lines = list(response.iter_lines())
    assert {line.partition(" ")[0] for line in lines} <= {"", "data:", "event:", ":"}
    told = "".join(line[6:] for line in lines if line.startswith("data: {"))
    assert all(f"\\u{ord(end):04x}" in told for end in UNUSUAL[1::2]), told


def test_huggingface_s_client_reads_a_stream(server: Server) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": UNUSUAL}], "stream": True}
    client = huggingface_hub.InferenceClient(base_url=f"{server.url}/v1", api_key="unused")
    told = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat_completion(**asked))
    assert told == f"user: {UNUSUAL}\nassistant: "


def test_clients_own_accumulator_reads_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=HELLO, n=2, logprobs=True) as stream:
        done = stream.get_final_completion()
    assert [choice.message.content for choice in done.choices] == [ECHO, (ECHO * 2)[1 : len(ECHO) + 1]]
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].logprobs is not None
    assert len(done.choices[0].logprobs.content or ()) == len(ECHO)


def test_async_client_runs_streams_side_by_side(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        messages: Any = [{"role": "user", "content": f"number {number} é😀"}]
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    assert asyncio.run(main()) == [f"user: number {number} é😀\nassistant: " for number in range(16)]


def test_logprobs_have_the_shapes_of_both_routes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    ).choices[0]
    assert chat.logprobs is not None
    content = chat.logprobs.content or []
    assert [(one.token, one.bytes, len(one.top_logprobs)) for one in content] == [
        (char, [ord(char)], 2) for char in ECHO[:3]
    ]
    assert all(one.logprob <= 0 for one in content)
    text = client.completions.create(model="m", prompt="aé", max_tokens=3, logprobs=1).choices[0]
    assert text.logprobs is not None
    assert text.logprobs.token_logprobs is not None
    assert len(text.logprobs.token_logprobs) == len(text.logprobs.tokens or ()) == 3
    assert text.logprobs.text_offset == [0, 1, 1]


def judged(prompt: bytes) -> list[float | None]:
    """Return what a stub says of a prompt's tokens: it expects the first one again."""
    return [None, *(-math.log(2) * (1 + (byte - prompt[0]) % 257) for byte in prompt[1:])]


@pytest.mark.parametrize("prompt", ["aé😀b", [97, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 98]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_logprobs(client: openai.OpenAI, prompt: Any, stream: bool) -> None:
    asked = {"model": "m", "prompt": [prompt, prompt], "n": 2}
    found = client.completions.create(**asked, max_tokens=2, echo=True, logprobs=1, stream=stream)  # type: ignore[call-overload]
    texts, tokens = [""] * 4, [[] for _ in range(4)]
    own, offsets, tops = ([[] for _ in range(4)] for _ in range(3))
    for part in found if stream else [found]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens
                own[choice.index] += choice.logprobs.token_logprobs
                offsets[choice.index] += choice.logprobs.text_offset
                tops[choice.index] += choice.logprobs.top_logprobs
    raw = "aé😀b".encode()
    for index in range(4):
        answer = [raw, raw[1:] + raw[:1]][index % 2][:2]
        assert texts[index] == (raw + answer).decode(errors="replace")
        assert own[index][:8] == [None, *map(pytest.approx, judged(raw)[1:])]
        assert (len(own[index]), len(tokens[index]), len(tops[index])) == (10, 10, 10)
        assert [tokens[index][0], tokens[index][7]] == ["a", "b"]
        assert offsets[index][:9] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
        assert tops[index][0] is None
        assert all("a" in top for top in tops[index][1:8])


def test_a_prompt_is_judged_without_an_answer(server: Server, client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.completions.create(model="m", prompt="hello", max_tokens=0, echo=True, **fields)

    found = ask(logprobs=1)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert choice.logprobs.token_logprobs == [None, *map(pytest.approx, judged(b"hello")[1:])]
    assert choice.logprobs.top_logprobs[1] == {"e": pytest.approx(judged(b"he")[1]), "h": pytest.approx(-math.log(2))}
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 0)
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    assert [(one.text, one.logprobs) for one in ask().choices] == [("hello", None)]
    assert [one.logprobs.token_logprobs[1:] for one in ask(logprobs=0, n=2).choices] == [
        choice.logprobs.token_logprobs[1:]
    ] * 2
    best = client.completions.create(model="m", prompt="hello", max_tokens=1, echo=True, logprobs=0, best_of=3).choices
    assert [(one.text, len(one.logprobs.tokens)) for one in best] == [("helloh", 6)]
    text, end = chunks(server, TEXTS, {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0})
    assert [one["choices"][0]["text"] for one in (text, end)] == ["hello", ""]
    assert text["choices"][0]["logprobs"]["token_logprobs"] == [None, *map(pytest.approx, judged(b"hello")[1:])]
    assert (end["choices"][0]["finish_reason"], end["usage"]["completion_tokens"]) == ("length", 0)
    assert [one["choices"][0]["text"] for one in chunks(server, TEXTS, {"prompt": "hi", "max_tokens": 0, "echo": True})] == [
        "hi", "",
    ]  # fmt: skip


def test_a_long_prompt_is_judged_as_a_whole(client: openai.OpenAI) -> None:
    prompt = bytes(65 + i % 26 for i in range(4096))
    found = client.completions.create(model="m", prompt=prompt.decode(), max_tokens=0, echo=True, logprobs=5).choices[0]
    assert found.logprobs.token_logprobs[1:] == [pytest.approx(value) for value in judged(prompt)[1:]]
    assert found.logprobs.text_offset == list(range(4096))


@pytest.mark.parametrize(
    ("echo", "offsets"), [(False, [0, 1, 1, 1, 1, 2]), (True, [0, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4, 5])]
)
def test_tokens_within_a_character_have_its_offset(client: openai.OpenAI, echo: bool, offsets: list[int]) -> None:
    asked: Any = {"model": "m", "prompt": "a😀b", "logprobs": 0, "echo": echo}
    whole = client.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.text_offset == offsets
    parts = [part.choices[0].logprobs for part in client.completions.create(**asked, stream=True)]
    assert [offset for part in parts if part is not None for offset in part.text_offset or ()] == offsets


def test_completions_take_every_form_of_prompt(client: openai.OpenAI) -> None:
    def texts(prompt: Any, **fields: Any) -> list[str]:
        return [c.text for c in client.completions.create(model="m", prompt=prompt, **fields).choices]

    assert texts("abc") == ["abc"]
    assert texts(["abc", "de"], n=2) == ["abc", "bca", "de", "ed"]
    assert texts([97, 98]) == ["ab"]
    assert texts([[97, 98], [99]], echo=True) == ["abab", "cc"]
    assert texts("x" * 100) == ["x" * 16], "max_tokens is 16 where it is not given"
    assert texts([[97, 98], [99]], best_of=3, n=2, temperature=1) == ["ab", "ba", "c", "c"]
    streamed = client.completions.create(model="m", prompt=["ab", "c"], echo=True, stream=True)
    shown = {0: "", 1: ""}
    for chunk in streamed:
        for choice in chunk.choices:
            shown[choice.index] += choice.text
    assert shown == {0: "abab", 1: "cc"}


def test_grammar_binds_the_answer(client: openai.OpenAI) -> None:
    """A stub's answer to a grammar is the grammar itself."""
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    (choice,) = client.chat.completions.create(model="m", messages=HELLO, response_format=schema).choices
    assert json.loads(choice.message.content or "") == {"type": "object"}
    extra = {"grammar": {"type": "regex", "value": "a+"}}
    assert client.completions.create(model="m", prompt="x", extra_body=extra).choices[0].text == "a+"


@pytest.mark.parametrize("result", [{"tool_call_id": "c"}, {}])
def test_a_result_behind_its_call_is_read(client: openai.OpenAI, result: dict[str, Any]) -> None:
    conversation: Any = [*HELLO, CALLED, {"role": "tool", "content": "42", **result}]
    reply = client.chat.completions.create(model="m", messages=conversation, max_tokens=60)
    assert "tool: 42" in (reply.choices[0].message.content or "")


def test_a_json_object_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_object", "schema": schema}
    reply = client.chat.completions.create(model="m", messages=HELLO, response_format=form)  # type: ignore[arg-type]
    assert json.loads(reply.choices[0].message.content or "") == schema, "the stub writes what binds it"


def test_tools_are_shown_to_the_model(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    for choice, is_shown in (("auto", True), ("none", False)):
        reply = client.chat.completions.create(model="m", messages=HELLO, tools=tools, tool_choice=choice)  # type: ignore[call-overload]
        assert ("weather" in (reply.choices[0].message.content or "")) is is_shown


def test_special_text_of_a_client_is_read_as_text(client: openai.OpenAI) -> None:
    content = "a<|end|>b"
    (choice,) = client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}]).choices
    assert choice.message.content == f"user: {content}\nassistant: "


def test_prompt_beyond_the_context(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=long)
    assert caught.value.code == "context_length_exceeded"
    reply = client.chat.completions.create(
        model="m", messages=long, max_tokens=5, extra_body={"truncate_sequence": True}
    )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 4096 - 5


def test_models_are_listed_for_both_readers(client: openai.OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert cards["m"].model_extra is not None
    assert (cards["m"].model_extra["status"], cards["m"].model_extra["tools_available"]) == ("loaded", True)
    assert cards["m"].owned_by == "local"
    assert client.models.retrieve("m").id == "m"
    assert cards["vectors"].model_extra is not None
    assert cards["vectors"].model_extra["status"] == "loaded"
    assert client.models.retrieve("default").model_dump() == cards["default"].model_dump()


def test_default_is_the_model_that_serves(client: openai.OpenAI) -> None:
    assert client.models.retrieve("default").model_extra["name"] == "m"  # type: ignore[index]
    assert client.completions.create(model="default", prompt="a", max_tokens=1).model == "m"
    given = [client.embeddings.create(model=name, input="x").data[0].embedding for name in ("default", "vectors")]
    assert given[0] == given[1], "the default model gives no vectors"


# --- refusals ---------------------------------------------------------------------------------------------------------

CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}

REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    (CHAT, {}, 422, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": 3}, 422, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, 422, "messages[0].role"),
    (CHAT, {"messages": [{"role": "a b", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400,
     "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
    (CHAT, {"messages": [*HELLO, {"role": "tool", "tool_call_id": "c", "content": "42"}]}, 400, "messages[1].tool_call_id"),
    (CHAT, {"messages": [*HELLO, {"role": "tool", "content": "42"}]}, 400, "messages[1].tool_call_id"),
    (CHAT, {"messages": [{"role": "tool", "tool_call_id": "c", "content": "42"}, CALLED]}, 400,
     "messages[0].tool_call_id"),
    (CHAT, {"messages": [CALLED, {"role": "tool", "tool_call_id": "d", "content": "42"}]}, 400,
     "messages[1].tool_call_id"),
    (CHAT, {"messages": [*HELLO, {"role": "asistant", "content": "hi"}]}, 400, "messages[1].role"),
    (CHAT, {"messages": [{"role": "function", "name": "f", "content": "42"}, *HELLO]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "two words", "content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n"),
    (CHAT, {"messages": HELLO, "n": 17}, 400, "n"),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 422, "temperature"),
    (CHAT, {"messages": HELLO, "presence_penalty": 3}, 400, "presence_penalty"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": HELLO, "stop": [str(number) for number in range(17)]}, 400, "stop"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "huge"}, 400, "reasoning_effort"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "off", "enable_thinking": True}, 400, "reasoning_effort"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    (CHAT, {"messages": HELLO, "adapter": "a"}, 400, "adapter"),
    (CHAT, {"messages": HELLO, "dry_multiplier": 1.0}, 400, "dry_multiplier"),
    (CHAT, {"messages": HELLO, "functions": []}, 400, "functions"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "code_interpreter"}]}, 400, "tools[0]"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 400,
     "tools[0].function.name"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, 400,
     "response_format"),
    (CHAT, {"messages": HELLO, "grammar": {"type": "regex", "value": "("}}, 400, "grammar"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "a<b"}]}, 400, "messages[0].name"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}, "grammar": {"type": "regex", "value": "a"}},
     400, "grammar"),
    *((CHAT, {"messages": HELLO, field: value}, 400, field) for field, value in {
        "files": [{"name": "a"}], "session_id": "a b", "agent_permission": "auto", "code_execution_permission": "ask",
        "enable_shell": True, "enable_code_execution": True, "max_tool_rounds": 3, "web_search_options": {},
    }.items()),
    (TEXTS, {}, 422, "prompt"),
    (TEXTS, {"prompt": []}, 400, "prompt"),
    (TEXTS, {"prompt": ""}, 400, "prompt"),
    (TEXTS, {"prompt": ["a", 1]}, 400, "prompt"),
    (TEXTS, {"prompt": [1000]}, 400, "prompt"),
    (TEXTS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (TEXTS, {"prompt": "a", "best_of": 1, "n": 2}, 400, "best_of"),
    (TEXTS, {"prompt": "a", "best_of": 17}, 400, "best_of"),
    (TEXTS, {"prompt": "x" * 5000}, 400, "prompt"),
    (TEXTS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (TEXTS, {"prompt": "a", "max_tokens": 0, "logprobs": 1}, 400, "max_tokens"),
    (TEXTS, {"prompt": "a", "max_tokens": -1, "echo": True}, 400, "max_tokens"),
    (TEXTS, {"prompt": "a", "logprobs": 100}, 400, "logprobs"),
    (TEXTS, {"prompt": "a", "echo": True, "logprobs": 100}, 400, "logprobs"),
    (TEXTS, {"prompt": "a", "grammar": {"type": "regex", "value": "("}}, 400, "grammar"),
    (TEXTS, {"prompt": "a", "model": "nope"}, 404, "model"),
    (TEXTS, {"prompt": "a", "model": "vectors"}, 400, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSED)
def test_wrong_request_hears_its_field(
    server: Server, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    for stream in (False, True):
        response = post_json(server.port, path, {**body, "stream": stream})
        assert response.status == status, response.body
        answer = json.loads(response.body)
        assert answer["error"]["param"] == param, answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["message"] == answer["error"]["message"]
        assert response.headers["x-request-id"].startswith("req_")


def test_best_of_has_its_own_refusal_in_a_stream(server: Server) -> None:
    answer = post_json(server.port, TEXTS, {"prompt": "a", "best_of": 2, "stream": True})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "best_of")


def test_agent_fields_mean_nothing_to_completions(server: Server) -> None:
    body = {"prompt": "a", "session_id": "s", "agent_permission": "ask", "files": [{"name": "a"}], "max_tool_rounds": 1,
            "web_search_options": {}, "enable_shell": True, "enable_thinking": True}  # fmt: skip
    assert post_json(server.port, TEXTS, body).json()["choices"][0]["text"] == "a"


def test_agent_fields_that_ask_for_nothing_are_no_fault(server: Server) -> None:
    body = {"messages": HELLO, "files": [], "session_id": None, "enable_shell": False, "unknown": 1, "user": "me"}
    assert post_json(server.port, CHAT, body).status == 200


def test_body_that_is_no_json_and_a_wrong_method(server: Server) -> None:
    headers = {"content-type": "application/json", "x-request-id": "mine"}
    broken = httpx.post(server.url + CHAT, content=b'{"messages":', headers=headers, timeout=WAIT_S)
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert broken.headers["x-request-id"] == "mine"
    assert (
        httpx.post(server.url + CHAT, content=b"{}", headers={"content-type": "text/plain"}, timeout=WAIT_S).status_code
        == 415
    )
    wrong = get(server.port, CHAT)
    assert (wrong.status, json.loads(wrong.body)["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 200), ("/health", 200), ("/readyz", 200), ("/metrics", 200), ("/docs", 200), ("/openapi.json", 200), ("/v1/models", 200), ("/v1/nothing", 404), (CHAT, 405), ("/v1/embeddings", 405)],
)  # fmt: skip
def test_every_answer_says_its_request_s_id(server: Server, path: str, status: int) -> None:
    said = httpx.get(server.url + path, headers={"x-request-id": "mine"}, timeout=WAIT_S)
    assert (said.status_code, said.headers.get_list("x-request-id")) == (status, ["mine"])
    assert httpx.get(server.url + path, timeout=WAIT_S).headers["x-request-id"].startswith("req_")


def test_embeddings_and_native_errors_say_their_request_s_id(server: Server, client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="vectors", input="a")._request_id
    for path in ("/v1/encode/nothing", "/v1/encode/vectors", "/v1/models/status"):
        assert (
            httpx.post(server.url + path, json={}, headers={"x-request-id": "mine"}, timeout=WAIT_S).headers[
                "x-request-id"
            ]
            == "mine"
        )


@pytest.mark.parametrize("body", [b'{"messages": 5, ', b"{} x", b'{"n": "x"'])
def test_what_is_no_json_is_that_whatever_is_wrong_before(server: Server, body: bytes) -> None:
    said = httpx.post(server.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=WAIT_S)
    assert (said.status_code, said.json()["error"]["code"]) == (400, "invalid_json")


def test_clients_errors_are_of_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="m, slow"):
        client.chat.completions.create(model="nope", messages=HELLO)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=[])
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(model="m", messages="hi", temperature="hot")  # type: ignore[arg-type,call-overload]


# --- time, departures, deaths -----------------------------------------------------------------------------------------


def slow_stream(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": "slow", "messages": HELLO, "stream": True, "max_tokens": 4000, "ignore_eos": True, **fields}


def running(server: Server) -> float:
    return total(server.port, "sie_sequences_running", model="slow") + total(
        server.port, "sie_sequences_waiting", model="slow"
    )


def test_silence_is_filled_with_comments(server: Server) -> None:
    body = {"model": "slow", "messages": HELLO, "max_tokens": 2, "stream": True}
    with contextlib.ExitStack() as stands_still:
        stands_still.enter_context(paused(server.worker()))  # however busy the frontend is, it has nothing to send
        lines: list[str] = []
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=WAIT_S) as response:
            for line in response.iter_lines():
                lines += [line] if line else []
                stands_still.close()
    assert lines[0] == ": keep-alive"
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [CHAT, TEXTS, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "field", ["guided_json", "structured_outputs", "regex", "prompt_logprobs", "allowed_token_ids"]
)
def test_a_field_of_another_server_is_not_ignored(server: Server, path: str, field: str) -> None:
    body: dict[str, Any] = {"input": "x"} if path == "/v1/responses" else {"messages": HELLO, "prompt": "x"}
    refused = post_json(server.port, path, {**body, "max_tokens": 1, field: {"regex": "a"}})
    assert (refused.status, f"Field '{field}'" in refused.body.decode()) == (400, True), refused.body
    assert post_json(server.port, path, {**body, "max_tokens": 1, field: None}).status == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, {"skip_special_tokens": False}) for path in (CHAT, TEXTS, "/v1/responses", "/v1/messages")),
        (CHAT, {"echo": True}), (CHAT, {"documents": [{"text": "x"}]}), (CHAT, {"add_special_tokens": True}),
        (TEXTS, {"add_special_tokens": False}),
    ],
)  # fmt: skip
def test_a_field_that_would_change_the_answer_is_refused(server: Server, path: str, fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {"input": "x"} if path == "/v1/responses" else {"messages": HELLO, "prompt": "x"}
    refused = post_json(server.port, path, {**body, "max_tokens": 1, **fields})
    assert (refused.status, f"Field '{next(iter(fields))}'" in refused.body.decode()) == (400, True), refused.body
    turned = {field: not value for field, value in fields.items()}
    assert post_json(server.port, path, {**body, "max_tokens": 1, **turned}).status == 200


def test_a_session_may_have_fields_that_only_routes_of_text_refuse(server: Server) -> None:
    body = json.dumps({"messages": HELLO, "regex": "a"})
    assert httpx.put(f"{server.url}/v1/sessions/foreign", content=body, headers=AS_JSON).status_code == 200


def test_nothing_ends_an_answer_before_its_fewest_tokens(client: openai.OpenAI) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "stop": "user"}
    fewest: Any = {"min_tokens": len(ECHO) + 2}
    whole = client.chat.completions.create(**asked, extra_body=fewest).choices[0]
    assert (whole.message.content, whole.finish_reason) == (ECHO, "stop"), "the second 'user' ends it, not the first"
    chunks_ = client.chat.completions.create(**asked, extra_body=fewest, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks_) == ECHO
    text = client.completions.create(model="m", prompt="abc", max_tokens=9, extra_body={"min_tokens": 9})
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("abc" * 3, "length")
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        client.completions.create(model="m", prompt="abc", max_tokens=4, extra_body={"min_tokens": 5})


def test_a_choice_ends_at_a_token_that_the_client_names(client: openai.OpenAI) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "extra_body": {"stop_token_ids": [ord("h"), ord(":")]}}
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("user", "stop")
    asked["extra_body"]["ignore_eos"] = True
    chunks_ = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks_) == "user"
    with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
        client.chat.completions.create(model="m", messages=HELLO, extra_body={"stop_token_ids": [257]})


def test_a_chat_goes_on_with_the_assistants_text(client: openai.OpenAI) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "so"}]
    going_on: Any = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(model="m", messages=begun, extra_body=going_on)
    assert answer.choices[0].message.content == f"{ECHO}so", "the stub repeats its prompt, which the beginning ends"


def test_client_that_leaves_a_stream_ends_its_work(server: Server) -> None:
    with httpx.stream("POST", server.url + CHAT, json=slow_stream(server), timeout=WAIT_S) as response:
        lines = response.iter_lines()  # whose end would be the connection's
        assert any(line.startswith("data: ") for line in lines)
        eventually(lambda: running(server) == 1, "it does not run")
    eventually(lambda: running(server) == 0, "the work of a client that left still runs")
    wait_no_extents(server.port)


def test_client_that_leaves_before_a_whole_answer_ends_its_work(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=slow_stream(server, stream=False), timeout=httpx.Timeout(30, read=0.3))
    eventually(lambda: running(server) == 0, "the work of a client that left still runs")
    wait_no_extents(server.port)


def test_client_that_reads_nothing_is_cut_off(server: Server) -> None:
    body = json.dumps({
        "model": "m", "messages": HELLO, "stream": True, "max_tokens": 4000, "ignore_eos": True, "n": 8,
        "logprobs": True, "top_logprobs": 20,
    }).encode()  # fmt: skip
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before = total(server.port, "http_requests_total", path=CHAT)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(head.encode() + body)
        eventually(lambda: total(server.port, "http_requests_total", path=CHAT) > before, "its end counted")
        sock.settimeout(WAIT_S)
        taken = 0
        try:
            while data := sock.recv(65536):
                taken += len(data)
                assert b"[DONE]" not in data
        except ConnectionResetError:
            pass
        assert taken < 8 << 20
    eventually(lambda: total(server.port, "sie_sequences_running", model="m") == 0, "its work still runs")
    wait_no_extents(server.port)


def test_metrics_count_a_stream_when_it_ends(server: Server) -> None:
    labels = {"path": CHAT, "model": "slow", "status": "200"}
    before = total(server.port, "http_requests_total", **labels)
    with contextlib.ExitStack() as stands_still:
        stands_still.enter_context(paused(server.worker()))  # and so it cannot end
        body = slow_stream(server, max_tokens=3)
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=WAIT_S) as response:
            blocks = response.iter_lines()
            assert next(blocks) == ": keep-alive"
            assert total(server.port, "http_requests_in_flight", path=CHAT, model="slow") == 1
            assert total(server.port, "http_requests_total", **labels) == before
            stands_still.close()
            for _ in blocks:
                pass
    eventually(lambda: total(server.port, "http_requests_total", **labels) == before + 1, "the stream is not counted")
    eventually(lambda: total(server.port, "http_requests_in_flight", path=CHAT, model="slow") == 0, "one is under way")
    names = {name for name, _ in samples(server.port)}
    assert {"sie_time_to_first_token_seconds_count", "sie_inter_token_latency_seconds_count"} <= names


def test_metrics_leave_housekeeping_out_and_name_no_model_none(server: Server) -> None:
    assert httpx.get(f"{server.url}/no/such/path", timeout=WAIT_S).status_code == 404
    assert httpx.post(server.url + CHAT, content=b"{", timeout=WAIT_S).status_code == 400
    probes = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/api/health/live", "/api/health/ready")
    for path in ("/", "/health", "/metrics", "/docs", "/v1/models", *probes):
        assert httpx.get(server.url + path, timeout=WAIT_S).status_code == 200
    httpx.options(server.url + CHAT, timeout=WAIT_S)
    shown = [dict(labels) for name, labels in samples(server.port) if name == "http_requests_total"]
    paths = {one["path"]: one["model"] for one in shown}
    assert not {"/", "/health", "/metrics", "/docs", *probes} & paths.keys()
    assert (paths["<unmatched>"], paths["/v1/models"]) == ("none", "none")
    assert {one["model"] for one in shown if one["path"] == CHAT and one["status"] == "400"} >= {"unknown"}
    assert {one["method"] for one in shown if one["path"] == "<unmatched>"} == {"GET"}
    assert not [one for one in shown if one["method"] == "OPTIONS"]


@pytest.mark.parametrize("path", [CHAT, TEXTS, "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
@pytest.mark.parametrize(("model", "label"), [("slow", "slow"), (None, "m"), ("default", "m"), ("made-up", "unknown")])
def test_metrics_of_a_bad_field_name_its_model(server: Server, path: str, model: str | None, label: str) -> None:
    def count() -> float:
        return total(server.port, "http_requests_total", path=path, model=label)

    before = count()
    body = {"model": model, "messages": HELLO, "temperature": "hot"}
    assert httpx.post(server.url + path, json=body, timeout=WAIT_S).status_code in {400, 422}
    eventually(lambda: count() == before + 1, "it is counted, which is behind its answer")
    eventually(lambda: total(server.port, "http_requests_in_flight", path=path, model=label) == 0, "none under way")


@pytest.mark.parametrize(
    ("body", "label"), [({"model_id": "m"}, "m"), ({"model_id": "made-up"}, "unknown"), ({"model_id": 5}, "unknown")]
)
def test_metrics_of_management_name_its_model(server: Server, body: dict[str, Any], label: str) -> None:
    def count() -> float:
        return total(server.port, "http_requests_total", path="/v1/models/status", model=label)

    before = count()
    httpx.post(f"{server.url}/v1/models/status", json=body, timeout=WAIT_S)
    eventually(lambda: count() == before + 1, "it is counted, which is behind its answer")


def test_worker_death_ends_what_was_begun_and_repeats_what_was_not(server: Server) -> None:
    whole: list[Any] = []

    def ask() -> None:
        body = slow_stream(server, stream=False, max_tokens=200)  # 6 s, so that it runs when the other is seen to run
        whole.append(httpx.post(server.url + CHAT, json=body, timeout=WAIT_S))

    asking = threading.Thread(target=ask)
    with httpx.stream("POST", server.url + CHAT, json=slow_stream(server), timeout=WAIT_S) as response:
        blocks = response.iter_text()
        first = next(blocks)
        while "data: " not in first:  # comments come until the worker does
            first += next(blocks)
        asking.start()
        eventually(lambda: running(server) == 2, "both do not run")
        time_s = time.monotonic()
        server.kill_worker()
        rest = first + "".join(blocks)
    assert time.monotonic() - time_s < 60, "its 4,000 tokens would have taken twice as long"
    *_, error, done = rest.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "worker_lost"
    asking.join(WAIT_S)
    assert whole[0].status_code == 200
    assert whole[0].json()["choices"][0]["message"]["content"] == (ECHO * 9)[:200]
    with pytest.raises(openai.APIError):
        _raise_in_stream(server)
    wait_no_extents(server.port)


def _raise_in_stream(server: Server) -> None:
    """Stream with the client's own reader while the worker dies."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        messages: Any = HELLO
        stream = client.chat.completions.create(
            model="slow", messages=messages, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.kill_worker()
        for _ in stream:
            pass
