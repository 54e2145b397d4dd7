"""Grammars of answers: what they let a model write, byte by byte, and what is refused before anything is queued."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from typing import Any, cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from sie.frontend.generation.choose_parser import choose_parser
from sie.frontend.generation.constraints import constrain
from sie.values.errors import BadRequest
from sie.values.generate import ChatMessage, GenerateRequest, GenerateRule, Grammar, Tool, ToolCall, ToolChoice

CITY: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TOOLS = (Tool(name="weather", parameters=CITY, strict=True), Tool(name="time"))
REQUIRED = ToolChoice(mode="required")
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
TOWN = '{"name": "weather", "arguments": {"town": "Oslo"}}'
TIME = '{"name": "time", "arguments": {"zone": {"utc": 1}}}'
ANSWER = Grammar(kind="json_schema", value='{"type":"object","properties":{"x":{"type":"integer"}},"required":["x"]}')
_TOKENIZER = LLTokenizer("byte")
_FORMS: dict[str, Any] = {
    "json_schema": LLMatcher.grammar_from_json_schema, "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}  # fmt: skip


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"model": "m", "messages": [ChatMessage(role="user", content="x")], "tools": TOOLS, **fields}
    )


def rule(tool_format: Any) -> GenerateRule:
    return GenerateRule(context_length=99, tool_format=tool_format)


def allows(grammar: Grammar | None, text: str) -> bool:
    """Tell whether a grammar lets a model write a text and end there."""
    assert grammar is not None
    matcher = LLMatcher(_TOKENIZER, _FORMS[grammar.kind](grammar.value), log_level=0)
    assert not matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def test_a_demanded_call_is_bound_from_its_first_token() -> None:
    grammar = constrain(request(tool_choice=REQUIRED), rule("hermes"))
    assert allows(grammar, tagged(OSLO))
    assert allows(grammar, tagged(TIME, OSLO))
    assert not allows(grammar, tagged(TOWN))
    assert not allows(grammar, "Sure. " + tagged(OSLO))
    assert not allows(grammar, "")


def test_a_named_call_is_of_that_tool_and_one_alone_where_no_two_are_wanted() -> None:
    named = ToolChoice(mode="required", names=("time",))
    grammar = constrain(request(tool_choice=named, parallel_tool_calls=False), rule("hermes"))
    assert allows(grammar, tagged(TIME))
    assert not allows(grammar, tagged(OSLO))
    assert not allows(grammar, tagged(TIME, TIME))


@pytest.mark.parametrize(
    ("tool_format", "key"), [("json", "arguments"), ("gemma", "arguments"), ("llama", "parameters")]
)
def test_other_formats_write_calls_bare_under_their_own_key(tool_format: Any, key: str) -> None:
    grammar = constrain(request(tool_choice=REQUIRED), rule(tool_format))
    assert allows(grammar, OSLO.replace("arguments", key))
    assert not allows(grammar, tagged(OSLO))
    assert not allows(grammar, TOWN.replace("arguments", key))


@pytest.mark.parametrize("tool_format", ["hermes", "json", "llama", "gemma"])
def test_what_a_demand_allows_is_read_as_a_call(tool_format: Any) -> None:
    asked = request(tool_choice=REQUIRED)
    key = "parameters" if tool_format == "llama" else "arguments"
    text = tagged(OSLO) if tool_format == "hermes" else OSLO.replace("arguments", key)
    assert allows(constrain(asked, rule(tool_format)), text)
    parser = choose_parser(asked, rule(tool_format), "")()
    (call,) = [*parser.push(text), *parser.flush()]
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})


def test_a_strict_tool_binds_its_arguments_amid_any_text() -> None:
    grammar = constrain(request(), rule("hermes"))
    assert allows(grammar, "No tool is needed: 1 < 2.")
    assert allows(grammar, f"First. {tagged(OSLO)}\n{tagged(TIME)} Then.")
    assert not allows(grammar, f"First. {tagged(TOWN)}")
    bare = constrain(request(), rule("json"))
    assert allows(bare, "No tool is needed.")
    assert allows(bare, "")
    assert allows(bare, OSLO)
    assert not allows(bare, TOWN)


def test_what_cannot_be_compiled_of_a_lenient_tool_does_not_bind() -> None:
    """One odd tool of an MCP server had every request that named the server refused."""
    tool = Tool(name="weather", parameters={**CITY, "if": {}, "then": {"required": ["x"]}}, strict=True)
    with pytest.raises(BadRequest, match="Unimplemented keys"):
        constrain(request(tools=(tool,)), rule("hermes"))
    lenient = Tool(name="weather", parameters=tool.parameters, strict=True, is_lenient=True)
    grammar = constrain(request(tools=(lenient,)), rule("hermes"))
    assert allows(grammar, tagged(OSLO))
    assert not allows(grammar, tagged(OSLO.replace('"Oslo"', "5")))
    assert not allows(grammar, tagged(TOWN))


def test_tools_that_are_not_strict_bind_nothing_by_themselves() -> None:
    assert constrain(request(tools=(Tool(name="weather", parameters=CITY),)), rule("hermes")) is None
    assert constrain(request(tool_choice=ToolChoice(mode="none")), rule("hermes")) is None
    assert constrain(request(tools=()), rule("hermes")) is None


@pytest.mark.parametrize("strict", [False, True])
def test_references_within_a_tool_s_schema_hold(strict: bool) -> None:
    """As pydantic writes them: definitions beside the properties, and a type that holds itself."""
    place = {"type": "object", "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/Place"}},
             "required": ["name"], "additionalProperties": False}  # fmt: skip
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Args", "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}, "default": {"$ref": "#"}, "as": {"enum": [{"$ref": "#/x"}]}},
        "required": ["at"], "additionalProperties": False, "$defs": {"Place": place},
    }  # fmt: skip
    asked = request(tools=(Tool(name="go", parameters=parameters, strict=strict),), tool_choice=REQUIRED)
    for tool_format, key in (("hermes", "arguments"), ("llama", "parameters")):
        grammar = constrain(asked, rule(tool_format))

        def says(arguments: str, key: str = key, grammar: Grammar | None = grammar) -> bool:
            call = f'{{"name": "go", "{key}": {arguments}}}'
            return allows(grammar, tagged(call) if key == "arguments" else call)

        assert says(
            '{"at": {"name": "a", "in": {"name": "b"}}, "default": {"at": {"name": "c"}}, "as": {"$ref": "#/x"}}'
        )
        assert not says('{"at": {"name": 1}}')
        assert not says('{"at": {"name": "a"}, "default": {}}')


def test_a_demanded_call_has_an_object_of_arguments_whatever_the_schema_leaves_open() -> None:
    open_schema = {"properties": {"city": {"type": "string"}}}
    grammar = constrain(
        request(tools=(Tool(name="weather", parameters=open_schema),), tool_choice=REQUIRED), rule("json")
    )
    assert allows(grammar, OSLO)
    assert not allows(grammar, '{"name": "weather", "arguments": 3}')
    with pytest.raises(BadRequest, match=r"weather.*object"):
        constrain(
            request(tools=(Tool(name="weather", parameters={"type": "string"}),), tool_choice=REQUIRED), rule("json")
        )


def test_no_grammar_of_json_lets_white_space_go_on() -> None:
    demanded = constrain(request(tool_choice=REQUIRED), rule("json"))
    assert allows(demanded, OSLO.replace(" ", ""))
    assert not allows(demanded, OSLO.replace(": ", ":  "))
    either = constrain(request(grammar=ANSWER), rule("json"))
    assert allows(either, '{\n    "x": 3\n}')
    assert not allows(either, '{\n\n"x": 3}')
    anything = Grammar(kind="json_schema", value="true")
    assert allows(constrain(request(grammar=anything), rule("json")), "[3]")
    own = Grammar(kind="json_schema", value='{"type": "array", "x-guidance": {"whitespace_pattern": "[ ]*"}}')
    assert allows(constrain(request(grammar=own), rule("json")), "[1,    2]")


def test_an_answers_schema_and_calls_are_alternatives() -> None:
    grammar = constrain(request(grammar=ANSWER), rule("hermes"))
    assert allows(grammar, '{"x": 3}')
    assert allows(grammar, tagged(OSLO))
    assert not allows(grammar, "neither")
    assert constrain(request(grammar=ANSWER, tools=()), rule("hermes")) == ANSWER


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar(kind="json_schema", value='{"type": "foo"}'), "foo"),
        (Grammar(kind="json_schema", value="[1]"), "response_format"),
        (Grammar(kind="json_schema", value='{"type": "null", "x-guidance": 3}'), "response_format"),
        (Grammar(kind="json_schema", value='{"$ref": "http://localhost/x"}'), "response_format"),
        (Grammar(kind="regex", value="(a"), "unclosed group"),
        (Grammar(kind="lark", value="begin: 1"), "response_format"),
        (Grammar(kind="llguidance", value="{}"), "response_format"),
        (Grammar(kind="regex", value=""), "empty"),
        (Grammar(kind="lark", value="start: A\nA: /.*a.{30}/ & /.*b.{29}/ & ~/.*c.{28}/"), "intersections"),
        (Grammar(kind="lark", value='start: A // " \nA: ~/b/ // "'), "complements"),
        (Grammar(kind="lark", value='start: A\nA: /a\n"/ & /b"/'), "intersections"),
        (Grammar(kind="lark", value='start: "a'), "no end"),
        (Grammar(kind="llguidance", value='{"grammars": [{"lark_grammar": "start: A\\nA: /a/ \\u0026 /b/"}]}'), "&"),
        (Grammar(kind="llguidance", value="start: A\nA: /a/ & /b/"), "&"),
    ],
)
def test_a_malformed_grammar_is_refused_with_its_reason(grammar: Grammar, named: str) -> None:
    with pytest.raises(BadRequest, match="response_format") as refused:
        constrain(request(grammar=grammar, tools=()), rule("json"))
    assert named in refused.value.message


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["lark", "llguidance"])
@pytest.mark.parametrize("opened", ['"' + '\\"' * 16_000, "/" + "\\/" * 16_000])
def test_an_open_text_of_many_escapes_is_refused_at_once(kind: Any, opened: str) -> None:
    started_s = time.thread_time()
    with pytest.raises(BadRequest, match="no end"):
        constrain(request(grammar=Grammar(kind=kind, value=f"start: {opened}"), tools=()), rule("json"))
    assert time.thread_time() - started_s < 0.5


PRICE: dict[str, Any] = {"type": "number", "multipleOf": 0.01}


def ways_in(schema: dict[str, Any]) -> list[GenerateRequest]:
    """Return requests that bind an answer, or a call, to a schema."""
    text = json.dumps(schema)
    composed = json.dumps({"grammars": [{"json_schema": schema}, {"lark_grammar": f"start: %json {text}"}]})
    grammars = [("json_schema", text), ("lark", f'start: "%json" %json\n{text}'), ("llguidance", composed)]
    tool = Tool(name="weather", parameters={"type": "object", "properties": {"city": schema}}, strict=True)
    return [
        *(request(grammar=Grammar(kind=cast("Any", kind), value=value), tools=()) for kind, value in grammars),
        request(tools=(tool,)),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 400_000_009},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": -1000.7}]}},
        {"type": "integer", "multipleOf": 1e300},
        {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
        {"allOf": [{"properties": {"a": {"multipleOf": 101}}}, {"properties": {"a": {"multipleOf": 100.1}}}]},
        {"$defs": {"a": {"type": "integer", "multipleOf": 9973}}, "$ref": "#/$defs/a", "multipleOf": 9967},
        {"examples": [{"type": "integer", "multipleOf": 99_991}], "$ref": "#/examples/0"},
    ],
)
def test_a_multiple_of_too_many_remainders_is_refused_by_name(schema: dict[str, Any]) -> None:
    for asked in ways_in(schema):
        with pytest.raises(BadRequest, match="multipleOf is over 10000"):
            constrain(asked, rule("json"))


@pytest.mark.parametrize(
    ("value", "named"),
    [('{"type": "integer", "multiple\\u004ff": 99991}', "multipleOf is over 10000"), ("// a\n{}", "not valid JSON")],
)
def test_a_schema_in_lark_is_read_as_json(value: str, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        constrain(request(grammar=Grammar(kind="lark", value=f"start: %json {value}"), tools=()), rule("json"))


@pytest.mark.parametrize("multiple", [0.07, -0.57, 1.005])
def test_a_multiple_that_is_read_inexactly_is_refused_by_name(multiple: float) -> None:
    for asked in ways_in({"allOf": [{"type": "number"}, {"multipleOf": multiple}]}):
        with pytest.raises(BadRequest, match=f"multipleOf {multiple} is one of the fractions"):
            constrain(asked, rule("json"))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "number", "minimum": 0}, {"multipleOf": 0.01}]},
        {"multipleOf": 0.01, "anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]},
        {"$defs": {"a": {"type": "number", "minimum": 0}}, "$ref": "#/$defs/a", "multipleOf": 0.01},
    ],
)
def test_a_multiple_holds_for_the_parts_that_it_is_joined_with(schema: dict[str, Any]) -> None:
    grammar = constrain(request(grammar=Grammar(kind="json_schema", value=json.dumps(schema)), tools=()), rule("json"))
    assert [text for text in ("1", "1.5", "1.25", "1.255", "-1") if allows(grammar, text)] == ["1", "1.5", "1.25"]


def test_ordinary_multiples_are_taken() -> None:
    many = {f"p{number}": {"type": "integer", "multipleOf": 9000 + number} for number in range(9)}
    for schema in (
        {"type": "object", "properties": {**many, "price": PRICE}},
        {"allOf": [PRICE, {"multipleOf": 0.25}, {"multipleOf": 3}]},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer", "multipleOf": 1500}, PRICE]}}},
    ):
        for asked in ways_in(schema):
            assert constrain(asked, rule("json")) is not None


@pytest.mark.parametrize("multiple", ["0.25", "0.05", "0.375", "12.5", "100.5"])
def test_every_multiple_can_be_written_with_the_decimals_of_its_step(multiple: str) -> None:
    """llguidance takes 1.5 for a multiple of 0.25 as 1.50 alone, which is the same number."""
    step = Decimal(multiple)
    schema = {"type": "number", "multipleOf": float(step)}
    grammar = constrain(request(grammar=Grammar(kind="json_schema", value=json.dumps(schema)), tools=()), rule("json"))
    numbers = [step * count for count in range(-20, 60)]
    assert all(allows(grammar, str(number)) for number in numbers)
    assert not any(allows(grammar, str(number + step / 5)) for number in numbers)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1.5, 2], "multipleOf": 0.25},
        {"const": 1.5, "type": "number", "multipleOf": 0.25},
        {"allOf": [{"enum": ["a", 1.1]}, {"multipleOf": 0.05}]},
    ],
)
def test_fractions_that_a_multiple_would_leave_out_are_refused_by_name(schema: dict[str, Any]) -> None:
    for asked in ways_in(schema):
        with pytest.raises(BadRequest, match=r"multipleOf 0\.[02]5 beside fractions in enum or const"):
            constrain(asked, rule("json"))


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1.5, 2], "multipleOf": 0.5},
        {"enum": [1.5, 2], "multipleOf": 0.01},
        {"anyOf": [{"enum": [1.5, 2]}, {"type": "number", "multipleOf": 0.25}]},
        {"enum": [1.5, 2], "properties": {"multipleOf": {"const": 0.5}}},
    ],
)
def test_fractions_that_a_multiple_keeps_are_taken(schema: dict[str, Any]) -> None:
    grammar = constrain(request(grammar=Grammar(kind="json_schema", value=json.dumps(schema)), tools=()), rule("json"))
    assert allows(grammar, "1.5")
    assert allows(grammar, "2")


def test_signs_that_intersect_or_complement_nothing_are_taken() -> None:
    text = 'start: A ~ 2 b # a comment, either/or ~ & "\nA: "&" | /~[&]/ // & "\nb: %json {"const": "a & b"}\n'
    grammar = Grammar(kind="lark", value=text)
    assert allows(constrain(request(grammar=grammar, tools=()), rule("json")), '&~&"a & b"')


def test_a_format_is_a_note_unless_it_is_known() -> None:
    """pydantic writes `path` for a Path and `password` for a secret; a client could not ask for such a type."""
    path = {"type": "string", "format": "path"}
    named = {"type": "object", "properties": {"format": path}, "required": ["format"]}
    schema: dict[str, Any] = {
        "type": "object", "required": ["at", "when", "format", "kind"], "additionalProperties": False,
        "properties": {
            "at": {"anyOf": [{"type": "string", "format": "uri-reference", "maxLength": 3}, {"type": "null"}]},
            "when": {"type": "string", "format": "date"}, "format": named, "kind": {"enum": [{"format": "x"}]},
        },
    }  # fmt: skip
    good = {"at": "a/b", "when": "2026-01-31", "format": {"format": "c"}, "kind": {"format": "x"}}
    answer = Grammar(kind="json_schema", value=json.dumps(schema))
    grammar = constrain(GenerateRequest(model="m", texts=["x"], grammar=answer), rule("hermes"))
    assert allows(grammar, json.dumps(good))
    for wrong in ({"at": "long"}, {"when": "soon"}, {"kind": {}}):
        assert not allows(grammar, json.dumps({**good, **wrong}))
    tool = Tool(name="open", parameters=schema, strict=True)
    grammar = constrain(request(tools=(tool,), tool_choice=REQUIRED), rule("hermes"))
    assert allows(grammar, tagged(json.dumps({"name": "open", "arguments": good})))
    assert path["format"] == "path", "the model still reads the format in its prompt"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, {"k": 1}, {"k": "a"}),
        ({"propertyNames": True, "properties": {"propertyNames": {"const": 1}}}, {"propertyNames": 1}, {"propertyNames": 2}),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}, {"a": 1, "b": 2}, {"c": 1}),
        ({"propertyNames": {"type": "string", "enum": ["a"]}}, {"a": "x"}, {"b": "x"}),
        ({"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": {"const": 1}, "c": {}}}, {"a": 1, "b": 2}, {"a": 2}),
        ({"propertyNames": {"enum": ["a", "c"]}, "properties": {"a": {}}, "additionalProperties": False}, {"a": 1}, {"c": 1}),
    ],
)  # fmt: skip
def test_names_of_a_record_are_bound(schema: dict[str, Any], good: Any, bad: Any) -> None:
    answer = Grammar(kind="json_schema", value=json.dumps({"type": "object", **schema}))
    grammar = constrain(GenerateRequest(model="m", texts=["x"], grammar=answer), rule("hermes"))
    assert allows(grammar, json.dumps(good))
    assert not allows(grammar, json.dumps(bad))


def test_names_that_cannot_be_listed_are_refused() -> None:
    answer = Grammar(kind="json_schema", value='{"type": "object", "propertyNames": {"pattern": "^a"}}')
    with pytest.raises(BadRequest, match="propertyNames"):
        constrain(GenerateRequest(model="m", texts=["x"], grammar=answer), rule("hermes"))


def test_the_field_that_a_client_used_is_named() -> None:
    broken = Grammar(kind="json_schema", value='{"enum": []}', field="output_config.format")
    with pytest.raises(BadRequest, match=r"output_config\.format") as refused:
        constrain(request(grammar=broken, tools=()), rule("json"))
    assert refused.value.extras["param"] == "output_config.format"


def test_parameters_nobody_can_compile_are_refused_only_where_they_bind() -> None:
    broken = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises(BadRequest, match=r"weather.*not"):
        constrain(request(tools=(Tool(name="weather", parameters=broken, strict=True),)), rule("json"))
    loose = request(tools=(Tool(name="weather", parameters=broken),), tool_choice=REQUIRED)
    assert allows(constrain(loose, rule("json")), TOWN)


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_parameters_bind_by_the_keywords_that_compile(tool_format: Any) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    loose = Tool(name="weather", parameters={**CITY, "properties": {**CITY["properties"], "tags": tags}})
    grammar = constrain(request(tools=(loose,), tool_choice=REQUIRED), rule(tool_format))
    for arguments, good in (
        ({"city": "Oslo", "tags": ["a"]}, True),
        ({"city": "Oslo", "tags": [1]}, False),
        ({}, False),
    ):
        call = json.dumps({"name": "weather", "arguments": arguments})
        assert allows(grammar, tagged(call) if tool_format == "hermes" else call) is good


def test_long_ebnf_is_refused_with_its_limit() -> None:
    grammar = Grammar(kind="ebnf", value='root ::= "a"' + " " * 16_384, field="grammar")
    with pytest.raises(BadRequest, match=r"^Field 'grammar': in EBNF it may have 16384 characters"):
        constrain(request(tools=(), grammar=grammar), rule("json"))


def test_ebnf_binds_as_it_is_written() -> None:
    ebnf = 'root ::= name ("," ws name)*\nname ::= [A-Z] [a-z]{1,3} # short ones\nws ::= " " | "\\n"'
    grammar = constrain(request(tools=(), grammar=Grammar(kind="ebnf", value=ebnf, field="grammar")), rule("json"))
    assert allows(grammar, "Ada, Bob,\nCarl")
    assert not allows(grammar, "Ada Bob")
    assert not allows(grammar, "Bobby, Ada, Carla, Dora")


@pytest.mark.parametrize(
    "ebnf",
    [
        "", "\n", 'x ::= "a"', "root ::= other", 'root ::= "a', 'root ::= ("a"', "root ::= [a", "root ::= " + "(" * 5000 + '"a"',
        "root ::= " + "(" * 400 + '"a"' + ")" * 400 + "{2000}" * 3,
    ],
)  # fmt: skip
def test_malformed_ebnf_is_refused_with_its_field(ebnf: str) -> None:
    with pytest.raises(BadRequest, match=r"^Field 'grammar': ."):
        constrain(request(tools=(), grammar=Grammar(kind="ebnf", value=ebnf, field="grammar")), rule("json"))
