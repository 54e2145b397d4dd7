"""Characters of several tokens: the oracle is `tokenizers`' own stream, and the decode of the whole text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sie.frontend.generation.parsers import PlainText
from sie.frontend.generation.reader import Reader
from sie.frontend.generation.reasoning import ReasoningParser
from sie.frontend.generation.vocabulary import FileVocabulary
from sie.values.card import ModelCard
from sie.values.generate import ReasoningDelta, TextDelta, TokenLogprob, TokenRecord
from tests.unit import tiny_tokenizers

KINDS = {
    "byte level": tiny_tokenizers.byte_level,
    "byte level and strip": tiny_tokenizers.byte_level_and_strip,
    "sentence piece": tiny_tokenizers.sentence_piece,
    "gemma": lambda: tiny_tokenizers.sentence_piece(strips=False),
}
EMOJI = "🦊🐻🐼🐨🐯🦁🐮🐷🐸🐵🐔"


@pytest.fixture(params=sorted(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def vocabulary(tokenizer: Tokenizer) -> FileVocabulary:
    return FileVocabulary(ModelCard(id="m", kind="generator"), tokenizer)


def ids_of(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """Return the tokens of single bytes."""
    voc = vocabulary(tokenizer)
    by_bytes = {voc.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.get_vocab_size()))}
    return [by_bytes[bytes((byte,))] for byte in raw]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    decoder = vocabulary(tokenizer).decoder()
    return [decoder.push(token_id) for token_id in ids], decoder.flush()


@pytest.mark.parametrize("text", [EMOJI, "a😀b", "😀 é東\n", "東京は", "é"])
def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = ids_of(tokenizer, text.encode())
    stream = DecodeStream(skip_special_tokens=True)
    expected = [stream.step(tokenizer, token_id) or "" for token_id in ids]
    assert streamed(tokenizer, ids) == (expected, "")
    assert "".join(expected) == text


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_only_the_character_that_was_cut_is_replaced(tokenizer: Tokenizer, num_bytes: int) -> None:
    ids = ids_of(tokenizer, EMOJI.encode() + "😀".encode()[:num_bytes])
    pieces, rest = streamed(tokenizer, ids)
    assert ("".join(pieces), rest) == (EMOJI, "\ufffd")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("😀".encode() + b"\xff" + "😀".encode(), "😀\ufffd😀"),
        ("😀".encode()[:2] + b"ab", "\ufffdab"),
        (b"\x80\x80a", "\ufffd\ufffda"),
        (b"a\xff", "a\ufffd"),
        (b"\xf0" * 50 + b"a", "\ufffd" * 50 + "a"),
        ("\ufffd".encode() + "😀".encode(), "\ufffd😀"),
    ],
)
def test_broken_bytes_leave_the_characters_around_them(tokenizer: Tokenizer, raw: bytes, expected: str) -> None:
    pieces, rest = streamed(tokenizer, ids_of(tokenizer, raw))
    assert "".join(pieces) + rest == expected


def test_words_behind_broken_bytes_keep_their_space() -> None:
    tokenizer = tiny_tokenizers.sentence_piece()
    ids = [*ids_of(tokenizer, b"\xff"), *tokenizer.encode("fox").ids]
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == "\ufffd fox"


def test_special_tokens_do_not_part_a_character(tokenizer: Tokenizer) -> None:
    special = tokenizer.token_to_id("<s>")
    assert special is not None
    ids = [special, *(part for token_id in ids_of(tokenizer, "é😀".encode()) for part in (token_id, special))]
    pieces, rest = streamed(tokenizer, ids)
    assert ("".join(pieces), rest) == ("é😀", "")


def test_an_answer_cut_by_max_tokens_keeps_its_characters_and_the_bytes_of_its_tokens(tokenizer: Tokenizer) -> None:
    raw = EMOJI.encode() + "😀".encode()[:1]
    ids = ids_of(tokenizer, raw)
    reader = Reader(1, vocabulary(tokenizer), (), PlainText)
    deltas: list[TextDelta] = []
    for index, token_id in enumerate(ids):
        finish = "length" if index == len(ids) - 1 else ""
        events = reader.read(TokenRecord(1, 0, index, (token_id,), finish, 0, (TokenLogprob(-1.0),)))
        deltas += [event for event in events if isinstance(event, TextDelta)]
    assert [delta.text for delta in deltas] == [*EMOJI, "\ufffd"]
    assert [len(delta.logprobs) for delta in deltas] == [4] * len(EMOJI) + [1]
    assert b"".join(log.raw for delta in deltas for log in delta.logprobs) == raw


def test_tokens_of_the_reasoning_come_with_it_and_not_with_the_text(tokenizer: Tokenizer) -> None:
    parser = ReasoningParser(("<x>", "</x>"), PlainText(), is_open=False)
    reader = Reader(1, vocabulary(tokenizer), (), lambda: parser)
    ids = ids_of(tokenizer, b"<x>why</x> so")
    records = [TokenRecord(1, 0, 0, (token_id,), "", 0, (TokenLogprob(-1.0),)) for token_id in ids]
    events = [event for record in records for event in reader.read(record)]
    events += reader.read(TokenRecord(1, 0, 0, (), "stop"))
    reasoning = [event for event in events if isinstance(event, ReasoningDelta)]
    texts = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(event.text for event in reasoning) == "why"
    assert b"".join(log.raw for event in reasoning for log in event.logprobs) == b"<x>why</x>"
    assert b"".join(log.raw for event in texts for log in event.logprobs) == b" so"
    assert reader.num_reasoning_tokens == len(b"<x>why")


def test_texts_that_look_like_bytes_stay_where_a_decoder_reads_none() -> None:
    tokenizer = tiny_tokenizers.word_piece()
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_tokens(["<0xF0>", "<0x0A>"])
    ids = [tokenizer.get_vocab_size() - 2, tokenizer.get_vocab_size() - 1]
    pieces, rest = streamed(tokenizer, ids)
    assert ("".join(pieces), rest) == (tokenizer.decode(ids), "")
