from __future__ import annotations

import itertools
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from sie.frontend.inputs.pairs import pair_arrays
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import ModelCard, PairTemplate, ScoreRule, StubOptions
from sie.values.errors import BadRequest

WORDS = ["<s>", "</s>", "<unk>", "{", "}", "query", *(f"w{i}" for i in range(50))]
IDS = {word: number for number, word in enumerate(WORDS)}


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Any:
    def make(limit: int | None = None, *, lowercase: bool = False, **rule: Any) -> Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        card = ModelCard(
            id="org/m", kind="cross-encoder", outputs=("score",), tokenizer_file=str(path), vocab_size=len(WORDS),
            max_sequence_length=limit, lowercase=lowercase, score=ScoreRule(activation="Sigmoid", **rule),
        )  # fmt: skip
        return Tokenizer.load(card)

    return make


def pairs(
    tokenizer: Tokenizer, query: str, documents: list[str], instruction: str | None = None, **options: Any
) -> list[str]:
    """Return each pair's tokens as words."""
    arrays = dict(pair_arrays(tokenizer.card, tokenizer, query, documents, instruction, options=options))
    assert arrays["cu_seqlens"].dtype == arrays["token_ids"].dtype == np.int32
    rows = np.split(arrays["token_ids"], arrays["cu_seqlens"][1:-1])
    return [" ".join(WORDS[token] for token in row) for row in rows]


def test_pairs_are_joined_as_the_tokenizer_does(make_tokenizer: Any) -> None:
    found = pairs(make_tokenizer(), "w1 w2", ["w3", "", "w4 w5"])
    assert found == ["<s> w1 w2 </s> w3 </s>", "<s> w1 w2 </s> </s>", "<s> w1 w2 </s> w4 w5 </s>"]


def test_longer_text_is_cut_first(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(9)
    assert pairs(tokenizer, "w1 w2", ["w3 " * 20]) == ["<s> w1 w2 </s> w3 w3 w3 w3 </s>"]
    assert pairs(tokenizer, "w1 " * 20, ["w3 w4"]) == ["<s> w1 w1 w1 w1 </s> w3 w4 </s>"]
    assert pairs(tokenizer, "w1 " * 20, ["w3 " * 20]) == ["<s> w1 w1 w1 </s> w3 w3 w3 </s>"]


def test_types_mark_the_document(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(token_types=True)
    arrays = dict(pair_arrays(tokenizer.card, tokenizer, "w1 w2", ["w3", ""], None))
    assert arrays["token_types"].dtype == np.uint8
    assert arrays["token_types"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    tokenizer = make_tokenizer()
    assert "token_types" not in dict(pair_arrays(tokenizer.card, tokenizer, "w1", ["w3"], None))


def test_instruction_stands_before_the_query(make_tokenizer: Any) -> None:
    assert pairs(make_tokenizer(), "w1", ["w2"], "w9 w8") == ["<s> w9 w8 w1 </s> w2 </s>"]
    assert pairs(make_tokenizer(), "w1", ["w2"], "") == ["<s> w1 </s> w2 </s>"]


@pytest.mark.parametrize(
    ("instruction", "options", "expected"),
    [
        (None, {"default_instruction": "w9"}, "<s> w9 w1 </s> w2 </s>"),
        ("w8", {"default_instruction": "w9"}, "<s> w8 w1 </s> w2 </s>"),
        ("", {"default_instruction": "w9"}, "<s> w1 </s> w2 </s>"),
        (None, {"query_template": "w3 {text} w4"}, "<s> w3 w1 w4 </s> w2 </s>"),
        ("w8", {"query_template": "w3 {text}"}, "<s> w3 w1 </s> w2 </s>"),
        ("w8", {"query_template": "{instruction} w3 {text}"}, "<s> w8 w3 w1 </s> w2 </s>"),
        ("w8", {"doc_template": "{instruction} w5 {text}"}, "<s> w8 w1 </s> w8 w5 w2 </s>"),
    ],
)
def test_options_set_the_templates_of_the_texts(
    make_tokenizer: Any, instruction: str | None, options: dict[str, str], expected: str
) -> None:
    assert pairs(make_tokenizer(), "w1", ["w2"], instruction, **options) == [expected]


def test_a_query_template_leaves_the_checkpoint_s_default_prompt_out(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.card = msgspec.structs.replace(tokenizer.card, default_prompt="w7 ")
    assert pairs(tokenizer, "w1", ["w2"]) == ["<s> w7 w1 </s> w2 </s>"]
    assert pairs(tokenizer, "w1", ["w2"], query_template="{text}") == ["<s> w1 </s> w2 </s>"]


def test_a_lower_limit_cuts_pairs_and_filled_templates(make_tokenizer: Any) -> None:
    assert pairs(make_tokenizer(9), "w1 w2", ["w3 " * 20], max_seq_length=7) == ["<s> w1 w2 </s> w3 w3 </s>"]
    template = PairTemplate(parts=("query {query}", "{document}", "w9"))
    found = pairs(make_tokenizer(9, template=template), "w1", ["w3 " * 20], max_seq_length=6)
    assert found == ["query w1 w3 w3 w3 w9"]


def test_texts_are_cleaned_as_the_card_says(make_tokenizer: Any) -> None:
    assert pairs(make_tokenizer(lowercase=True), "W1", ["W2"]) == ["<s> w1 </s> w2 </s>"]


def test_template_has_a_place_for_everything(make_tokenizer: Any) -> None:
    template = PairTemplate(parts=("w40", "{instruction} {query} {document}", "w41"), default_instruction="w30")
    tokenizer = make_tokenizer(template=template)
    assert pairs(tokenizer, "w1", ["w2", ""]) == ["w40 w30 w1 w2 w41", "w40 w30 w1 w41"]
    assert pairs(tokenizer, "w1", ["w2"], "w31") == ["w40 w31 w1 w2 w41"]
    assert pairs(tokenizer, "w1", ["w2"], "") == ["w40 w1 w2 w41"]


def test_braces_of_a_text_are_not_placeholders(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(template=PairTemplate(parts=("{query} w40 {document}",)))
    assert pairs(tokenizer, "{document}", ["{query}"]) == ["{ <unk> } w40 { query }"]


def test_template_without_a_place_takes_the_instruction_with_the_query(make_tokenizer: Any) -> None:
    instructed = ("{instruction} w41 {query}", "w40", "{document}")
    template = PairTemplate(parts=("{query}", "w40", "{document}"), instructed_parts=instructed)
    tokenizer = make_tokenizer(template=template)
    assert pairs(tokenizer, "w1", ["w2"]) == ["w1 w40 w2"]
    assert pairs(tokenizer, "w1", ["w2"], "w9") == ["w9 w41 w1 w40 w2"]


def test_template_is_kept_whole_when_a_pair_is_too_long(make_tokenizer: Any) -> None:
    template = PairTemplate(parts=("w40", "{query}", "{document}", "w41"))
    tokenizer = make_tokenizer(8, template=template)
    assert pairs(tokenizer, "w1", ["w2 " * 20]) == ["w40 w1 w2 w2 w2 w2 w2 w41"]
    assert pairs(tokenizer, "w1 " * 20, ["w2 w3"]) == ["w40 w1 w1 w1 w1 w1 w1 w41"]


@pytest.mark.parametrize(("query", "documents"), [("\ud800", ["a"]), ("q", ["a", "\udfff"])])
def test_text_that_is_no_unicode_is_refused(make_tokenizer: Any, query: str, documents: list[str]) -> None:
    plain, filled = make_tokenizer(), make_tokenizer(template=PairTemplate(parts=("{query} {document}",)))
    stub = ModelCard(id="stub", kind="stub", stub=StubOptions(score=True))
    for card, tokenizer in ((plain.card, plain), (filled.card, filled), (stub, None)):
        with pytest.raises(BadRequest, match="lone surrogate"):
            pair_arrays(card, tokenizer, query, documents, None)


def test_stub_reads_the_querys_length_and_both_texts() -> None:
    card = ModelCard(id="stub", kind="stub", stub=StubOptions(score=True, max_tokens=3))
    arrays = dict(pair_arrays(card, None, "é", ["ab", "", "x" * 40], None))
    head = struct.pack("<I", 2) + "é".encode()
    expected = [head + b"ab", head, head + b"x" * 40]
    offsets = arrays["text_offsets"]
    assert [arrays["text"][a:b].tobytes() for a, b in itertools.pairwise(offsets)] == expected
    assert np.diff(arrays["cu_seqlens"]).tolist() == [1, 1, 3]


@pytest.mark.parametrize("limit", [5, 6, 9, 10])
@pytest.mark.parametrize("num_query", [0, 1, 4, 9, 40])
def test_pairs_of_long_texts_are_cut_as_the_library_does(make_tokenizer: Any, limit: int, num_query: int) -> None:
    """A query of more characters than the limit is joined here, so that no piece of one text meets those of the other."""
    tokenizer, query = make_tokenizer(limit), "w1 " * num_query
    library = tokenizers.Tokenizer.from_file(tokenizer.card.tokenizer_file)
    library.enable_truncation(limit)
    documents = ["w2 " * count for count in (0, 1, 4, 8, 9, 10, 39, 40, 41)]
    expected = library.encode_batch([(query, document) for document in documents])
    cuts: dict[int, int] = {}
    token_ids, bounds, _ = tokenizer.encode_pairs(query, documents, cuts=cuts)
    assert np.split(token_ids, bounds[1:-1])[0].dtype == np.int32
    assert [row.tolist() for row in np.split(token_ids, bounds[1:-1])] == [one.ids for one in expected]
    assert cuts == {number: limit for number, one in enumerate(expected) if one.overflowing}


def test_two_texts_are_cut_to_a_few_tokens_in_no_time(make_tokenizer: Any) -> None:
    """The library would join a thousand pieces of one text with as many of the other."""
    tokenizer, began_s = make_tokenizer(1000), time.process_time()
    assert pairs(tokenizer, "w1 " * 1000, ["w2 " * 1000], max_seq_length=5) == ["<s> w1 </s> w2 </s>"]
    assert time.process_time() - began_s < 1.0


def test_cut_pairs_are_told_whatever_makes_them(make_tokenizer: Any) -> None:
    def cut(
        tokenizer: Tokenizer | None, card: ModelCard, query: str, *documents: str, **options: Any
    ) -> dict[int, int]:
        cuts: dict[int, int] = {}
        pair_arrays(card, tokenizer, query, documents, None, options=options, cuts=cuts)
        return cuts

    plain = make_tokenizer(8)
    assert cut(plain, plain.card, "w1", "w2", "w2 " * 4, "w2 " * 5) == {2: 8}
    assert cut(plain, plain.card, "w1", "w2", "w2 " * 4, max_seq_length=7) == {1: 7}
    filled = make_tokenizer(8, template=PairTemplate(parts=("query {query}", "{document}", "}")))
    assert cut(filled, filled.card, "w1", "w2 " * 5, "w2 " * 6) == {1: 8}
    assert cut(filled, filled.card, "w1 " * 6, "w2", "w2") == {0: 8, 1: 8}, "the query is cut beside both"
    stub = ModelCard(id="stub", kind="stub", stub=StubOptions(score=True, max_tokens=2))
    assert cut(None, stub, "ab", "x" * 6, "x" * 7) == {1: 2}
