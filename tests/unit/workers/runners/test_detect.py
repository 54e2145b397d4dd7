"""Detectors against transformers' own processor, model and post-processing, on few random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.image_reader import ReadImages
from sie.frontend.inputs.images import prepare_image
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.boxes import BoxReading, box_threshold
from sie.values.errors import BadRequest, Internal, ModelLoadFailed
from sie.values.extract import DetectedObject, Detection, ExtractTask
from sie.workers.loading.loader import load_detector
from sie.workers.model_api import SearchedImage
from sie.workers.runners.detect import Recent
from sie.workers.runners.square import to_square
from tests.unit.detection_checkpoints import FAMILIES, PROCESSORS, save_detector

LABELS = ("cat", "Remote control", "leather handbag", "sofa")
TOLERANCE = 2e-4
"""Of scores, and of boxes as parts of the image."""
LIBRARY = {
    "owlvit": transformers.OwlViTProcessor,
    "owlv2": transformers.Owlv2Processor,
    "grounding-dino": transformers.GroundingDinoProcessor,
}


class Expected(NamedTuple):
    """What the library finds in one image, best first."""

    labels: list[str]
    scores: NDArray[np.float32]
    boxes: NDArray[np.float32]
    """(b, 4): left, top, right, bottom in pixels, not cut off at the image's sides."""


def pictures() -> list[Image.Image]:
    """Return images of different shapes, two of them of one size."""
    random = np.random.default_rng(5)
    sizes = ((40, 70), (90, 55), (40, 70), (200, 120), (64, 64))
    return [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


class Served:
    """One checkpoint, loaded by us and by transformers."""

    def __init__(self, directory: Path, family: str) -> None:
        self.family = family
        self.card = read_card(ModelSpec(id="test/detector"), str(directory))
        assert isinstance(self.card.extract, Detection)
        self.rule = self.card.extract
        self.threshold = 0.2 if self.rule.needs_labels else 0.4
        """What several boxes pass and others do not."""
        self.runner: Any = load_detector(self.card, "cpu", "float32", lambda *_: None)
        self.tokenizer = Tokenizer.load(self.card)
        self._model: Any = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(directory).eval()
        self._processor: Any = LIBRARY[family](
            PROCESSORS[family][0].from_pretrained(directory), transformers.AutoTokenizer.from_pretrained(directory)
        )

    def searched(self, picture: Image.Image, task: ExtractTask) -> tuple[SearchedImage, BoxReading]:
        """Return a picture as it reaches the worker, and what reads the answer."""
        assert self.card.image is not None
        reading = BoxReading(self.rule, task, self.tokenizer)
        (_, ids), (_, bounds) = reading.prepare(reading.texts)
        pixels = prepare_image(picture, self.card.image)
        sizes, own = np.array([pixels.shape[:2]], np.int32), np.array([[picture.height, picture.width]], np.int32)
        reading.see(ReadImages(pixels.reshape(-1), sizes, {0: 1}, own))
        return SearchedImage(pixels, tuple(np.split(ids, bounds[1:-1])), ids.tobytes() + bounds.tobytes()), reading

    def run(self, *wanted: tuple[Image.Image, ExtractTask]) -> list[list[DetectedObject]]:
        """Return the objects of each picture, all of them from one step."""
        searched = [self.searched(picture, task) for picture, task in wanted]
        thresholds = [box_threshold(self.rule, task) for _, task in wanted]
        rows = self.runner.run_boxes([image for image, _ in searched], thresholds)
        return [reading.read([own])[0].objects for (_, reading), own in zip(searched, rows, strict=True)]

    def expected(self, picture: Image.Image, labels: tuple[str, ...], threshold: float) -> Expected:
        with torch.no_grad():
            if self.rule.needs_labels:
                prompts = [[f"a photo of {label.lower()}" for label in labels]]
                inputs = self._processor(images=picture, text=prompts, return_tensors="pt")
                read: dict[str, Any] = {"text_labels": [list(labels)]}
            else:
                text = " ".join(f"{label.lower()}." for label in labels)
                inputs = self._processor(images=picture, text=text, return_tensors="pt")
                read = {"input_ids": inputs["input_ids"], "text_threshold": threshold}
            outputs = self._model(**inputs)
        [found] = self._processor.post_process_grounded_object_detection(
            outputs, threshold=threshold, target_sizes=[(picture.height, picture.width)], **read
        )
        order = torch.argsort(-found["scores"], stable=True)
        names = [found["text_labels"][place] for place in order]
        return Expected(names, found["scores"][order].numpy(), found["boxes"][order].numpy())


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(save_detector(tmp_path_factory.mktemp("detector"), request.param), request.param)


@pytest.fixture(scope="module")
def owl(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(save_detector(tmp_path_factory.mktemp("owl"), "owlv2"), "owlv2")


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(save_detector(tmp_path_factory.mktemp("dino"), "grounding-dino"), "grounding-dino")


def task_of(served: Served, labels: tuple[str, ...] = LABELS, threshold: float | None = None) -> ExtractTask:
    threshold = served.threshold if threshold is None else threshold
    if served.rule.needs_labels:
        return ExtractTask(labels=labels, score_threshold=threshold)
    return ExtractTask(labels=labels, box_threshold=threshold, text_threshold=threshold)


def assert_alike(objects: list[DetectedObject], expected: Expected, picture: Image.Image, grounded: bool) -> None:
    """Compare what is inside the image: ours are cut off at its sides, and whole pixels."""
    right_bottom = (picture.width, picture.height)
    boxes = np.clip(expected.boxes, 0, right_bottom * 2)
    inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    boxes = boxes[inside]
    assert len(objects) == len(boxes) > 2
    np.testing.assert_allclose([found.score for found in objects], expected.scores[inside], atol=TOLERANCE)
    ours = np.array([found.bbox for found in objects])
    theirs = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
    # Ours are whole: what lies within the tolerance of one may be the next.
    slack = TOLERANCE * max(right_bottom)
    assert (ours <= theirs + slack).all()
    assert (ours > theirs - 1 - slack).all()
    names = [name for name, is_inside in zip(expected.labels, inside, strict=True) if is_inside]
    if not grounded:
        assert [found.label for found in objects] == names
        return
    for found, phrase in zip(objects, names, strict=True):
        words = set(phrase.split())
        parts = {label: np.mean([word in words for word in label.lower().split()]) for label in LABELS}
        assert parts[found.label] == max(parts.values())


def test_boxes_labels_and_scores_are_those_of_the_library(served: Served):
    for picture in pictures():
        [objects] = served.run((picture, task_of(served)))
        expected = served.expected(picture, LABELS, served.threshold)
        assert_alike(objects, expected, picture, grounded=served.family == "grounding-dino")


def test_a_step_gives_each_image_what_it_gets_alone(served: Served):
    wanted = [(picture, task_of(served)) for picture in pictures()]
    other = task_of(served, ("dog", "cat"), 0.3)
    wanted = [wanted[0], (pictures()[0], other), *wanted[1:], (pictures()[3], other)]
    together = served.run(*wanted)
    assert len({tuple(found.label for found in objects) for objects in together}) > 2
    for objects, one in zip(together, wanted, strict=True):
        [alone] = served.run(one)
        assert [found.label for found in objects] == [found.label for found in alone]
        np.testing.assert_allclose([f.score for f in objects], [f.score for f in alone], atol=TOLERANCE)
        np.testing.assert_allclose([f.bbox for f in objects], [f.bbox for f in alone], atol=1)


def test_several_labels_are_found(served: Served):
    labels = {found.label for picture in pictures() for found in served.run((picture, task_of(served)))[0]}
    assert len(labels) > 1


def test_a_threshold_over_every_score_leaves_no_box(served: Served):
    assert served.run((pictures()[0], task_of(served, threshold=1.0))) == [[]]


def test_queries_are_encoded_once(served: Served, monkeypatch: pytest.MonkeyPatch):
    calls = 0
    texts = served.runner._towers.text_model if served.rule.needs_labels else served.runner._text.layers
    forward = texts.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(texts, "forward", count)
    new = task_of(served, ("the red sofa", "dog on sofa"))
    served.run(*((picture, new) for picture in pictures()))
    served.run((pictures()[0], new))
    assert calls == 1


def test_a_model_looks_at_each_image_of_an_equal_size_once(dino: Served, monkeypatch: pytest.MonkeyPatch):
    batches: list[tuple[int, ...]] = []
    forward = dino.runner._model.forward

    def count(**kwargs: Any) -> Any:
        batches.append(tuple(kwargs["pixel_values"].shape))
        return forward(**kwargs)

    monkeypatch.setattr(dino.runner._model, "forward", count)
    dino.run(*((picture, task_of(dino)) for picture in pictures()))
    assert sorted(shape[0] for shape in batches) == [1, 1, 1, 2]


@pytest.mark.parametrize("size", [(40, 70), (64, 64), (61, 107), (9, 107), (100, 33)])
def test_places_are_counted_as_the_model_has_them(dino: Served, size: tuple[int, int]):
    values = torch.zeros(1, 3, *size)
    with torch.no_grad():
        found = dino._model(pixel_values=values, input_ids=torch.tensor([[101, 200, 1012, 102]]))
    assert found.encoder_last_hidden_state_vision.shape[1] == dino.rule.count_places(*size)


def test_a_token_outside_the_vocabulary_is_a_bad_request(served: Served):
    wrong = np.array([1, 99_999], np.int32)
    image, _ = served.searched(pictures()[0], task_of(served))
    with pytest.raises(BadRequest, match="vocabulary"):
        served.runner.run_boxes([SearchedImage(image.pixels, (wrong,), wrong.tobytes())], [0.1])


def test_an_image_of_another_size_is_refused(tmp_path: Path):
    served = Served(save_detector(tmp_path, "owlvit"), "owlvit")
    image, _ = served.searched(pictures()[0], task_of(served))
    with pytest.raises(Internal, match="size"):
        served.runner.run_boxes([SearchedImage(np.zeros((8, 8, 3), np.uint8), image.queries, image.key)], [0.1])


def test_bfloat16_keeps_the_heads_exact(tmp_path: Path, formats_read: list[set[torch.dtype]]):
    exact = Served(save_detector(tmp_path, "owlv2"), "owlv2")
    half: Any = load_detector(exact.card, "cpu", "bfloat16", lambda *_: None)
    assert half.dtype == "bfloat16"
    assert half._model.box_head.dense2.weight.dtype == torch.float32
    assert formats_read == [{torch.float32}, {torch.bfloat16, torch.float32}], "only the heads were read in float32"
    image, _ = exact.searched(pictures()[1], task_of(exact))
    [rows], [expected] = half.run_boxes([image], [-1.0]), exact.runner.run_boxes([image], [-1.0])
    assert np.abs(rows[:, :5] - expected[:, :5]).max() < 0.05


def test_grounding_dino_stays_in_float32(tmp_path: Path):
    exact = Served(save_detector(tmp_path, "grounding-dino"), "grounding-dino")
    assert load_detector(exact.card, "cpu", "bfloat16", lambda *_: None).dtype == "float32"


def test_values_that_are_not_finite_refuse_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    card = read_card(ModelSpec(id="test/detector"), str(save_detector(tmp_path, "owlv2")))
    monkeypatch.setattr("sie.workers.runners.owl.to_square", lambda *_: torch.full((3, 48, 48), torch.nan))
    with pytest.raises(ModelLoadFailed, match="overflow"):
        load_detector(card, "cpu", "float32", lambda *_: None)


@pytest.mark.parametrize(
    "size", [(20, 90), (90, 20), (48, 48), (49, 384), (13, 9), (300, 200), (1, 1), (1, 300), (47, 96)]
)
def test_a_square_is_that_of_the_library(size: tuple[int, int]):
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    processor = transformers.Owlv2ImageProcessorPil(size={"height": 48, "width": 48}, do_normalize=False)
    expected = processor(image, input_data_format="channels_last", return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(to_square(image, 48, torch.device("cpu")) / 255, expected, atol=1e-6)


def test_what_was_not_asked_for_longest_is_forgotten():
    recent: Recent[int, str] = Recent(2)
    recent.put(1, "a")
    recent.put(2, "b")
    assert recent.get(1) == "a"
    recent.put(3, "c")
    assert (recent.get(2), recent.get(1), recent.get(3), len(recent)) == (None, "a", "c", 2)
