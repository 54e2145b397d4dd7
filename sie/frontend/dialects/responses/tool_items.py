"""Writes the calls of the server's tools as output items, and reads stored items as the events that made them. Pure.

Source: generation API reference, section 5.2, and the types of the openai client 3.52. Calls of file helpers and of
dispatched functions have no item.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sie.frontend.dialects.responses.items import Item
from sie.values.agent import AgentFile, FileProduced, ToolProgress

_to_json: Final = msgspec.json.Encoder().encode
_PICTURE: Final = "data:image/png;base64,"
TOOL_ITEMS: Final = frozenset(
    {"code_interpreter_call", "shell_call", "shell_call_output", "web_search_call", "mcp_call"}
)


def tool_item(event: ToolProgress, container_id: str, *, shows_pictures: bool) -> Item | None:
    """Return the item that an event completes, without its id, or None."""
    kind, data = event.data.get("tool_type"), event.data
    if kind == "shell" and event.phase == "calling":
        return {
            "type": "shell_call", "call_id": event.call_id, "action": {"commands": data.get("commands", [])},
            "status": "completed",
        }  # fmt: skip
    if event.phase == "calling":
        return None
    if event.server:
        return _mcp_item(event)
    if kind == "shell":
        outcome = (
            {"type": "timeout"} if data.get("timed_out") else {"type": "exit", "exit_code": data.get("exit_code", -1)}
        )
        output = {"stdout": data.get("stdout", ""), "stderr": data.get("stderr", ""), "outcome": outcome}
        return {"type": "shell_call_output", "call_id": event.call_id, "output": [output], "status": "completed"}
    if kind == "code_execution":
        logs = "\n".join(data[name] for name in ("stdout", "stderr", "result", "exception") if data.get(name))
        outputs = [{"type": "logs", "logs": logs}] if logs else []
        pictures = data.get("images_base64", ()) if shows_pictures else ()
        outputs += [{"type": "image", "url": f"{_PICTURE}{picture}"} for picture in pictures]
        code = _arguments(event).get("code", "")
        return {
            "type": "code_interpreter_call", "code": code, "container_id": container_id, "outputs": outputs,
            "status": "completed",
        }  # fmt: skip
    if kind == "web_search":
        asked = _arguments(event)
        action = (
            {"type": "open_page", "url": asked["url"]}
            if "url" in asked
            else {"type": "search", "query": asked.get("query", "")}
        )
        return {"type": "web_search_call", "action": action, "status": "completed"}
    return None


def _mcp_item(event: ToolProgress) -> Item:
    """Return the item of a call of an MCP server's tool."""
    content = event.data.get("content", "")
    ended = (
        {
            "error": {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": content}]},
            "status": "failed",
        }
        if event.is_error
        else {"output": content, "status": "completed"}
    )
    return {"type": "mcp_call", "server_label": event.server, "name": event.name, "arguments": event.arguments, **ended}


def tool_events(item: Item) -> Iterator[ToolProgress]:
    """Yield the event that made a stored item."""
    kind = item["type"]
    if kind == "shell_call":
        yield _event("shell", "calling", {"commands": item["action"]["commands"]}, call_id=item["call_id"])
    elif kind == "shell_call_output":
        (output,) = item["output"]
        outcome = output["outcome"]
        data = {**output, "timed_out": outcome["type"] == "timeout", "exit_code": outcome.get("exit_code")}
        yield _event("shell", "complete", data, call_id=item["call_id"])
    elif kind == "mcp_call":
        failed = item["status"] == "failed"
        content = item["error"]["content"][0]["text"] if failed else item["output"]
        yield ToolProgress(
            round=0, name=item["name"], phase="complete", data={"tool_type": "custom", "content": content}, call_id="",
            arguments=item["arguments"], server=item["server_label"], is_error=failed,
        )  # fmt: skip
    elif kind == "code_interpreter_call":
        outputs: list[dict[str, str]] = item["outputs"]
        shown = {
            "stdout": "\n".join(one["logs"] for one in outputs if one["type"] == "logs"),
            "images_base64": [one["url"].removeprefix(_PICTURE) for one in outputs if one["type"] == "image"],
        }
        yield _event("code_execution", "complete", shown, arguments={"code": item["code"]})
    else:
        asked = {name: value for name, value in item["action"].items() if name != "type"}
        yield _event("web_search", "complete", {}, arguments=asked)


def cited_files(part: dict[str, Any]) -> Iterator[FileProduced]:
    """Yield the events of the files that a stored text cites."""
    for cited in part.get("annotations", ()):
        yield FileProduced(AgentFile(id=cited["file_id"], name=cited["filename"], created_at=0, source={}))


def _event(kind: str, phase: Any, data: dict[str, Any], *, call_id: str = "", arguments: Any = None) -> ToolProgress:
    return ToolProgress(
        round=0, name="", phase=phase, data={"tool_type": kind, **data}, call_id=call_id,
        arguments=_to_json(arguments or {}).decode(),
    )  # fmt: skip


def _arguments(event: ToolProgress) -> dict[str, Any]:
    try:
        return msgspec.json.decode(event.arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
