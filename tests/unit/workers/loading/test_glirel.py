"""GLiREL from its library's files to relations between given entities, compared with the library itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from sie.catalog.checkpoint_card import read_card
from sie.catalog.convert import convert
from sie.catalog.spec import ModelSpec
from sie.config.limits import Limits
from sie.frontend.inputs.text_windows import split_words
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.glirel import RelationReading, read_given
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong
from sie.values.extract import Entity, Extraction, ExtractTask, Glirel, Relation
from sie.values.glirel_items import GlirelItem
from sie.values.inference import ExtractRequest
from sie.workers.device.fallbacks import collecting
from sie.workers.device.faults import DeviceLostError
from sie.workers.loading.libraries import load_glirel
from sie.workers.runners import glirel
from sie.workers.runners.glirel import GlirelRunner
from sie.workers.runners.glirel_model import GlirelModel
from tests.gli_models import _save_encoder, _spread, save_tokenizer
from tests.unit.workers.loading.test_library_models import _items

TEXTS = ["Alice met Bob at Acme in Paris", "and then Carol left Acme-Berlin for Alice!"]
GIVEN = {
    0: [("Alice", "PER"), ("Acme", "ORG"), ("Paris", "LOC"), ("Bob at Acme", "X")],
    1: [("Alice", "PER"), ("Carol", "PER"), ("Acme-Berlin", "ORG")],
}
LABELS = ("works at", "lives", "met")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "refined": ("bert", {"refine_relation": True, "refine_prompt": True}),
    "means, thresholds, near entities": (
        "deberta-v2",
        {"span_marker_mode": "markerv2", "scorer": "dot_thresh", "label_embed_strategy": "both", "max_entity_pair_distance": 2},
    ),
    "marks, the encoder's width": ("bert", {"label_embed_strategy": "ent_token", "hidden_size": 32}),
}  # fmt: skip


@pytest.fixture
def any_tokenizer(tmp_path: Path) -> Tokenizer:
    save_tokenizer(tmp_path)
    return Tokenizer.load(ModelCard(id="m", kind="extractor", tokenizer_file=str(tmp_path / "tokenizer.json")))


_NOT_INSTALLED = (
    ("loguru", "logger"),
    ("seqeval", "metrics"),
    ("seqeval.metrics", "v1"),
    ("seqeval.metrics.v1", "_prf_divide"),
)


@contextmanager
def imported_library() -> Iterator[Any]:
    """Yield the library, whose logs and measures are not installed."""
    stubs = {name: ModuleType(name) for name, _ in _NOT_INSTALLED}
    for name, attribute in _NOT_INSTALLED:
        setattr(stubs[name], attribute, argparse.Namespace(info=print, warning=print))
    with patch.dict(sys.modules, stubs):
        yield pytest.importorskip("glirel")


@pytest.fixture
def library() -> Iterator[Any]:
    with imported_library() as imported:
        yield imported


def save(library: Any, directory: Path, variant: str) -> tuple[Path, Any]:
    """Write a checkpoint as the library does, convert it, and return the result and the library's model."""
    encoder, settings = VARIANTS[variant]
    torch.manual_seed(5)
    base = directory / "encoder"
    _save_encoder(base, encoder)
    config = {
        "model_name": str(base), "hidden_size": 128, "dropout": 0.0, "max_width": 4, "max_len": 24, "ffn_mul": 2,
        "subtoken_pooling": "first", "fine_tune": True, "rel_mode": "marker", "span_marker_mode": "markerv1", "scorer": "dot",
        "label_embed_strategy": "label", "max_entity_pair_distance": None, "fixed_relation_types": True, **settings,
    }  # fmt: skip
    model = library.GLiREL(argparse.Namespace(**config)).eval()
    _spread(model)
    model.save_pretrained(directory / "source", config={**config, "model_name": "someone/encoder"})
    convert("m", str(directory / "source"), directory / "model", lambda *_: None, lambda _name: str(base))
    return directory / "model", model


def given_in(texts: list[str]) -> dict[int, tuple[Entity, ...]]:
    return {
        number: tuple(
            Entity(label, 1.0, texts[number].index(name), texts[number].index(name) + len(name), name)
            for name, label in entities
        )
        for number, entities in GIVEN.items()
    }


def library_scores(model: Any, text: str, given: tuple[Entity, ...], **choices: Any) -> dict[tuple[str, ...], float]:
    """Return the library's scores by the entities' texts and the label."""
    words = split_words(text)
    names = {}
    for entity in given:
        own = [place for place, (start, end) in enumerate(words) if entity.start <= start and end <= entity.end]
        names[own[0], own[-1]] = entity.text
    found = model.predict_relations(
        [text[start:end] for start, end in words], list(LABELS), ner=[[*span, "X", ""] for span in names], **choices
    )
    ends = ("head_pos", "tail_pos")
    return {(*(names[one[end][0], one[end][1] - 1] for end in ends), one["label"]): one["score"] for one in found}


def test_a_model_that_does_not_run_in_16_bits_says_so(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = save(library, tmp_path, "refined")
    run = GlirelRunner.run_extract

    def refuse_half(runner: GlirelRunner, *inputs: Any) -> Any:
        if runner.dtype != "float32":
            raise RuntimeError("a product is not implemented for 'BFloat16'")
        return run(runner, *inputs)

    monkeypatch.setattr(GlirelRunner, "run_extract", refuse_half)
    with collecting("m") as fallbacks:
        runner = load_glirel(read_card(ModelSpec(id="m"), str(directory)), "cpu", "bfloat16", lambda *_: None)
    assert runner.dtype == "float32"
    (fallback,) = fallbacks.found
    assert fallback.name == "float32"
    assert fallback.reason == "bfloat16: RuntimeError: a product is not implemented for 'BFloat16'"


def test_a_device_that_is_lost_while_a_format_is_tried_is_not_blamed_on_the_model(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = save(library, tmp_path, "refined")

    def lose(*_: Any) -> None:
        raise DeviceLostError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(GlirelRunner, "run_extract", lose)
    with pytest.raises(DeviceLostError):
        load_glirel(read_card(ModelSpec(id="m"), str(directory)), "cpu", "bfloat16", lambda *_: None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_relations_are_those_of_the_library(library: Any, tmp_path: Path, variant: str) -> None:
    directory, theirs = save(library, tmp_path, variant)
    card = read_card(ModelSpec(id="m"), str(directory))
    assert card.extract == Glirel(max_words=24)
    runner = load_glirel(card, "cpu", "float32", lambda *_: None)
    given = given_in(TEXTS)
    threshold = float(np.median(list(library_scores(theirs, TEXTS[0], given[0], threshold=0.0).values())))
    task = ExtractTask(labels=LABELS, threshold=threshold, top_k=2)
    reading = RelationReading(Glirel(max_words=24), task, Tokenizer.load(card), Limits(), given)
    items = _items(reading.prepare(TEXTS))
    answers = runner.run_extract(items, [task] * len(items))
    pieces = [np.frombuffer(msgspec.msgpack.encode(answer), np.uint8) for answer in answers]
    for number, found in enumerate(reading.read(pieces)):
        expected = library_scores(theirs, TEXTS[number], given[number], threshold=threshold, top_k=2)
        scores = {(one.head, one.tail, one.relation): one.score for one in found.relations}
        assert scores == pytest.approx(expected, rel=1e-3, abs=1e-12)
        assert expected
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert tuple(found.entities) == given[number]


def request_with(metadata: dict[int, Any], texts: list[str], *, msgpack: bool = False) -> ExtractRequest:
    encode = msgspec.msgpack.encode if msgpack else msgspec.json.encode
    raw = {index: msgspec.Raw(encode(own)) for index, own in metadata.items()}
    return ExtractRequest(model="m", texts=texts, metadata=raw, is_msgpack=msgpack, task=ExtractTask(labels=("a", "b")))


def test_entities_come_from_the_metadata_of_items(any_tokenizer: Tokenizer) -> None:
    entities = [{"start": 1, "end": 3, "label": "X"}, {"start": 0, "end": 1, "text": "A"}]
    request = request_with({1: {"entities": entities, "other": {}}}, ["a", "abc"])
    given = read_given(request, Limits())
    assert given == {1: (Entity("X", 1.0, 1, 3), Entity("", 1.0, 0, 1, "A"))}
    reading = RelationReading(Glirel(max_words=4), request.task, any_tokenizer, Limits(), given)
    reading.prepare(request.texts)
    answers = [np.frombuffer(msgspec.msgpack.encode(Extraction()), np.uint8)] * 2
    assert reading.read(answers)[1].entities == [Entity("X", 1.0, 1, 3, "bc"), Entity("", 1.0, 0, 1, "A")]
    packed = request_with({0: {"entities": None}, 3: None}, ["a"] * 4, msgpack=True)
    assert read_given(packed, Limits()) == {0: (), 3: ()}


@pytest.mark.parametrize(
    ("entities", "reason"),
    [
        ([{"start": 1}], r"`\$\.items\[1\]\.metadata\.entities\[0\]"),
        ([{"start": 0, "end": 2}, {"start": 2, "end": 2}], r"after its start \(2\) - at `\$\.items\[1\]\.metadata\.entities\[1\]\.end`"),
        ([{"start": 0, "end": 9}], r"8 characters - at `\$\.items\[1\]\.metadata\.entities\[0\]\.end`"),
        ([{"start": 0, "end": 1}] * 5, r"over max_relation_candidates \(4\)"),
        ([{"start": 0, "end": 1}] * 4, r"over max_relation_scores \(20\)"),
        ([{"start": 0, "end": 8, "text": "a" * 4097}], r"over max_reply_bytes \(4096\)"),
    ],
)  # fmt: skip
def test_entities_over_a_limit_are_refused_before_a_text_is_cut(entities: list[Any], reason: str) -> None:
    limits = Limits(max_relation_candidates=4, max_relation_scores=20, max_reply_bytes=4096)
    with pytest.raises(BadRequest, match=reason):
        read_given(request_with({1: {"entities": entities}}, ["", "abcdefgh"]), limits)


def test_pairs_of_entities_cost_more_than_the_tokens_that_are_told(any_tokenizer: Tokenizer) -> None:
    given = {0: [Entity("X", 1.0, 0, 1)] * 40}
    reading = RelationReading(Glirel(max_words=4), ExtractTask(labels=("a",)), any_tokenizer, Limits(), given)
    (_, bounds), *_ = reading.prepare(["a b"])
    assert bounds[-1] == reading.num_tokens + 40 * 39 // 16


def test_relations_whose_texts_do_not_fit_into_a_reply_are_refused(any_tokenizer: Tokenizer) -> None:
    given = {0: [Entity("X", 1.0, 0, 1, "a" * 300)] * 2}
    limits = Limits(max_reply_bytes=4096)
    reading = RelationReading(Glirel(max_words=4), ExtractTask(labels=("a",)), any_tokenizer, limits, given)
    reading.prepare(["a b"])
    pieces = [
        np.frombuffer(msgspec.msgpack.encode(Extraction(relations=[Relation("0", "1", "a", 1.0)] * number)), np.uint8)
        for number in (1, 6)
    ]
    reading.read(pieces[:1])
    assert reading.num_chars == 4 * 300
    with pytest.raises(BadRequest, match="max_reply_bytes"):
        reading.read(pieces[1:])


class Words:
    """Stands in for a tokenizer: one token a word."""

    word_ids = property(lambda self: [None, *range(len(self.ids) - 2), None])

    def encode(self, words: list[str], *, is_pretokenized: bool) -> Words:
        self.ids = [1] * (len(words) + 2)
        return self


def test_pairs_that_are_scored_in_slices_have_the_scores_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    settings = {
        "hidden_size": 64, "label_embed_strategy": "both", "span_marker_mode": "markerv1", "refine_relation": True,
        "refine_prompt": True, "ffn_mul": 2, "scorer": "dot",
    }  # fmt: skip
    config = AutoConfig.for_model(
        "bert", hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=10
    )
    model = GlirelModel(settings, AutoModel.from_config(config), 64).eval()
    words: Any = Words()
    runner = GlirelRunner(ModelCard(id="m", kind="extractor"), model, words, max_distance=2, dtype="float32")
    item = np.frombuffer(msgspec.json.encode(GlirelItem(list("abcdef"), [(n, n) for n in range(6)])), np.uint8)
    task = ExtractTask(labels=("x", "y"), threshold=0.0)
    (whole,) = runner.run_extract([item], [task])
    monkeypatch.setattr(glirel, "_PAIRS_AT_ONCE", 7)
    (sliced,) = runner.run_extract([item], [task])
    assert [one.score for one in sliced.relations] == pytest.approx([one.score for one in whole.relations], rel=1e-4)
    assert [(one.head, one.tail) for one in sliced.relations] == [(one.head, one.tail) for one in whole.relations]
    assert len(whole.relations) == 2 * (15 + 9)


@pytest.mark.parametrize(
    ("text", "entities", "error", "reason"),
    [
        ("a b", [(2, 4)], BadRequest, r"metadata\.entities\[0\]\.end"),
        ("a  b", [(0, 1), (1, 3)], BadRequest, r"metadata\.entities\[1\]"),
        ("a b c", [(0, 1)] * 3, BadRequest, r"over max_relation_candidates \(2\)"),
        (" ", [], BadRequest, "must not be blank"),
        ("a " * 5, [], InputTooLong, "5 words, and the model reads at most 4"),
    ],
)
def test_what_cannot_be_read_is_refused(
    text: str, entities: list[tuple[int, int]], error: type[Exception], reason: str, any_tokenizer: Tokenizer
) -> None:
    given = {0: [Entity("X", 1.0, *place) for place in entities]}
    limits = Limits(max_relation_candidates=2)
    reading = RelationReading(Glirel(max_words=4), ExtractTask(labels=("a",)), any_tokenizer, limits, given)
    with pytest.raises(error, match=reason):
        reading.prepare([text])
