"""What `/v1/responses` reads: bodies and items to a request, and what it refuses by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from sie.config.limits import Limits
from sie.frontend.dialects.responses.items import find_items, read_kept
from sie.frontend.dialects.responses.page import read_page, read_stream_query
from sie.frontend.dialects.responses.reply import ResponseRecord
from sie.frontend.dialects.responses.request import ResponsesCall, decode_responses
from sie.values.agent import SearchRule
from sie.values.errors import BadRequest
from sie.values.generate import ChatMessage, ToolCall, ToolChoice

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def decode(**fields: Any) -> ResponsesCall:
    return decode_responses(json.dumps({"input": "hi", **fields}).encode(), "application/json", Limits())


def messages(items: Any) -> list[ChatMessage]:
    call = decode(input=items)
    call.begin([])
    assert call.request.messages is not None
    return call.request.messages


def test_every_served_field_reaches_the_request() -> None:
    request = decode(
        model="m", temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, logit_bias={"5": 2}, seed=7, stop=["x"], ignore_eos=True, stream=True,
        max_output_tokens=9, truncation="auto", parallel_tool_calls=False, tools=[FUNCTION], tool_choice="required",
        reasoning={"effort": "High", "summary": "auto"}, top_logprobs=2,
    ).request  # fmt: skip
    assert (request.model, request.temperature, request.top_p, request.top_k, request.min_p) == ("m", 0.5, 0.9, 3, 0.1)
    assert (request.presence_penalty, request.frequency_penalty, request.repetition_penalty) == (1, -1, 1.1)
    assert (request.logit_bias, request.seed, request.stop) == ({5: 2.0}, 7, ("x",))
    assert (request.ignore_eos, request.stream, request.max_tokens, request.truncate_prompt) == (True, True, 9, True)
    assert (request.parallel_tool_calls, request.tools[0].name) == (False, "f")
    assert request.tool_choice == ToolChoice(mode="required")
    assert (request.thinking, request.reasoning_effort, request.logprobs) == (True, "high", 2)


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [({"max_tokens": 3}, 3), ({"max_completion_tokens": 4, "max_tokens": 3}, 4), ({"max_output_tokens": 5, "max_tokens": 3}, 5), ({}, None)],
)  # fmt: skip
def test_names_of_the_cap(fields: dict[str, Any], max_tokens: int | None) -> None:
    call = decode(**fields)
    assert call.request.max_tokens == max_tokens == call.echoed["max_output_tokens"]


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}}}, '{"type":"null"}'),
        ({"text": {"format": {"type": "json_object"}}}, '{"type":"object"}'),
        ({"text": {"format": {"type": "json_object", "schema": {"type": "null"}}}}, '{"type":"null"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}}, '{"type":"null"}'),
        ({"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}}, None),
        ({"grammar": {"type": "json_schema", "value": {"type": "null"}}}, '{"type":"null"}'),
    ],
)
def test_form_of_the_answer(fields: dict[str, Any], value: str | None) -> None:
    grammar = decode(**fields).request.grammar
    assert (grammar and (grammar.kind, grammar.value)) == (value and ("json_schema", value))


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"top_logprobs": 3}, 3),
    ],
)
def test_logprobs_are_asked_for_in_three_ways(fields: dict[str, Any], logprobs: int | None) -> None:
    assert decode(**fields).request.logprobs == logprobs


def test_items_are_the_messages_that_templates_know() -> None:
    got = messages([
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "calling", "annotations": [], "logprobs": []}]},
        CALL, {**CALL, "call_id": "c2"}, OUTPUT,
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ])  # fmt: skip
    assert got == [
        ChatMessage(role="developer", content="be brief"),
        ChatMessage(role="user", content="a\n\nb"),
        ChatMessage(
            role="assistant",
            content="calling",
            tool_calls=(
                ToolCall(id="c1", name="f", arguments='{"a":1}'),
                ToolCall(id="c2", name="f", arguments='{"a":1}'),
            ),
        ),
        ChatMessage(role="tool", content="42", tool_call_id="c1", name="f"),
        ChatMessage(role="tool", content="43", tool_call_id="c2", name="f"),
        ChatMessage(role="assistant", content="no"),
    ]


def test_a_result_belongs_to_a_call_that_its_item_names() -> None:
    call = decode(input=[{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "fc_r1"}, OUTPUT])
    stored = {
        "output": [{**CALL, "id": "fc_r1", "status": "completed"}, {"type": "reasoning", "id": "rs_r1", "summary": []}]
    }
    call.resolve(find_items([msgspec.json.encode(stored)], {"fc_r1"}, 10_000))
    call.begin([])
    assert call.request.messages is not None
    assert call.request.messages[1:] == [
        ChatMessage(role="assistant", tool_calls=(ToolCall(id="c1", name="f", arguments='{"a":1}'),)),
        ChatMessage(role="tool", content="42", tool_call_id="c1", name="f"),
    ]
    with pytest.raises(BadRequest, match="max_generation_body_bytes"):
        find_items([msgspec.json.encode(stored)], {"fc_r1"}, 10)


def test_shell_calls_of_an_earlier_conversation_are_told_to_the_model() -> None:
    action = {"commands": ["ls"], "timeout_ms": 5}
    output = [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    items = [
        {"type": "shell_call", "call_id": "c", "action": action, "status": "completed"},
        {"type": "shell_call_output", "call_id": "c", "output": output},
    ]
    called, said = messages(items)
    assert (called.tool_calls[0].name, json.loads(called.tool_calls[0].arguments)) == ("shell", action)
    assert (said.role, said.name, json.loads(said.content or "")) == ("tool", "shell", output)
    assert [(item["type"], item["id"][:3]) for item in decode(input=items).items] == [
        ("shell_call", "sc_"), ("shell_call_output", "sco"),
    ]  # fmt: skip


def test_listed_items_have_what_their_readers_need() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    listed = decode(input=[said, CALL, {"type": "reasoning", "id": "rs_1"}]).items
    assert listed[0]["content"] == [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]
    assert [item.get("status") for item in listed] == ["completed", "completed", None]
    assert (listed[2]["id"], listed[2]["summary"]) == ("rs_1", [])
    assert read_kept(json.dumps(listed).encode())[0][0].content == "a"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (OUTPUT, {"status": "completed", "output": "42"}),
        ({**OUTPUT, "status": "incomplete"}, {"status": "incomplete"}),
        ({**OUTPUT, "output": [{"type": "text", "text": "4"}]}, {"output": [{"type": "input_text", "text": "4"}]}),
        ({"type": "function_call", "call_id": "c", "name": "f"}, {"arguments": "{}", "status": "completed"}),
        ({"role": "user", "content": [{"text": "a"}]}, {"content": [{"type": "input_text", "text": "a"}]}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, {"content": [{"type": "input_text", "text": "a"}]}),
        ({"role": "assistant", "content": [{"type": "input_text", "text": "a"}]},
         {"content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
         {"content": [{"type": "refusal", "refusal": "no"}]}),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "status": "incomplete"},
         {"status": "incomplete"}),
        ({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}, {"status": "completed"}),
        ({"type": "shell_call_output", "call_id": "c",
          "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
         {"status": "completed"}),
    ],
)  # fmt: skip
def test_each_listed_item_is_one_of_the_clients_types(item: dict[str, Any], expected: dict[str, Any]) -> None:
    """Strictly: the client itself takes whatever comes, and its reader finds the field missing."""
    (listed,) = decode(input=[item], previous_response_id="resp_1").items
    _ITEM.validate_python(listed)
    assert expected.items() <= listed.items()


def test_instructions_and_history_stand_before_the_input() -> None:
    call = decode(instructions="be", input=[OUTPUT])
    call.begin(read_kept(json.dumps([{"role": "user", "content": "q"}, CALL]).encode())[0])
    roles = [(message.role, message.name) for message in call.request.messages or ()]
    assert roles == [("system", None), ("user", None), ("assistant", None), ("tool", "f")]


_SCHEMA = {"type": "object"}
_FLAT = {"type": "json_schema", "name": "n", "schema": _SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice",
         {"type": "function", "name": "f"}),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", {"type": "function", "name": "f"}),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": {"name": "f"}}]}}},
         "tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({}, "tool_choice", "auto"),
        ({"reasoning": {"effort": " High "}}, "reasoning", {"effort": "high", "summary": None}),
        ({"reasoning": {"effort": "off"}}, "reasoning", {"effort": "none", "summary": None}),
        ({"reasoning": {"effort": "minimal"}}, "reasoning", {"effort": "low", "summary": None}),
        ({"reasoning": {}}, "reasoning", {"effort": None, "summary": None}),
        ({"text": {"format": _FLAT}}, "text", {"format": _FLAT}),
        ({"text": {"format": {"type": "json_schema", "schema": _SCHEMA}}}, "text",
         {"format": {"type": "json_schema", "name": "", "schema": _SCHEMA}}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}},
         "text", {"format": _FLAT}),
        ({"response_format": {"type": "json_object"}}, "text", {"format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_object", "schema": {"type": "null"}}}},
            "text", {"format": {"type": "json_object", "schema": {"type": "null"}}},
        ),
        ({"text": {}, "response_format": {"type": "json_object"}}, "text", {"format": {"type": "text"}}),
        ({"tools": [{"type": "namespace", "name": "f", "tools": [FUNCTION]}]}, "tool_choice", "auto"),
    ],
)  # fmt: skip
def test_response_repeats_its_request_as_the_client_has_it(fields: dict[str, Any], name: str, expected: Any) -> None:
    """Strictly: the client itself takes whatever comes, and its reader finds the field missing."""
    call = decode(**{"tools": [{"type": "function", "function": {"name": "f"}}], **fields})
    Response.model_validate(ResponseRecord("resp_1", 1, call, "m").to_object())
    assert call.echoed[name] == expected


@pytest.mark.parametrize("kind", ["shell", "code_interpreter", "web_search"])
def test_a_call_of_the_server_s_tools_alone_may_be_required(kind: str) -> None:
    call = decode(tools=[{"type": kind}], tool_choice="required")
    assert (call.request.tool_choice.mode, call.echoed["tool_choice"]) == ("required", "required")


def test_a_search_tool_has_its_filters() -> None:
    filters = {"allowed_domains": ["a.example"], "blocked_domains": ["b.a.example"]}
    call = decode(tools=[{"type": "web_search", "filters": filters}])
    assert call.request.agent is not None
    assert call.request.agent.search == SearchRule(allowed=("a.example",), blocked=("b.a.example",))
    assert call.echoed["tools"] == [{"type": "web_search", "filters": filters}]
    assert decode(tools=[{"type": "web_search", "external_web_access": False}]).request.agent is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"filters": {"allowed_domains": ["x"]}}, "tools[0].filters"),
        ({"return_token_budget": "unlimited"}, "tools[0].return_token_budget"),
        ({"type": "web_search", "search_content_types": ["text", "image"]}, "tools[0].search_content_types"),
    ],
)
def test_a_search_tool_is_refused_by_the_field_that_it_cannot_have(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decode(tools=[{"type": "web_search_preview", **fields}])
    assert refused.value.extras["param"] == named


def test_a_second_search_tool_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"'tools\[1\]' is a second web search"):
        decode(tools=[{"type": "web_search", "external_web_access": False}, {"type": "web_search_preview"}])


def test_functions_of_a_namespace_have_their_full_names() -> None:
    call = decode(tools=[{"type": "namespace", "name": "crm", "tools": [FUNCTION]}, FUNCTION])
    assert [tool.name for tool in call.request.tools] == ["crm.f", "f"]
    assert call.namespaces == {"crm.f": ("crm", "f")}
    assert call.echoed["tools"][0]["tools"][0]["name"] == "f"
    (said,) = messages([{**CALL, "namespace": "crm"}])
    assert said.tool_calls[0].name == "crm.f"


def test_fields_that_ask_for_nothing_or_are_none_here_are_no_fault() -> None:
    decode(
        session_id="s",
        agent_permission="ask",
        code_execution_permission="ask",
        enable_shell=True,
        web_search_options={},
        truncate_sequence=True,
        unknown=1,
        files=[],
        n=1,
        service_tier="x",
    )
    assert decode(truncate_sequence=True).request.truncate_prompt is False


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"input": []}, 400, "input"),
    ({"input": 3}, 422, "input"),
    ({"input": [{"type": "message", "role": "user"}]}, 400, "input[0].content"),
    ({"input": [{"content": "x"}]}, 400, "input[0].type"),
    ({"input": [{"role": "a b", "content": "x"}]}, 400, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input[0].content[0]"),
    ({"input": [{"role": "assistant", "content": [{"type": "input_file", "file_id": "x"}]}]}, 400,
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "a b"}]}, 400, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, 400, "input[0].output"),
    ({"input": [{"type": "function_call_output", "output": "c"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "shell_call", "call_id": "c"}]}, 400, "input[0].action"),
    ({"input": [{"type": "shell_call", "action": {"commands": []}}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "shell_call_output", "call_id": "c"}]}, 400, "input[0].output"),
    ({"input": [{"type": "computer_call", "call_id": "c"}]}, 400, "input[0].type"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tool_calls": 1}, 400, "max_tool_calls"),
    ({"conversation": "c"}, 400, "conversation"),
    ({"prompt": {"id": "p"}}, 400, "prompt"),
    ({"n": 2}, 400, "n"),
    ({"background": True, "store": False}, 400, "background"),
    ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, 422, "text.format.type"),
    ({"text": {"format": {"type": "json_object"}}, "grammar": {"type": "regex", "value": "a"}}, 400, "grammar"),
    ({"metadata": {str(number): "x" for number in range(17)}}, 400, "metadata"),
    ({"metadata": {"a": 1}}, 422, "metadata[...]"),
    ({"reasoning": {"effort": "huge"}}, 400, "reasoning.effort"),
    ({"truncation": "some"}, 422, "truncation"),
    ({"temperature": -1}, 400, "temperature"),
    ({"adapter": "a"}, 400, "adapter"),
    ({"dry_multiplier": 1}, 400, "dry_multiplier"),
    ({"files": [{"name": 1}]}, 422, "files[0].name"),
    ({"max_tool_rounds": -2}, 400, "max_tool_rounds"),
    ({"tools": [{"type": "mcp"}]}, 400, "tools[0].server_label"),
    ({"tools": [{"type": "shell"}, {"type": "shell"}]}, 400, "tools[1]"),
    ({"tools": [{"type": "shell", "environment": {"type": "local"}}]}, 400, "tools[0].environment"),
    ({"tools": [{"type": "shell", "environment": {"type": "container_auto", "skills": [{}]}}]}, 400, "tools[0].environment.skills[0].type"),
    ({"tools": [{"type": "shell", "environment": {"type": "container_auto", "skills": [{"type": "skill_reference"}]}}]}, 400, "tools[0].environment.skills[0].skill_id"),
    ({"tools": [{"type": "code_interpreter", "container": {"type": "auto", "skills": [{}]}}]}, 400, "tools[0].container.skills"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, 400, "tools[0]"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}]}, 400, "tools[0].tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED)
def test_wrong_field_is_named(fields: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(**fields)
    assert (caught.value.http_status, caught.value.extras["param"]) == (status, param)


@pytest.mark.parametrize(
    ("query", "after"),
    [
        ({}, None), ({"stream": ["false"]}, None), ({"stream": ["true"]}, -1), ({"stream": ["True"]}, -1),
        ({"stream": ["true"], "starting_after": ["0"]}, 0), ({"stream": ["1"], "starting_after": ["3", "41"]}, 41),
    ],
)  # fmt: skip
def test_query_for_a_stream(query: dict[str, list[str]], after: int | None) -> None:
    assert read_stream_query(query) == after


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": ["yes"]}, "stream"),
        ({"starting_after": ["3"]}, "starting_after"),
        ({"stream": ["true"], "starting_after": ["-1"]}, "starting_after"),
        ({"stream": ["true"], "starting_after": ["x"]}, "starting_after"),
        ({"stream": ["true"], "starting_after": ["9" * 40]}, "starting_after"),
    ],
)
def test_query_for_a_stream_is_refused_by_name(query: dict[str, list[str]], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_stream_query(query)
    assert caught.value.extras["param"] == param


ITEMS = json.dumps([{"id": f"i{number}"} for number in range(5)]).encode()


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, ["i4", "i3", "i2", "i1", "i0"], False),
        ({"order": ["asc"], "limit": ["2"]}, ["i0", "i1"], True),
        ({"order": ["asc"], "limit": ["2"], "after": ["i2"]}, ["i3", "i4"], False),
        ({"after": ["i1"]}, ["i0"], False),
        ({"after": ["i0"]}, [], False),
    ],
)
def test_page_of_items(query: dict[str, list[str]], ids: list[str], has_more: bool) -> None:
    page = json.loads(read_page(ITEMS, query))
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids, has_more)
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    "query", [{"limit": ["0"]}, {"limit": ["101"]}, {"limit": ["x"]}, {"order": ["up"]}, {"after": ["no"]}]
)
def test_page_refuses_by_name(query: dict[str, list[str]]) -> None:
    with pytest.raises(BadRequest) as caught:
        read_page(ITEMS, query)
    assert caught.value.extras["param"] == next(iter(query))
