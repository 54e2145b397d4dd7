"""GLiNER and GLiClass from a checkpoint's files to their findings, compared with the libraries themselves."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.config.limits import Limits
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction import gliclass
from sie.frontend.operations.extraction.gliclass import LabelReading
from sie.frontend.operations.extraction.gliner import WindowReading
from sie.values.errors import BadRequest, InputTooLong, ModelLoadFailed
from sie.values.extract import Extraction, ExtractTask, LabelGroup, LabelledExample
from sie.workers.loading.libraries import load_gliclass, load_gliner, load_gliner2
from tests.gli_models import GLINER_VARIANTS, WORDS, change_json, save_gliclass, save_gliner
from tests.unit.tiny_tokenizers import count_reads

TOLERANCE = 1e-5
LABELS = ("person", "company", "city")
RELATIONS = ("works", "lives")
TEXTS = [
    "Alice met Bob at Acme in Paris",
    "Carol",
    "  Bob,  then 😀 e\u0301t\u00e9 at Acme-Berlin_Paris! ",
    "and then Carol left Berlin in Paris at Acme and met Bob",
]
THRESHOLDS = (0.3, 0.5)


class Served:
    """A checkpoint as it is served, frontend and worker, without what lies between them."""

    def __init__(self, directory: Path, dtype: str = "float32", limits: Limits | None = None) -> None:
        self.card = read_card(ModelSpec(id="test/model"), str(directory))
        self.limits = limits or Limits(max_relation_candidates=4096)
        self.tokenizer = Tokenizer.load(self.card)
        self.is_gliner = self.card.architecture in ("GLiNER", "GLiNER2")
        self.runner: Any
        if self.card.architecture == "GLiNER2":
            self.runner = load_gliner2(self.card, "cpu", _no_progress, self.limits)
        elif self.is_gliner:
            self.runner = load_gliner(self.card, "cpu", dtype, _no_progress, self.limits)
        else:
            self.runner = load_gliclass(self.card, "cpu", dtype, _no_progress)

    def reading(self, task: ExtractTask) -> Any:
        rule: Any = self.card.extract
        if self.is_gliner:
            return WindowReading(rule, task, self.tokenizer, self.limits)
        gliclass.check_task(rule, task)
        return LabelReading(rule, task, self.tokenizer, self.limits)

    def extract(self, texts: Sequence[str], task: ExtractTask) -> list[Extraction]:
        return self.extract_all([(texts, task)])[0]

    def extract_all(self, requests: Sequence[tuple[Sequence[str], ExtractTask]]) -> list[list[Extraction]]:
        """Run the requests in one step."""
        readings = [self.reading(task) for _, task in requests]
        works = [_items(reading.prepare(texts)) for reading, (texts, _) in zip(readings, requests, strict=True)]
        inputs = [item for work in works for item in work]
        if self.is_gliner:
            tasks = [task for work, (_, task) in zip(works, requests, strict=True) for _ in work]
            answers = self.runner.run_extract(inputs, tasks)
            pieces = [np.frombuffer(msgspec.msgpack.encode(answer), np.uint8) for answer in answers]
        else:
            pieces = self.runner.run_token_logits(inputs)
        bounds = list(itertools.accumulate((len(work) for work in works), initial=0))
        return [reading.read(pieces[bounds[i] : bounds[i + 1]]) for i, reading in enumerate(readings)]


def _no_progress(_fraction: float, _text: str) -> None:
    pass


def _items(arrays: list[tuple[str, np.ndarray]]) -> list[np.ndarray]:
    """Return the items of a request's extent, as a worker reads them."""
    named = dict(arrays)
    costs = np.diff(named["cu_seqlens"])
    assert (costs > 0).all()
    data, bounds = ("text", "text_offsets") if "text" in named else ("token_ids", "cu_seqlens")
    return np.split(named[data], named[bounds][1:-1])


def _gliner(directory: Path) -> Any:
    import gliner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gliner.GLiNER.from_pretrained(str(directory), local_files_only=True)


def _same_entities(found: Extraction, expected: list[dict[str, Any]]) -> bool:
    ours = [(entity.start, entity.end, entity.label) for entity in found.entities]
    theirs = [(entity["start"], entity["end"], entity["label"]) for entity in expected]
    assert ours == theirs
    scores = [entity.score for entity in found.entities]
    assert scores == pytest.approx([entity["score"] for entity in expected], abs=TOLERANCE)
    return bool(expected)


def _assert_alike(found: list[Extraction], others: list[Extraction]) -> None:
    for one, other in zip(found, others, strict=True):
        assert [msgspec.structs.replace(e, score=0) for e in one.entities] == [
            msgspec.structs.replace(e, score=0) for e in other.entities
        ]
        for name in ("entities", "relations", "classifications"):
            scores = [item.score for item in getattr(one, name)]
            assert scores == pytest.approx([item.score for item in getattr(other, name)], abs=TOLERANCE)


# --- GLiNER -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoder", "variant"),
    [*(("bert", variant) for variant in GLINER_VARIANTS if "relations" not in variant),
     ("deberta-v2", "span"), ("modernbert", "token")],
)  # fmt: skip
def test_entities_are_those_of_the_library(tmp_path: Path, encoder: str, variant: str) -> None:
    directory = save_gliner(tmp_path / "model", encoder, variant)
    served, library = Served(directory), _gliner(directory)
    num_found = 0
    for flat, multi, threshold in itertools.product((True, False), (True, False), THRESHOLDS):
        task = ExtractTask(labels=LABELS, threshold=threshold, flat_ner=flat, multi_label=multi)
        found = served.extract(TEXTS, task)
        for text, one in zip(TEXTS, found, strict=True):
            choices = {"threshold": threshold, "flat_ner": flat, "multi_label": multi}
            num_found += _same_entities(one, library.predict_entities(text, list(LABELS), **choices))
    assert num_found


def test_defaults_are_a_half_flat_and_one_label_a_span(tmp_path: Path) -> None:
    directory = save_gliner(tmp_path / "model", "deberta-v2", "bi-encoder")
    found = Served(directory).extract(TEXTS, ExtractTask(labels=LABELS))
    library = _gliner(directory)
    expected = [library.predict_entities(text, list(LABELS)) for text in TEXTS]
    assert sum(_same_entities(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("encoder", "variant", "threshold"),
    [("modernbert", "relations", 0.5), ("bert", "relations mlp", 0.2), ("deberta-v2", "relations token", 0.5)],
)
def test_relations_are_those_of_the_library(tmp_path: Path, encoder: str, variant: str, threshold: float) -> None:
    directory = save_gliner(tmp_path / "model", encoder, variant)
    served, library = Served(directory), _gliner(directory)
    task = ExtractTask(labels=LABELS, threshold=threshold, relation_labels=RELATIONS, relation_threshold=0.45)
    num_found = 0
    texts = [*TEXTS, f"{TEXTS[0]} {TEXTS[0]}"]
    for text, found in zip(texts, served.extract(texts, task), strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entities, relations = library.predict_relations(
                text, list(LABELS), list(RELATIONS), threshold=threshold, relation_threshold=0.45
            )
        _same_entities(found, entities)
        # The library answers a relation once for each place of its words. Here it has no place.
        best = {}
        for r in relations:
            key = r["relation"], r["head"]["text"], r["tail"]["text"]
            best[key] = max(best.get(key, 0.0), r["score"])
        expected = sorted((*key, round(score, 4)) for key, score in best.items())
        assert sorted((r.relation, r.head, r.tail, round(r.score, 4)) for r in found.relations) == expected
        assert [r.score for r in found.relations] == sorted((r.score for r in found.relations), reverse=True)
        num_found += len(expected)
    assert num_found
    without = served.extract(TEXTS, ExtractTask(labels=LABELS, threshold=0.5))
    assert not any(found.relations for found in without)


@pytest.mark.parametrize("variant", ["span", "bi-encoder token", "relations"])
def test_tasks_in_one_step_answer_as_alone(tmp_path: Path, variant: str) -> None:
    served = Served(save_gliner(tmp_path / "model", "modernbert", variant))
    tasks = [
        ExtractTask(labels=LABELS, threshold=0.3),
        ExtractTask(labels=("city",), threshold=0.3, flat_ner=False),
        ExtractTask(labels=("sport", "news"), threshold=0.2, multi_label=True),
    ]
    together = served.extract_all([(TEXTS, task) for task in tasks])
    for task, found in zip(tasks, together, strict=True):
        alone = [served.extract([text], task)[0] for text in TEXTS]
        _assert_alike(found, alone)
    assert any(one.entities for found in together for one in found)


def test_few_relation_candidates_keep_all_entities(tmp_path: Path) -> None:
    directory = save_gliner(tmp_path / "model", "modernbert", "relations")
    task = ExtractTask(labels=LABELS, threshold=0.1, relation_labels=RELATIONS, relation_threshold=0.0)
    whole = Served(directory)
    few = Served(directory, limits=Limits(max_relation_candidates=2))
    (all_found,), (found,) = whole.extract(TEXTS[:1], task), few.extract(TEXTS[:1], task)
    assert found.entities == all_found.entities
    assert len(found.relations) < len(all_found.relations)


@pytest.mark.parametrize("variant", ["span", "token", "relations"])
def test_threshold_that_almost_all_spans_pass_is_refused(tmp_path: Path, variant: str) -> None:
    served = Served(save_gliner(tmp_path / "model", "modernbert", variant), limits=Limits(max_span_candidates=256))
    low, high = (ExtractTask(labels=tuple("abcdefghij"), threshold=threshold) for threshold in (0.1, 0.999))
    text = " ".join(WORDS)
    with pytest.raises(BadRequest, match=r"max_span_candidates \(256\).*options\.threshold"):
        served.extract([text], low)
    assert served.extract([text], high)[0].entities == []
    assert served.extract([text[:12]], ExtractTask(labels=("a",), threshold=0.1))
    with pytest.raises(BadRequest, match="max_span_candidates"):
        served.extract(["Bob left", text], low)


@pytest.mark.parametrize("variant", ["span", "token"])
def test_lowest_threshold_chooses_as_the_library_does(tmp_path: Path, variant: str) -> None:
    directory = save_gliner(tmp_path / "model", "deberta-v2", variant)
    served, library = Served(directory), _gliner(directory)
    for flat, multi in itertools.product((True, False), repeat=2):
        task = ExtractTask(labels=LABELS, threshold=0.01, flat_ner=flat, multi_label=multi)
        (found,) = served.extract(TEXTS[:1], task)
        expected = library.predict_entities(TEXTS[0], list(LABELS), threshold=0.01, flat_ner=flat, multi_label=multi)
        assert _same_entities(found, expected)


def test_long_text_is_read_in_windows(tmp_path: Path) -> None:
    directory = save_gliner(tmp_path / "model", "deberta-v2", "bi-encoder", max_words=12)
    served, library = Served(directory), _gliner(directory)
    random = np.random.default_rng(4)
    text = "é 😀 " + " ".join(random.choice(WORDS, 60))
    task = ExtractTask(labels=LABELS, threshold=0.4)
    (found,) = served.extract([text], task)
    reading = served.reading(task)
    windows = [bytes(item).decode() for item in _items(reading.prepare([text]))]
    assert len(windows) > 5
    seen: dict[tuple[int, int, str], list[float]] = {}
    start = 0
    for window in windows:
        start = text.index(window, start)
        for entity in library.predict_entities(window, list(LABELS), threshold=0.4):
            key = (start + entity["start"], start + entity["end"], entity["label"])
            seen.setdefault(key, []).append(pytest.approx(entity["score"], abs=TOLERANCE))
    assert {(e.start, e.end, e.label) for e in found.entities} <= seen.keys()
    assert found.entities[-1].end is not None
    assert found.entities[-1].end > len(text) * 3 // 4
    for entity in found.entities:
        assert entity.score in seen[entity.start, entity.end, entity.label]
    bounds = [(entity.start, entity.end) for entity in found.entities]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))


def test_overflow_policy_decides_about_a_long_text(tmp_path: Path) -> None:
    served = Served(save_gliner(tmp_path / "model", max_words=12))
    text = " ".join(WORDS)
    first = " ".join(WORDS[:12])
    cut = served.extract([text], ExtractTask(labels=LABELS, threshold=0.3, overflow_policy="truncate_text"))
    _assert_alike(cut, served.extract([first], ExtractTask(labels=LABELS, threshold=0.3)))
    with pytest.raises(InputTooLong, match=r"items\[1\]"):
        served.extract([first, text], ExtractTask(labels=LABELS, overflow_policy="error"))


def test_window_keeps_within_the_encoders_positions(tmp_path: Path) -> None:
    served = Served(save_gliner(tmp_path / "model", max_words=384))  # BERT with 128 positions
    text = " ".join(["Paris"] * 300)
    arrays = served.reading(ExtractTask(labels=LABELS)).prepare([text])
    costs = np.diff(dict(arrays)["cu_seqlens"])
    assert len(costs) > 2
    assert costs.max() <= 128
    served.extract([text], ExtractTask(labels=LABELS))


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
@pytest.mark.parametrize("save", [save_gliner, save_gliclass])
def test_each_text_turns_by_the_factors_of_its_own_length(tmp_path: Path, save: Any, rope: str) -> None:
    directory = save(tmp_path / "model", f"modernbert {rope}")
    task = ExtractTask(labels=LABELS, threshold=0.2)
    alone = [Served(directory).extract([text], task)[0] for text in TEXTS]
    assert any(one.entities or one.classifications for one in alone)
    served = Served(directory)
    _assert_alike(served.extract(TEXTS, task), alone)
    for text, expected in zip(TEXTS, alone, strict=True):  # the first one right behind the longest
        _assert_alike(served.extract([text], task), [expected])


@pytest.mark.parametrize("save", [save_gliner, save_gliclass])
def test_lowered_maximum_is_kept(tmp_path: Path, save: Any) -> None:
    served = Served(save(tmp_path / "model"))
    card = msgspec.structs.replace(served.card, max_sequence_length=24)
    served.tokenizer = Tokenizer.load(card)
    arrays = served.reading(ExtractTask(labels=LABELS)).prepare([" ".join(["Paris"] * 60)])
    assert np.diff(dict(arrays)["cu_seqlens"]).max() <= 24


def test_limits_of_a_request(tmp_path: Path) -> None:
    limits = Limits(max_text_windows=3, max_prompt_tokens=20, max_label_chars=10, max_labels=4)
    served = Served(save_gliner(tmp_path / "model", "modernbert", "relations", max_words=12), limits=limits)
    fine = ExtractTask(labels=LABELS)

    def fails(expected: type[BadRequest], match: str, task: ExtractTask = fine, text: str = "Bob") -> None:
        with pytest.raises(expected, match=match):
            served.extract(["Bob", text], task)

    fails(InputTooLong, r"windows.*items\[1\]", text=" ".join(["Bob"] * 40))
    fails(InputTooLong, r"max_text_windows.*items\[1\]", text=" ".join(["Bob"] * 30))
    fails(BadRequest, r"blank.*items\[1\]", text=" \n")
    fails(BadRequest, "Unicode", text="\ud800")
    fails(BadRequest, r"10 characters.*params.labels\[1\]", ExtractTask(labels=("city", "x" * 11)))
    fails(BadRequest, "max_prompt_tokens", ExtractTask(labels=tuple(letter * 9 for letter in "abc")))
    fails(BadRequest, "together", ExtractTask(labels=LABELS, relation_labels=RELATIONS))


def test_long_word_takes_no_more_than_a_window(tmp_path: Path) -> None:
    served = Served(save_gliner(tmp_path / "model", "deberta-v2", max_words=24))
    arrays = served.reading(ExtractTask(labels=LABELS)).prepare(["a1" * 5000])
    named = dict(arrays)
    assert np.diff(named["text_offsets"]).max() <= 24 * 256
    assert np.diff(named["cu_seqlens"]).max() <= 24 * 8 + 20


@pytest.mark.parametrize("max_length", [128, None])
def test_script_without_spaces_keeps_within_the_encoders_positions(tmp_path: Path, max_length: int | None) -> None:
    directory = save_gliner(tmp_path / "model")  # BERT with 128 positions
    change_json(directory / "tokenizer_config.json", model_max_length=max_length)
    served = Served(directory)
    text = "Bob 日" + "本" * 600
    named = dict(served.reading(ExtractTask(labels=LABELS)).prepare([text]))
    assert np.diff(named["cu_seqlens"]).max() <= 128
    windows = np.split(named["text"], named["text_offsets"][1:-1])
    assert b"".join(map(bytes, windows)).decode().count("本") >= 600, "each is read"
    served.extract([text], ExtractTask(labels=LABELS))


# --- GLiClass ---------------------------------------------------------------------------------------------------------


def _pipeline(directory: Path, kind: str) -> Any:
    import gliclass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gliclass.GLiClassModel.from_pretrained(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        return gliclass.ZeroShotClassificationPipeline(
            model, tokenizer, max_length=126, classification_type=kind, device="cpu", progress_bar=False
        )


def _logits(pipeline: Any, text: str, labels: Sequence[str], **choices: Any) -> np.ndarray:
    with torch.inference_mode():
        return pipeline.get_embeddings([text], list(labels), batch_size=1, **choices)[0]["logits"][: len(labels)]


def _sorted_by_score(labels: Sequence[str], scores: Sequence[float]) -> list[tuple[str, float]]:
    pairs = zip(labels, map(float, scores), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])


def _assert_scores(found: Extraction, expected: list[tuple[str, float]]) -> None:
    assert [one.label for one in found.classifications] == [label for label, _ in expected]
    assert [one.score for one in found.classifications] == pytest.approx([s for _, s in expected], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("encoder", "settings"),
    [
        ("bert", {}),
        ("bert", {"prompt_first": False, "pooling_strategy": "avg"}),
        ("deberta-v2", {"scorer_type": "weighted-dot", "use_lstm": True, "extract_text_features": True}),
        ("modernbert", {"scorer_type": "mlp", "class_token_pooling": "average", "normalize_features": True}),
        ("deberta-v2", {"use_segment_embeddings": True, "max_labels_alloc": "fixed"}),
        ("bert", {"use_calibrator": True}),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_library(tmp_path: Path, encoder: str, settings: dict[str, Any]) -> None:
    directory = save_gliclass(tmp_path / "model", encoder, **settings)
    served, pipeline = Served(directory), _pipeline(directory, "multi-label")
    for task in (
        ExtractTask(labels=LABELS),
        ExtractTask(labels=LABELS, instruction="then left at", examples=(
            LabelledExample("Alice met Bob", ("person",)), LabelledExample("in Paris", ("city", "company")))),
    ):  # fmt: skip
        examples = [{"text": example.text, "labels": list(example.labels)} for example in task.examples] or None
        multi = msgspec.structs.replace(task, classification_type="multi-label")
        found, found_multi = served.extract(TEXTS, task), served.extract(TEXTS, multi)
        for text, one, many in zip(TEXTS, found, found_multi, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = pipeline(
                    text, list(LABELS), threshold=0.0, batch_size=1, prompt=task.instruction, examples=examples
                )[0]
            _assert_scores(many, _sorted_by_score(LABELS, [item["score"] for item in expected]))
            logits = _logits(pipeline, text, LABELS, prompt=task.instruction, examples=examples)
            if not settings.get("use_calibrator"):  # the embeddings' logits are those before it
                _assert_scores(one, _sorted_by_score(LABELS, torch.softmax(torch.tensor(logits), -1).tolist()))


def test_best_single_label_is_the_librarys(tmp_path: Path) -> None:
    directory = save_gliclass(tmp_path / "model")
    served, pipeline = Served(directory), _pipeline(directory, "single-label")
    for text, found in zip(TEXTS, served.extract(TEXTS, ExtractTask(labels=LABELS)), strict=True):
        (best,) = pipeline(text, list(LABELS), batch_size=1)[0]
        assert found.classifications[0].label == best["label"]
        assert found.classifications[0].score == pytest.approx(best["score"], abs=TOLERANCE)
        assert sum(one.score for one in found.classifications) == pytest.approx(1)


def test_single_label_has_a_sigmoid(tmp_path: Path) -> None:
    directory = save_gliclass(tmp_path / "model")
    pipeline = _pipeline(directory, "multi-label")
    for text, found in zip(TEXTS, Served(directory).extract(TEXTS, ExtractTask(labels=("city",))), strict=True):
        _assert_scores(found, [("city", pipeline(text, ["city"], threshold=0.0)[0][0]["score"])])


def test_label_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    served = Served(save_gliclass(tmp_path / "model"))
    once, twice = (served.extract(TEXTS, ExtractTask(labels=labels)) for labels in (LABELS, (*LABELS, LABELS[0])))
    _assert_alike(twice, once)
    assert sum(one.score for one in twice[0].classifications) == pytest.approx(1)


def test_threshold_leaves_out_what_is_below(tmp_path: Path) -> None:
    served = Served(save_gliclass(tmp_path / "model"))
    (whole,) = served.extract(TEXTS[:1], ExtractTask(labels=LABELS))
    threshold = whole.classifications[1].score
    (found,) = served.extract(TEXTS[:1], ExtractTask(labels=LABELS, threshold=threshold))
    assert found.classifications == whole.classifications[:2]


def test_groups_are_scored_apart(tmp_path: Path) -> None:
    served = Served(save_gliclass(tmp_path / "model"))
    groups = (LabelGroup("topic", ("sport", "news", "city")), LabelGroup("who", ("person", "company")))
    examples = (LabelledExample("Alice met Bob", ("who.person", "topic.news")),)
    found = served.extract(TEXTS, ExtractTask(label_groups=groups, examples=examples))
    for group in groups:
        own = tuple(
            LabelledExample(e.text, tuple(name.split(".")[1] for name in e.labels if name.startswith(group.name)))
            for e in examples
        )
        alone = served.extract(TEXTS, ExtractTask(labels=group.labels, examples=own))
        for one, other in zip(found, alone, strict=True):
            answer = one.data[group.name]
            assert answer["type"] == "choice"
            assert answer["choice"] == other.classifications[0].label
            assert 0 <= answer["confidence"] <= 1
            expected = {item.label: item.score for item in other.classifications}
            assert answer["probabilities"] == pytest.approx(expected, abs=TOLERANCE)
    labels = {f"{group.name}.{label}" for group in groups for label in group.labels}
    assert all({one.label for one in item.classifications} == labels for item in found)
    assert all(
        [c.score for c in item.classifications] == sorted((c.score for c in item.classifications), reverse=True)
        for item in found
    )
    (many,) = served.extract(TEXTS[:1], ExtractTask(label_groups=groups, classification_type="multi-label"))
    scores = many.data["topic"]["probabilities"]
    assert many.data["topic"] == {"labels": [n for n, s in scores.items() if s >= 0.5], "probabilities": scores}


@pytest.mark.parametrize(
    "settings", [{}, {"pooling_strategy": "avg"}, {"scorer_type": "mlp", "max_labels_alloc": "fixed"}]
)
def test_labels_in_one_step_answer_as_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    served = Served(save_gliclass(tmp_path / "model", **settings))
    tasks = [ExtractTask(labels=LABELS), ExtractTask(labels=("news",)), ExtractTask(labels=("a", "b", "c", "d"))]
    together = served.extract_all([(TEXTS, task) for task in tasks])
    for task, found in zip(tasks, together, strict=True):
        _assert_alike(found, [served.extract([text], task)[0] for text in TEXTS])


@pytest.mark.parametrize("prompt_first", [True, False])
def test_overflow_policy_decides_about_a_text_over_the_limit(tmp_path: Path, prompt_first: bool) -> None:
    directory = save_gliclass(tmp_path / "model", prompt_first=prompt_first)
    served, pipeline = Served(directory), _pipeline(directory, "multi-label")
    limit = served.card.max_sequence_length
    assert limit == 126  # of BERT's 128 positions
    words = [WORDS[number % 7] for number in range(200)]
    text = " ".join(words)
    num_others = 3 * 2 + 1 + 2  # three labels of a word with a mark each, a separator, begin and end
    cut = " ".join(words[: limit - num_others])
    task = ExtractTask(labels=LABELS, classification_type="multi-label", overflow_policy="truncate_text")
    (found,) = served.extract([text], task)
    _assert_alike([found], served.extract([cut], task))
    with pytest.raises(InputTooLong, match=r"more than the 126 tokens.*9 that.*items\[1\]"):
        served.extract([cut, text], msgspec.structs.replace(task, overflow_policy="error"))
    default = msgspec.structs.replace(task, overflow_policy="default")
    if not prompt_first:  # the text has pushed the labels out
        with pytest.raises(InputTooLong, match="labels do not fit"):
            served.extract([text], default)
        return
    expected = pipeline(text, list(LABELS), threshold=0.0)[0]
    _assert_scores(served.extract([text], default)[0], _sorted_by_score(LABELS, [item["score"] for item in expected]))


@pytest.mark.parametrize("policy", ["default", "truncate_text"])
def test_of_a_text_to_classify_only_the_beginning_is_read(tmp_path: Path, policy: str, monkeypatch: Any) -> None:
    served = Served(save_gliclass(tmp_path / "model"))
    reads = count_reads(monkeypatch, served.tokenizer)
    short = " ".join(WORDS[number % 7] for number in range(700))
    text = f"{short} " * 100
    groups = tuple(LabelGroup(name, LABELS) for name in ("one", "two"))
    task = ExtractTask(label_groups=groups, overflow_policy=policy)
    _assert_alike(served.extract(["Alice", text], task), served.extract(["Alice", short], task))
    assert reads.num_chars < len(text) / 4


@pytest.mark.parametrize("policy", ["default", "error", "truncate_text"])
def test_labels_over_the_limit_are_too_long(tmp_path: Path, policy: str) -> None:
    served = Served(save_gliclass(tmp_path / "model"))
    with pytest.raises(InputTooLong):
        served.extract(TEXTS, ExtractTask(labels=tuple(f"{n}" for n in range(100)), overflow_policy=policy))


def test_marks_of_the_model_are_refused_in_what_a_client_sends(tmp_path: Path) -> None:
    served = Served(save_gliclass(tmp_path / "model"))
    with pytest.raises(BadRequest, match=r"<<LABEL>>.*items\[1\]"):
        served.extract(["Bob", "Bob <<LABEL>> city"], ExtractTask(labels=LABELS))
    with pytest.raises(BadRequest, match="<<LABEL>>"):
        served.extract(["Bob"], ExtractTask(labels=("a<<LABEL>>b",)))


def test_mark_in_a_text_does_not_stand_for_a_label_that_was_cut(tmp_path: Path) -> None:
    served = Served(save_gliclass(tmp_path / "model", prompt_first=False))
    room = (served.card.max_sequence_length or 0) - 2 - 2 * (len(LABELS) - 1)  # the last label finds none
    words = ["<<LABEL>>", *("Bob" for _ in range(room - 1))]
    with pytest.raises(BadRequest, match=r"must not hold <<LABEL>>.*items\[0\]"):
        served.extract([" ".join(words)], ExtractTask(labels=LABELS))


def test_texts_times_groups_are_bounded_as_a_body_is(tmp_path: Path) -> None:
    served = Served(save_gliclass(tmp_path / "model"), limits=Limits(max_body_bytes=2048))
    groups = tuple(LabelGroup(f"g{number}", ("a", "b")) for number in range(20))
    assert served.extract(["Bob " * 20] * 12, ExtractTask(labels=LABELS))
    with pytest.raises(BadRequest, match=r"max_body_bytes \(2048\)"):
        served.extract(["Bob " * 20] * 12, ExtractTask(label_groups=groups))
    with pytest.raises(BadRequest, match=r"max_body_bytes \(2048\)"):
        served.extract(["Bob"] * 12, ExtractTask(labels=("a" * 200,)))
    with pytest.raises(BadRequest, match=r"blank.*items\[0\]"):
        served.extract([" "], ExtractTask(labels=LABELS))


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_gliner, save_gliclass])
def test_sixteen_bits_stay_close(tmp_path: Path, save: Any) -> None:
    directory = save(tmp_path / "model", "deberta-v2")
    served = Served(directory, "bfloat16")
    assert served.runner.dtype == "bfloat16"
    whole = Served(directory)
    assert served.runner.memory_bytes * 2 == whole.runner.memory_bytes
    if served.is_gliner:
        assert served.extract(TEXTS, ExtractTask(labels=LABELS, threshold=0.3)) is not None
        return
    task = ExtractTask(labels=LABELS, classification_type="multi-label")
    for one, other in zip(served.extract(TEXTS, task), whole.extract(TEXTS, task), strict=True):
        expected = {item.label: item.score for item in other.classifications}
        assert {item.label: item.score for item in one.classifications} == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(("name", "save"), [("gliner", save_gliner), ("gliclass", save_gliclass)])
def test_missing_library_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, save: Any
) -> None:
    card = read_card(ModelSpec(id="test/model"), str(save(tmp_path / "model")))
    monkeypatch.setitem(sys.modules, name, None)  # what makes Python say that there is no such module
    load = load_gliclass if name == "gliclass" else partial(load_gliner, limits=Limits())
    with pytest.raises(ModelLoadFailed, match=f"pip install.* {name}") as caught:
        load(card, "cpu", "float32", _no_progress)
    assert caught.value.extras["error_class"] == "DEPENDENCY"


@pytest.mark.parametrize("save", [save_gliner, save_gliclass])
def test_missing_weights_are_refused(tmp_path: Path, save: Any) -> None:
    from safetensors.torch import load_file, save_file

    directory = save(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    name = max(weights)
    del weights[name]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadFailed, match=name):
        Served(directory)


@pytest.mark.parametrize("save", [save_gliner, save_gliclass])
def test_damaged_weights_are_refused_until_they_change(tmp_path: Path, save: Any) -> None:
    directory = save(tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelLoadFailed) as caught:
        Served(directory)
    assert caught.value.extras["error_class"] == "CONFIG"


def test_loading_leaves_the_process_in_its_own_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    set_default = torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: (seen.append(dtype), set_default(dtype))[1])
    for save in (save_gliner, save_gliclass):
        directory = save(tmp_path / save.__name__)
        name = "gliner_config.json" if save is save_gliner else "config.json"
        settings = msgspec.json.decode((directory / name).read_bytes())
        change_json(
            directory / name, dtype="bfloat16", encoder_config={**settings["encoder_config"], "dtype": "bfloat16"}
        )
        seen.clear()
        assert Served(directory).runner.dtype == "float32"
        assert set(seen) <= {torch.float32}
