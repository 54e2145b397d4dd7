"""Builds the stream of a response that was made without one, from the stored object.

Each text is one delta, because its pieces were not recorded. Everything else is as in a live stream. The same object
always gives the same events, so a client can continue after any event number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sie.frontend.dialects.openai import text_fields
from sie.frontend.dialects.responses.items import Item, full_name
from sie.frontend.dialects.responses.reply import CANCELLED, RUNNING, ResponseRecord
from sie.frontend.dialects.responses.request import ResponsesCall
from sie.frontend.dialects.responses.tool_items import TOOL_ITEMS, cited_files, tool_events
from sie.values.errors import SieError
from sie.values.generate import (
    Ended,
    Finished,
    GenerateEvent,
    GenerateRequest,
    GenerateUsage,
    LogprobText,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)

_OWN: Final = frozenset({
    "id", "object", "created_at", "completed_at", "status", "model", "error", "incomplete_details", "output",
    "output_text", "usage", "store",
})  # fmt: skip
"""Keys of an object that do not echo the request."""
_STATUSES: Final = {"rate_limit_exceeded": 429, "server_error": 500}
_TERMINAL: Final = tuple(b"event: response.%b\n" % name for name in (b"completed", b"incomplete", b"failed"))


def replay(body: bytes) -> list[bytes]:
    """Return the events of a response in its current state: all if it has ended, otherwise the first two."""
    made: dict[str, Any] = msgspec.json.decode(body)
    record, output = _record(made), made["output"]
    record.apply([Started(0, 0)], 0)
    if made["status"] not in RUNNING:
        for item in output:
            record.apply([*_written(item)], 0)
            if item["status"] == "completed":
                record.end_text()  # the next text is an item of its own, if a tool without an item ran before it
        _end(record, made)
    return record.take_unkept()[1]


def end_events(body: bytes, number: int) -> list[bytes]:
    """Return the missing last events of a stream whose writer ended early. number is that of the first one."""
    made: dict[str, Any] = msgspec.json.decode(body)
    status = made["status"] if made["status"] in ("completed", "incomplete") else "failed"
    events: list[tuple[str, dict[str, Any]]] = [(f"response.{status}", {"response": made})]
    if made["error"] is not None:
        events.insert(0, ("error", {**made["error"], "param": None}))
    return [
        text_fields.named_event(name, {"sequence_number": number + index, **fields})
        for index, (name, fields) in enumerate(events)
    ]


def is_terminal(event: bytes) -> bool:
    """Tell whether an event is the last one of a stream."""
    return event.startswith(_TERMINAL)


def _record(made: dict[str, Any]) -> ResponseRecord:
    """Return an empty record that will use the ids and names of this object."""
    ids = iter([item["id"] for item in made["output"]])
    calls = [item for item in made["output"] if item["type"] == "function_call"]
    call = ResponsesCall(
        request=GenerateRequest(model=made["model"], stream=True),
        instructions=None,
        previous_id=None,
        items=[],
        echoed={key: value for key, value in made.items() if key not in _OWN},
        namespaces={_name(item): (item["namespace"], item["name"]) for item in calls if item.get("namespace")},
        stores=made["store"],
        is_background=False,
        shows_pictures=True,
    )
    record = ResponseRecord(
        made["id"], made["created_at"], call, made["model"], max_kept_bytes=sys.maxsize, new_id=lambda _kind: next(ids)
    )
    record.is_followed = False
    return record


def _written(item: Item) -> Iterator[GenerateEvent]:
    """Yield the events that make this output item."""
    if item["type"] == "function_call":
        yield ToolCallDelta(0, 0, ToolCall(id=item["call_id"], name=_name(item), arguments=item["arguments"]))
        return
    if item["type"] in TOOL_ITEMS:
        yield from tool_events(item)
        return
    for part in item["content"]:
        if item["type"] == "reasoning":
            yield ReasoningDelta(0, part["text"])
        else:
            yield from cited_files(part)
            yield TextDelta(0, part["text"], tuple(_logprob(one) for one in part["logprobs"]))


def _end(record: ResponseRecord, made: dict[str, Any]) -> None:
    status, output = made["status"], made["output"]
    if status in ("completed", "incomplete"):
        record.apply([Finished(0, "length" if status == "incomplete" else "stop"), Ended(_usage(made["usage"]))],
                     made["completed_at"] or 0)  # fmt: skip
        return
    if output and output[-1]["status"] == "completed":
        record.apply([Finished(0, "stop")], 0)
    error = made["error"] or {"message": "The response was cancelled", "code": CANCELLED}
    code = CANCELLED if status == "cancelled" else None
    record.fail(SieError(error["message"], code=code, http_status=_STATUSES.get(error["code"], 400)))


def _name(call: Item) -> str:
    return full_name(call.get("namespace"), call["name"])


def _usage(usage: dict[str, Any]) -> GenerateUsage:
    return GenerateUsage(
        prompt_tokens=usage["input_tokens"],
        completion_tokens=usage["output_tokens"],
        cached_tokens=usage["input_tokens_details"]["cached_tokens"],
        reasoning_tokens=usage["output_tokens_details"]["reasoning_tokens"],
    )


def _logprob(one: dict[str, Any]) -> LogprobText:
    top = tuple(_logprob(other) for other in one.get("top_logprobs", ()))
    return LogprobText(text=one["token"], raw=bytes(one["bytes"]), logprob=one["logprob"], top=top)
