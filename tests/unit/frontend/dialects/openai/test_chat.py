"""What a body of chat completions is read as."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.openai.chat import ChatWriter, decode_chat
from sie.frontend.dialects.openai.text_fields import Shown, error_object
from sie.frontend.generation.prompt import chat_variables
from sie.values.agent import SearchRule
from sie.values.errors import BadRequest, NotFound, Overloaded
from sie.values.generate import (
    ChatMessage,
    Ended,
    Finished,
    GenerateRequest,
    GenerateRule,
    GenerateUsage,
    Grammar,
    LogprobText,
    ReasoningDelta,
    Started,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

JSON = "application/json"
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "g", "strict": True}


def read(**fields: Any) -> GenerateRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_chat(msgspec.json.encode(body), JSON, Limits())[0]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hi", [ChatMessage(role="user", content="hi")]),
        (
            [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}],
            [ChatMessage(role="developer", content="a b")],
        ),
        (
            [
                {
                    "role": "assistant",
                    "reasoning": "why",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
                },
                {"role": "tool", "tool_call_id": "f", "content": "2", "name": "f"},
            ],
            [
                ChatMessage(
                    role="assistant", reasoning="why", tool_calls=(ToolCall(id="f", name="f", arguments='{"a":1}'),)
                ),
                ChatMessage(role="tool", content="2", name="f", tool_call_id="f"),
            ],
        ),
        (
            [{"role": "assistant", "name": "José/2", "content": [{"type": "refusal", "refusal": "no"}]}],
            [ChatMessage(role="assistant", name="José/2", content="no")],
        ),
        ([{"role": "assistant", "content": None, "refusal": "no"}], [ChatMessage(role="assistant", content="no")]),
        ([{"role": "assistant", "content": "yes", "refusal": None}], [ChatMessage(role="assistant", content="yes")]),
    ],
)
def test_messages(messages: Any, expected: list[ChatMessage]) -> None:
    assert read(messages=messages).messages == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice(mode="required", names=("f",))),
        ({"type": "function", "name": "g"}, ToolChoice(mode="required", names=("g",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice(mode="auto", names=("f",)),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
            ToolChoice(mode="required", names=("g",)),
        ),
    ],
)
def test_tools_and_the_choice_among_them(choice: Any, expected: ToolChoice) -> None:
    request = read(tools=[FUNCTION, FLAT], tool_choice=choice)
    assert request.tools == (
        Tool(name="f", description="d", parameters={"type": "object"}),
        Tool(name="g", strict=True),
    )
    assert request.tool_choice == expected


SERVERS: list[dict[str, Any]] = [
    {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, {"enable_shell": True}, {"web_search_options": {}},
    {"tools": [{"type": "mcp", "server_label": "wiki"}]},
]  # fmt: skip


def test_other_options_reach_the_template_unless_they_are_text() -> None:
    given = {"thinking": False, "budget": 9, "enable_thinking": True, "none": None}
    request = read(chat_template_kwargs=given)
    assert request.template_options == {"thinking": False, "budget": 9}
    variables = chat_variables(request, GenerateRule(context_length=9, special_tokens={"budget": "<b>"}))
    assert (variables["thinking"], variables["enable_thinking"], variables["budget"]) == (False, True, "<b>")
    for wrong in ("<|im_end|>", ["a"], {}, 2**60):
        with pytest.raises(BadRequest, match=r"Field 'chat_template_kwargs\.x'"):
            read(chat_template_kwargs={"x": wrong})


BEGUN: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": BEGUN, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": BEGUN[1:], "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_only_a_text_of_the_assistant_is_continued(fields: Any, named: str) -> None:
    assert read(messages=BEGUN, continue_final_message=True).continues
    assert not read(messages=BEGUN, continue_final_message=False, add_generation_prompt=True).continues
    with pytest.raises(BadRequest, match=f"Field '{named}'"):
        read(**fields)


@pytest.mark.parametrize("fields", SERVERS)
def test_a_call_of_the_server_s_tools_alone_may_be_required(fields: dict[str, Any]) -> None:
    assert read(**fields, tool_choice="required").tool_choice == ToolChoice(mode="required")


@pytest.mark.parametrize("verbosity", [None, "medium", "low"])
def test_an_answer_has_one_length_to_choose(verbosity: str | None) -> None:
    with pytest.raises(BadRequest, match="verbosity") if verbosity == "low" else contextlib.nullcontext():
        read(verbosity=verbosity)


@pytest.mark.parametrize("fields", [{}, {"session_id": "s"}, {"max_tool_rounds": 3}])
def test_a_call_cannot_be_required_without_a_tool(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="'tool_choice' is 'required', but there are no tools"):
        read(**fields, tool_choice="required")


def test_options_of_a_search_bound_it() -> None:
    filters = {"allowed_domains": ["A.example"], "blocked_domains": ["b.a.example"]}
    asked = read(
        web_search_options={"filters": filters, "search_context_size": "low", "user_location": {"type": "approximate"}}
    )
    assert asked.agent is not None
    assert asked.agent.search == SearchRule(allowed=("A.example",), blocked=("b.a.example",))
    assert read(web_search_options={"external_web_access": False}).agent is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"filters": {"allowed_domains": "x"}}, "web_search_options.filters.allowed_domains"),
        ({"filters": {"allowed_domains": ["http://x"]}}, "web_search_options.filters.allowed_domains"),
        ({"filters": {"blocked_domains": ["x"] * 101}}, "web_search_options.filters.blocked_domains"),
        ({"filters": {"blocked_domains": ["*.example"]}}, "web_search_options.filters.blocked_domains"),
        ({"search_content_types": ["image"]}, "web_search_options.search_content_types"),
        ({"search_context_size": "huge"}, "web_search_options.search_context_size"),
    ],
)
def test_wrong_options_of_a_search_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        read(web_search_options=options)


@pytest.mark.parametrize(
    ("kind", "hint"), [("shell", "enable_shell"), ("web_search", "web_search_options"), ("file_search", "not served"), ("x", "no such tool")]
)  # fmt: skip
def test_a_tool_of_another_route_is_refused_with_its_field_here(kind: str, hint: str) -> None:
    with pytest.raises(BadRequest, match=rf"'tools\[0\]\.type' is '{kind}'.*{hint}"):
        read(tools=[{"type": kind}])


@pytest.mark.parametrize(
    "choice",
    [
        "any", 3, {}, {"type": "function"}, {"type": "function", "function": {"name": "h"}},
        {"type": "allowed_tools"}, {"type": "allowed_tools", "mode": "auto", "tools": []},
        {"type": "allowed_tools", "mode": "none", "tools": [{"name": "f"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": ["f"]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
        {"type": "allowed_tools", "allowed_tools": 3}, {"type": "code_interpreter"},
    ],
)  # fmt: skip
def test_malformed_tool_choice_is_refused(choice: Any) -> None:
    with pytest.raises(BadRequest, match="tool_choice") as caught:
        read(tools=[FUNCTION], tool_choice=choice)
    assert error_object(caught.value)["code"] == "tool_choice_invalid"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, None)),
        ({"enable_thinking": False}, (False, None)),
        ({"reasoning_effort": " High "}, (True, "high")),
        ({"reasoning_effort": "none"}, (False, None)),
        ({"reasoning_effort": "minimal"}, (True, "low")),
        ({"reasoning_effort": "max"}, (True, "xhigh")),
        ({"reasoning_effort": "off", "enable_thinking": False}, (False, None)),
        ({"chat_template_kwargs": {"enable_thinking": True, "other": 1}}, (True, None)),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}, "enable_thinking": True}, (True, "low")),
    ],
)
def test_thinking(fields: dict[str, Any], expected: tuple[bool | None, str | None]) -> None:
    request = read(**fields)
    assert (request.thinking, request.reasoning_effort) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"grammar": {"type": "llguidance", "value": {"grammars": []}}},
            Grammar(kind="llguidance", value='{"grammars":[]}', field="grammar"),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind="json_schema", value='{"type":"object"}')),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            Grammar(kind="json_schema", value='{"a":1}'),
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {"a": 1}}}},
            Grammar(kind="json_schema", value='{"a":1}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}},
            Grammar(kind="json_schema", value='{"a":1}'),
        ),
        ({"grammar": {"type": "lark", "value": "start: A"}}, Grammar(kind="lark", value="start: A", field="grammar")),
        (
            {"grammar": {"type": "json_schema", "value": {"a": 1}}},
            Grammar(kind="json_schema", value='{"a":1}', field="grammar"),
        ),
    ],
)
def test_what_an_answer_must_follow(fields: dict[str, Any], expected: Grammar | None) -> None:
    assert read(**fields).grammar == expected


def test_later_name_of_max_tokens_counts() -> None:
    assert read(max_tokens=5).max_tokens == 5
    assert read(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert read(logprobs=True).logprobs == 0
    assert read(logprobs=True, top_logprobs=3).logprobs == 3
    assert read(stop=["a", "b", "a"]).stop == ("a", "b")
    assert read(logit_bias={"3": -100}).logit_bias == {3: -100.0}


def test_stream_shows_reasoning_and_calls_whole() -> None:
    writer = ChatWriter(Shown(id="x", created=1, num_choices=1), "m")
    call = ToolCall(id="c", name="f", arguments="{}")
    usage = GenerateUsage(prompt_tokens=1, completion_tokens=2)
    data = writer.write([
        Started(1, 0), ReasoningDelta(0, "hm"), TextDelta(0, "so"), ToolCallDelta(0, 0, call),
        Finished(0, "tool_calls"), Ended(usage),
    ])  # fmt: skip
    *lines, last = data.decode().split("\n\n")[:-1]
    assert last == "data: [DONE]"
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "so"},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {},
    ]  # fmt: skip
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert [bool(chunk["usage"]) for chunk in chunks] == [False, False, False, False, True]
    error = msgspec.json.decode(writer.write_error(Overloaded("full")).split(b"\n\n")[0].removeprefix(b"data: "))
    assert error["error"]["type"] == "server_error"


def test_a_stream_has_the_log_probabilities_of_its_reasoning_beside_it() -> None:
    writer = ChatWriter(Shown(id="x", created=1, num_choices=1), "m")
    thought = LogprobText(text="hm", raw=b"hm", logprob=-1.0)
    (line,) = writer.write([ReasoningDelta(0, "hm", (thought,))]).decode().split("\n\n")[:-1]
    (choice,) = msgspec.json.decode(line.removeprefix("data: "))["choices"]
    assert choice["delta"] == {"reasoning_content": "hm"}
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["hm"]


def test_codes_are_words_in_lower_case() -> None:
    assert error_object(BadRequest("x"))["code"] is None
    missing = error_object(NotFound("x"))
    assert (missing["code"], missing["type"], missing["param"]) == (
        "model_not_found", "invalid_request_error", "model"
    )  # fmt: skip
