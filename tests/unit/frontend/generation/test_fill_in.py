"""Prompts with a gap: the oracle is the tokenizer itself, on the text that a model's card shows, marks and all."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, normalizers, processors

from sie.frontend.generation.fill_in import find_marks, gap_ids, require_marks
from sie.frontend.generation.vocabulary import FileVocabulary
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from tests.unit import tiny_tokenizers

STYLES = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<|endoftext|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|endoftext|>"),
]
GAPS = [
    ("def f(x):\n    return ", "\n\n\nprint(f(3))\n"),
    ("  indented", "  more"),
    ("\n\n", "\n"),
    ("", "only behind"),
    ("Zwölf ", " 東京"),
]


def with_marks(tokenizer: Tokenizer, names: tuple[str, ...], *, begins: bool) -> Tokenizer:
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_special_tokens(list(names))
    if begins:
        begin = ("<s>", made.token_to_id("<s>"))
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return made


def vocabulary(tokenizer: Tokenizer) -> FileVocabulary:
    return FileVocabulary(ModelCard(id="m", kind="generator"), tokenizer)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("names", STYLES)
def test_a_gap_is_written_with_the_marks_of_its_tokenizer(names: tuple[str, ...], begins: bool) -> None:
    tokenizer = with_marks(tiny_tokenizers.byte_level(), names, begins=begins)
    voc = vocabulary(tokenizer)
    marks = require_marks(voc, "m")
    prefix, suffix, middle, end = names
    for before, behind in GAPS:
        expected = tokenizer.encode(f"{prefix}{before}{suffix}{behind}{middle}").ids
        assert gap_ids(before, behind, voc, marks) == expected
    assert set(marks.ends) == {tokenizer.token_to_id(name) for name in (prefix, suffix, middle, end)}


def test_no_space_is_put_before_either_text_where_words_have_marks_for_spaces() -> None:
    """Source: CodeLlama's tokenizer in transformers, whose normalizer for gaps puts no space before a text."""
    names = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    tokenizer = with_marks(tiny_tokenizers.sentence_piece(), names, begins=True)
    voc = vocabulary(tokenizer)
    marks = require_marks(voc, "m")
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.normalizer = normalizers.Replace(" ", "▁")
    ids = [tokenizer.token_to_id(name) for name in ("<s>", *names)]
    for before, behind in GAPS:
        first, second = (plain.encode(text, add_special_tokens=False).ids for text in (before, behind))
        assert gap_ids(before, behind, voc, marks) == [ids[0], ids[1], *first, ids[2], *second, ids[3]]
    assert marks.ends == (ids[1], ids[2], ids[3], ids[4])


@pytest.mark.parametrize(
    "names", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("<fim_prefix>", "<|fim_suffix|>", "<|fim_middle|>")]
)
def test_a_tokenizer_without_all_marks_of_one_kind_fills_no_gap(names: tuple[str, ...]) -> None:
    voc = vocabulary(with_marks(tiny_tokenizers.byte_level(), names, begins=False))
    assert find_marks(voc) is None
    with pytest.raises(BadRequest) as caught:
        require_marks(voc, "m")
    assert caught.value.extras["param"] == "suffix"
