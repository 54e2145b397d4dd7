"""Encodes the replies of `/v1/responses`: the response object as it grows, and the events of its stream.

Must not read the clock. Source: generation API reference, sections 5.2 and 5.4, and the types of the openai client 3.52.
Items are in the order in which they happened. The last event is exactly one of completed, incomplete and failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from sie.frontend.dialects.openai import text_fields
from sie.frontend.dialects.openai.agent_reply import agent_events
from sie.frontend.dialects.openai.chat import logprob_json
from sie.frontend.dialects.responses.items import Item
from sie.frontend.dialects.responses.items import new_id as new_item_id
from sie.frontend.dialects.responses.request import ResponsesCall
from sie.frontend.dialects.responses.tool_items import tool_item
from sie.values.agent import AgentEvent, AgentFile, ApprovalRequired, FileProduced, ToolProgress
from sie.values.errors import SieError
from sie.values.generate import (
    Ended,
    Finished,
    GenerateEvent,
    GenerateUsage,
    LogprobText,
    PromptScored,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
)

_to_json: Final = msgspec.json.Encoder().encode
_TEXT_EVENTS: Final = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
RUNNING: Final = ("queued", "in_progress")
"""Statuses of a response that is being made."""
StreamForm = Literal["", "kept", "cut"]
CANCELLED: Final = "CANCELLED"
"""Error code of a cancelled response. A cancelled response has not failed."""


class ResponseRecord:
    """One response: apply events to it, and read it as an object or as a stream at any time.

    If the request asks for a stream, `apply` and `fail` record its events. `take_stream` returns each event once, for the
    client. `take_unkept` returns each event once, to be stored, up to max_kept_bytes in all.
    """

    def __init__(
        self, response_id: str, created_s: int, call: ResponsesCall, model: str,
        *, max_kept_bytes: int = 0, new_id: Callable[[str], str] | None = None,
    ) -> None:  # fmt: skip
        """new_id takes the type of an item and returns a new id for it."""
        self.id = response_id
        self.is_streamed = call.request.stream
        self.is_followed = call.request.stream
        """Whether a client reads the stream while the response is generated."""
        self.model = model
        self.status = "queued" if call.is_background else "in_progress"
        self.is_kept = call.stores
        """Whether it is stored, so that clients can ask for it later."""
        self._created_s = created_s
        self._completed_s: int | None = None
        self._echoed = call.echoed
        self._namespaces = call.namespaces
        self._shows_pictures = call.shows_pictures
        self._items: list[Item] = []
        self._open: _OpenText | None = None
        self._files: list[AgentFile] = []
        """Files that tools made and that no text has cited yet."""
        self._usage: GenerateUsage | None = None
        self._error: dict[str, str] | None = None
        self._is_announced = False
        self._is_cut = False
        self._new_id = new_id or functools.partial(new_item_id, response_id=response_id)
        self._num_events = 0
        self._stream: list[bytes] = []
        self._unkept: list[bytes] = []
        self._room_bytes = max_kept_bytes if call.stores else 0
        """Bytes of the stream that may still be stored."""
        self.is_newly_cut = False
        """Whether the stored part of the stream must be deleted. The code that deletes it resets this."""

    @property
    def is_over(self) -> bool:
        """Whether it has its last status."""
        return self.status not in RUNNING

    def apply(self, events: Sequence[GenerateEvent], now_s: int) -> None:
        """Apply the next events; now_s is the present time, in unix seconds."""
        for event in events:
            self._apply(event, now_s)

    def fail(self, error: SieError) -> None:
        """End with an error or as cancelled. The output so far stays."""
        if self.is_over:
            return
        self._announce()
        if self._open is not None:
            self._close_text("incomplete")
        self.status = "cancelled" if error.code == CANCELLED else "failed"
        if self.status == "failed":
            made = text_fields.error_object(error)
            self._emit("error", code=made["code"], message=error.message, param=made["param"])
            self._error = {"code": _error_code(error), "message": error.message}
        self._emit("response.failed", response=self.to_object())

    def take_stream(self) -> bytes:
        """Return the events since the last call, encoded to be sent."""
        stream, self._stream = self._stream, []
        return b"".join(stream)

    @property
    def stream_form(self) -> StreamForm:
        """Whether its stream can be read again from stored events: it has none (""), they are kept, or they were cut."""
        return "" if not self.is_streamed else "kept" if self._room_bytes > 0 else "cut"

    @property
    def num_unkept(self) -> int:
        """The number of events that are still to be stored."""
        return len(self._unkept)

    def take_unkept(self) -> tuple[int, list[bytes]]:
        """Return the number of the first event to store since the last call, and the events."""
        events, self._unkept = self._unkept, []
        return self._num_events - len(events), events

    def stop_keeping(self) -> None:
        """Stop storing its events, and mark the stored ones for deletion."""
        self._room_bytes = 0
        self._unkept = []
        self.is_newly_cut = self.is_streamed

    def to_object(self) -> dict[str, Any]:
        """Return the current state of the response."""
        is_incomplete = self.status == "incomplete"
        made: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": self._completed_s,
            "status": self.status,
            "model": self.model,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [dict(item) for item in self._items],
            "usage": _usage(self._usage) if self._usage is not None else None,
            **self._echoed,
            "store": self.is_kept,
        }
        if self.is_over:
            made["output_text"] = "".join(
                part["text"] for item in self._items if item["type"] == "message" for part in item["content"]
            )
        return made

    def to_json(self) -> bytes:
        """Return the current state of the response, as a body."""
        return _to_json(self.to_object())

    # --- events ---------------------------------------------------------------------------------------------------

    def _apply(self, event: GenerateEvent, now_s: int) -> None:
        match event:
            case Started():
                self._announce()
            case PromptScored():
                pass
            case ReasoningDelta(_, text):
                self._add_text("reasoning", text)
            case TextDelta(_, text, logprobs):
                self._add_text("message", text, logprobs)
            case ToolCallDelta(_, _, call):
                self._add_call(call)
            case ToolProgress():
                self._add_progress(event)
            case FileProduced(file=file):
                self._files += [file] if file.code is None else []
                self._emit_beside(event)
            case ApprovalRequired():
                self._emit_beside(event)
            case Finished(_, reason):
                self._is_cut = reason == "length"
                if self._open is None and (self._files or not self._items):
                    self._open_text("message")
                if self._open is not None:
                    self._close_text("incomplete" if self._is_cut else "completed")
            case Ended(usage):
                self._usage = usage
                self.status = "incomplete" if self._is_cut else "completed"
                self._completed_s = None if self._is_cut else now_s
                self._emit(f"response.{self.status}", response=self.to_object())

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            self.status = "in_progress"
            self._emit("response.created", response=self.to_object())
            self._emit("response.in_progress", response=self.to_object())

    def _emit(self, name: str, /, **fields: Any) -> None:
        if not self.is_streamed:
            return
        event = text_fields.named_event(name, {"sequence_number": self._num_events, **fields})
        self._num_events += 1
        if self.is_followed:
            self._stream.append(event)
        if self._room_bytes > 0:
            self._room_bytes -= len(event)
            self._unkept.append(event)
            if self._room_bytes <= 0:
                self.stop_keeping()

    def _emit_beside(self, event: AgentEvent) -> None:
        """Send an event that has no number: it is not stored, and the numbers of the others have no gap."""
        if self.is_streamed and self.is_followed:
            self._stream.append(agent_events(event))

    def _begin_item(self, item: Item) -> dict[str, Any]:
        """Add an item; return the fields that name it in events."""
        index = len(self._items)
        self._items.append(item)
        self._emit("response.output_item.added", output_index=index, item=item)
        return {"item_id": item["id"], "output_index": index}

    def _end_item(self, place: dict[str, Any], item: Item) -> None:
        self._items[place["output_index"]] = item
        self._emit("response.output_item.done", output_index=place["output_index"], item=item)

    # --- items ----------------------------------------------------------------------------------------------------

    def _add_text(self, kind: str, text: str, logprobs: Sequence[LogprobText] = ()) -> None:
        if not text and (self._open is None or self._open.kind != kind):
            return  # tokens without text do not belong to an item, and do not end one
        if self._open is not None and self._open.kind != kind:
            self.end_text()
        if self._open is None:
            self._open_text(kind)
        assert self._open is not None
        shown = [logprob_json(one) for one in logprobs]
        self._open.texts.append(text)
        self._open.logprobs += shown
        extra = {"logprobs": shown} if kind == "message" else {}
        self._emit(f"{_TEXT_EVENTS[kind]}.delta", **self._open.place, content_index=0, delta=text, **extra)

    def _open_text(self, kind: str) -> None:
        item: Item = {"type": kind, "id": self._new_id(kind), "status": "in_progress", "content": []}
        item |= {"role": "assistant"} if kind == "message" else {"summary": []}
        self._open = _OpenText(kind, item, self._begin_item(item))
        if kind == "message":
            self._emit("response.content_part.added", **self._open.place, content_index=0, part=_text_part("", []))

    def end_text(self) -> None:
        """End the text that still grows, if there is one: the next text is an item of its own."""
        if self._open is not None:
            self._close_text("completed")

    def _close_text(self, status: str) -> None:
        assert self._open is not None
        opened, self._open = self._open, None
        place, kind, text = opened.place, opened.kind, "".join(opened.texts)
        if kind == "message":
            part = {**_text_part(text, opened.logprobs), "annotations": self._cite()}
            self._emit("response.output_text.done", **place, content_index=0, text=text, logprobs=opened.logprobs)
            self._emit("response.content_part.done", **place, content_index=0, part=part)
        else:
            part = {"type": "reasoning_text", "text": text}
            self._emit("response.reasoning_text.done", **place, content_index=0, text=text)
        self._end_item(place, {**opened.item, "status": status, "content": [part]})

    def _add_call(self, call: ToolCall) -> None:
        self.end_text()
        namespace, name = self._namespaces.get(call.name, ("", call.name))
        item: Item = {
            "type": "function_call", "id": self._new_id("function_call"), "call_id": call.id, "name": name, "arguments": "",
            "status": "in_progress", **({"namespace": namespace} if namespace else {}),
        }  # fmt: skip
        place = self._begin_item(item)
        step = "response.function_call_arguments"
        self._emit(f"{step}.delta", **place, call_id=call.id, delta=call.arguments)
        self._emit(f"{step}.done", **place, call_id=call.id, name=name, arguments=call.arguments)
        self._end_item(place, {**item, "arguments": call.arguments, "status": "completed"})

    # --- the server's tools ---------------------------------------------------------------------------------------

    def _add_progress(self, event: ToolProgress) -> None:
        """Add the items of a call that the server runs. The items of a shell replace its events."""
        item = tool_item(event, f"cntr_{self.id}", shows_pictures=self._shows_pictures)
        self.end_text()  # ORDER: before the files of this call are announced, because only a later text cites them
        if event.data.get("tool_type") != "shell":
            self._emit_beside(event)
        if item is None:
            return
        item = {"id": self._new_id(item["type"]), **item}
        self._end_item(self._begin_item({**item, "status": "in_progress"}), item)

    def _cite(self) -> list[dict[str, Any]]:
        """Return the annotations of the files made since the last text."""
        files, self._files = self._files, []
        return [
            {"type": "container_file_citation", "container_id": f"cntr_{self.id}", "file_id": file.id, "filename": file.name,
             "start_index": 0, "end_index": 0}
            for file in files
        ]  # fmt: skip


class _OpenText:
    """A text item that still grows; place holds the fields that name it in events."""

    __slots__ = ("item", "kind", "logprobs", "place", "texts")

    def __init__(self, kind: str, item: Item, place: dict[str, Any]) -> None:
        self.kind = kind
        self.item = item
        self.place = place
        self.texts: list[str] = []
        self.logprobs: list[msgspec.Raw] = []


class ResponseWriter:
    """Writes the stream of a record that another object applies the events to. Here, events only signal that it grew."""

    keep_alive = text_fields.KEEP_ALIVE

    def __init__(self, record: ResponseRecord) -> None:
        self._record = record

    def write(self, events: Sequence[GenerateEvent]) -> bytes:  # the protocol's
        """See `sie.frontend.http.stream.EventWriter`."""
        return self._record.take_stream()

    def write_error(self, error: SieError) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        self._record.fail(error)
        return self._record.take_stream()


def _text_part(text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: GenerateUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_code(error: SieError) -> str:
    """Return one of this API's few error codes of a response."""
    if error.http_status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.http_status >= 500 else "invalid_prompt"


# --- what else is answered --------------------------------------------------------------------------------------------


def encode_deleted(response_id: str) -> bytes:
    """Return the body of an answer to a deletion."""
    return _to_json({"id": response_id, "object": "response.deleted", "deleted": True})


def encode_count(num_tokens: int) -> bytes:
    """Return the body of an answer with the number of tokens in a prompt."""
    return _to_json({"object": "response.input_tokens", "input_tokens": num_tokens})


def encode_page(items: Sequence[Item], *, has_more: bool) -> bytes:
    """Return the body of one page of a list of items."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    page = {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
    return _to_json(page)
