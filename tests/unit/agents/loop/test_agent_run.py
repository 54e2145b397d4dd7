"""The rounds of a run, with rounds that are written down and tools that answer at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from sie.agents import tools
from sie.agents.loop.agent_run import AgentRun
from sie.agents.loop.plan import AgentPlan, plan_agent
from sie.agents.messages import (
    Approval,
    AwaitApproval,
    Decision,
    FindFiles,
    FoundFiles,
    OpenApproval,
    RunTool,
    ToolResult,
)
from sie.config.agent_settings import Agents
from sie.values.agent import (
    AgentFile,
    AgentTask,
    ApprovalRequired,
    ExpectedFile,
    FileProduced,
    McpChoice,
    ToolProgress,
)
from sie.values.errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    InputTooLong,
    Overloaded,
    SieError,
    Unavailable,
)
from sie.values.generate import (
    ChatMessage,
    Ended,
    Finished,
    GenerateEvent,
    GenerateReply,
    GenerateRequest,
    GenerateUsage,
    Started,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)
from sie.values.inference import Timing

ON = Agents(agent=True)
USAGE = GenerateUsage(prompt_tokens=10, completion_tokens=3)


def call(name: str, number: int = 0, arguments: str = "{}") -> ToolCall:
    return ToolCall(id=f"call_{name}_{number}", name=name, arguments=arguments)


class Said:
    """One round: a text, and calls; or an error at its beginning, or after its text."""

    def __init__(self, text: str, *calls: ToolCall, reason: Any = "stop", error: SieError | None = None) -> None:
        self.model = "m"
        self.is_over = False
        self.error = error
        self.why: SieError | None = None
        deltas = [ToolCallDelta(0, place, one) for place, one in enumerate(calls)]
        reason = "tool_calls" if calls and reason == "stop" else reason
        self.events: list[GenerateEvent] = [
            *([Started(10, 0), TextDelta(0, text)] if text else []), *deltas,
            *([] if error else [Finished(0, reason), Ended(USAGE)]),
        ]  # fmt: skip

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        await asyncio.sleep(0)
        if self.events:
            self.is_over = len(self.events) == 1 and self.error is None
            return [self.events.pop(0)]
        assert self.error is not None
        raise self.error

    async def gather(self) -> list[GenerateEvent]:
        if self.error is not None:
            raise self.error
        self.is_over = True
        return self.events

    def give_up(self, error: SieError) -> None:
        self.why = error

    def timing(self, began_ns: int) -> Timing:
        return Timing(total_ms=0, queue_ms=0, inference_ms=0)

    def usage(self) -> GenerateUsage:
        return USAGE


class Link:
    """Tools whose result is their own name; a tool named `slow` never answers."""

    def __init__(self, decision: Decision | None = None, error: SieError | None = None) -> None:
        self.asked: list[Any] = []
        self.decision = decision
        self.error = error
        self.num_cancelled = 0

    async def ask(self, question: Any, kind: Any) -> Any:
        self.asked.append(question)
        match question:
            case RunTool(name="slow"):
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    self.num_cancelled += 1
                    raise
            case RunTool():
                if self.error is not None:
                    raise self.error
                file = AgentFile(id="file_0", name="made", created_at=0, source={})
                return ToolResult(
                    content=f"result of {question.name}", record="record", data={"stdout": "x"}, files=(file,)
                )
            case OpenApproval():
                return Approval("appr_1")
            case AwaitApproval():
                return self.decision
            case FindFiles():
                return FoundFiles(tuple(
                    AgentFile(id="file_9", name=name, created_at=0, source={}, code="not_produced") for name in question.names
                ))  # fmt: skip

    @property
    def names(self) -> list[str]:
        return [question.name for question in self.asked if isinstance(question, RunTool)]


CLIENT_TOOL = Tool(name="mine")


def make_plan(task: AgentTask | None = None, settings: Agents = ON, **fields: Any) -> AgentPlan:
    request = GenerateRequest(
        **{
            "model": "m",
            "messages": [ChatMessage(role="user", content="hi")],
            "tools": (CLIENT_TOOL,),
            "stream": True,
            "agent": task or AgentTask(code_field="tools", shell_field="enable_shell"),
            **fields,
        }
    )
    plan = plan_agent(request, settings)
    assert plan is not None
    return plan


def run(
    rounds: Sequence[Said],
    work: Callable[[AgentRun], Awaitable[Any]],
    *,
    link: Link | None = None,
    plan: AgentPlan | None = None,
) -> tuple[Any, list[GenerateRequest]]:
    """Return what work gives for a run of these rounds, and the requests of all but the first round."""
    requests: list[GenerateRequest] = []

    async def start(request: GenerateRequest) -> Said:
        requests.append(request)
        return rounds[len(requests)]

    async def main() -> Any:
        return await work(AgentRun(rounds[0], start, plan or make_plan(), link or Link(), owner="me"))

    return asyncio.run(asyncio.wait_for(main(), 60)), requests


async def gather(agent: AgentRun) -> list[GenerateEvent]:
    return await agent.gather()


def texts(events: list[GenerateEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def kinds(events: list[GenerateEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_without_a_call_the_first_round_is_the_answer() -> None:
    events, requests = run([Said("hello")], gather)
    assert kinds(events) == ["Started", "TextDelta", "Finished", "Ended"]
    assert events[-2:] == [Finished(0, "stop"), Ended(USAGE, events[-1].session)]
    assert events[-1].session
    assert requests == []


def test_every_call_of_a_round_runs_and_their_results_are_in_order() -> None:
    link = Link()
    first, second = call(tools.SHELL, 1), call(tools.PYTHON, 2)
    events, requests = run([Said("look", first, second), Said("done")], gather, link=link)
    assert kinds(events) == [
        "Started", "TextDelta", *["ToolProgress", "FileProduced", "ToolProgress"] * 2, "TextDelta", "Finished", "Ended",
    ]  # fmt: skip
    progress = [event for event in events if isinstance(event, ToolProgress)]
    assert [(one.round, one.name, one.phase) for one in progress] == [
        (0, tools.SHELL, "calling"), (0, tools.SHELL, "complete"), (0, tools.PYTHON, "calling"), (0, tools.PYTHON, "complete"),
    ]  # fmt: skip
    assert [one.data["tool_type"] for one in progress] == ["shell", "shell", "code_execution", "code_execution"]
    (request,) = requests
    assert request.messages is not None
    assert request.messages[1:] == [
        ChatMessage(role="assistant", content="look", tool_calls=(first, second)),
        ChatMessage(role="tool", content=f"result of {tools.SHELL}", name=tools.SHELL, tool_call_id=first.id),
        ChatMessage(role="tool", content=f"result of {tools.PYTHON}", name=tools.PYTHON, tool_call_id=second.id),
    ]
    assert events[-1].usage == GenerateUsage(prompt_tokens=20, completion_tokens=6)
    assert [(one.round, one.turn, one.owner) for one in link.asked] == [(0, 0, "me"), (0, 1, "me")]


def test_the_time_of_a_run_says_how_many_rounds_came_before() -> None:
    async def timed(agent: AgentRun) -> int:
        await agent.gather()
        return agent.timing(0).num_earlier

    assert run([Said("done")], timed)[0] == 0
    assert run([Said("", call(tools.SHELL)), Said("", call(tools.SHELL)), Said("done")], timed)[0] == 2


def test_a_client_s_call_goes_to_the_client_after_the_server_s_own() -> None:
    link = Link()
    mine = call("mine")
    events, requests = run([Said("", mine, call(tools.SHELL))], gather, link=link)
    assert link.names == [tools.SHELL]
    assert [event for event in events if isinstance(event, ToolCallDelta)] == [ToolCallDelta(0, 0, mine)]
    assert events[-2] == Finished(0, "tool_calls")
    assert requests == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_round_of_both_kinds_of_calls_keeps_its_text(stream: bool) -> None:
    """A whole answer lost it: its end came after the server's call, which looked like the end of an earlier round."""
    mine = call("mine")

    async def read(agent: AgentRun) -> tuple[GenerateReply, list[ChatMessage]]:
        return await agent.whole(), agent.said

    (reply, said), _ = run([Said("I do both.", call(tools.SHELL), mine)], read, plan=make_plan(stream=stream))
    (choice,) = reply.choices
    assert (choice.text, choice.calls, choice.call_places, choice.reason) == ("I do both.", [mine], [10], "tool_calls")
    assert [(one.role, one.content, [c.name for c in one.tool_calls]) for one in said] == [
        ("assistant", "I do both.", [tools.SHELL]), ("tool", f"result of {tools.SHELL}", []), ("assistant", None, ["mine"]),
    ]  # fmt: skip


def test_the_messages_of_all_rounds_are_known_at_the_end() -> None:
    async def read(agent: AgentRun) -> list[ChatMessage]:
        await agent.gather()
        return agent.said

    one = call(tools.PYTHON)
    said, _ = run([Said("look", one), Said("done")], read)
    assert said == [
        ChatMessage(role="assistant", content="look", tool_calls=(one,)),
        ChatMessage(role="tool", content=f"result of {tools.PYTHON}", name=tools.PYTHON, tool_call_id=one.id),
        ChatMessage(role="assistant", content="done"),
    ]


def test_an_answer_that_continues_its_beginning_is_one_message_for_the_next_round() -> None:
    begun = [ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="I ")]
    _, requests = run(
        [Said("look", call(tools.PYTHON)), Said("done")], gather, plan=make_plan(messages=begun, continues=True)
    )
    messages = requests[0].messages or []
    assert [(one.role, one.content) for one in messages[:3]] == [
        ("user", "hi"), ("assistant", "I look"), ("tool", f"result of {tools.PYTHON}"),
    ]  # fmt: skip


def test_a_client_s_call_alone_runs_nothing() -> None:
    link = Link()
    events, _ = run([Said("x", call("mine"))], gather, link=link)
    assert link.asked == []
    assert events[-2] == Finished(0, "tool_calls")


@pytest.mark.parametrize(("wanted", "setting", "num_rounds"), [(0, 256, 0), (1, 256, 1), (None, 2, 2), (5, 1, 1)])
def test_at_the_cap_the_call_is_returned(wanted: int | None, setting: int, num_rounds: int) -> None:
    link = Link()
    plan = make_plan(AgentTask(code_field="tools", max_rounds=wanted), Agents(agent=True, max_tool_rounds=setting))
    events, requests = run([Said("x", call(tools.PYTHON)) for _ in range(4)], gather, link=link, plan=plan)
    assert len(requests) == num_rounds == len(link.names)
    assert isinstance(events[-3], ToolCallDelta)
    assert events[-2] == Finished(0, "tool_calls")


def test_an_answer_that_was_cut_runs_nothing() -> None:
    link = Link()
    events, _ = run([Said("x", call(tools.PYTHON), reason="length")], gather, link=link)
    assert link.asked == []
    assert events[-2] == Finished(0, "length")


def test_a_forced_choice_holds_for_the_first_round_only() -> None:
    plan = make_plan(tool_choice=ToolChoice(mode="required", names=(tools.PYTHON,)))
    _, requests = run([Said("x", call(tools.PYTHON)), Said("y")], gather, plan=plan)
    assert requests[0].tool_choice == ToolChoice(mode="auto", names=(tools.PYTHON,))


def test_the_budget_of_tokens_ends_a_run() -> None:
    plan = make_plan(settings=Agents(agent=True, agent_tokens=5))
    events, requests = run([Said("x", call(tools.PYTHON)), Said("y", call(tools.PYTHON))], gather, plan=plan)
    assert [request.max_tokens for request in requests] == [2]
    assert events[-2] == Finished(0, "length")


def test_the_budget_of_time_ends_a_run() -> None:
    link = Link()
    plan = msgspec.structs.replace(
        make_plan(settings=Agents(tool_dispatch_url="http://x", agent=True)), timeout_s=1.0
    )  # longer than it takes to begin the call, however busy the machine
    rounds = [Said("x", call("slow"))]

    async def work(agent: AgentRun) -> None:
        with pytest.raises(DeadlineExceeded, match="agent_timeout_s"):
            await agent.gather()

    run(rounds, work, link=link, plan=plan)
    assert link.num_cancelled == 1


def test_a_client_that_leaves_ends_the_call_that_runs() -> None:
    link = Link()
    rounds = [Said("x", call("slow"))]

    async def work(agent: AgentRun) -> None:
        async for event in agent:
            if isinstance(event, ToolProgress):
                break
        agent.give_up(ClientGone("gone"))
        with pytest.raises(ClientGone):
            await agent.gather()
        while not link.num_cancelled:  # noqa: ASYNC110  # the cancelled task sets no event
            await asyncio.sleep(0)

    run(rounds, work, link=link, plan=make_plan(settings=Agents(tool_dispatch_url="http://x", agent=True)))


def test_whole_answer_is_the_last_round_with_the_calls_of_all() -> None:
    async def whole(agent: AgentRun) -> Any:
        reply = await agent.whole()
        assert agent.usage() == reply.usage
        return reply

    rounds = [Said("before", call(tools.PYTHON, arguments='{"code":"1"}')), Said("after")]
    reply, _ = run(rounds, whole, plan=make_plan(AgentTask(code_field="x", session="mine"), stream=False))
    assert reply.choices[0].text == "after"
    assert reply.usage.completion_tokens == 6
    assert reply.agent.session == "mine"
    (record,) = reply.agent.records
    assert (record.round, record.arguments, record.result, record.file_ids) == (
        0,
        '{"code":"1"}',
        "record",
        ("file_0",),
    )
    assert [file.name for file in reply.agent.files] == ["made"]


def test_files_that_nobody_made_are_placeholders_and_the_text_stays() -> None:
    async def whole(agent: AgentRun) -> Any:
        return await agent.whole()

    files = (ExpectedFile("made"), ExpectedFile("missing"))
    plan = make_plan(AgentTask(code_field="x", files=files), stream=False)
    reply, _ = run([Said("x", call(tools.PYTHON)), Said("after")], whole, plan=plan)
    assert [(file.name, file.code) for file in reply.agent.files] == [("made", None), ("missing", "not_produced")]
    assert reply.choices[0].text == "after"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_round_of_which_nothing_was_sent_begins_again(is_stream: bool) -> None:
    lost = Unavailable("lost", code="WORKER_LOST")
    rounds = [Said("x", call(tools.PYTHON)), Said("", error=lost), Said("", error=lost), Said("done")]
    link = Link()
    events, requests = run(rounds, gather, link=link, plan=make_plan(stream=is_stream))
    assert texts(events) == "xdone"
    assert len(requests) == 3
    assert len(link.names) == 1, "the call ran once"


def test_a_round_that_was_begun_fails_honestly() -> None:
    lost = Unavailable("lost", code="WORKER_LOST")

    async def work(agent: AgentRun) -> None:
        with pytest.raises(Unavailable, match="lost"):
            await agent.gather()
        assert agent.has_acted

    run([Said("x", call(tools.PYTHON)), Said("half", error=lost)], work)


def test_a_lost_agent_process_is_a_result_for_the_model() -> None:
    link = Link(error=Unavailable("The agent process is not running", code="AGENT_LOST"))
    events, requests = run([Said("x", call(tools.PYTHON)), Said("so")], gather, link=link)
    assert requests[0].messages is not None
    assert "not running" in str(requests[0].messages[-1].content)
    assert "not running" in [event for event in events if isinstance(event, ToolProgress)][-1].data["exception"]


def test_an_agent_process_that_is_lost_while_an_approval_waits_is_a_result_for_the_model() -> None:
    class Lost(Link):
        async def ask(self, question: Any, kind: Any) -> Any:
            if isinstance(question, AwaitApproval):
                raise Unavailable("The agent process is not running", code="AGENT_LOST")
            return await super().ask(question, kind)

    link, plan = Lost(), make_plan(AgentTask(code_field="x", permission="ask"))
    events, requests = run([Said("x", call(tools.PYTHON)), Said("so")], gather, link=link, plan=plan)
    assert texts(events) == "xso"
    assert link.names == [], "nobody approved it"
    assert requests[0].messages is not None
    assert msgspec.json.decode(str(requests[0].messages[-1].content)) == {
        "status": "error",
        "exception": "The agent process is not running",
    }


@pytest.mark.parametrize("error", [Unavailable("It is not running", code="AGENT_LOST"), Overloaded("It is full")])
def test_an_answer_that_is_there_is_given_though_nobody_can_look_for_its_files(error: SieError) -> None:
    class Lost(Link):
        async def ask(self, question: Any, kind: Any) -> Any:
            if isinstance(question, FindFiles):
                raise error
            return await super().ask(question, kind)

    plan = make_plan(AgentTask(code_field="x", files=(ExpectedFile("a"), ExpectedFile("b"))))
    events, _ = run([Said("answer")], gather, link=Lost(), plan=plan)
    files = [event.file for event in events if isinstance(event, FileProduced)]
    assert [(file.name, file.code, file.message) for file in files] == [
        ("a", "not_produced", error.message),
        ("b", "not_produced", error.message),
    ]
    assert len({file.id for file in files}) == 2
    assert texts(events) == "answer"
    assert isinstance(events[-1], Ended)


@pytest.mark.parametrize("reason", ["the host is full", "the second call finds it full"])
def test_a_call_for_which_the_host_had_no_room_has_not_acted(reason: str) -> None:
    class Full(Link):
        async def ask(self, question: Any, kind: Any) -> Any:
            if isinstance(question, RunTool) and (question.turn or reason == "the host is full"):
                raise Overloaded(reason)
            return await super().ask(question, kind)

    async def work(agent: AgentRun) -> tuple[bool, SieError]:
        with pytest.raises(Overloaded) as caught:
            await agent.gather()
        return agent.has_acted, caught.value

    rounds = [Said("x", call(tools.PYTHON), call(tools.PYTHON, 1)), Said("so")]
    (has_acted, error), _ = run(rounds, work, link=Full())
    assert has_acted == (not error.may_be_repeated) == (reason != "the host is full")


@pytest.mark.parametrize("is_stream", [True, False])
def test_results_without_room_in_the_context_end_the_answer_and_not_the_conversation(is_stream: bool) -> None:
    """The client heard that its own prompt was too long, and got nothing of what the tools had done."""
    long = InputTooLong("The prompt has 9 tokens", code="CONTEXT_LENGTH_EXCEEDED")
    rounds = [Said("one", call(tools.PYTHON)), Said("two", call(tools.SHELL)), Said("", error=long)]

    async def work(agent: AgentRun) -> Any:
        return await agent.whole(), agent.said

    (reply, said), _ = run(rounds, work, plan=make_plan(stream=is_stream))
    assert (reply.choices[0].text, reply.choices[0].reason, reply.choices[0].calls) == ("two", "length", [])
    assert [record.name for record in reply.agent.records] == [tools.PYTHON, tools.SHELL]
    assert [(one.role, one.content, len(one.tool_calls)) for one in said] == [
        ("assistant", "one", 1),
        ("tool", f"result of {tools.PYTHON}", 0),
        ("assistant", "two", 0),
    ]
    assert reply.usage.completion_tokens == 2 * USAGE.completion_tokens


def test_a_client_s_own_prompt_without_room_is_its_mistake() -> None:
    async def work(agent: AgentRun) -> None:
        with pytest.raises(InputTooLong, match="9 tokens"):
            await agent.gather()

    long = InputTooLong("The prompt has 9 tokens", code="CONTEXT_LENGTH_EXCEEDED")
    run([Said("", error=long)], work)


def test_a_remembered_approval_is_for_one_kind_of_built_in_tool_and_for_one_other_tool() -> None:
    link = Link(Decision(True))
    settings = Agents(agent=True, tool_dispatch_url="http://h/")
    plan = make_plan(AgentTask(code_field="x", permission="ask"), settings, tools=(CLIENT_TOOL, Tool(name="other")))
    names = (tools.PYTHON, tools.RESET_PYTHON, "mine", "other")
    run([Said("x", *map(call, names)), Said("so")], gather, link=link, plan=plan)
    kinds = [question.kind for question in link.asked if isinstance(question, OpenApproval)]
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 3


def test_a_denied_call_is_told_to_the_model() -> None:
    link = Link()
    plan = make_plan(AgentTask(code_field="x", permission="deny"))
    _, requests = run([Said("x", call(tools.PYTHON)), Said("so")], gather, link=link, plan=plan)
    assert link.asked == []
    assert requests[0].messages is not None
    assert msgspec.json.decode(str(requests[0].messages[-1].content))["status"] == "denied"


@pytest.mark.parametrize("decision", [Decision(True), Decision(False, "not that")])
def test_an_approval_is_asked_for_between_the_two_events(decision: Decision) -> None:
    link = Link(decision)
    plan = make_plan(AgentTask(code_field="x", permission="ask", session="s"))
    rounds = [Said("x", call(tools.PYTHON, arguments='{"code":"1"}')), Said("so")]
    events, requests = run(rounds, gather, link=link, plan=plan)
    made = [name for name in kinds(events) if name in {"ToolProgress", "ApprovalRequired", "FileProduced"}]
    assert made == ["ToolProgress", "ApprovalRequired", *["FileProduced"] * decision.is_approved, "ToolProgress"]
    (asked,) = [event for event in events if isinstance(event, ApprovalRequired)]
    assert asked.arguments == {"code": "1"}
    assert asked.tool == {"source": "built_in", "kind": "code_execution", "label": "Python code"}
    assert (asked.session, asked.round) == ("s", 0)
    assert bool(link.names) == decision.is_approved
    if not decision.is_approved:
        assert requests[0].messages is not None
        assert "not that" in str(requests[0].messages[-1].content)


def test_at_most_64_files_are_shown() -> None:
    rounds = [Said("x", *(call(tools.PYTHON, number) for number in range(70))), Said("so")]
    events, _ = run(rounds, gather)
    assert sum(isinstance(event, FileProduced) for event in events) == 64


# --- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "settings", "fields", "param", "said"),
    [
        (AgentTask(code_field="tools[0]"), Agents(enable_shell=True), {}, "tools[0]", "--enable-code-execution"),
        (
            AgentTask(shell_field="enable_shell"),
            Agents(enable_code_execution=True),
            {},
            "enable_shell",
            "--enable-shell",
        ),
        (AgentTask(search_field="web_search_options"), ON, {}, "web_search_options", "--enable-search"),
        (AgentTask(field="session_id", session="s"), Agents(), {}, "session_id", "--agent"),
        (AgentTask(code_field="x", permission="ask"), ON, {"stream": False}, "agent_permission", "stream"),
        (
            AgentTask(code_field="x"),
            Agents(agent=True, agent_permission="ask"),
            {"stream": False},
            "agent_permission",
            "stream",
        ),
        (AgentTask(code_field="x"), ON, {"num_choices": 2}, "n", "1"),
        (AgentTask(code_field="x"), ON, {"tools": (Tool(name=tools.SHELL),)}, "tools", tools.SHELL),
    ],
)
def test_what_is_off_or_impossible_is_refused_by_name(
    task: AgentTask, settings: Agents, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        make_plan(task, settings, **fields)
    assert refused.value.extras["param"] == param
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("asked", "setting", "found"),
    [
        ("auto", "auto", "auto"),
        ("auto", "ask", "ask"),
        ("ask", "auto", "ask"),
        ("ask", "deny", "deny"),
        ("deny", "ask", "deny"),
    ],
)
def test_the_stricter_permission_counts(asked: Any, setting: Any, found: str) -> None:
    plan = make_plan(AgentTask(code_field="x", permission=asked), Agents(agent=True, agent_permission=setting))
    assert plan.task.permission == found


@pytest.mark.parametrize(
    ("task", "switch"),
    [
        (AgentTask(code_field="f"), "start it with --enable-code-execution, or --agent for all"),
        (AgentTask(search_field="f"), "start it with --search-url and --enable-search"),
        (AgentTask(mcp=(McpChoice(field="f", label="x"),)), "start it with --mcp-config"),
    ],
)
def test_a_tool_that_is_off_is_refused_with_the_switches_that_turn_it_on(task: AgentTask, switch: str) -> None:
    for settings in (Agents(), Agents(agent=True)):
        if not (task.code_field and settings.agent):
            with pytest.raises(BadRequest) as refused:
                make_plan(task, settings)
            assert refused.value.message.endswith(switch)
            assert refused.value.extras["param"] == "f"


def test_functions_are_dispatched_only_with_an_address() -> None:
    request = GenerateRequest(model="m", messages=[ChatMessage(role="user", content="x")], tools=(CLIENT_TOOL,))
    assert plan_agent(request, ON) is None
    plan = plan_agent(request, Agents(tool_dispatch_url="http://x/"))
    assert plan is not None
    assert plan.runs("mine")
    assert not plan.runs(tools.PYTHON)
