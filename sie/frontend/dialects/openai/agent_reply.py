"""Encodes what the server did besides generating: named events in a stream, and the fields of a whole answer.

Source: generation API reference, sections 3.3, 7.1, 8.3 and 8.4. The same on every dialect.
"""

from __future__ import annotations

from typing import Any, Final

from sie.frontend.dialects.openai.text_fields import named_event
from sie.values.agent import AgentEvent, AgentOutcome, ApprovalRequired, FileProduced, ToolProgress, ToolRecord

_MAX_FILES: Final = 64


def agent_events(event: AgentEvent) -> bytes:
    """Return one event with a name. Its data has the name, too."""
    match event:
        case ToolProgress(round=number, name=name, phase=phase, data=data):
            fields = {"round": number, "tool_name": name, "phase": phase, "data": _shown(data)}
            return named_event("agentic_tool_call_progress", fields)
        case ApprovalRequired(approval_id=approval_id, session=session, round=number, tool=tool, arguments=arguments):
            fields = {"approval_id": approval_id, "session_id": session, "round": number, "tool": tool}
            return named_event("agentic_tool_approval_required", {**fields, "arguments": arguments})
        case FileProduced(file=file):
            return named_event("file_produced", {"file": file.to_wire()})


def agent_object(outcome: AgentOutcome | None) -> dict[str, Any]:
    """Return the fields that an answer has if the server acted; without a call or a file, those are left out."""
    if outcome is None:
        return {}
    made: dict[str, Any] = {"session_id": outcome.session}
    if outcome.records:
        made["agentic_tool_calls"] = [_record(record) for record in outcome.records]
    return {**made, **files_object(outcome)}


def files_object(outcome: AgentOutcome) -> dict[str, Any]:
    """Return the field of the files that tools made."""
    return {"files": [file.to_wire() for file in outcome.files[:_MAX_FILES]]} if outcome.files else {}


def _record(record: ToolRecord) -> dict[str, Any]:
    made: dict[str, Any] = {
        "round": record.round, "name": record.name, "arguments": record.arguments, "result_content": record.result,
    }  # fmt: skip
    if record.images:
        made["result_images_base64"] = record.images
    if record.file_ids:
        made["file_ids"] = record.file_ids
    return made


def _shown(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data without the fields that are absent."""
    return {name: value for name, value in data.items() if value is not None and value != []}
