"""Anthropic's Messages on the wire: what a body decodes to, what is refused by name, and what is written back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sie.agents.store.splicing import splice
from sie.config.limits import Limits
from sie.frontend.dialects.anthropic.reply import MessageWriter, encode_message, error_body, error_status
from sie.frontend.dialects.anthropic.request import decode_messages
from sie.frontend.dialects.openai.chat_messages import name_results
from sie.values.agent import SearchRule
from sie.values.errors import BadRequest, Overloaded, SieError
from sie.values.generate import (
    ChatMessage,
    ChoiceReply,
    Ended,
    Finished,
    GenerateEvent,
    GenerateReply,
    GenerateRequest,
    GenerateUsage,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
CALL = ToolCall(id="call_1", name="weather", arguments='{"city":"Oslo"}')
USAGE = GenerateUsage(prompt_tokens=9, completion_tokens=4, cached_tokens=2)
_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def decode(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, **fields}
    return decode_messages(json.dumps(body).encode(), "application/json", Limits())


# --- reading --------------------------------------------------------------------------------------------------------


def test_blocks_become_the_messages_that_templates_know() -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "clock"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "and now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]  # fmt: skip
    assert decode(system=[{"type": "text", "text": "s"}], messages=conversation).messages == [
        ChatMessage(role="system", content="s"),
        ChatMessage(role="user", content="a\nb"),
        ChatMessage(
            role="assistant", content="c", reasoning="why",
            tool_calls=(ToolCall(id="t1", name="weather", arguments='{"x":1}'),
                        ToolCall(id="t2", name="clock", arguments="{}")),
        ),
        ChatMessage(role="tool", content="rain", tool_call_id="t1", name="weather"),
        ChatMessage(role="tool", content="", tool_call_id="t2", name="clock"),
        ChatMessage(role="user", content="and now?"),
    ]  # fmt: skip


def test_turns_of_one_side_that_follow_each_other_are_one() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
    read = decode(messages=[
        {"role": "user", "content": "a"}, {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"}, {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]}, {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]).messages or []  # fmt: skip
    assert [(message.role, message.content, len(message.tool_calls)) for message in read] == [
        ("user", "a\nb", 0), ("assistant", "c", 1), ("tool", "rain", 0), ("tool", "rain", 0), ("user", "d\ne", 0),
    ]  # fmt: skip


def test_an_instruction_within_the_conversation_is_text_of_the_users_turn() -> None:
    blocks = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    read = decode(messages=[
        *HELLO, {"role": "system", "content": blocks}, {"role": "assistant", "content": "c"},
        {"role": "system", "content": "in French", "clear_at": "next_user_message"}, {"role": "user", "content": "d"},
        {"role": "system", "content": "now in Welsh", "clear_at": "next_user_message"},
    ]).messages or []  # fmt: skip
    assert [(message.role, message.content) for message in read] == [
        ("user", "hello\nbe\nbrief"), ("assistant", "c"), ("user", "d\nnow in Welsh"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        ("begun", True),
        ("", False),
        ([{"type": "text", "text": "be"}, {"type": "text", "text": "gun"}], True),
        ([{"type": "text", "text": "a"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}], False),
        ([{"type": "thinking", "thinking": "a", "signature": ""}], False),
    ],
)
def test_an_assistants_last_message_is_continued(last: Any, continues: bool) -> None:
    said = {"role": "assistant", "content": last}
    assert decode(messages=[*HELLO, said]).continues is continues
    assert not decode(messages=[*HELLO, said, *HELLO]).continues
    assert not decode(messages=[said]).continues, "there is nothing to answer"


def test_what_a_server_s_own_tools_left_behind_is_dropped_whatever_its_form() -> None:
    left = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "web_search_tool_result", "tool_use_id": "s1",
         "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"}},
        {"type": "code_execution_tool_result", "tool_use_id": "s1",
         "content": {"type": "code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []}},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "s1",
         "content": {"type": "bash_code_execution_result", "stdout": "1"}},
        {"type": "text", "text": "so"},
    ]  # fmt: skip
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": left}]
    assert decode(messages=conversation).messages == [
        ChatMessage(role="user", content="a"),
        ChatMessage(role="assistant", content="so"),
    ]


def test_fields_reach_the_request() -> None:
    request = decode(
        system="be brief", stop_sequences=["x", "x"], temperature=0.5, top_k=3, top_p=0.9, stream=True, seed=4,
        tools=[TOOL], tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "max"},
    )  # fmt: skip
    assert request.messages is not None
    assert request.messages[0] == ChatMessage(role="system", content="be brief")
    assert (request.stop, request.temperature, request.top_k, request.top_p) == (("x",), 0.5, 3, 0.9)
    assert (request.stream, request.seed, request.max_tokens) == (True, 4, 5)
    assert request.tools[0].parameters == {"type": "object"}
    assert request.tool_choice == ToolChoice(mode="required", names=("weather",))
    assert (request.parallel_tool_calls, request.thinking, request.reasoning_effort) == (False, True, "xhigh")


def test_a_search_tool_has_its_domains_and_its_number_of_uses() -> None:
    tool = {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["a.example"], "max_uses": 3}
    agent = decode(tools=[tool]).agent
    assert agent is not None
    assert agent.search == SearchRule(allowed=("a.example",), max_uses=3)


@pytest.mark.parametrize(
    "fields", [{"enable_shell": True}, {"tools": [{"type": "mcp_toolset", "mcp_server_name": "wiki"}]}]
)
def test_any_call_may_be_one_of_the_server_s_tools(fields: dict[str, Any]) -> None:
    assert decode(**fields, tool_choice={"type": "any"}).tool_choice.mode == "required"


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_counts_as_missing(system: Any) -> None:
    assert decode(system=system).messages == decode().messages


@pytest.mark.parametrize(
    ("choice", "mode"), [({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none")]
)
def test_every_choice_of_tools_has_its_mode(choice: dict[str, Any], mode: str) -> None:
    assert decode(tools=[TOOL], tool_choice=choice).tool_choice.mode == mode


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        {"grammar": {"type": "json_schema", "value": {"type": "object"}}},
    ],
)
def test_each_spelling_of_a_schema_binds_the_answer(fields: dict[str, Any]) -> None:
    grammar = decode(**fields).grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.value)) == ("json_schema", {"type": "object"})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "'n' must be 1"),
        ({"stop": "x"}, "stop_sequences"),
        ({"logprobs": True}, "logprobs"),
        ({"stop_token_ids": [3]}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "what"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [*HELLO, {"role": "system", "content": "x", "output_config": {"effort": "low"}}]},
            "messages[1].output_config",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": {"a": 1}}]}
                ]
            },
            "messages[0].content[0].content",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": {}}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "name"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "a b"}]}]},
            "messages[0].content[0].name",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "mcp_toolset"}]}, "tools[0].mcp_server_name"),
        ({"tools": [{"type": "web_search_20250305", "blocked_domains": ["a/b"]}]}, "tools[0].blocked_domains"),
        ({"tools": [{"type": "web_search_20250305", "max_uses": 0}]}, "tools[0].max_uses"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "thinking"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking": {"type": "adaptive"}, "enable_thinking": False}, "thinking"),
        ({"output_config": {"effort": "a lot"}}, "output_config.effort"),
        ({"container": "container_1"}, "container"),
        ({"container": {"id": "container_1"}}, "container.id"),
        ({"container": {"skills": [{"type": "anthropic", "skill_id": "pdf"}]}}, "container.skills[0].type"),
        ({"container": {"skills": [{"type": "custom"}]}}, "container.skills[0].skill_id"),
        ({"session_id": "a b"}, "session_id"),
        ({"files": [{"name": ""}]}, "files[0].name"),
        ({"dry_multiplier": 1}, "dry_multiplier"),
        (
            {
                "grammar": {"type": "regex", "value": "a"},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "grammar",
        ),
    ],
)
def test_what_is_wrong_is_named_and_a_400(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decode(**fields)
    assert named in refused.value.message
    assert error_status(refused.value) == 400
    assert json.loads(error_body(refused.value))["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 3}', b"\xff", b'{"messages": [{}]}'])
def test_a_malformed_body_is_a_400(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        decode_messages(body, None, Limits())
    assert error_status(refused.value) == 400


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (SieError("x", http_status=401), 401, "authentication_error"),
        (SieError("x", http_status=404), 404, "not_found_error"),
        (SieError("x", http_status=413), 413, "request_too_large"),
        (SieError("x", http_status=415), 400, "invalid_request_error"),
        (SieError("x", http_status=429), 429, "rate_limit_error"),
        (Overloaded("x"), 529, "overloaded_error"),
        (SieError("x"), 500, "api_error"),
        (SieError("x", http_status=504), 504, "timeout_error"),
    ],
)
def test_errors_have_this_apis_status_and_type(error: SieError, status: int, kind: str) -> None:
    assert error_status(error) == status
    assert json.loads(error_body(error)) == {"type": "error", "error": {"type": kind, "message": "x"}}


# --- writing --------------------------------------------------------------------------------------------------------


def whole(**fields: Any) -> Message:
    places = [len(fields.get("text", ""))] * len(fields.get("calls", ()))
    reply = GenerateReply(model="m", choices=[ChoiceReply(**{"call_places": places, **fields})], usage=USAGE)
    return Message.model_validate_json(encode_message(reply, "msg_1"))


def test_a_whole_answer_has_its_blocks_in_order() -> None:
    message = whole(text="Sure.", reasoning="hm", calls=[CALL], reason="tool_calls")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    call = message.content[2]
    assert call.type == "tool_use"
    assert (call.id, call.name, call.input) == ("toolu_1", "weather", {"city": "Oslo"})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert (message.usage.input_tokens, message.usage.output_tokens, message.usage.cache_read_input_tokens) == (7, 4, 2)


def test_a_result_without_its_call_is_named_by_the_id_that_the_client_knows() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2", "content": "4 C"}]}
    with pytest.raises(BadRequest, match=r"'messages\[1\]\.content\[0\]\.tool_use_id' is 'toolu_2'"):
        decode(messages=[call, result])


def test_a_call_has_one_id_in_a_session_and_in_what_its_client_sends_back() -> None:
    """A stored call had another id than the client's result of it: the result was refused, or the call was there twice."""
    stored = [ChatMessage(role="user", content="hello"), ChatMessage(role="assistant", tool_calls=(CALL,))]
    blocks = [block.model_dump() for block in whole(calls=[CALL], reason="tool_calls").content]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": blocks[0]["id"], "content": "4 C"}]}
    for messages in ([result], [*HELLO, {"role": "assistant", "content": blocks}, result]):
        continued = splice(stored, decode(session_id="s", messages=messages).messages or [])
        assert name_results(continued, "messages")[2:] == [
            ChatMessage(
                role="tool", content="4 C", name="weather", tool_call_id="call_1", given_call_id=blocks[0]["id"]
            )
        ]
        assert len(continued) == 3


def test_a_result_without_its_call_in_a_session_is_named_by_the_id_that_the_client_knows() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2", "content": "4 C"}]}
    with pytest.raises(BadRequest, match="of call 'toolu_2'"):
        name_results(decode(session_id="s", messages=[result]).messages or [], "messages")


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"text": "a"}, "end_turn", "a"),
        ({"text": "a", "reason": "length"}, "max_tokens", "a"),
        ({"text": "a", "stop_string": "b"}, "stop_sequence", "a"),
        ({}, "end_turn", ""),
    ],
)
def test_each_end_has_its_reason(fields: dict[str, Any], reason: str, text: str) -> None:
    message = whole(**fields)
    (block,) = message.content
    assert block.type == "text"
    assert (message.stop_reason, message.stop_sequence, block.text) == (reason, fields.get("stop_string"), text)


def test_arguments_that_are_no_json_are_kept_as_text() -> None:
    message = whole(calls=[ToolCall(id="call_2", name="f", arguments="{broken")], reason="tool_calls")
    assert message.content[0].type == "tool_use"
    assert message.content[0].input == {"arguments": "{broken"}


def test_text_stands_where_it_stood_between_calls() -> None:
    message = whole(text="abc", calls=[CALL, CALL], call_places=[1, 3], reason="tool_calls")
    assert [block.text if block.type == "text" else block.type for block in message.content] == [
        "a", "tool_use", "bc", "tool_use",
    ]  # fmt: skip
    assert [block.type for block in whole(text="abc", calls=[CALL], call_places=[0]).content] == ["tool_use", "text"]


def read_events(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each with the name that its data has."""
    found: list[dict[str, Any]] = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, text = block.partition("\ndata: ")
        found.append(json.loads(text))
        assert name == f"event: {found[-1]['type']}"
        _EVENT.validate_json(text)
    return found


DELTAS = st.lists(
    st.one_of(
        st.builds(TextDelta, st.just(0), st.sampled_from(["", "a", "bc"])),
        st.just(ToolCallDelta(0, 0, CALL)),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(reasoning=st.lists(st.sampled_from(["x", "yz"]), max_size=3), deltas=DELTAS, cuts=st.integers(1, 4))
def test_a_stream_is_one_block_after_the_other(reasoning: list[str], deltas: list[GenerateEvent], cuts: int) -> None:
    thoughts: list[GenerateEvent] = [ReasoningDelta(0, text) for text in reasoning]
    events = [Started(9, 2), *thoughts, *deltas, Finished(0, "stop"), Ended(USAGE)]
    writer = MessageWriter("msg_1", "m")
    written = read_events(b"".join(writer.write(events[at : at + cuts]) for at in range(0, len(events), cuts)))
    assert written[0]["type"] == "message_start"
    assert [event["type"] for event in written[-2:]] == ["message_delta", "message_stop"]
    opened: int | None = None
    last = -1
    for event in written[1:-2]:
        if event["type"] == "content_block_start":
            assert opened is None
            assert event["index"] == last + 1
            opened = last = event["index"]
        else:
            assert event["index"] == opened
            if event["type"] == "content_block_stop":
                opened = None
    assert opened is None
    assert last >= 0, "an answer has at least one block"
    parts = [event["delta"] for event in written if event["type"] == "content_block_delta"]
    assert "".join(part.get("thinking", "") for part in parts) == "".join(reasoning)
    texts = [event.text for event in deltas if isinstance(event, TextDelta)]
    assert "".join(part.get("text", "") for part in parts) == "".join(texts)
    calls = [part["partial_json"] for part in parts if part["type"] == "input_json_delta"]
    assert calls == [CALL.arguments] * sum(isinstance(event, ToolCallDelta) for event in deltas)


def test_an_error_in_a_stream_is_an_event() -> None:
    data = MessageWriter("msg_1", "m").write_error(SieError("lost"))
    assert data == b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"lost"}}\n\n'
