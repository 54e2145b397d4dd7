from __future__ import annotations

import pytest

from sie.catalog.options import check_options
from sie.frontend.inputs.prompts import apply_prompt
from sie.values.card import ModelCard
from sie.values.errors import BadRequest

PLAIN = ModelCard(id="plain", kind="encoder")
PROMPTED = ModelCard(id="prompted", kind="encoder", prompts={"query": "q: ", "passage": "p: "}, default_prompt="d: ")


@pytest.mark.parametrize(
    ("card", "options", "instruction", "is_query", "expected"),
    [
        (PLAIN, {}, None, False, "x"),
        (PLAIN, {}, None, True, "x"),
        (PLAIN, {}, "Find", True, "Find x"),
        (PLAIN, {}, "Find", False, "Find x"),
        (PLAIN, {}, "", False, "x"),
        (PLAIN, {"default_instruction": "D"}, None, True, "D x"),
        (PLAIN, {"default_instruction": "D"}, None, False, "x"),
        (PLAIN, {"default_instruction": "D"}, "", True, "x"),
        (PLAIN, {"default_instruction": "D"}, "I", True, "I x"),
        (PLAIN, {"query_template": "query: {text}"}, None, True, "query: x"),
        (PLAIN, {"query_template": "query: {text}"}, "I", True, "query: x"),
        (PLAIN, {"query_template": "query: {text}"}, None, False, "x"),
        (PLAIN, {"doc_template": "passage: {text}"}, None, False, "passage: x"),
        (PLAIN, {"query_template": "Instruct: {instruction}\nQuery: {text}"}, "I", True, "Instruct: I\nQuery: x"),
        (PLAIN, {"query_template": "Instruct: {instruction}\nQuery: {text}"}, None, True, "Instruct: \nQuery: x"),
        (PLAIN, {"query_template": "{text}{text}"}, None, True, "xx"),
        (PLAIN, {"query_template": "{instruction}|{text}"}, "{text}", True, "{text}|x"),
        (PROMPTED, {}, None, True, "q: x"),
        (PROMPTED, {}, None, False, "p: x"),
        (PROMPTED, {}, "I", True, "I x"),
        (PROMPTED, {"query_template": "{text}"}, None, True, "x"),
    ],
)
def test_rules_in_order(card, options, instruction, is_query, expected):
    assert apply_prompt(card, ["x"], options, instruction, is_query) == [expected]


def test_document_prompt_beats_passage_and_an_empty_prompt_beats_the_default():
    card = ModelCard(id="m", kind="encoder", prompts={"document": "", "passage": "p: "}, default_prompt="d: ")
    assert apply_prompt(card, ["x"], {}, None, False) == ["x"]
    assert apply_prompt(card, ["x"], {}, None, True) == ["d: x"]


def test_braces_of_a_text_are_kept():
    assert apply_prompt(PLAIN, ["{text} {other}"], {"doc_template": "<{text}>"}, None, False) == ["<{text} {other}>"]


@pytest.mark.parametrize("template", ["{other}", "{}", "{text!r}", "{text.__class__}", "{0}"])
def test_other_placeholders_are_refused_by_name(template):
    with pytest.raises(BadRequest, match="placeholder"):
        apply_prompt(PLAIN, ["x"], {"query_template": template}, None, True)


@pytest.mark.parametrize("template", ["{text", "{text} {", "{text}}", "}{text}{", "{"])
def test_a_brace_without_its_other_half_is_refused(template):
    with pytest.raises(BadRequest, match=r"is not closed|without its"):
        apply_prompt(PLAIN, ["x"], {"query_template": template}, None, True)
    with pytest.raises(BadRequest, match=r"is not closed|without its"):
        check_options({"doc_template": template}, "Model 'm'", "$.options")


@pytest.mark.parametrize("name", ["query_template", "default_instruction"])
def test_a_value_that_is_no_string_is_refused_with_its_path(name):
    with pytest.raises(BadRequest, match=rf"\$\.params\.options\.{name}"):
        apply_prompt(PLAIN, ["x"], {name: 5}, None, True)


def test_every_text_is_prompted_in_order():
    assert apply_prompt(PROMPTED, ["a", "", "c"], {}, None, True) == ["q: a", "q: ", "q: c"]
