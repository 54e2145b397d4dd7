"""The texts of a load have the requested lengths in the requested shares."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import tokenizers

from sie.loadgen.sample_texts import MIXED, count_words, make_texts, parse_mix


def test_each_text_has_as_many_tokens_as_its_mix_says(minilm_directory: Path):
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = make_texts(parse_mix("mixed"), 1000, seed=3)
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    assert lengths == [count_words(text) for text in texts]
    assert Counter(lengths) == {12: 600, 64: 300, 230: 100}


@pytest.mark.parametrize("count", [1, 3, 7, 32, 101])
def test_any_number_of_texts_is_as_near_to_the_mix_as_can_be(count: int):
    found = Counter(map(count_words, make_texts(parse_mix("mixed"), count, seed=1)))
    assert found.total() == count
    assert all(abs(found[length] - count * share) < 1 for share, length in parse_mix("mixed"))


def test_a_seed_says_what_the_texts_are():
    mix = parse_mix("12:1,64:3")
    assert make_texts(mix, 50, seed=1) == make_texts(mix, 50, seed=1)
    assert make_texts(mix, 50, seed=1) != make_texts(mix, 50, seed=2)


def test_mixed_is_a_name():
    assert parse_mix("mixed") == parse_mix(MIXED) == ((0.6, 12), (0.3, 64), (0.1, 230))


@pytest.mark.parametrize("text", ["", "x", "12:x", "2", "12:0", "12:-1", "12:inf", "12:nan", "99999", "12,,3", "1.5"])
def test_what_is_no_mix_is_refused_with_the_part(text: str):
    with pytest.raises(ValueError, match=r"TOKENS|tokens|weight"):
        parse_mix(text)
