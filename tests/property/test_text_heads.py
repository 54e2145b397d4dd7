"""Of a long text only one end is read, with the result of reading all of it: for every kind of tokenizer and any limit."""

from __future__ import annotations

import functools

from hypothesis import event, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from sie.frontend.inputs.pair_cuts import Lengths, cut_pairs
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import ModelCard, Side
from tests.unit import tiny_tokenizers

MAX_CHARS = 30_000
PIECES = (*tiny_tokenizers.CORPUS, "a", " ", "0123456789", "x" * 130, "\n", "é", "€ 😀", "<s>", "\x00", "e\u0301")
KINDS = st.sampled_from(("byte_level", "sentence_piece", "unigram", "word_piece"))
TEXTS = st.tuples(st.lists(st.sampled_from(PIECES), max_size=12), st.integers(1, 300)).map(
    lambda drawn: ("".join(drawn[0]) * drawn[1])[:MAX_CHARS]
)
SIDES: st.SearchStrategy[Side] = st.sampled_from(("left", "right"))
NUM_TOKENS = st.integers(1, 200)


@functools.cache
def tokenizer_of(kind: str, limit: int | None = None, side: Side = "right") -> Tokenizer:
    library = LibraryTokenizer.from_str(getattr(tiny_tokenizers, kind)().to_str())
    if limit is not None:
        library.enable_truncation(limit, direction=side)
    return Tokenizer(ModelCard(id="m", kind="encoder", max_sequence_length=limit, truncation_side=side), library)


@given(kind=KINDS, texts=st.lists(TEXTS, min_size=1, max_size=3), num_tokens=NUM_TOKENS, data=st.data())
def test_a_token_ends_where_it_ends_in_the_whole_text(kind, texts, num_tokens, data):
    limit, side = data.draw(st.none() | st.sampled_from((8, 64))), data.draw(SIDES)
    expected = []
    for text in texts:
        offsets = tokenizer_of(kind).backend.encode(text, add_special_tokens=False).offsets
        expected.append(len(text) if len(offsets) <= num_tokens else offsets[num_tokens - 1][1])
    event(f"{'some' if expected != [*map(len, texts)] else 'none'} ends before its text")
    assert tokenizer_of(kind, limit, side).ends_of(texts, num_tokens) == expected


@given(kind=KINDS, text=TEXTS, limit=NUM_TOKENS, side=SIDES)
def test_one_end_of_a_text_has_the_tokens_of_the_whole_text(kind, text, limit, side):
    tokenizer = tokenizer_of(kind)
    [head] = tokenizer.shorten([text], limit, side=side)
    event(f"{'a part' if head != text else 'all'} of it is read")
    found, expected = tokenizer.backend.encode_batch([head, text], add_special_tokens=False)
    assert min(len(found), limit + 1) == min(len(expected), limit + 1)
    for encoding in (found, expected):
        encoding.truncate(limit, direction=side)
    assert found.ids == expected.ids
    if side == "right":
        assert found.offsets == expected.offsets


@given(kind=KINDS, texts=st.tuples(TEXTS, TEXTS), limit=NUM_TOKENS, side=SIDES)
def test_the_ends_of_a_pair_have_the_tokens_of_the_whole_pair(kind, texts, limit, side):
    tokenizer = tokenizer_of(kind)
    query, document = tokenizer.shorten(texts, limit, side=side)
    lengths = Lengths(tokenizer.backend, texts)
    [found] = cut_pairs(tokenizer.backend, query, [document], limit, {}, lengths=lengths, side=side)
    [expected] = cut_pairs(tokenizer.backend, texts[0], [texts[1]], limit, {}, side=side)
    assert found.ids == expected.ids
