"""A union of GLiNER models from their files to the entities of a text, compared with the library's own answers, composed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sie.catalog.checkpoint_card import read_card
from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelMember, ModelSpec
from sie.config.limits import Limits
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.gliner_union import UnionReading
from sie.frontend.operations.resolve_extract import resolve_extract
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, ModelLoadFailed
from sie.values.extract import Entity, Extraction, ExtractTask, Gliner, GlinerUnion, UnionMember
from sie.values.inference import ExtractRequest
from sie.workers.loading.libraries import load_gliner_union
from tests.gli_models import change_json, save_gliner

LABELS = ("person", "company", "city")
TEXTS = [
    "Alice met Bob at Acme in Paris",
    "and then Carol left Berlin in Paris at Acme and met Bob, then Bob left Acme; Alice works in Berlin and lives in Paris",
    "  Bob,  then 😀 e\u0301t\u00e9 at Acme-Berlin_Paris! Bob1 Bobby bob (Bob)",
]
Found = tuple[int, int, str]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("union")
    saved = [
        save_gliner(folder / "spans", "deberta-v2"),
        save_gliner(folder / "words", "deberta-v2", "token", hidden_size=48),
    ]
    change_json(saved[1] / "tokenizer_config.json", model_max_length=10**30)
    return saved


@pytest.fixture(scope="module")
def card(directories: list[Path]) -> ModelCard:
    return read_card(spec_of(directories), str(directories[0]))


def spec_of(directories: list[Path], **changes: Any) -> ModelSpec:
    member = ModelMember(directory=str(directories[1]), merge_adjacent_entities=True)
    return ModelSpec(**{"id": "test/union", "directory": str(directories[0]), "members": (member,), **changes})


def extract(card: ModelCard, runner: Any, texts: Sequence[str], task: ExtractTask) -> list[dict[Found, float]]:
    assert isinstance(card.extract, GlinerUnion)
    reading = UnionReading(card.extract, task, Tokenizer.load(card), Limits())
    named = dict(reading.prepare(texts))
    inputs = np.split(named["text"], named["text_offsets"][1:-1])
    answers = runner.run_extract(inputs, [task] * len(inputs))
    found = reading.read([np.frombuffer(msgspec.msgpack.encode(answer), np.uint8) for answer in answers])
    places = [[(entity.start, entity.end) for entity in own.entities] for own in found]
    assert places == [sorted(own) for own in places]
    return [{(e.start or 0, e.end or 0, e.label): e.score for e in own.entities} for own in found]


def windows_of(text: str, size: int, overlap: int) -> list[tuple[int, int]]:
    words = [match.span() for match in re.finditer(r"\w+(?:[-_]\w+)*|\S", text)]
    starts = range(0, max(1, len(words) - overlap), size - overlap)
    return [(words[first][0], words[min(first + size, len(words)) - 1][1]) for first in starts]


def joined(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for entity in sorted(entities, key=lambda one: (one["start"], one["end"])):
        last = merged[-1] if merged else None
        if last and last["label"] == entity["label"] and entity["start"] <= last["end"] + 1:
            last["end"], last["score"] = max(last["end"], entity["end"]), max(last["score"], entity["score"])
        else:
            merged.append(dict(entity))
    return merged


def expected(models: list[Any], text: str, task: ExtractTask) -> dict[Found, float]:
    best: dict[Found, float] = {}
    for start, end in windows_of(text, task.window_words or 0, task.window_overlap or 0):
        for number, model in enumerate(models):
            own = model.predict_entities(text[start:end], list(task.labels))
            for entity in joined(own) if number else own:
                if entity["score"] >= (task.score_floor or 0):
                    key = (entity["start"] + start, entity["end"] + start, entity["label"])
                    best[key] = max(best.get(key, 0), entity["score"])
    names: dict[str, float] = {}
    for (start, end, label), score in best.items():
        for name in re.findall(rf"[^\W\d_]{{{task.name_min_letters or 3},}}", text[start:end]):
            if label == task.propagate_label:
                names[name] = max(names.get(name, 0), score)
    covered = list(best)
    for name, score in names.items():
        for match in re.finditer(rf"(?<![^\W\d_]){name}(?![^\W\d_])", text):
            start, end = match.span()
            if not any(own[0] <= start and end <= own[1] for own in covered):
                best[start, end, task.propagate_label or ""] = score
    return best


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score_floor": 0.6},
        {"window_words": 6, "window_overlap": 4, "propagate_label": "person"},
        {"window_words": 5, "window_overlap": 0, "propagate_label": "city", "score_floor": 0.7, "name_min_letters": 5},
    ],
    ids=str,
)
def test_answer_is_the_union_of_the_library_s(
    directories: list[Path], card: ModelCard, options: dict[str, Any]
) -> None:
    import gliner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [gliner.GLiNER.from_pretrained(str(own), local_files_only=True) for own in directories]
    runner = load_gliner_union(card, "cpu", "float32", lambda *_: None, Limits())
    task = ExtractTask(labels=LABELS, **{"window_words": 24, "window_overlap": 12, **options})
    found = extract(card, runner, TEXTS, task)
    for own, text in zip(found, TEXTS, strict=True):
        assert own == pytest.approx(expected(models, text, task), abs=1e-5)
    assert any(found)
    assert runner.memory_bytes == sum(4 * sum(w.numel() for w in model.model.parameters()) for model in models)


def test_names_recur_in_any_alphabet_and_not_within_words(card: ModelCard) -> None:
    assert isinstance(card.extract, GlinerUnion)
    text = "Zoé Müller wrote; Müllers read Müller_2, zoé and 'Zoé'. Al left Al."
    task = ExtractTask(labels=LABELS, window_words=24, propagate_label="person")
    reading = UnionReading(card.extract, task, Tokenizer.load(card), Limits())
    reading.prepare([text])
    answer = Extraction([Entity("person", 0.9, 0, 10), Entity("person", 0.8, 56, 58)], data={"members": [1, 1]})
    [found] = reading.read([np.frombuffer(msgspec.msgpack.encode(answer), np.uint8)])
    texts = [(text[entity.start : entity.end], entity.start, entity.score) for entity in found.entities]
    assert texts == [("Zoé Müller", 0, 0.9), ("Müller", 31, 0.9), ("Zoé", 50, 0.9), ("Al", 56, 0.8)]
    with pytest.raises(ValueError, match="not counted by member"):
        reading.read([np.frombuffer(msgspec.msgpack.encode(Extraction(answer.entities)), np.uint8)])


CARD = ModelCard(
    id="u", kind="extractor", outputs=("extract",),
    extract=GlinerUnion(members=(UnionMember(directory="/a", rule=Gliner(max_words=384)),)),
    profiles={"default": {"default_labels": ["person"], "score_floor": 0.6, "propagate_label": "person"}},
)  # fmt: skip


def task_of(**options: Any) -> ExtractTask:
    labels = options.pop("labels", ())
    return resolve_extract(ExtractRequest(model="u", texts=["a"], labels=labels, options=options), CARD).task


def test_profile_has_labels_for_requests_without_any() -> None:
    assert task_of() == ExtractTask(labels=("person",), score_floor=0.6, propagate_label="person")
    assert task_of(labels=("city",), propagate_label=None).propagate_label is None
    assert task_of(labels=("city",)).labels == ("city",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_labels": None}, "needs labels"),
        ({"window_words": 385}, "reads at most 384 words at once"),
        ({"window_words": 20, "window_overlap": 20}, "Windows of 20 words cannot share 20"),
        ({"score_floor": 1.5}, "Expected `float` <= 1.0 - at `$.params.options.score_floor`"),
        ({"threshold": 0.4}, "does not support 'threshold'"),
    ],
)
def test_options_that_a_union_cannot_follow_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)):
        task_of(**options)


def test_what_cannot_be_a_union_is_refused(directories: list[Path], tmp_path: Path) -> None:
    def refusal(run: Callable[[], Any]) -> str:
        with pytest.raises(ModelLoadFailed) as caught:
            run()
        return caught.value.message

    both = (ModelMember(directory=str(directories[0])),)
    assert "reads 128 tokens at once" in refusal(
        lambda: read_card(spec_of(directories, members=both), str(directories[0]))
    )
    (tmp_path / "config.json").write_text("{}")
    none = (ModelMember(directory=str(tmp_path)),)
    assert "is not a GLiNER model" in refusal(
        lambda: read_card(spec_of(directories, members=none), str(directories[0]))
    )

    def prepared(**changes: Any) -> Any:
        return prepare(Request(spec=spec_of(directories, **changes), cache_dir=str(tmp_path)), lambda *_: None)

    assert "members but no directory" in refusal(lambda: prepared(directory=None))
    known = refusal(lambda: prepared(id="superlinked/pii-redact", members=(), directory=None))
    assert "union of urchade/gliner_multi_pii-v1 and numind/NuNER_Zero" in known
    assert prepared(id="superlinked/pii-redact").num_weights > prepared(members=()).num_weights
