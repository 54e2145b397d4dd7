"""The texts of a load: as many tokens as was said, in the shares that were said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import tokenizers

from sie.loadgen.texts import MIXED, count_words, make_texts, parse_mix


def test_each_text_has_as_many_tokens_as_its_mix_says(minilm_directory: Path):
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = make_texts(parse_mix("mixed"), 1000, seed=3)
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    assert lengths == [count_words(text) for text in texts]
    shares = {length: count / 1000 for length, count in Counter(lengths).items()}
    assert shares == pytest.approx({12: 0.6, 64: 0.3, 230: 0.1}, abs=0.05)


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
