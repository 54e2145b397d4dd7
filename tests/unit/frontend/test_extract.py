"""Which requests to extract are tokenised on a thread, and not on the event loop."""

from __future__ import annotations

import time

import pytest

from sie.extraction import ExtractTask, Gliclass, Gliner, LabelGroup, LabelledExample, TokenClassification, ZeroShot
from sie.frontend.extract import is_long_work

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


@pytest.mark.parametrize("rule", [NER, NLI, SPANS, CLASSES])
def test_little_to_read_stays_on_it(rule):
    task = ExtractTask() if rule is NER else ExtractTask(labels=("person", "city"))
    assert not is_long_work(rule, task, ["Ada Lovelace met Charles Babbage in London"] * 3)


def test_asking_costs_nothing_itself():
    task = ExtractTask(labels=tuple(f"l{number}" for number in range(1000)))
    began_s = time.perf_counter()
    assert is_long_work(NLI, task, ["x"] * 16)
    assert time.perf_counter() - began_s < 0.005, "16,000 pairs are not to be listed for it"
