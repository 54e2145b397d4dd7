from __future__ import annotations

import time

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sie.frontend.inputs import text_rules
from sie.frontend.inputs.text_rules import RulesError, is_linear, rules_to_try

RUNS = [
    "a",
    "A",
    "aA",
    "Aa",
    " ",
    "1",
    "\n",
    " \n",
    "\r",
    "漢",
    "!",
    "'s",
    "'",
    "é",
    "a'",
    "1a",
    " a",
    "! ",
    "\u0301",
    "ǅ",
]
"""Texts that a loop of a known expression may run over."""


def split_by(pattern: str) -> Tokenizer:
    made = Tokenizer(models.WordLevel({"u": 0}, "u"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return made


@pytest.mark.parametrize("pattern", sorted(text_rules._KNOWN), ids=lambda pattern: pattern[:40])
@pytest.mark.timing
def test_known_expression_takes_linear_time(pattern: str):
    """A square would take a second for 20,000 characters."""
    tokenizer = split_by(pattern)
    for run in RUNS:
        for end in ("", "x", " !"):
            began_s = time.process_time()
            tokenizer.encode_batch_fast([run * (20_000 // len(run)) + end])
            assert time.process_time() - began_s < 0.4, (run, end)


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        " {2,}",
        r"\s+",
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[\r\n]",
        "[^a-z]+",
        r"\s?[A-Za-zµ]+",
        r"[ \t]?\p{L}+",
        r"\d",
        "[0-9][0-9][0-9]",
        r"\p{N}\p{L}",
    ],
)
def test_one_item_is_linear(pattern: str):
    assert is_linear(pattern)
    assert rules_to_try(split_by(pattern)) == b""


@pytest.mark.parametrize(
    "pattern",
    [
        "(x+x+)+y", r"\s+$", r"\d{1,3}(?=(?:\d{3})*\b)", "(a|a)*b", "a*a*b", "a{1000}", "a{20}{20}", "[a[b]]+", "[a&&b]+",
        r"\s*[\r\n]+", ".*x", "a+?b", "^a+",
    ],
)  # fmt: skip
def test_any_other_expression_is_to_be_tried(pattern: str):
    assert not is_linear(pattern)


def test_rules_to_try_hold_every_step_before():
    made = split_by("(x+x+)+y")
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()])
    rules = rules_to_try(made)
    assert b"Lowercase" in rules
    assert b"(x+x+)+y" in rules


def with_parts(**parts: object) -> Tokenizer:
    made = Tokenizer(parts.pop("model", None) or models.WordLevel({"u": 0}, "u"))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (with_parts(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits()] * 129)), "129 rules"),
        (
            with_parts(model=models.WordPiece({"u": 0}, unk_token="u", max_input_chars_per_word=201)),
            "max_input_chars_per_word",
        ),
        (with_parts(decoder=decoders.Replace(Regex("(x+x+)+y"), "")), "its decoder"),
        (with_parts(normalizer=normalizers.Replace(Regex("(?:" + "a|" * 40_000 + "b)"), "")), "65536 characters"),
    ],
    ids=["steps", "words", "decoder", "pattern"],
)
def test_rules_of_no_real_tokenizer_are_refused(tokenizer: Tokenizer, reason: str):
    with pytest.raises(RulesError, match=reason):
        rules_to_try(tokenizer)
