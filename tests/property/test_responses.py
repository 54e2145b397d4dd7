"""For any output of a model, a response's stream is numbered without a gap, ends once, and agrees with the object."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from sie.config.limits import Limits
from sie.frontend.dialects.responses.openapi import ResponseAnswer
from sie.frontend.dialects.responses.replay import is_terminal, replay
from sie.frontend.dialects.responses.reply import CANCELLED, ResponseRecord, ResponseWriter
from sie.frontend.dialects.responses.request import decode_responses
from sie.values.agent import ToolProgress
from sie.values.errors import Internal, SieError
from sie.values.generate import (
    Ended,
    Finished,
    GenerateEvent,
    GenerateUsage,
    LogprobText,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)

_as_client: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
NOW_S = 1_800_000_000

HELPER = ToolProgress(
    round=0, name="mistralrs_read_file", phase="complete", data={"tool_type": "custom", "content": "x"}, call_id="c",
    arguments="{}",
)  # fmt: skip
"""A call that the server ran, and that is not an item of its own."""
texts = st.text(st.sampled_from("aé😀 \n"), max_size=4)
logprobs = st.builds(
    lambda text: (LogprobText(text=text, raw=text.encode(), logprob=-0.5),), st.sampled_from(["a", "é"])
)
calls = st.builds(
    lambda number: ToolCallDelta(0, number, ToolCall(id=f"call_{number}", name="ns.f", arguments='{"a":1}')),
    st.integers(0, 9),
)
deltas = st.one_of(
    st.builds(lambda text: TextDelta(0, text), texts),
    st.builds(lambda text, log: TextDelta(0, text, log), texts, logprobs),
    st.builds(lambda text, log: ReasoningDelta(0, text, log), texts, logprobs),
    calls,
    st.just(HELPER),
)
ends: st.SearchStrategy[list[GenerateEvent] | SieError] = st.one_of(
    st.sampled_from(["stop", "length"]).map(
        lambda reason: [Finished(0, reason), Ended(GenerateUsage(prompt_tokens=3, completion_tokens=2))]
    ),
    st.just(Internal("it broke")),
    st.just(SieError("stopped", code=CANCELLED, http_status=400)),
)


def new_record(*, stream: bool) -> ResponseRecord:
    body = {"input": "hi", "stream": stream, "metadata": {"k": "v"}}
    call = decode_responses(json.dumps(body).encode(), None, Limits())
    named = msgspec.structs.replace(call, namespaces={"ns.f": ("ns", "f")})
    return ResponseRecord("resp_1", NOW_S, named, "m")


def parse(stream: bytes) -> list[dict[str, Any]]:
    blocks = stream.decode().split("\n\n")[:-1]
    parsed = [json.loads(block.split("\ndata: ", 1)[1]) for block in blocks]
    assert [block.split("\n")[0] for block in blocks] == [f"event: {one['type']}" for one in parsed]
    return parsed


@settings(deadline=None)
@given(st.lists(deltas, max_size=12), ends, st.booleans(), st.data())
def test_stream_is_whole_and_says_what_the_object_says(
    written: list[GenerateEvent], end: list[GenerateEvent] | SieError, is_started: bool, data: st.DataObject
) -> None:
    record, silent = new_record(stream=True), new_record(stream=False)
    writer = ResponseWriter(record)
    events = [Started(3, 0), *written] if is_started or isinstance(end, list) else []
    stream = b""
    for batch in ([one] for one in events):
        for each in (record, silent):
            each.apply(batch, NOW_S)
        if data.draw(st.booleans()):
            stream += writer.write(batch)
    if isinstance(end, list):
        for each in (record, silent):
            each.apply(end, NOW_S)
        stream += writer.write(end)
    else:
        silent.fail(end)
        stream += writer.write_error(end) + writer.write_error(Internal("too late"))
    got = [one for one in parse(stream) if "sequence_number" in one]  # the others are beside the API's own

    assert [one["sequence_number"] for one in got] == list(range(len(got)))
    assert [one["type"] for one in got[:2]] == ["response.created", "response.in_progress"]
    assert [one["type"] in TERMINAL for one in got] == [False] * (len(got) - 1) + [True]
    for one in got:
        _as_client.validate_python(one)
    final = got[-1]["response"]
    Response.model_validate(final)
    msgspec.convert(final, ResponseAnswer)
    check_items(got, final["output"])
    whole = json.loads(silent.to_json())
    assert json.loads(record.to_json()) == final
    hidden = {"id": None, "type": None}
    assert [{**item, **hidden} for item in final["output"]] == [{**item, **hidden} for item in whole["output"]]
    assert (final["status"], final["usage"]) == (whole["status"], whole["usage"])
    event(f"{final['status']}, items: {len(final['output'])}")
    check_replay(whole)


def check_replay(made: dict[str, Any]) -> None:
    """What was made without a stream has one all the same, the same whenever it is read, that ends in the object itself."""
    body = json.dumps(made).encode()
    events = replay(body)
    assert events == replay(body)
    got = parse(b"".join(events))
    assert [one["sequence_number"] for one in got] == list(range(len(got)))
    assert [is_terminal(one) for one in events] == [False] * (len(events) - 1) + [True]
    for one in got:
        _as_client.validate_python(one)
    assert got[-1]["response"] == made
    check_items(got, made["output"])
    begun = replay(json.dumps({**made, "status": "in_progress", "output": [], "usage": None, "error": None}).encode())
    assert [one["type"] for one in parse(b"".join(begun))] == ["response.created", "response.in_progress"]


def check_items(got: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Fold the events as a client does; that must come to the output."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    done: set[int] = set()
    for one in got:
        kind, index = one["type"], one.get("output_index")
        if kind == "response.output_item.added":
            assert index == len(items)
            assert one["item"].get("arguments", "") == ""
            items[index], texts[index] = one["item"], ""
        elif kind == "response.output_item.done":
            assert index not in done
            assert one["item"]["id"] == items[index]["id"]
            assert one["item"] == output[index]
            done.add(index)
        elif index is not None:
            assert one["item_id"] == items[index]["id"]
            assert index not in done
            if kind.endswith(".delta"):
                texts[index] += one["delta"]
            elif "text" in one or "arguments" in one:
                assert one.get("text", one.get("arguments")) == texts[index]
    assert done == set(items) == set(range(len(output)))
    for index, item in enumerate(output):
        shown = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert shown == texts[index]
        if item["type"] == "function_call":
            assert (item["namespace"], item["name"]) == ("ns", "f")
