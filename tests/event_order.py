"""State machines that judge the order of the events of an agent's stream, one for each dialect.

`judge` takes every event as (name, data), in order, and raises AssertionError at the first that may not come there.
Source: generation API reference, sections 3.5, 5.4, 6.3 and 8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PROGRESS, APPROVAL, FILE = "agentic_tool_call_progress", "agentic_tool_approval_required", "file_produced"
SURFACE, SHELL = "mistralrs_surface_outputs", "mistralrs_shell"
NAMED = frozenset({PROGRESS, APPROVAL, FILE})
Event = tuple[str, Any]


class Calls:
    """The server's calls: calling, an approval, files, complete. One at a time, in rounds that count up from 0.

    Files that the request asked for come after all calls. silent: tools whose calls have no progress here.
    """

    def __init__(self, *silent: str) -> None:
        self.silent = silent
        self.is_late = False
        self.open: dict[str, Any] | None = None
        self.is_approved = False
        self.round = -1
        self.num_calls = 0

    def take(self, name: str, data: dict[str, Any]) -> None:
        assert data["type"] == name
        if name == PROGRESS and data["phase"] == "calling":
            assert self.open is None, "a call begins within another"
            assert not self.is_late, "a call begins after the end of all calls"
            assert self.round <= data["round"] <= self.round + 1, "rounds count up"
            self.open, self.round, self.is_approved = data, data["round"], False
            self.num_calls += 1
        elif name == PROGRESS:
            assert self.open is not None, "a call ends that never began"
            same = ("round", "tool_name")
            assert [data[one] for one in same] == [self.open[one] for one in same]
            assert data["data"]["tool_type"] == self.open["data"]["tool_type"]
            self.open = None
        elif name == APPROVAL:
            assert self.open is not None, "an approval without a call"
            assert not self.is_approved, "a second approval of one call"
            assert data["round"] == self.open["round"]
            self.is_approved = True
        else:
            source = data["file"]["source"]
            if self.open is not None:
                assert (source["tool"], source["round"]) == (self.open["tool_name"], self.open["round"])
            elif source["tool"] not in self.silent:
                assert source["tool"] == SURFACE, "a file outside of its call"
                self.is_late = True

    def check_quiet(self, what: str) -> None:
        assert self.open is None, f"{what} while a call runs"


def judge_chat(events: Iterable[Event]) -> None:
    """Judge a stream of chunks."""
    calls, state, heads = Calls(), "start", set[tuple[Any, ...]]()
    for name, data in events:
        assert state != "over", "an event after [DONE]"
        if data == "[DONE]":
            assert state in {"finished", "counted"}
            state = "over"
            continue
        if name:
            assert state in {"start", "said"}, f"{name} after the end of the answer"
            calls.take(name, data)
            continue
        calls.check_quiet("a chunk")
        heads.add((data["id"], data["created"], data["model"]))
        if not data["choices"]:
            assert state == "finished"
            assert data["usage"]
            state = "counted"
            continue
        (choice,) = data["choices"]
        assert state in {"start", "said"}, "a chunk after the finishing one"
        assert ("role" in choice["delta"]) == (state == "start"), "the first chunk alone has the role"
        state = "finished" if choice["finish_reason"] else "said"
        assert ("session_id" in data) == (state == "finished"), "the finishing chunk has the session"
    assert state == "over"
    assert len(heads) == 1


def judge_messages(events: Iterable[Event]) -> None:
    """Judge a stream of Anthropic's events."""
    calls, state, block, num_blocks = Calls(), "start", "", 0
    deltas = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    for name, data in events:
        assert data["type"] == name
        assert state != "over", "an event after message_stop"
        if name == "ping":
            continue
        if name in NAMED:
            assert (state, block) == ("open", ""), f"{name} outside of a message, or within a block"
            calls.take(name, data)
            continue
        calls.check_quiet(name)
        if name == "message_start":
            assert state == "start"
            assert data["message"]["content"] == []
            state = "open"
        elif name == "content_block_start":
            assert (state, block, data["index"]) == ("open", "", num_blocks)
            block, num_blocks = data["content_block"]["type"], num_blocks + 1
        elif name == "content_block_delta":
            assert data["index"] == num_blocks - 1
            assert data["delta"]["type"] in {deltas[block], "signature_delta"}
        elif name == "content_block_stop":
            assert block
            assert data["index"] == num_blocks - 1
            block = ""
        elif name == "message_delta":
            assert (state, block) == ("open", "")
            assert data["delta"]["stop_reason"]
            state = "ended"
        else:
            assert (name, state) == ("message_stop", "ended")
            state = "over"
    assert state == "over"


class _Item:
    """One item of a response, from `added` to `done`."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item
        self.text = ""
        self.part = "none"

    def take(self, kind: str, data: dict[str, Any]) -> None:
        if "item_id" in data:
            assert data["item_id"] == self.item["id"]
        step = kind.rpartition(".")[2]
        if kind == "response.content_part.added":
            assert self.part == "none"
            self.part = "open"
        elif step == "delta":
            assert self.part == "open" or self.item["type"] != "message"
            self.text += data["delta"]
        elif kind == "response.content_part.done":
            assert self.part == "told"
            assert data["part"]["text"] == self.text
            self.part = "done"
        else:
            assert self.text == data.get("text", data.get("arguments"))
            self.part = "told"


def judge_responses(events: Iterable[Event]) -> None:
    """Judge a stream of `/v1/responses`."""
    calls, done, item, state, number = Calls(SHELL), list[dict[str, Any]](), None, "start", 0
    for name, data in events:
        assert data["type"] == name
        assert state != "over", "an event after the terminal one"
        if name in NAMED:
            assert item is None or (name == FILE and calls.open is None), f"{name} within an item"
            assert "sequence_number" not in data
            assert state == "open"
            calls.take(name, data)
            continue
        assert data["sequence_number"] == number
        number += 1
        if name == "response.created":
            assert state == "start"
            state = "created"
        elif name == "response.in_progress":
            assert state == "created"
            state = "open"
        elif name == "response.output_item.added":
            assert (state, item, data["output_index"]) == ("open", None, len(done))
            item = _Item(data["item"])
        elif name == "response.output_item.done":
            assert item is not None
            assert data["output_index"] == len(done)
            assert data["item"]["id"] == item.item["id"]
            assert item.part != "open"
            done.append(data["item"])
            item = None
        elif name in {"response.completed", "response.incomplete", "response.failed"}:
            assert (state, item) == ("open", None)
            calls.check_quiet(name)
            assert data["response"]["output"] == done
            state = "over"
        else:
            assert item is not None, f"{name} outside of an item"
            item.take(name, data)
    assert state == "over"
