"""Detection on the frontend's side: prompts, and boxes as the caller's objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sie.frontend.inputs.image_reader import ReadImages
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.boxes import BoxReading, box_threshold
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong, Internal
from sie.values.extract import DetectedObject, Detection, ExtractTask
from tests.unit.detection_checkpoints import WORDS, save_bert_tokenizer, save_owl_tokenizer

OWL = Detection(family="owlv2")
DINO = Detection(family="grounding-dino", strides=(8, 16, 32, 64), num_boxes=20)
LABELS = ("Cat", "red handbag", "leather handbag")


@pytest.fixture(scope="module")
def make_reading(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders = {"owlv2": tmp_path_factory.mktemp("owl"), "grounding-dino": tmp_path_factory.mktemp("dino")}
    save_owl_tokenizer(folders["owlv2"])
    save_bert_tokenizer(folders["grounding-dino"])

    def make(rule: Detection, task: ExtractTask, limit: int = 32) -> BoxReading:
        folder: Path = folders.get(rule.family, folders["owlv2"])
        card = ModelCard(
            id="org/m", kind="extractor", outputs=("extract",), extract=rule, max_sequence_length=limit,
            tokenizer_file=str(folder / "tokenizer.json"), vocab_size=1100,
        )  # fmt: skip
        return BoxReading(rule, task, Tokenizer.load(card))

    return make


def see(reading: BoxReading, *own_sizes: tuple[int, int]) -> None:
    sizes = np.array(own_sizes, np.int32)
    reading.see(ReadImages(np.empty(0, np.uint8), sizes, dict.fromkeys(range(len(sizes)), 1), sizes))


def rows(*columns: list[float]) -> np.ndarray:
    return np.array(columns, np.float32)


def test_labels_of_owl_are_prompts_of_their_own(make_reading: Any):
    reading = make_reading(OWL, ExtractTask(labels=("Cat", " RED handbag ")))
    assert reading.texts == ["a photo of cat", "a photo of red handbag"]
    arrays = dict(reading.prepare(reading.texts))
    ids = {word: 3 + number for number, word in enumerate(WORDS)}
    prompt = [1, ids["a"], ids["photo"], ids["of"]]
    assert arrays["query_ids"].tolist() == [*prompt, ids["cat"], 16, *prompt, ids["red"], ids["handbag"], 16]
    assert arrays["query_offsets"].tolist() == [0, 6, 13]


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (ExtractTask(labels=("A Cat", " dog ")), "a cat. dog."),
        (ExtractTask(instruction=" The red Sofa "), "the red sofa."),
        (ExtractTask(instruction="cat. dog."), "cat. dog."),
    ],
)
def test_grounding_dino_reads_one_text(make_reading: Any, task: ExtractTask, text: str):
    reading = make_reading(DINO, task)
    assert reading.texts == [text]
    assert len(dict(reading.prepare(reading.texts))["query_offsets"]) == 2


def test_a_long_label_of_owl_is_cut_or_refused(make_reading: Any):
    labels = ("cat", "red leather handbag on the sofa")
    reading = make_reading(OWL, ExtractTask(labels=labels), 8)
    arrays = dict(reading.prepare(reading.texts))
    assert np.diff(arrays["query_offsets"]).tolist() == [6, 8]
    assert arrays["query_ids"][-1] == 16  # it still ends
    reading = make_reading(OWL, ExtractTask(labels=labels, overflow_policy="error"), 8)
    with pytest.raises(InputTooLong, match=r"11 tokens with their prompt.*at most 8.*labels\[1\]"):
        reading.prepare(reading.texts)


def test_a_long_text_of_grounding_dino_is_refused(make_reading: Any):
    reading = make_reading(DINO, ExtractTask(labels=("cat", "dog", "sofa")), 7)
    with pytest.raises(InputTooLong, match="8 tokens, and the model reads at most 7"):
        reading.prepare(reading.texts)


def test_a_label_that_is_not_unicode_is_named(make_reading: Any):
    reading = make_reading(OWL, ExtractTask(labels=("cat", "\ud800")))
    with pytest.raises(BadRequest, match="Text 1 is not valid Unicode"):
        reading.prepare(reading.texts)


def test_boxes_are_whole_pixels_best_first_and_inside_the_image(make_reading: Any):
    reading = make_reading(Detection(family="owlvit"), ExtractTask(labels=LABELS))
    see(reading, (100, 200), (10, 10))
    first = rows([0.3, 0.5, 0.5, 0.505, 0.5, 2], [0.9, 0.1, 0.5, 0.4, 2.0, 0], [0.4, 0.9, 0.95, 0.4, 0.2, 1])
    found, none = reading.read([first, rows().reshape(0, 6)])
    assert found.objects == [
        DetectedObject("Cat", pytest.approx(0.9), (0, 0, 60, 100)),
        DetectedObject("red handbag", pytest.approx(0.4), (140, 85, 60, 15)),
        DetectedObject("leather handbag", pytest.approx(0.3), (49, 25, 101, 50)),
    ]
    assert none.objects == []


def test_boxes_of_owlv2_are_parts_of_the_square_around_the_image(make_reading: Any):
    reading = make_reading(OWL, ExtractTask(labels=LABELS))
    see(reading, (100, 200))
    inside, below = [0.5, 0.5, 0.25, 0.5, 0.25, 0], [0.9, 0.5, 0.9, 0.1, 0.1, 1]
    [found] = reading.read([rows(inside, below)])
    assert found.objects == [DetectedObject("Cat", 0.5, (50, 25, 100, 50))]  # nothing of the other is in the image


def grounded(make_reading: Any, scores: dict[str, float], **task: Any) -> str:
    """Return the label of a box for which these tokens of the text score."""
    reading = make_reading(DINO, ExtractTask(**task))
    reading.prepare(reading.texts)
    see(reading, (100, 100))
    words = reading._tokenizer.backend.encode(reading.texts[0]).tokens
    left = dict(scores)
    columns = [left.pop(word, 0.0) for word in words]  # the first of equal ones
    [found] = reading.read([rows([0.9, 0.5, 0.5, 0.2, 0.2, *columns])])
    return found.objects[0].label


@pytest.mark.parametrize(
    ("scores", "label"),
    [
        ({"cat": 0.9}, "Cat"),
        ({"red": 0.9, "handbag": 0.8}, "red handbag"),
        ({"leather": 0.6, "handbag": 0.5}, "leather handbag"),
        ({"handbag": 0.5}, "red handbag"),  # as much of both: the first
        ({"cat": 0.3, "red": 0.9}, "Cat"),  # all of it, not half
        ({".": 0.9, "[SEP]": 0.9, "leather": 0.3}, "leather handbag"),
        ({"[CLS]": 0.9, "[SEP]": 0.8, "leather": 0.2, "red": 0.1}, "leather handbag"),  # none is over the threshold
        ({}, "Cat"),
    ],
)
def test_a_phrase_becomes_the_callers_label(make_reading: Any, scores: dict[str, float], label: str):
    assert grounded(make_reading, scores, labels=LABELS) == label


@pytest.mark.parametrize(
    ("labels", "scores", "label"),
    [
        (("handbag", "Réd handbag"), {"red": 0.9, "handbag": 0.8}, "Réd handbag"),
        (("猫", "红色 猫"), {"红": 0.9, "色": 0.9}, "红色 猫"),
    ],
)
def test_labels_are_compared_as_the_tokenizer_spells_them(
    make_reading: Any, labels: tuple[str, ...], scores: dict[str, float], label: str
):
    """BERT reads words without their accents, and Chinese characters one by one."""
    # The part of the text that belongs to a label decides only if the phrase has no word of any label.
    elsewhere = {**scores, ".": 0.95}
    assert grounded(make_reading, elsewhere, labels=labels) == label


def test_a_free_text_gives_its_own_phrases(make_reading: Any):
    text = "the red sofa. cat."
    assert grounded(make_reading, {"red": 0.9, "sofa": 0.5}, instruction=text) == "red sofa"
    assert grounded(make_reading, {"red": 0.9, "sofa": 0.5}, instruction=text, text_threshold=0.6) == "red"
    assert grounded(make_reading, {"sofa": 0.9, ".": 0.5, "[SEP]": 0.9}, instruction=text) == "sofa"
    assert grounded(make_reading, {}, instruction=text) == ""


@pytest.mark.parametrize(
    ("rule", "options", "threshold"),
    [
        (OWL, {}, 0.1),
        (OWL, {"threshold": 0.3}, 0.3),
        (OWL, {"threshold": 0.3, "score_threshold": 0.0}, 0.0),
        (DINO, {}, 0.25),
        (DINO, {"box_threshold": 0.5}, 0.5),
    ],
)
def test_thresholds_have_the_familys_defaults(rule: Detection, options: dict[str, float], threshold: float):
    assert box_threshold(rule, ExtractTask(**options)) == threshold


def test_an_image_with_too_few_places_is_named(make_reading: Any):
    reading = make_reading(DINO, ExtractTask(labels=("cat",)))
    see(reading, (64, 64), (8, 80))  # 10 + 5 + 3 + 2 places
    with pytest.raises(BadRequest, match=r"too thin: 72 x 8 pixels.*20 boxes.*items\[1\]"):
        see(reading, (64, 64), (8, 72))


@pytest.mark.parametrize("rule", [OWL, DINO])
def test_a_reply_of_another_shape_is_our_fault(make_reading: Any, rule: Detection):
    reading = make_reading(rule, ExtractTask(labels=LABELS))
    reading.prepare(reading.texts)
    see(reading, (64, 64))
    with pytest.raises(Internal):
        reading.read([np.zeros((1, 5), np.float32)])
    if rule is DINO:
        with pytest.raises(Internal):
            reading.read([rows([0.5, 0.5, 0.5, 0.5, 0.5, 0.1])])
