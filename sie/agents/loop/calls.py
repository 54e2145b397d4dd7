"""Runs one call of a model: approval, execution, and the events that show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from sie.agents.loop.plan import AgentPlan
from sie.agents.messages import (
    Answer,
    Approval,
    AwaitApproval,
    Decision,
    OpenApproval,
    Question,
    RunTool,
    ToolResult,
    failed,
)
from sie.agents.pictures import bound_pictures, note_left_out
from sie.agents.tools import ServerTool
from sie.values.agent import ApprovalRequired, FileProduced, ToolProgress, ToolRecord
from sie.values.errors import Overloaded, Unavailable
from sie.values.generate import GenerateEvent, ToolCall

_DENIED: Final = "The permission of this request denies every call of a tool"
_MAX_PICTURE_CHARS: Final = 64 << 20
"""The pictures of one run, in base64. Its records hold them until it ends."""
_AnswerT = TypeVar("_AnswerT", bound=Answer)


class AgentLink(Protocol):
    """A connection to the agent process."""

    async def ask(self, question: Question, kind: type[_AnswerT]) -> _AnswerT:
        """Return the answer to a question. Raises SieError."""
        ...


class CallRunner:
    """Runs the calls of one run, one after another. emit takes the events as they happen."""

    def __init__(
        self, link: AgentLink, plan: AgentPlan, emit: Callable[[GenerateEvent], None],
        *, owner: str, session: str, run_id: str,
    ) -> None:  # fmt: skip
        self.has_begun = False
        """Whether a tool has begun to run."""
        self.records: list[ToolRecord] = []
        self._link = link
        self._plan = plan
        self._task = plan.task
        self._emit = emit
        self._owner = owner
        self._session = session
        self._run_id = run_id
        self._picture_chars = _MAX_PICTURE_CHARS
        """The room for further pictures."""
        self._num_searches = 0

    async def run(self, call: ToolCall, number: int, turn: int) -> str:
        """Run call `turn` of round `number`; return its result for the model. Raises SieError if the run must end."""
        tool = self._plan.find_tool(call.name)
        arguments = _arguments(call.arguments)
        self._progress(tool, call, number, "calling", _calling(tool, arguments))
        result = self._bound(await self._result_of(tool, call, arguments, number, turn))
        for file in result.files:
            self._emit(FileProduced(file))
        data = _failed(tool, result) if result.problem else result.data
        self._progress(tool, call, number, "complete", data, is_error=bool(result.problem))
        self.records.append(
            ToolRecord(
                round=number, name=call.name, arguments=call.arguments, result=result.record,
                images=tuple(result.data.get("images_base64", ())), file_ids=tuple(file.id for file in result.files),
            )
        )  # fmt: skip
        return result.content

    async def _result_of(
        self, tool: ServerTool, call: ToolCall, arguments: dict[str, Any], number: int, turn: int
    ) -> ToolResult:
        """Return what a call gave, or why it gave nothing. Raises SieError if the run must end."""
        try:
            decision = await self._decide(tool, arguments, number)
            if not decision.is_approved:
                return failed(decision.message, is_denied=True)
            return await self._execute(tool, call, number, turn)
        except Unavailable as error:  # the agent process died meanwhile: the model is told, and the run goes on
            return failed(error.message)

    def _bound(self, result: ToolResult) -> ToolResult:
        """Return a result with the pictures for which this run has room, and a note about others."""
        data, self._picture_chars, num_left_out = bound_pictures(result.data, self._picture_chars)
        if not num_left_out:
            return result
        note = note_left_out(num_left_out, "one request")
        return msgspec.structs.replace(
            result, content=f"{result.content}\n{note}", record=f"{result.record}\nnote: {note}".lstrip(),
            data={**data, "note": f"{data.get('note', '')}\n{note}".strip()},
        )  # fmt: skip

    async def _decide(self, tool: ServerTool, arguments: dict[str, Any], number: int) -> Decision:
        if tool.type == "web_search":
            self._num_searches += 1
            most = self._task.search.max_uses
            if most is not None and self._num_searches > most:
                return Decision(False, f"This request allows at most {most} calls of web search (max_uses)")
        if self._task.permission != "ask":
            return Decision(self._task.permission == "auto", _DENIED)
        question = OpenApproval(owner=self._owner, session=self._session, kind=_approved_kind(tool))
        approval = await self._link.ask(question, Approval)
        if not approval.id:
            return Decision(True)
        shown = {"source": tool.source, "kind": tool.kind, "label": tool.label}
        self._emit(
            ApprovalRequired(
                approval_id=approval.id, session=self._session, round=number, tool=shown, arguments=arguments
            )
        )
        return await self._link.ask(AwaitApproval(approval.id), Decision)

    async def _execute(self, tool: ServerTool, call: ToolCall, number: int, turn: int) -> ToolResult:
        question = RunTool(
            owner=self._owner, session=self._session, run_id=self._run_id, round=number, turn=turn, name=call.name,
            arguments=call.arguments, server=tool.server, search=self._task.search, inputs=self._task.inputs, skills=self._task.mounted,
        )  # fmt: skip
        had_begun, self.has_begun = self.has_begun, True
        try:
            return await self._link.ask(question, ToolResult)
        except Overloaded:  # the host had no room to begin the call
            self.has_begun = had_begun
            raise

    def _progress(
        self, tool: ServerTool, call: ToolCall, number: int, phase: Any, data: dict[str, Any], *, is_error: bool = False
    ) -> None:
        self._emit(
            ToolProgress(
                round=number, name=call.name, phase=phase, data={"tool_type": tool.type, **data}, call_id=call.id,
                arguments=call.arguments, server=tool.server, is_error=is_error,
            )
        )  # fmt: skip


def _approved_kind(tool: ServerTool) -> str:
    """Return what the approval of a call may be remembered for: tools that others made have nothing in common."""
    return tool.kind if tool.source == "built_in" else f"{tool.kind} {tool.server} {tool.name}"


def _arguments(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"arguments": text}


def _calling(tool: ServerTool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a call, before it runs, as its client sees it."""
    if tool.type == "code_execution":
        return {"code": arguments["code"]} if "code" in arguments else {}
    if tool.type == "shell":
        commands = arguments.get("commands", [])
        return {"commands": [commands] if isinstance(commands, str) else commands}
    if tool.type == "web_search":
        return {"query": arguments.get("query", arguments.get("url", ""))}
    return {"arguments": arguments}


def _failed(tool: ServerTool, result: ToolResult) -> dict[str, Any]:
    """Return the fields of a call that did nothing."""
    if tool.type == "shell":
        return {"stderr": result.problem, "status": "denied" if result.is_denied else "error"}
    if tool.type == "web_search":
        return {"results_count": 0, "sources": [], "exception": result.problem}
    return {"exception" if tool.type == "code_execution" else "content": result.problem}
