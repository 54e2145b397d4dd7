"""A model's output, parsed: for every split the same text, reasoning and calls as all at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sie.frontend.generation.choose_parser import choose_parser
from sie.frontend.generation.parsers import OutputParser, Piece, Reasoning, Text
from sie.frontend.generation.reasoning import ReasoningParser
from sie.frontend.generation.tool_calls import BareCalls, FirstCall, TaggedCalls
from sie.values.generate import ChatMessage, GenerateRequest, GenerateRule, Tool, ToolCall, ToolChoice

NAMES = ("weather", "time")
TAGS = ("<think>", "</think>")
CALL = '{"name": "weather", "arguments": {"city": "Oslo \\"x\\" }"}}'
TAGGED = '{"name": "weather", "arguments": {"city": "a </tool_call> b"}}'
LLAMA = '{"name": "time", "parameters": {"zone": "UTC"}}'
FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "</", "<", ">", "{", "}", "[", "]", '"', "\\", "\n", " ",
    ";", ",", "`", "```json", "```", "<|python_tag|>", "a", "Sure.", CALL, LLAMA, TAGGED, '{"name": "rain"}', "{}", "[1]", "\u00e9",
)  # fmt: skip


def ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


PARSERS: dict[str, Callable[[], OutputParser]] = {
    "tagged": lambda: TaggedCalls(NAMES, ids()),
    "bare": lambda: BareCalls(NAMES, ids()),
    "first": lambda: FirstCall(TaggedCalls(NAMES, ids())),
    "reasoning": lambda: ReasoningParser(TAGS, TaggedCalls(NAMES, ids()), is_open=False),
    "open": lambda: ReasoningParser(TAGS, BareCalls(NAMES, ids()), is_open=True),
}


def parse(parser: OutputParser, pieces: list[str]) -> list[Piece]:
    """Return the pieces with neighbours of one kind joined."""
    return join([piece for text in pieces for piece in parser.push(text)] + parser.flush())


def join(found: list[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in found:
        if piece == Reasoning(""):  # ends the reasoning
            continue
        if joined and type(piece) is type(joined[-1]) and not isinstance(piece, ToolCall):
            joined[-1] = type(piece)(joined[-1].text + piece.text)  # type: ignore[union-attr]
        else:
            joined.append(piece)
    return joined


def read(kind: str, text: str) -> list[Any]:
    return [
        (piece.name, piece.arguments) if isinstance(piece, ToolCall) else piece
        for piece in parse(PARSERS[kind](), [text])
    ]


@pytest.mark.parametrize("kind", PARSERS)
@settings(deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same(kind: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    whole = parse(PARSERS[kind](), [text])
    assert parse(PARSERS[kind](), pieces) == whole
    assert parse(PARSERS[kind](), list(text)) == whole


@pytest.mark.parametrize("kind", ["tagged", "bare"])
@settings(deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab<{[\"'\n /tol_c>"), max_size=40))
def test_text_without_a_call_is_given_as_it_was_written(kind: str, text: str) -> None:
    assert parse(PARSERS[kind](), [text]) == ([Text(text)] if text else [])


QUOTED = ("weather", '{"city": "a </tool_call> b"}')
OSLO = ("weather", '{"city": "Oslo \\"x\\" }"}')
UTC = ("time", '{"zone": "UTC"}')


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("tagged", f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n", [Text("Sure."), OSLO]),
        ("tagged", f"<tool_call>{CALL}</tool_call>\n<tool_call>{LLAMA}</tool_call> done", [OSLO, UTC, Text("done")]),
        ("tagged", f"<tool_call>{CALL}", [OSLO]),
        ("tagged", f"<tool_call>{TAGGED}</tool_call>\n<tool_call>{LLAMA}</tool_call>", [QUOTED, UTC]),
        ("tagged", f"<tool_call>{TAGGED}", [QUOTED]),
        ("tagged", f'<tool_call>"x</tool_call> a <tool_call>{LLAMA}</tool_call>', [Text('<tool_call>"x</tool_call> a'), UTC]),
        ("tagged", '<tool_call>"x</tool_call> a', [Text('<tool_call>"x</tool_call> a')]),
        ("tagged", "a <tool_call>{}</tool_call>b", [Text("a <tool_call>{}</tool_call>b")]),
        ("tagged", '<tool_call>{"name": "rain"}</tool_call>', [Text('<tool_call>{"name": "rain"}</tool_call>')]),
        ("bare", f" {CALL}", [OSLO]),
        ("bare", f"<|python_tag|>{LLAMA}; {CALL}", [UTC, OSLO]),
        ("bare", f"```json\n[{CALL}, {LLAMA}]\n```", [OSLO, UTC]),
        ("bare", f"```json\n{CALL}\n```\nThat is all.", [OSLO, Text("That is all.")]),
        ("bare", 'Here: {"name": "weather"}', [Text('Here: {"name": "weather"}')]),
        ("bare", '{"temperature": 3}\n', [Text('{"temperature": 3}\n')]),
        ("bare", '{"name": "weather", "arguments": "{\\"a\\": 1}"}', [("weather", '{"a": 1}')]),
        ("bare", '{"name": "weather"}', [("weather", "{}")]),
        ("bare", '{"name": "weather", "arguments": [1]}', [Text('{"name": "weather", "arguments": [1]}')]),
        ("bare", '{"name": "weather", "argum', [Text('{"name": "weather", "argum')]),
        ("first", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> x", [OSLO]),
        ("reasoning", f"<think>\nwhy?\n</think>\n\nSo: <tool_call>{CALL}</tool_call>", [Reasoning("why?"), Text("So:"), OSLO]),
        ("reasoning", "no <think>tags</think>", [Text("no <think>tags</think>")]),
        ("reasoning", "<think>\n\n</think>\n\nYes", [Text("Yes")]),
        ("reasoning", "<think>cut off", [Reasoning("cut off")]),
        ("open", "so, 1 < 2 </think> {", [Reasoning("so, 1 < 2"), Text("{")]),
        ("open", "<think>again</think>x", [Reasoning("again"), Text("x")]),
    ],
)  # fmt: skip
def test_each_format_is_read_as_its_models_write_it(kind: str, text: str, expected: list[Any]) -> None:
    assert read(kind, text) == expected


def cut(kind: str, text: str) -> list[Piece]:
    parser = PARSERS[kind]()
    return join([*parser.push(text), *parser.flush(is_cut=True)])


BEGUN = {
    "tagged": ("<tool", f"<tool_call>\n{CALL}"), "first": ("<tool", f"<tool_call>{CALL}"),
    "reasoning": ("<tool", f"<tool_call>{TAGGED}"), "open": ("</think>{", f"</think>{CALL}"), "bare": ("{", CALL),
    "bare python": ("<|python_tag|>", f"<|python_tag|>{LLAMA}"), "bare fence": ("```tool_code", f"```tool_code\n[{CALL}"),
    "bare array": ("[", f"[{CALL}"), "bare typed": ("{", '{"type": "function", "name": "time"}'),
}  # fmt: skip


@pytest.mark.parametrize("case", BEGUN)
def test_a_call_that_is_cut_anywhere_is_no_text(case: str) -> None:
    least, whole = BEGUN[case]
    for length in range(len(least), len(whole)):
        assert cut(case.partition(" ")[0], whole[:length]) == [], whole[:length]
    if case not in {"bare array", "bare fence"}:
        assert [type(piece) for piece in cut(case.partition(" ")[0], whole)] == [ToolCall]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tagged", "a <"), ("tagged", "<tool_call>hello"), ("tagged", '<tool_call>{"name": "rain'), ("bare", "a {"),
        ("bare", '{"temperature": 3'), ("bare", '{"name": "Oslo'), ("bare", '```json\n{"name": "Oslo'), ("bare", "```json"),
        ("open", '</think>{"n": "'),
    ],
)  # fmt: skip
def test_text_that_is_cut_stays(kind: str, text: str) -> None:
    (piece,) = cut(kind, text)
    assert piece == Text(text.removeprefix("</think>"))


def test_calls_before_the_one_that_is_cut_stay() -> None:
    pieces = cut("tagged", f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "time", "argu')
    assert [piece.name for piece in pieces if isinstance(piece, ToolCall)] == ["weather"]
    assert len(pieces) == 1


def request(**fields: Any) -> GenerateRequest:
    tools = tuple(Tool(name=name) for name in NAMES)
    return GenerateRequest(
        **{"model": "m", "messages": [ChatMessage(role="user", content="x")], "tools": tools, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [OSLO]),
        ({"tools": ()}, [Text(CALL)]),
        ({"tool_choice": ToolChoice(mode="none")}, [Text(CALL)]),
        ({"tool_choice": ToolChoice(mode="required", names=("time",))}, [Text(CALL)]),
    ],
)
def test_only_tools_that_may_be_called_are(fields: dict[str, Any], expected: list[Any]) -> None:
    parser = choose_parser(request(**fields), GenerateRule(context_length=9), "")()
    found = parse(parser, [CALL])
    assert [(one.name, one.arguments) if isinstance(one, ToolCall) else one for one in found] == expected


@pytest.mark.parametrize(
    ("prompt_end", "fields", "expected"),
    [
        ("<|assistant|>\n<think>\n", {}, [Reasoning("a"), Text("b")]),
        ("<|assistant|>\n", {}, [Text("a</think>b")]),
        ("<think>", {"tool_choice": ToolChoice(mode="required")}, [Text("a</think>b")]),
    ],
)
def test_reasoning_is_open_where_the_prompt_opened_it(
    prompt_end: str, fields: dict[str, Any], expected: list[Any]
) -> None:
    rule = GenerateRule(context_length=9, reasoning_tags=TAGS, tool_format="hermes")
    assert parse(choose_parser(request(**fields), rule, prompt_end)(), ["a</think>b"]) == expected
