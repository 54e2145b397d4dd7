"""Dual encoders against transformers' own get_text_features and get_image_features, on few random weights."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.images import prepare_image
from sie.frontend.inputs.tokenize import Tokenizer
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong, Internal
from sie.workers.loading.loader import load_dual_encoder
from sie.workers.model_api import ImageItem
from sie.workers.packed import attention
from sie.workers.runners.dual import DualRunner
from tests.unit.dual_checkpoints import FAMILIES, PROCESSORS, save_dual_encoder

TEXTS = ["w1 w2 w3", "w4", "", "W5 w6 w7 w8", "w9 unheard-of w10", "w11 " * 40, "w1 w2 w4"]
TOLERANCE = {"atol": 2e-4, "rtol": 2e-3}
SAME = {"atol": 1e-5, "rtol": 1e-3}


def pictures(count: int = 4) -> list[Image.Image]:
    random = np.random.default_rng(5)
    return [
        Image.fromarray(random.integers(0, 256, (20 + 37 * i, 90 - 13 * i, 3), np.uint8)) for i in range(1, count + 1)
    ]


class Dual:
    """One checkpoint, loaded by us and by transformers."""

    def __init__(self, directory: Path, family: str) -> None:
        self.family = family
        self.card: ModelCard = read_card(ModelSpec(id="test/dual"), str(directory))
        self.runner: DualRunner = load_dual_encoder(self.card, "cpu", "float32", lambda *_: None)
        self.model: Any = transformers.AutoModel.from_pretrained(directory).eval()
        self.processor: Any = PROCESSORS[family][0].from_pretrained(directory)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def tokens(self, texts: list[str]) -> list[NDArray[np.int32]]:
        ids, bounds = Tokenizer.load(self.card).encode_texts(texts)
        return [ids[start:end] for start, end in itertools.pairwise(bounds)]

    def image(self, picture: Image.Image) -> NDArray[np.uint8]:
        assert self.card.image is not None
        return prepare_image(picture, self.card.image)

    def run(self, *inputs: Any) -> NDArray[np.float32]:
        rows = self.runner.run_wants(inputs, [None] * len(inputs)).dense  # type: ignore[list-item]  # one output only
        assert rows is not None
        return rows

    def expected_texts(self, texts: list[str]) -> NDArray[np.float32]:
        limit = self.card.max_sequence_length
        padding = "max_length" if self.family == "siglip" else True
        inputs = self._tokenizer(texts, padding=padding, truncation=True, max_length=limit, return_tensors="pt")
        names = ["input_ids"] if self.family == "siglip" else ["input_ids", "attention_mask"]
        with torch.no_grad():
            return self.model.get_text_features(**{name: inputs[name] for name in names}).pooler_output.numpy()

    def expected_images(self, images: list[Image.Image]) -> NDArray[np.float32]:
        with torch.no_grad():
            return self.model.get_image_features(**self.processor(images, return_tensors="pt")).pooler_output.numpy()


@pytest.fixture(scope="module", params=list(FAMILIES))
def dual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dual:
    directory = save_dual_encoder(tmp_path_factory.mktemp("dual"), request.param)
    return Dual(directory, request.param)


@pytest.fixture
def clip(tmp_path: Path) -> Dual:
    return Dual(save_dual_encoder(tmp_path, "clip"), "clip")


def test_texts_are_those_of_the_library(dual: Dual):
    np.testing.assert_allclose(dual.run(*dual.tokens(TEXTS)), dual.expected_texts(TEXTS), **TOLERANCE)


def test_images_are_those_of_the_library_and_its_processor(dual: Dual):
    images = pictures()
    rows = dual.run(*(ImageItem((dual.image(image),)) for image in images))
    np.testing.assert_allclose(rows, dual.expected_images(images), **TOLERANCE)


def test_a_step_of_texts_and_images_gives_each_what_it_gets_alone(dual: Dual):
    tokens, images = dual.tokens(TEXTS), [dual.image(image) for image in pictures()]
    inputs = [tokens[0], ImageItem((images[0],)), tokens[5], ImageItem(tuple(images[1:])), *tokens[1:5]]
    together = dual.run(*inputs)
    for row, item in zip(together, inputs, strict=True):
        np.testing.assert_allclose(row, dual.run(item)[0], **SAME)


def test_several_images_are_the_mean_of_their_directions(dual: Dual):
    images = pictures(3)
    rows = dual.expected_images(images)
    expected = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(0)
    np.testing.assert_allclose(dual.run(ImageItem(tuple(map(dual.image, images))))[0], expected, **TOLERANCE)


def test_the_card_tells_both_inputs_and_what_an_image_costs(dual: Dual):
    card = dual.card
    assert (card.kind, card.inputs, card.outputs, card.normalize) == (
        "dual-encoder",
        ("text", "image"),
        ("dense",),
        True,
    )
    assert card.image is not None
    patches = 9 if dual.family == "siglip" else 10  # 24 pixels a side, patches of 8, and CLIP's class token
    assert card.image.count_tokens(24, 24) == patches
    assert card.dims == {"dense": dual.expected_texts(["w1"]).shape[1]}


def test_only_clip_s_texts_run_packed(dual: Dual):
    assert dual.runner.execution.packed == (dual.family == "clip")


def test_siglip_fills_texts_up(tmp_path: Path):
    siglip = Dual(save_dual_encoder(tmp_path, "siglip"), "siglip")
    assert [len(ids) for ids in siglip.tokens(TEXTS)] == [12] * len(TEXTS)
    ids, bounds = Tokenizer.load(siglip.card).check_token_ids([[5, 6, 1]])
    assert bounds.tolist() == [0, 12]
    assert np.array_equal(ids, siglip.tokens(["w1 w2"])[0])


def test_the_old_end_token_of_clip_is_the_highest_id(tmp_path: Path):
    # Old configurations say 2, which is another token; the tokenizer's end is not the highest id here, either.
    old = Dual(save_dual_encoder(tmp_path, "clip", eos_token_id=2), "clip")
    assert old.runner.execution.packed
    np.testing.assert_allclose(old.run(*old.tokens(TEXTS)), old.expected_texts(TEXTS), **TOLERANCE)


def test_packed_texts_that_differ_run_in_rectangles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = save_dual_encoder(tmp_path, "clip")
    monkeypatch.setattr(
        "sie.workers.runners.dual.find_ends", lambda batch, _eos: batch.cu_seqlens[:-1].astype(np.int64)
    )
    dual = Dual(directory, "clip")
    assert not dual.runner.execution.packed
    np.testing.assert_allclose(dual.run(*dual.tokens(TEXTS)), dual.expected_texts(TEXTS), **TOLERANCE)


def test_packed_texts_of_a_row_longer_than_the_positions_keep_their_own(clip: Dual):
    texts = [" ".join(f"w{(i + j) % 60}" for j in range(1 + i % 17)) for i in range(40)]
    calls = 0
    original = attention.attend

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    np.testing.assert_allclose(clip.run(*clip.tokens(texts)), clip.expected_texts(texts), **TOLERANCE)
    transformers.AttentionInterface.register(attention.NAME, count)
    try:
        clip.run(*clip.tokens(texts))
    finally:
        attention.register()
    assert calls == 3  # a layer once, whatever the lengths


def test_bfloat16_is_close(tmp_path: Path):
    directory = save_dual_encoder(tmp_path, "clip")
    exact = Dual(directory, "clip")
    half = load_dual_encoder(exact.card, "cpu", "bfloat16", lambda *_: None)
    inputs = [*exact.tokens(TEXTS[:4]), *(ImageItem((exact.image(image),)) for image in pictures())]
    rows, expected = half.run_wants(inputs, [None] * 8).dense, exact.run(*inputs)  # type: ignore[list-item]
    assert rows is not None
    cosine = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() > 0.999


def test_what_would_end_a_gpu_process_is_refused(clip: Dual):
    with pytest.raises(BadRequest, match="vocabulary"):
        clip.run(np.array([0, 99_999], np.int32))
    with pytest.raises(InputTooLong, match="positions"):
        clip.run(np.ones(21, np.int32))
    with pytest.raises(Internal, match="size"):
        clip.run(ImageItem((np.zeros((8, 8, 3), np.uint8),)))


def test_a_text_without_a_token_is_a_row_of_zeros(clip: Dual):
    rows = clip.run(np.empty(0, np.int32), clip.tokens(["w1"])[0])
    assert not rows[0].any()
    assert rows[1].any()


def test_sentence_transformers_gives_the_same_vectors(tmp_path: Path):
    folder = tmp_path / "0_CLIPModel"
    save_dual_encoder(folder, "clip")
    modules = [{"idx": 0, "name": "0", "path": folder.name, "type": "sentence_transformers.models.CLIPModel"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        oracle = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
        images = pictures()
        expected = np.concatenate([oracle.encode(TEXTS), oracle.encode(images)])
    card = read_card(ModelSpec(id="test/dual"), str(tmp_path))
    ours = Dual(folder, "clip")
    assert card.directory == str(folder)
    rows = ours.run(*ours.tokens(TEXTS), *(ImageItem((ours.image(image),)) for image in images))
    np.testing.assert_allclose(rows, expected, **TOLERANCE)
