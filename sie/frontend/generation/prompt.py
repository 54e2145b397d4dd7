"""Turns a conversation into the token ids of its prompt. Pure: `templates` renders the template between the two halves.

A client's own text never becomes a special token. A part of its text that the tokenizer would read as a special token
is marked before the template sees it, with two characters that none of the texts contain. The template's output is cut
at the marks, and marked parts are read as plain text. Texts without special tokens stay unchanged, so their prompts
have the same tokens as the library's. Idea: transformers 5.23
(`mark_control_tokens`, `encode_marked_chat`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import msgspec

from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.generation.special_texts import find_special
from sie.frontend.generation.templates import pack
from sie.frontend.generation.vocabulary import Vocabulary
from sie.frontend.inputs.bounded_json import children_of
from sie.frontend.inputs.tokenize import LONG_TEXT_BYTES, is_long
from sie.values.errors import BadRequest, InputTooLong
from sie.values.generate import ROLES, ChatMessage, GenerateRequest, GenerateRule, Tool, ToolCall

_PRIVATE_USE: Final = range(0xE000, 0xF900)
_MANY_MARKS: Final = 64
"""Each mark starts a new piece, which takes about 20 microseconds to read."""
_CHECKED_TOKENS: Final = 65_536
"""Ids that are checked at a time: other threads run between two such parts."""
_TAG_END: Final = re.compile(r"[%}]\}")
_DEVELOPER: Final = "developer"
"""A role of newer APIs. Few templates know it; for the others it becomes `system`."""


class Marks:
    """The two characters around special texts in a client's strings; adds and removes them."""

    def __init__(self, special_texts: Sequence[str], texts: Iterable[str]) -> None:
        self._special = find_special(tuple(special_texts))
        used = {char for text in texts if not text.isascii() for char in text}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        try:
            self.start, self.end = next(free), next(free)
        except StopIteration:
            raise BadRequest("the texts use all private characters of Unicode") from None

    def put(self, value: Any) -> Any:
        """Return JSON data with every special text in its strings and keys marked. No template uses such a key."""
        if isinstance(value, str):
            return self._special.sub(f"{self.start}\\g<0>{self.end}", value)
        if isinstance(value, dict):
            return {self.put(key): self.put(part) for key, part in cast("dict[str, Any]", value).items()}
        if isinstance(value, list):
            return [self.put(part) for part in cast("list[Any]", value)]
        return value

    def cut(self, text: str) -> list[tuple[str, bool]]:
        """Return a text's pieces without the marks, each with whether it was marked.

        A template may have separated the two marks of a pair. A single mark still separates the pieces around it.
        """
        marks = self.start + self.end
        parts: list[str | None] = re.split(f"{self.start}([^{marks}]*){self.end}|[{marks}]", text)
        return [
            (part, index % 2 == 1 and self._special.fullmatch(part) is not None)
            for index, part in enumerate(parts)
            if part
        ]


def chat_variables(request: GenerateRequest, rule: GenerateRule) -> dict[str, Any]:
    """Return a template's variables for a request, as plain data."""
    roles = {} if _DEVELOPER in _source(request, rule) else {_DEVELOPER: "system"}
    variables: dict[str, Any] = {
        "messages": [_message(message, roles) for message in request.messages or ()],
        "tools": [_tool(tool) for tool in request.tools] or None,
        "documents": None,
        "add_generation_prompt": True,
    }
    if request.tool_choice.mode == "none":
        variables["tools"] = None
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    return {**request.template_options, **rule.special_tokens, **variables}


class Draft(NamedTuple):
    """The input for a template, before it is rendered."""

    packed: bytes
    """See `templates.pack`."""
    marks: Marks
    """The marks in its texts."""
    begun: str | None
    """The given beginning of the answer, which the model continues."""


class Rendered(NamedTuple):
    """A template's output, with the marks in it."""

    text: str
    marks: Marks

    @property
    def is_long(self) -> bool:
        """Whether tokenising may take over about 2 ms, so that it must run on a thread."""
        return self.text.count(self.marks.start) > _MANY_MARKS or is_long([self.text], LONG_TEXT_BYTES)


def draft_chat(request: GenerateRequest, rule: GenerateRule) -> Draft:
    """Return the input for a conversation's template. Raises BadRequest for a model without one, and for a role that it does not name."""
    source = _source(request, rule)
    if not source:
        text = "has no chat template: ask it on /v1/completions, or give the server one with the setting chat_template"
        raise BadRequest(f"Model '{request.model}' {text}", extras={"param": "model"})
    # The first message of each other role, because a long template is searched for each.
    others = {message.role: message for message in reversed(request.messages or ()) if message.role not in ROLES}
    for message in others.values():
        _check_role(message, source)
    variables = chat_variables(request, rule)
    marks = Marks(rule.special_texts, _strings([variables["messages"], variables["tools"]]))
    for name in ("messages", "tools"):
        variables[name] = marks.put(variables[name])
    begun: str | None = variables["messages"].pop()["content"] if request.continues else None
    return Draft(pack(source, variables), marks, begun)


def _check_role(message: ChatMessage, source: str) -> None:
    """Raise BadRequest for a role that no tag of the template names: it would be left out, or mean nothing to the model."""
    role = message.role
    tags = (part[max(part.rfind("{%"), part.rfind("{{")) :] for part in _TAG_END.split(source))
    if not any("role" in tag and (f"'{role}'" in tag or f'"{role}"' in tag) for tag in tags):
        known = ", ".join(map(repr, ROLES))
        raise wrong(
            message.role_field or "messages",
            f"is {role!r}, which this model's chat template does not name; use one of {known}",
        )


def finish_chat(draft: Draft, text: str, rule: GenerateRule) -> Rendered:
    """Return the rendered conversation, followed by the given beginning of the answer."""
    if draft.begun is None:
        return Rendered(text, draft.marks)
    return Rendered(_without_reasoning(text, rule) + draft.begun, draft.marks)


def _without_reasoning(text: str, rule: GenerateRule) -> str:
    """Return the prompt with its reasoning closed, if the template opens one, so that the answer follows at once.

    Source: chat template of Qwen 3, which writes this where `enable_thinking` is false.
    """
    if rule.reasoning_tags is None:
        return text
    begins, ends = rule.reasoning_tags
    kept = text.rstrip()
    return f"{kept}\n\n{ends}\n\n" if kept.endswith(begins) else text


def _source(request: GenerateRequest, rule: GenerateRule) -> str:
    return (rule.tool_chat_template if request.tools else "") or rule.chat_template


def chat_ids(rendered: Rendered, vocabulary: Vocabulary, *, whole: bool = False) -> list[int]:
    """Return the token ids of a rendered prompt; whole as in `Vocabulary.encode`, for texts without special ones."""
    ids: list[int] = []
    for piece, is_marked in rendered.marks.cut(rendered.text):
        if ids or is_marked:
            ids += vocabulary.encode_behind(piece, plain=is_marked)
        else:
            ids = vocabulary.encode(piece, whole=whole)
    return ids


def fit(ids: list[int], max_tokens: int | None, context_length: int, *, truncate: bool | None) -> tuple[list[int], int]:
    """Return the prompt and the most tokens of each choice, which together fit the context.

    truncate: an overlong prompt loses its oldest tokens until max_tokens fit, or a quarter of the context without
    max_tokens; None: the client cannot ask for that. Raises BadRequest for an empty prompt, and InputTooLong if no room
    is left for a wanted token.
    """
    if not ids:
        raise BadRequest("The prompt is empty: it has no token", extras={"param": "messages"})
    room = max_tokens if max_tokens is not None else max(1, context_length // 4)
    if truncate and len(ids) + room > context_length:
        ids = ids[-max(1, context_length - room) :]
    left = context_length - len(ids)
    if left < (1 if max_tokens is None else min(1, max_tokens)):
        hint = "" if truncate is None else ", or have it cut with 'truncate_sequence'"
        raise InputTooLong(
            f"This model's context is {context_length} tokens, and the prompt alone has {len(ids)}; shorten it{hint}",
            code="CONTEXT_LENGTH_EXCEEDED",
            extras={"param": "messages"},
        )
    return ids, left if max_tokens is None else min(left, max_tokens)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise BadRequest for a client's token id that the model does not have."""
    for start in range(0, len(ids), _CHECKED_TOKENS):
        part = ids[start : start + _CHECKED_TOKENS]
        if min(part) < 0 or max(part) >= vocab_size:
            text = f"Field '{param}' holds an id outside the vocabulary [0, {vocab_size})"
            raise BadRequest(text, extras={"param": param})


def _message(message: ChatMessage, roles: Mapping[str, str]) -> dict[str, Any]:
    """Return a message in the form that templates expect, with its reasoning under each name that some template reads.

    roles maps a role to the template's name for it, if they differ.
    """
    shown: dict[str, Any] = {"role": roles.get(message.role, message.role), "content": message.content}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_calls:
        shown["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        shown["reasoning_content"] = shown["thinking"] = shown["reasoning"] = message.reasoning
    return shown


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates write as JSON; invalid ones stay text."""
    try:
        arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _strings(value: Any) -> Iterable[str]:
    """Yield every string in JSON data, including the keys of objects."""
    if isinstance(value, str):
        yield value
    else:
        if isinstance(value, dict):
            yield from cast("dict[str, Any]", value)
        for part in children_of(value):
            yield from _strings(part)
