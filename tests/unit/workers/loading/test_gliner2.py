"""GLiNER2 from a checkpoint's files to its findings, compared with the library itself."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sie.config.limits import Limits
from sie.frontend.operations.extraction import gliner
from sie.values.errors import BadRequest
from sie.values.extract import Extraction, ExtractTask, Gliner, LabelGroup
from sie.workers.runners.gliner2 import limit_cache
from tests.gli_models import WORDS, save_gliner2
from tests.unit.workers.loading.test_library_models import LABELS, RELATIONS, TOLERANCE, Served
from tests.unit.workers.loading.test_library_models import TEXTS as SPACED

TEXTS = [
    text.strip() for text in SPACED
]  # windows begin and end with words, and the library ends texts with a full stop
GROUPS = (LabelGroup("topic", ("sport", "news", "city")), LabelGroup("topic of all", ("person", "company")))
TASK = ExtractTask(
    labels=LABELS, threshold=0.4, relation_labels=RELATIONS, relation_threshold=0.3, label_groups=GROUPS,
    classification_type="multi-label",
)  # fmt: skip


def _expected(directory: Path, text: str, task: ExtractTask) -> dict[str, Any]:
    import gliner2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gliner2.AutoExtractor.from_pretrained(str(directory))
    schema = model.create_schema().entities(list(task.labels))
    schema = schema.relations(list(task.relation_labels), threshold=task.relation_threshold)
    for group in task.label_groups:
        schema = schema.classification(group.name, list(group.labels), multi_label=True, cls_threshold=0.0)
    return model.extract(text, schema, task.threshold, False, True, True)


def _assert_like(found: Extraction, expected: dict[str, Any], text: str) -> int:
    spans = [
        (span["start"], min(span["end"], len(text)), label, pytest.approx(span["confidence"], abs=TOLERANCE))
        for label, spans in (expected["entities"] or [{}])[0].items()
        for span in spans
        if span["start"] < len(text)  # the library reads a full stop behind the text
    ]
    assert [(e.start, e.end, e.label, e.score) for e in found.entities] == sorted(spans, key=lambda span: span[:3])
    relations = [
        (name, *(text[pair[end]["start"] : pair[end]["end"]] for end in ("head", "tail")))
        for name in RELATIONS
        for pair in expected.get(name, ())
        if all(pair[end]["start"] < len(text) for end in ("head", "tail"))
    ]
    # Ours have no places, so equal ones are answered once.
    assert sorted((r.relation, r.head, r.tail) for r in found.relations) == sorted(set(relations))
    scores = {f"{group.name}.{label}": score for group in GROUPS for label, score in expected[group.name]}
    kept = {name: score for name, score in scores.items() if score >= 0.4}
    assert {one.label: one.score for one in found.classifications} == pytest.approx(kept, abs=TOLERANCE)
    return len(spans) + len(relations)


SHARED = {"candidate_pool": "shared", "record_dim": 128}


@pytest.mark.parametrize(
    ("architecture", "encoder", "settings"),
    [
        ("span", "deberta-v2", {"counting_layer": "count_lstm_v2", "config_version": 1}),
        ("span", "bert", {}),
        ("boundary", "deberta-v2", {"boundary_head": SHARED}),
        ("boundary", "modernbert", {}),
    ],
)
def test_findings_are_those_of_the_library(tmp_path: Path, architecture: str, encoder: str, settings: Any) -> None:
    directory = save_gliner2(tmp_path / "model", architecture, encoder, **settings)
    served = Served(directory)
    together = served.extract(TEXTS, TASK)
    num_found = 0
    for text, found in zip(TEXTS, together, strict=True):
        expected = _expected(directory, text, TASK)
        num_found += _assert_like(found, expected, text)
        _assert_like(served.extract([text], TASK)[0], expected, text)
    assert num_found
    for found, turned in zip(together, reversed(served.extract(TEXTS[::-1], TASK)), strict=True):
        assert [(e.start, e.end, e.label) for e in found.entities] == [
            (e.start, e.end, e.label) for e in turned.entities
        ]
        own, other = ([one.score for one in (*f.relations, *f.entities)] for f in (found, turned))
        assert own == pytest.approx(other, abs=TOLERANCE)


def test_single_label_groups_are_a_choice(tmp_path: Path) -> None:
    served = Served(save_gliner2(tmp_path / "model"))
    (found,) = served.extract(TEXTS[:1], ExtractTask(label_groups=GROUPS))
    assert not found.entities
    for group in GROUPS:
        answer = found.data[group.name]
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert answer["choice"] == max(answer["probabilities"], key=answer["probabilities"].get)


def test_long_text_is_read_in_windows(tmp_path: Path) -> None:
    served = Served(save_gliner2(tmp_path / "model", encoder="deberta-v2", max_len=12))
    text = " ".join(np.random.default_rng(4).choice(WORDS, 60))
    (found,) = served.extract([text], TASK)
    ends = {entity.label: entity.end for entity in found.entities}
    assert max(ends.values()) > len(text) * 3 // 4
    for label in ends:  # entities of one label do not overlap
        bounds = [(e.start, e.end) for e in found.entities if e.label == label]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))


def test_prompt_and_window_keep_within_the_encoders_positions(tmp_path: Path) -> None:
    served = Served(save_gliner2(tmp_path / "model"))  # BERT with 128 positions
    for text in ("ÀÉ日本" * 90, "a@b.com " * 90, "İ" * 200):
        served.extract([text], ExtractTask(labels=LABELS, relation_labels=RELATIONS))


def test_only_short_words_are_kept() -> None:
    read: list[str] = []
    tokenizer = SimpleNamespace(tokenize=lambda word: [read.append(word)])
    processor: Any = SimpleNamespace(tokenizer=tokenizer)
    limit_cache(processor)
    for word in ("short", "http://" + "a" * 100) * 2:
        processor._tokenize_cached(word)
    assert read == ["short", "http://" + "a" * 100, "http://" + "a" * 100]


def test_threshold_that_almost_all_spans_pass_is_refused(tmp_path: Path) -> None:
    served = Served(save_gliner2(tmp_path / "model"), limits=Limits(max_span_candidates=256))
    low = ExtractTask(labels=tuple("abcdefghij"), threshold=0.01)
    with pytest.raises(BadRequest, match=r"max_span_candidates \(256\).*options\.threshold"):
        served.extract([" ".join(WORDS)], low)
    assert served.extract(["Bob"], ExtractTask(labels=LABELS, threshold=0.5))


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (ExtractTask(), "needs 'labels', 'relation_labels' or 'label_groups'"),
        (ExtractTask(labels=("a[SEP_TEXT]",)), "SEP_TEXT"),
        (ExtractTask(relation_labels=("entities",)), "differ, other than 'entities'"),
        (ExtractTask(relation_labels=("topic",), label_groups=GROUPS), "differ"),
        (ExtractTask(label_groups=(LabelGroup("x", ("one",)),)), "two labels"),
    ],
)
def test_names_that_the_schema_cannot_hold_are_refused(task: ExtractTask, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        gliner.check_task(Gliner(max_words=9, library="gliner2", relations=True), task)
