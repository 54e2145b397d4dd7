"""Which requests to extract are tokenised on a thread, and how GLiNER's windows are cut for a tokenizer of bytes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers

from sie.config.limits import Limits
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.extract import fill_texts, is_long_work
from sie.frontend.operations.extraction.gliner import WindowReading
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong
from sie.values.extract import (
    Entity,
    Extraction,
    ExtractTask,
    Gliclass,
    Gliner,
    Glirel,
    LabelGroup,
    LabelledExample,
    TokenClassification,
    ZeroShot,
)

NER = TokenClassification(labels=("O", "A"))
NLI = ZeroShot(labels=("c", "n", "e"), entailment=2, contradiction=0)
SPANS = Gliner(max_words=384)
CLASSES = Gliclass(label_token_id=5)
LABELS = tuple(f"label number {number}" for number in range(600))
GROUPS = tuple(LabelGroup(f"g{number}", ("yes", "no")) for number in range(200))


@pytest.mark.parametrize(
    ("rule", "task", "text"),
    [
        (NER, ExtractTask(), "x" * 9000),
        (NLI, ExtractTask(labels=LABELS[:100]), "a text of some words"),
        (SPANS, ExtractTask(labels=LABELS), "x"),
        (SPANS, ExtractTask(labels=("a",), relation_labels=LABELS), "x"),
        (CLASSES, ExtractTask(labels=LABELS), "x"),
        (CLASSES, ExtractTask(label_groups=GROUPS), "a text of some words"),
        (CLASSES, ExtractTask(label_groups=(LabelGroup("g", LABELS),)), "x"),
        (CLASSES, ExtractTask(labels=("a", "b"), examples=(LabelledExample("x" * 9000, ("a",)),)), "x"),
    ],
)
def test_much_to_read_leaves_the_event_loop(rule, task, text):
    assert is_long_work(rule, task, [text])


def test_many_given_entities_leave_the_event_loop():
    rule, task = Glirel(max_words=384), ExtractTask(labels=("a",))
    assert is_long_work(rule, task, ["a b"] * 10, num_entities=1000)
    assert not is_long_work(rule, task, ["a b"] * 10, num_entities=100)


@pytest.mark.parametrize("rule", [NER, NLI, SPANS, CLASSES])
def test_small_requests_are_tokenised_on_the_event_loop(rule):
    task = ExtractTask() if rule is NER else ExtractTask(labels=("person", "city"))
    assert not is_long_work(rule, task, ["Ada Lovelace met Charles Babbage in London"] * 3)


def test_asking_costs_nothing_itself():
    task = ExtractTask(labels=tuple(f"l{number}" for number in range(1000)))
    took_s: list[float] = []
    for _ in range(20):
        began_s = time.perf_counter()
        assert is_long_work(NLI, task, ["x"] * 16)
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) < 0.005, "16,000 pairs are not to be listed for it"


def test_texts_of_overlapping_entities_are_bounded_before_they_are_cut():
    found = Extraction([Entity("X", start=0, end=8), Entity("Y", start=1, end=8), Entity("Z", text="as it is")])
    (named,), num_chars = fill_texts([found], ["Ada Lovelace"], max_chars=15)
    assert ([one.text for one in named.entities], num_chars) == (["Ada Love", "da Love", "as it is"], 15)
    with pytest.raises(BadRequest, match=r"15 characters, over max_reply_bytes \(14\)"):
        fill_texts([found], ["Ada Lovelace"], max_chars=14)


def windows_of(text: str, *, limit: int, labels: tuple[str, ...] = ("a",)) -> tuple[list[str], np.ndarray]:
    """Return GLiNER's windows of a text and the tokens of each, read by a tokenizer whose tokens are bytes."""
    alphabet = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = LibraryTokenizer(models.BPE(alphabet, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    card = ModelCard(id="m", kind="extractor", max_sequence_length=limit)
    reading = WindowReading(SPANS, ExtractTask(labels=labels), Tokenizer(card, library), Limits())
    arrays: dict[str, Any] = dict(reading.prepare([text]))
    parts = np.split(arrays["text"], arrays["text_offsets"][1:-1])
    return [bytes(part).decode() for part in parts], np.diff(arrays["cu_seqlens"])


def test_long_word_of_wide_characters_is_cut_to_what_the_model_reads():
    text = "ab " + "\u0f40" * 300  # a word: Tibetan has no spaces, and each letter is three bytes
    windows, costs = windows_of(text, limit=512)
    assert costs.max() <= 512
    assert "".join(windows).count("\u0f40") >= 300
    assert windows[0].startswith("ab ")


def test_character_of_more_tokens_than_the_labels_leave_is_too_long():
    labels = ("x" * 20,)  # with its mark, the one behind the labels and the special ones: 26
    assert windows_of("a", limit=28, labels=labels)
    with pytest.raises(
        InputTooLong, match=r"takes 3 tokens, and the labels leave room for 2 - at `\$\.items\[0\]\.text`"
    ):
        windows_of("a \u0f40", limit=28, labels=labels)
