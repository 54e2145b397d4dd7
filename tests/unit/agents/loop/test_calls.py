"""What a run keeps of its calls until it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sie.agents import tools
from sie.agents.loop import calls
from sie.agents.loop.calls import CallRunner
from sie.agents.loop.plan import plan_agent
from sie.agents.messages import ToolResult, failed
from sie.config.agent_settings import Agents
from sie.values.agent import AgentTask, SearchRule, ToolProgress
from sie.values.generate import ChatMessage, GenerateEvent, GenerateRequest, ToolCall


class Link:
    """Tools that each make two pictures."""

    async def ask(self, question: Any, kind: Any) -> Any:
        return ToolResult(content="{}", record="", data={"images_base64": [f"{question.round}" * 1000] * 2})


def test_searches_over_their_number_are_denied() -> None:
    task = AgentTask(search_field="tools", search=SearchRule(max_uses=2))
    request = GenerateRequest(model="m", messages=[ChatMessage(role="user", content="q")], agent=task)
    plan = plan_agent(request, Agents(agent=True, search_url="http://h/"))
    assert plan is not None
    runner = CallRunner(Link(), plan, lambda _: None, owner="", session="s", run_id="r")
    names = (tools.SEARCH, tools.READ_PAGE, tools.SEARCH)

    async def main() -> list[str]:
        return [await runner.run(ToolCall(id="c", name=name, arguments="{}"), 0, 0) for name in names]

    first, second, third = asyncio.run(main())
    assert (first, second) == ("{}", "{}")
    assert "at most 2 calls of web search (max_uses)" in third


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (tools.PYTHON, {"tool_type": "code_execution", "exception": "no"}),
        (tools.SHELL, {"tool_type": "shell", "stderr": "no", "status": "error"}),
        (tools.SEARCH, {"tool_type": "web_search", "results_count": 0, "sources": [], "exception": "no"}),
        (tools.LIST_FILES, {"tool_type": "custom", "content": "no"}),
    ],
)
def test_a_call_that_failed_has_the_fields_of_its_tool(name: str, data: dict[str, Any]) -> None:
    class Failing:
        async def ask(self, question: Any, kind: Any) -> Any:
            return failed("no")

    task = AgentTask(code_field="x", shell_field="x", search_field="x")
    request = GenerateRequest(model="m", messages=[ChatMessage(role="user", content="q")], agent=task)
    plan = plan_agent(request, Agents(agent=True, search_url="http://h/"))
    assert plan is not None
    events: list[GenerateEvent] = []
    runner = CallRunner(Failing(), plan, events.append, owner="", session="s", run_id="r")
    told = asyncio.run(runner.run(ToolCall(id="c", name=name, arguments="{}"), 0, 0))
    assert told == runner.records[0].result == '{"status":"error","exception":"no"}'
    assert isinstance(events[-1], ToolProgress)
    assert (events[-1].data, events[-1].is_error) == (data, True)


def test_the_pictures_of_a_run_are_bounded_and_others_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_PICTURE_CHARS", 7000)
    request = GenerateRequest(
        model="m", messages=[ChatMessage(role="user", content="q")], agent=AgentTask(code_field="tools")
    )
    plan = plan_agent(request, Agents(agent=True))
    assert plan is not None
    events: list[GenerateEvent] = []
    runner = CallRunner(Link(), plan, events.append, owner="", session="s", run_id="r")
    call = ToolCall(id="c", name=tools.PYTHON, arguments="{}")

    async def main() -> list[str]:
        return [await runner.run(call, number, 0) for number in range(3)]

    told = asyncio.run(main())
    assert [len(record.images) for record in runner.records] == [2, 1, 0]
    assert [
        len(one.data["images_base64"]) for one in events if isinstance(one, ToolProgress) and one.phase == "complete"
    ] == [2, 1, 0]
    note = "pictures left out, because they were too many or too large for one request: "
    assert told == ["{}", f"{{}}\n{note}1", f"{{}}\n{note}2"]
    assert [record.result for record in runner.records] == ["", f"note: {note}1", f"note: {note}2"]
    assert [one.data.get("note") for one in events if isinstance(one, ToolProgress)][1::2] == [
        None,
        f"{note}1",
        f"{note}2",
    ]
