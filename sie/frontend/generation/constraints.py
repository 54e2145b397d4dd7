"""Chooses the grammar that constrains an answer: the request's own, the required calls, or both as alternatives.

A required call is constrained from its first token. A strict tool constrains only its own arguments: any text may stand
around its calls. Grammars are written in llguidance's Lark and checked here, so that a client is told which field is
wrong, and why, before its request is queued. A worker compiles them over its model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec

from sie.frontend.generation.choose_parser import callable_tools
from sie.frontend.generation.ebnf import read_ebnf
from sie.frontend.generation.lark import refusal_of, refusal_of_composed
from sie.frontend.generation.multiples import refusal_of_json, refusal_of_schema
from sie.frontend.generation.schema_keywords import DATA, NAMED, with_known_keywords
from sie.values.errors import BadRequest
from sie.values.generate import JSON_SPACE, GenerateRequest, GenerateRule, Grammar, Tool

_HEADER: Final = "%llguidance {}\n"
_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_LENIENT: Final = {"x-guidance": {"lenient": True}}
"""Has llguidance leave out the keywords that it does not know."""
_MAX_ERROR_CHARS: Final = 400
_REFUSALS: Final[dict[str, Callable[[str], str]]] = {
    "json_schema": refusal_of_json, "lark": refusal_of, "llguidance": refusal_of_composed,
}  # fmt: skip
"""Functions that return the reason not to compile a grammar, or an empty text, by the kind of the grammar."""


def constrain(request: GenerateRequest, rule: GenerateRule) -> Grammar | None:
    """Return the grammar that every token of an answer must follow, or None.

    Raises BadRequest for a grammar or a strict tool's parameters that cannot be compiled.
    """
    own = _checked(request.grammar) if request.grammar is not None else None
    tools = callable_tools(request) if request.messages is not None else ()
    if tools and request.tool_choice.mode == "required":
        return _lark(_Calls(tools, rule, request.parallel_tool_calls).demanded())
    if tools and own is not None and (answer := _as_rule(own)) is not None:
        return _lark(_Calls(tools, rule, request.parallel_tool_calls).demanded(answer))
    if own is None and any(tool.strict for tool in tools):
        return _lark(_Calls(tools, rule, request.parallel_tool_calls).amid_text())
    return own


def schema_bytes(request: GenerateRequest) -> int:
    """Return the bytes of the schemas that tools add to an answer's grammar; 0 if tools do not constrain it."""
    tools = callable_tools(request) if request.messages is not None else ()
    is_bound = request.tool_choice.mode == "required" or request.grammar is not None
    if not is_bound and not any(tool.strict for tool in tools):
        return 0
    return sum(len(_to_json(tool.parameters)) for tool in tools if tool.parameters)


def _lark(text: str) -> Grammar:
    grammar = Grammar(kind="lark", value=text, field="tools")
    _refuse(grammar, problem_of(grammar))
    return grammar


def _as_rule(grammar: Grammar) -> str | None:
    """Return a grammar as the body of a rule, or None if it can only constrain the whole answer."""
    if grammar.kind == "json_schema":
        schema: Any = msgspec.json.decode(grammar.value)
        is_object = isinstance(schema, dict)
        return _json_rule(cast("dict[str, Any]", schema) if is_object else {}, JSON_SPACE)  # else it is `true`
    return None


def _json_rule(schema: dict[str, Any], space: str) -> str:
    """Return the body of a rule for JSON with this white space between its parts; the schema's own setting wins."""
    own = schema.get("x-guidance", {})
    if isinstance(own, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": space, **cast("dict[str, Any]", own)}}
    return f"%json {_to_json(schema)}"


class _Calls:
    """Writes the grammars of one request's calls."""

    def __init__(self, tools: Sequence[Tool], rule: GenerateRule, is_parallel: bool) -> None:
        self._is_tagged = rule.tool_format == "hermes"
        self._key = "parameters" if rule.tool_format == "llama" else "arguments"
        self._is_parallel = is_parallel and self._is_tagged
        self._schemas = [self._schema(tool) for tool in tools]
        self._any_body = " | ".join(f"body_{number}" for number in range(len(tools)))

    def demanded(self, answer: str = "") -> str:
        """Return the grammar of calls alone. With answer, the body of a rule, that text is the alternative."""
        calls = 'call ("\\n" call)*' if self._is_parallel else "call"
        call = f'"<tool_call>\\n" ({self._any_body}) "\\n</tool_call>"' if self._is_tagged else self._any_body
        rules = [f"start: {calls} | answer" if answer else f"start: {calls}", f"call: {call}"]
        if answer:  # its white space must be that of the calls: both begin alike
            return self._join([*rules, f"answer: {answer}"])
        return self._join(rules, space="[ ]?")  # on one line, as chat templates show calls to models

    def amid_text(self) -> str:
        """Return the grammar of any text that contains only well-formed calls."""
        if self._is_tagged:
            times = "*" if self._is_parallel else "?"
            return self._join([
                f'start: (head body "</tool_call>"){times} tail',
                'head[lazy]: TEXT "<tool_call>"',
                "tail: TEXT",
                f"body: SPACE ({self._any_body}) SPACE",
                r"TEXT: /(.|\n)*/",
                r"SPACE: /[ \n]*/",
            ])  # fmt: skip
        # A bare call begins the answer, with a brace: text that begins otherwise is free.
        return self._join([f"start: {self._any_body} | answer", r"answer: /([^{\[](.|\n)*)?/"])

    def _join(self, rules: Sequence[str], space: str = JSON_SPACE) -> str:
        bodies = [f"body_{number}: {_json_rule(schema, space)}" for number, schema in enumerate(self._schemas)]
        return _HEADER + "\n".join([*rules, *bodies]) + "\n"

    def _schema(self, tool: Tool) -> dict[str, Any]:
        """Return the schema of one tool's call.

        Unless it is strict and the client's, keywords that do not compile are left out; if the rest does not compile either,
        any object is allowed.
        """
        parameters: dict[str, Any] = msgspec.json.decode(with_known_keywords(_to_json(_as_object(tool))))
        problem, setting = _problem_of_schema(parameters), {}
        if problem and tool.strict and not tool.is_lenient:
            raise _wrong_parameters(tool, problem)
        if problem:
            setting = _LENIENT
            problem = _problem_of_schema({**parameters, **_LENIENT})
        moved = _ANY_OBJECT if problem else _move(parameters, f"#/properties/{self._key}")
        properties = {"name": {"const": tool.name}, self._key: moved}
        own = {"properties": properties, "required": [*properties], "additionalProperties": False}
        return {"type": "object", **own, **setting}


def _problem_of_schema(schema: dict[str, Any]) -> str:
    return refusal_of_schema(schema) or problem_of(Grammar(kind="json_schema", value=_to_json(schema)))


def _as_object(tool: Tool) -> dict[str, Any]:
    """Return a tool's parameters as a schema that allows only objects, as a call must have. Raises BadRequest."""
    parameters = tool.parameters or _ANY_OBJECT
    kinds = parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise _wrong_parameters(tool, "their type must be 'object'")
    return {**parameters, "type": "object"}


def _wrong_parameters(tool: Tool, problem: str) -> BadRequest:
    return BadRequest(f"Field 'tools': the parameters of {tool.name!r}: {problem}", extras={"param": "tools"})


def _move(schema: Any, place: str, *, has_names: bool = False) -> Any:
    """Return a schema, or a part of one, with its references changed for its new place in another schema.

    has_names: its keys are the client's names, not keywords.
    """
    if isinstance(schema, list):
        return [_move(part, place) for part in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", schema).items():
        if not has_names and key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif not has_names and key in DATA:
            moved[key] = value
        else:
            moved[key] = _move(value, place, has_names=not has_names and key in NAMED)
    return moved


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _checked(grammar: Grammar) -> Grammar:
    """Return a client's grammar in a form that workers accept.

    Raises BadRequest for a grammar that is empty, is not served or cannot be compiled.
    """
    _refuse(grammar, "" if grammar.value.strip() else "it is empty, which would bind nothing")
    if grammar.kind == "ebnf":
        grammar = read_ebnf(grammar)
    check = _REFUSALS.get(grammar.kind)
    _refuse(grammar, check(grammar.value) if check is not None else "")
    if grammar.kind == "json_schema":
        grammar = msgspec.structs.replace(grammar, value=with_known_keywords(grammar.value))
    _refuse(grammar, problem_of(grammar))
    return grammar


def _refuse(grammar: Grammar, problem: str) -> None:
    if problem:
        raise BadRequest(f"Field '{grammar.field}': {problem}", extras={"param": grammar.field})


def problem_of(grammar: Grammar) -> str:
    """Return the error in a grammar, or an empty text if it compiles. Slow for a large one; imports llguidance."""
    from llguidance import LLMatcher

    forms: dict[str, Any] = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
        "llguidance": str,
    }
    try:
        text = LLMatcher.validate_grammar(forms[grammar.kind](grammar.value))
    except ValueError as error:
        text = str(error)
    return "" if text.startswith("WARNING") else text[:_MAX_ERROR_CHARS]
