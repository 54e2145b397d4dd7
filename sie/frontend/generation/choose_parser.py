"""Chooses the parser of a model's answers from the model's rule and the request's tools and grammar. Pure."""

from __future__ import annotations

from functools import partial

from sie.frontend.generation.parsers import OutputParser, ParserFactory, PlainText
from sie.frontend.generation.reasoning import ReasoningParser
from sie.frontend.generation.tool_calls import BareCalls, FirstCall, TaggedCalls
from sie.values.generate import GenerateRequest, GenerateRule, Tool


def callable_tools(request: GenerateRequest) -> tuple[Tool, ...]:
    """Return the tools that an answer to a request may call."""
    choice = request.tool_choice
    if choice.mode == "none":
        return ()
    return tuple(tool for tool in request.tools if not choice.names or tool.name in choice.names)


def choose_parser(request: GenerateRequest, rule: GenerateRule, prompt_end: str) -> ParserFactory:
    """Return the factory of the parsers, one for each choice. prompt_end: the last text of the prompt."""
    return partial(_make_parser, request, rule, prompt_end.rstrip())


def _make_parser(request: GenerateRequest, rule: GenerateRule, prompt_end: str) -> OutputParser:
    tools = callable_tools(request) if request.messages is not None else ()
    names = frozenset(tool.name for tool in tools)
    parser: OutputParser = PlainText()
    if names:
        parser = TaggedCalls(names) if rule.tool_format == "hermes" else BareCalls(names)
        if not request.parallel_tool_calls:
            parser = FirstCall(parser)
    is_bound = request.grammar is not None or (bool(names) and request.tool_choice.mode == "required")
    if rule.reasoning_tags is None or request.messages is None or is_bound:
        return parser  # a grammar over every token leaves no room for reasoning
    return ReasoningParser(rule.reasoning_tags, parser, is_open=prompt_end.endswith(rule.reasoning_tags[0]))
