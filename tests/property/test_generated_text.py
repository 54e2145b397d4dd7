"""A client gets the same answer for any pieces in which tokens and texts arrive."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sie.frontend.generation.parsers import PlainText
from sie.frontend.generation.reader import Reader
from sie.frontend.generation.reasoning import ReasoningParser
from sie.frontend.generation.stops import StopFilter
from sie.frontend.generation.vocabulary import FileVocabulary
from sie.values.card import ModelCard
from sie.values.generate import Finished, GenerateRule, TextDelta, TokenLogprob, TokenRecord
from tests.unit import tiny_tokenizers

TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": tiny_tokenizers.byte_level,
    "byte level in a sequence": tiny_tokenizers.byte_level_in_sequence,
    "byte level and strip": tiny_tokenizers.byte_level_and_strip,
    "sentence piece": tiny_tokenizers.sentence_piece,
    "gemma": lambda: tiny_tokenizers.sentence_piece(strips=False),
    "word piece": tiny_tokenizers.word_piece,
}
_vocabularies: dict[str, FileVocabulary] = {}


def vocabulary(kind: str) -> FileVocabulary:
    if kind not in _vocabularies:
        card = ModelCard(id="m", kind="generator", generate=GenerateRule(context_length=100))
        _vocabularies[kind] = FileVocabulary(card, TOKENIZERS[kind]())
    return _vocabularies[kind]


def whole_text(kind: str, token_ids: Sequence[int], *, skips: bool = True) -> str:
    """Return the text of all tokens, from the library.

    It writes U+FFFD for all bytes of a run with one that is broken, whole characters among them. A stream has sent those
    already, so broken bytes are replaced before the library reads the rest.
    """
    tokenizer = TOKENIZERS[kind]()
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if skips and token.special}
    shown = [token_id for token_id in token_ids if token_id not in special]
    if tokenizer.token_to_id("<0x00>") is None:
        return tokenizer.decode(shown, skip_special_tokens=False)
    byte_of = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    id_of = {byte: token_id for token_id, byte in byte_of.items()}
    mended: list[int] = []
    for is_run, run in itertools.groupby(shown, byte_of.__contains__):
        if is_run:
            raw = bytes(byte_of[token_id] for token_id in run).decode(errors="replace").encode()
            mended += [id_of[byte] for byte in raw]
        else:
            mended += run
    return tokenizer.decode(mended, skip_special_tokens=False)


ids = st.lists(st.integers(0, 299), max_size=40)
kinds = st.sampled_from(sorted(TOKENIZERS))


def pieces(draw: st.DrawFn, items: Sequence[int]) -> list[tuple[int, ...]]:
    """Return items cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=6)))
    bounds = [0, *cuts, len(items)]
    return [tuple(items[start:end]) for start, end in itertools.pairwise(bounds)]


@settings(deadline=None)
@given(kinds, ids)
def test_tokens_one_by_one_are_the_text_of_all_at_once(kind: str, token_ids: list[int]) -> None:
    decoder = vocabulary(kind).decoder()
    texts = [decoder.push(token_id) for token_id in token_ids]
    text = "".join(texts) + decoder.flush()
    assert text == whole_text(kind, token_ids)
    event(f"{kind}: a character of several tokens", any(not t for t in texts))


@settings(deadline=None)
@given(kinds, st.text(st.sampled_from("aé東😀 \nx<|"), max_size=30))
def test_text_comes_in_whole_characters(kind: str, text: str) -> None:
    voc = vocabulary(kind)
    token_ids = voc.encode(text, whole=False)
    decoder = voc.decoder()
    shown = [decoder.push(token_id) for token_id in token_ids]
    expected = TOKENIZERS[kind]().decode(token_ids)
    if "�" not in expected:
        assert not any("�" in piece for piece in shown)
    assert "".join(shown) + decoder.flush() == expected


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(deadline=None)
@given(token_ids=ids)
def test_special_tokens_that_nobody_looks_for_stay_out_of_the_text(kind: str, token_ids: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]()
    kept = tokenizer.token_to_id("<|im_end|>")
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    reader = Reader(
        1, vocabulary(kind), (), lambda: ReasoningParser(("<|im_end|>", "</x>"), PlainText(), is_open=False)
    )
    events = reader.read(TokenRecord(1, 0, 0, (60, kept, *token_ids), "stop"))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    shown = [token_id for token_id in (60, kept, *token_ids) if token_id == kept or token_id not in special]
    assert text == whole_text(kind, shown, skips=False)
    event("special ones among them", any(token_id in special for token_id in token_ids))


alphabet = st.text("ab<>", max_size=4)


@settings(deadline=None)
@given(st.text("ab<>", max_size=24), st.lists(alphabet.filter(bool), max_size=4), st.data())
def test_stop_strings_cut_the_same_for_every_split(text: str, stops: list[str], data: st.DataObject) -> None:
    parts: list[str] = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(rest[:size])
        rest = rest[size:]
    whole, split = StopFilter(stops), StopFilter(stops)
    expected = whole.push(text) + whole.flush()
    shown: list[str] = []
    for part in parts:
        shown.append(split.push(part))
        if not split.found:
            # nothing is held back that cannot begin a stop string
            held = "".join(parts[: len(shown)])[len("".join(shown)) :]
            assert not held or any(stop.startswith(held) for stop in stops)
    assert "".join(shown) + split.flush() == expected
    assert split.found == whole.found

    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert (expected, whole.found) == (text[: ends[0] - len(longest)], longest)
        event("stopped")
    else:
        assert (expected, whole.found) == (text, None)


@settings(deadline=None)
@given(st.text("ab<>", max_size=12), st.text("ab<>", max_size=12), st.lists(alphabet.filter(bool), max_size=4))
def test_stop_string_that_ends_too_early_is_text(early: str, late: str, stops: list[str]) -> None:
    stopper = StopFilter(stops)
    shown = "".join(stopper.push(char, may_end=False) for char in early)
    assert stopper.found is None
    shown += "".join(map(stopper.push, late)) + stopper.flush()
    text = early + late
    ends = [end for end in range(len(early) + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    if ends:
        longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert (shown, stopper.found) == (text[: ends[0] - len(longest)], longest)
        event("stopped")
    else:
        assert (shown, stopper.found) == (text, None)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(deadline=None)
@given(data=st.data())
def test_answer_is_the_same_for_every_split_of_its_tokens(kind: str, data: st.DataObject) -> None:
    voc = vocabulary(kind)
    token_ids = data.draw(ids)
    stops = data.draw(st.lists(st.sampled_from(["e", "th", "o", " f", "東京", "ab"]), max_size=2))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    answers = []
    for cut in ([tuple(token_ids)], pieces(data.draw, token_ids)):
        reader = Reader(1, voc, stops, PlainText)
        events, index = [], 0
        for part in [*cut, ()]:
            logprobs = tuple(TokenLogprob(-1.0 - position) for position in range(index, index + len(part)))
            is_last = index + len(part) == len(token_ids) and part == ()
            events += reader.read(TokenRecord(1, 0, index, part, finish if is_last else "", 0, logprobs))
            index += len(part)
        text = "".join(e.text for e in events if isinstance(e, TextDelta))
        logs = [log for e in events if isinstance(e, TextDelta) for log in e.logprobs]
        finished = [e for e in events if isinstance(e, Finished)]
        assert isinstance(events[-1], Finished)
        assert len(finished) == 1
        answers.append((text, logs, finished, reader.num_tokens))
    assert answers[0] == answers[1]
    text, logs, finished, _ = answers[0]
    whole = whole_text(kind, token_ids)
    assert whole.startswith(text)
    if finished[0].stop_string is None:
        assert (text, finished[0].reason) == (whole, finish)
        assert len(logs) == len(token_ids)
    else:
        assert finished[0].reason == "stop"
        assert whole[len(text) :].startswith(finished[0].stop_string)
