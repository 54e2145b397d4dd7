"""The order of events in the streams of agents, judged by state machines, in all three dialects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.event_order import APPROVAL, FILE, Event, judge_chat, judge_messages, judge_responses
from tests.process.harness import start_server
from tests.process.test_agents import CHAT, PYTHON, SHELL, Client, call, script

MAKE = call(PYTHON, code="open('a', 'w').write('x')")
SCENES = {
    "a text": ("Hello.",),
    "one call": (MAKE, "Then."),
    "text before and after": (f"First.{MAKE}", "Then."),
    "two calls in a round, and another round": (f"I look.{MAKE}{call(SHELL, commands=['exit 3'])}", MAKE, "Done."),
    "a call without an answer": (call(PYTHON, code="1/0"), ""),
    "a client's call after the server's": (f"Both.{call(SHELL, commands=['true'])}{call('weather', city='Oslo')}",),
    "a client's call alone": (call("weather", city="Oslo"),),
    "wrong arguments": (call(SHELL, commands=7), "Sorry."),
}
WEATHER: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with start_server(
        "--model", "s=stub:generate,scripted", "--agent", "--sandbox-nice", "10", "--frontends", "1"
    ) as server:
        client = Client(server, "")
        client.wait_for_tools()
        yield client


def chat(client: Client, text: str, **fields: Any) -> list[Event]:
    body = {"messages": [{"role": "user", "content": text}], "enable_code_execution": True, "enable_shell": True}
    return list(client.events(CHAT, **body, tools=[{"type": "function", "function": WEATHER}], **fields))


def messages(client: Client, text: str, **fields: Any) -> list[Event]:
    body = {"model": "s", "max_tokens": 500, "messages": [{"role": "user", "content": text}]}
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    on = {"enable_code_execution": True, "enable_shell": True}
    return list(client.events("/v1/messages", **body, **on, tools=[tool], **fields))


def responses(client: Client, text: str, **fields: Any) -> list[Event]:
    tools = [{"type": "code_interpreter"}, {"type": "shell"}, {"type": "function", **WEATHER}]
    return list(client.events("/v1/responses", model="s", input=text, tools=tools, **fields))


Dialect = tuple[Callable[..., list[Event]], Callable[[list[Event]], None]]
DIALECTS: dict[str, Dialect] = {
    "chat": (chat, judge_chat), "messages": (messages, judge_messages), "responses": (responses, judge_responses),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_events_come_in_order(client: Client, dialect: str, scene: str) -> None:
    stream, judge = DIALECTS[dialect]
    judge(stream(client, script(*SCENES[scene]), files=[{"name": "a"}, {"name": "never"}]))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_cap_of_rounds_ends_in_order(client: Client, dialect: str) -> None:
    stream, judge = DIALECTS[dialect]
    judge(stream(client, script(MAKE, MAKE, "never"), max_tool_rounds=1))


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_approvals_come_in_order(client: Client, dialect: str) -> None:
    stream, judge = DIALECTS[dialect]
    fields = {"agent_permission": "ask", "session_id": f"order {dialect}".replace(" ", "-")}
    events: list[Event] = []
    text = script(MAKE + call(SHELL, commands=["true"]), "Then.")
    inner = Client(client.server, "")

    def decided(*args: Any, **body: Any) -> Iterator[Event]:
        decisions = iter(["approve", "deny"])
        for name, data in Client.events(inner, *args, **body):
            if name == APPROVAL:
                client.post(f"/v1/agent/approvals/{data['approval_id']}", decision=next(decisions))
            yield name, data

    inner.events = decided  # type: ignore[method-assign]
    events = stream(inner, text, **fields)
    judge(events)
    assert [name for name, _ in events].count(APPROVAL) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_judge_refuses_any_two_neighbours_that_change_places(client: Client, dialect: str) -> None:
    """Texts may be cut anywhere, so neighbours that are both pieces of one text are left as they are."""
    stream, judge = DIALECTS[dialect]
    events = [event for event in stream(client, script(f"A.{MAKE}", "B.")) if event[0] != "ping"]  # those come anywhere
    judge(events)
    refused = 0
    for place in range(len(events) - 1):
        if _is_text(events[place]) and _is_text(events[place + 1]):
            continue
        changed = [*events[:place], events[place + 1], events[place], *events[place + 2 :]]
        with pytest.raises((AssertionError, KeyError)):
            judge(changed)
        refused += 1
    assert refused >= 6
    for place in range(len(events)):
        if not _is_text(events[place]) and events[place][0] != FILE:
            with pytest.raises((AssertionError, KeyError)):
                judge([*events[:place], *events[place + 1 :]])


def _is_text(event: Event) -> bool:
    name, data = event
    if data == "[DONE]" or name.endswith("block_delta"):
        return name.endswith("block_delta")
    is_chunk = not name and bool(data["choices"])
    return is_chunk and not data["choices"][0]["finish_reason"] and "role" not in data["choices"][0]["delta"]
