"""Cards of detectors, read from files alone, and the kinds of models that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.values.card import ImageRule, ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.extract import Detection

# As google/owlv2-base-patch16-ensemble and IDEA-Research/grounding-dino-tiny have them.
OWL = {
    "model_type": "owlv2", "architectures": ["Owlv2ForObjectDetection"], "projection_dim": 512, "text_config": {},
    "vision_config": {"image_size": 960},
}  # fmt: skip
OWL_IMAGES = {
    "image_processor_type": "Owlv2ImageProcessor", "do_normalize": True, "do_pad": True, "do_rescale": True,
    "do_resize": True, "resample": 2, "rescale_factor": 0.00392156862745098, "size": {"height": 960, "width": 960},
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
OLD_OWL = {**OWL, "model_type": "owlvit", "architectures": ["OwlViTForObjectDetection"], "vision_config": {}}
OLD_OWL_IMAGES = {
    "feature_extractor_type": "OwlViTFeatureExtractor", "crop_size": {"height": 768, "width": 768}, "resample": 3,
    "do_center_crop": True, "do_normalize": True, "do_resize": True, "size": {"height": 768, "width": 768},
    "image_mean": OWL_IMAGES["image_mean"], "image_std": OWL_IMAGES["image_std"],
}  # fmt: skip
DINO = {
    "model_type": "grounding-dino", "architectures": ["GroundingDinoForObjectDetection"], "use_timm_backbone": False,
    "backbone": None, "num_queries": 900, "max_text_len": 256, "num_feature_levels": 4, "two_stage": True,
    "backbone_config": {
        "model_type": "swin", "depths": [2, 2, 6, 2], "out_features": ["stage2", "stage3", "stage4"],
        "out_indices": [2, 3, 4],
    },
    "text_config": {"model_type": "bert"},
}  # fmt: skip
DINO_IMAGES = {
    "image_processor_type": "GroundingDinoImageProcessor", "do_convert_annotations": True, "do_normalize": True,
    "do_pad": True, "do_rescale": True, "do_resize": True, "format": "coco_detection", "pad_size": None, "resample": 2,
    "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 1333, "shortest_edge": 800},
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip


def read(directory: Path) -> ModelCard:
    return read_card(ModelSpec(id="test/model", revision="v1"), str(directory))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        read(directory)
    assert caught.value.extras == {"error_class": "CONFIG"}
    return caught.value.message


def rule_of(card: ModelCard) -> tuple[Detection, ImageRule]:
    assert isinstance(card.extract, Detection)
    assert card.image is not None
    return card.extract, card.image


def test_owlv2(write_files: Any):
    card = read(write_files({"config.json": OWL, "preprocessor_config.json": OWL_IMAGES}))
    rule, image = rule_of(card)
    assert (card.kind, card.inputs, card.outputs, card.revision) == ("extractor", ("image",), ("extract",), "v1")
    assert (card.max_sequence_length, card.vocab_size) == (16, 49_408)
    assert (rule.family, rule.needs_labels) == ("owlv2", True)
    assert (image.square, image.height, image.patch) == (960, 0, 16)
    assert image.count_tokens(20, 3000) == 60 * 60 + 1
    assert image.mean == (0.48145466, 0.4578275, 0.40821073)


def test_owlvit_as_it_was_first_published(write_files: Any):
    card = read(write_files({"config.json": OLD_OWL, "preprocessor_config.json": OLD_OWL_IMAGES}))
    rule, image = rule_of(card)
    assert rule.family == "owlvit"
    assert (image.square, image.height, image.width, image.resample) == (0, 768, 768, 3)
    assert image.count_tokens(768, 768) == 24 * 24 + 1


def test_grounding_dino(write_files: Any):
    card = read(write_files({"config.json": DINO, "preprocessor_config.json": DINO_IMAGES}))
    rule, image = rule_of(card)
    assert (rule.family, rule.needs_labels, rule.num_boxes) == ("grounding-dino", False, 900)
    assert rule.strides == (8, 16, 32, 64)
    assert (card.max_sequence_length, card.vocab_size) == (256, 30_522)
    assert (image.resize, image.keep_aspect, image.longest, image.resample) == ((800, 800), True, 1333, 2)


@pytest.mark.parametrize(
    ("backbone", "strides"),
    [
        (None, (8, 16, 32, 64)),
        ({"model_type": "swin"}, (32, 64, 128, 256)),
        ({"out_features": ["stage1", "stage4"]}, (4, 32, 64, 128)),
        ({"out_indices": [-1], "patch_size": 2}, (16, 32, 64, 128)),
        ({"out_features": ["stem"]}, (4, 8, 16, 32)),
    ],
)
def test_places_follow_the_backbone(write_files: Any, backbone: Any, strides: tuple[int, ...]):
    config = {**DINO, "backbone_config": backbone}
    rule, _ = rule_of(read(write_files({"config.json": config, "preprocessor_config.json": DINO_IMAGES})))
    assert rule.strides == strides


@pytest.mark.parametrize(
    ("config", "images", "reason"),
    [
        ({"architectures": ["Owlv2Model"]}, {}, "Owlv2Model has no boxes"),
        ({"vision_config": {"image_size": 768}}, {}, "makes 960 pixels a side, its vision_config wants 768"),
        ({"vision_config": {"image_size": 960, "patch_size": 7}}, {}, "patch_size 7"),
        ({}, {"size": {"shortest_edge": 960}}, "size {'shortest_edge': 960}"),
        ({}, {"size": {"height": 960, "width": 480}}, "which cannot be run"),
        ({}, {"do_pad": False}, "do_pad or do_rescale false"),
        ({}, {"do_resize": False}, "do_resize false"),
        ({}, {"resample": 0}, "resample 0"),
        ({}, {"image_std": [0.2, 0.2]}, "image_std [0.2, 0.2]"),
    ],
)
def test_an_owlv2_that_cannot_be_run_is_refused(write_files: Any, config: Any, images: Any, reason: str):
    files = {"config.json": {**OWL, **config}, "preprocessor_config.json": {**OWL_IMAGES, **images}}
    assert reason in refusal(write_files(files))


@pytest.mark.parametrize(
    ("config", "images", "reason"),
    [
        ({"use_timm_backbone": True, "backbone": "resnet50"}, {}, "its backbone is resnet50; only transformers' swin"),
        ({"backbone_config": {"model_type": "resnet"}}, {}, "its backbone is resnet"),
        ({"backbone_config": {"out_features": ["stage9"]}}, {}, "its backbone must give ['stage9']"),
        ({"backbone_config": {"out_indices": [7]}}, {}, "its backbone must give [7]"),
        ({"backbone_config": {"depths": 4}}, {}, "depths 4"),
        ({"num_feature_levels": 10**9}, {}, "num_feature_levels 1000000000"),
        ({}, {"size": {"shortest_edge": 800}}, "size {'shortest_edge': 800}"),
        ({}, {"size": {"shortest_edge": 800, "longest_edge": "x"}}, "which cannot be run"),
        ({}, {"pad_size": {"height": 9, "width": 9}}, "pad_size"),
    ],
)
def test_a_grounding_dino_that_cannot_be_run_is_refused(write_files: Any, config: Any, images: Any, reason: str):
    files = {"config.json": {**DINO, **config}, "preprocessor_config.json": {**DINO_IMAGES, **images}}
    assert reason in refusal(write_files(files))


@pytest.mark.parametrize("config", [OWL, DINO])
def test_a_detector_without_settings_of_its_images_is_refused(write_files: Any, config: Any):
    assert "preprocessor_config.json" in refusal(write_files({"config.json": config}))


def test_pickled_weights_are_refused(write_files: Any):
    files = {"config.json": OWL, "preprocessor_config.json": OWL_IMAGES, "model.safetensors": None,
             "pytorch_model.bin": b"x"}  # fmt: skip
    assert "safetensors" in refusal(write_files(files))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "pix2struct"}, "TrOCR"),
        ({"model_type": "colpali"}, "ColPali"),
        ({"model_type": "colqwen2"}, "ColPali"),
        ({"model_type": "idefics3", "vision_config": {}}, "vision and language; ColPali, Docling"),
        ({"model_type": "granite_docling"}, "Docling"),
        ({"model_type": "sam2"}, "SAM"),
        ({"model_type": "whisper"}, "audio"),
        ({"model_type": "newly-published", "audio_config": {}}, "audio)"),
        ({"model_type": "gemma4", "audio_config": {}, "vision_config": {}}, "images and audio beside text)"),
        (
            {"model_type": "qwen2_5_omni", "thinker_config": {"audio_config": {}, "vision_config": {}}},
            "images and audio",
        ),
        ({"model_type": "mm-grounding-dino"}, "detector of other families"),
        ({"model_type": "yolos"}, "detector of other families or of fixed classes"),
    ],
)
def test_a_kind_that_is_not_served_yet_is_named(write_files: Any, config: Any, kind: str):
    message = refusal(write_files({"config.json": config}))
    assert f"its model_type '{config['model_type']}' ({kind}" in message
    assert message.endswith("is of a kind that is not served yet")
