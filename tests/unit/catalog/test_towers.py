"""Cards of dual encoders, read from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.values.card import ImageRule, ModelCard, TextPadding
from sie.values.errors import ModelLoadFailed

CLIP = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "projection_dim": 512,
    "text_config": {},
    "vision_config": {},
}
SIGLIP = {"model_type": "siglip", "architectures": ["SiglipModel"], "text_config": {}, "vision_config": {}}
# As openai/clip-vit-base-patch32 has it: from before sizes had names and processors were told apart from extractors.
OLD_CLIP_IMAGES = {
    "crop_size": 224, "do_center_crop": True, "do_normalize": True, "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor", "resample": 3, "size": 224,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
SIGLIP_IMAGES = {
    "image_processor_type": "SiglipImageProcessor", "size": {"height": 224, "width": 224}, "resample": 3,
    "do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 0.00392156862745098,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
SIGLIP_TOKENIZER = {"tokenizer_class": "SiglipTokenizer", "model_max_length": 64, "pad_token": "</s>"}


def clip_files(**changes: Any) -> dict[str, Any]:
    return {"config.json": CLIP, "preprocessor_config.json": OLD_CLIP_IMAGES, **changes}


def siglip_files(tokenizer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    files = {"config.json": SIGLIP, "preprocessor_config.json": SIGLIP_IMAGES, "tokenizer_config.json": tokenizer}
    return {**files, **changes}


def read(directory: Path) -> ModelCard:
    return read_card(ModelSpec(id="test/dual", revision="v1"), str(directory))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        read(directory)
    assert caught.value.extras == {"error_class": "CONFIG"}
    return caught.value.message


def test_clip_as_it_was_first_published(write_files: Any):
    card = read(write_files(clip_files()))
    assert (card.kind, card.inputs, card.dims, card.revision) == (
        "dual-encoder",
        ("text", "image"),
        {"dense": 512},
        "v1",
    )
    assert (card.max_sequence_length, card.vocab_size, card.padding, card.lowercase) == (77, 49408, None, False)
    assert card.image == ImageRule(
        height=224, width=224, resize=(224, 224), keep_aspect=True, resample=3, rescale_factor=1 / 255,
        mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711), patch=32, extra_tokens=1,
    )  # fmt: skip
    assert card.image.count_tokens(224, 224) == 50


def test_siglip_is_filled_up_and_loses_punctuation(write_files: Any):
    card = read(write_files(siglip_files(SIGLIP_TOKENIZER)))
    assert (card.dims, card.max_sequence_length, card.vocab_size) == ({"dense": 768}, 64, 32000)
    assert (card.lowercase, card.strip, card.drop_punctuation) == (True, True, True)
    assert card.padding == TextPadding(token="</s>", length=64)
    assert card.image is not None
    assert (card.image.keep_aspect, card.image.resize, card.image.patch) == (False, (224, 224), 16)


@pytest.mark.parametrize(("name", "lowers"), [("GemmaTokenizerFast", False), ("Siglip2Tokenizer", True)])
def test_siglip2_of_one_size_keeps_punctuation(write_files: Any, name: str, lowers: bool):
    tokenizer = {
        "tokenizer_class": name,
        "model_max_length": 1e30,
        "pad_token": {"content": "<pad>"},
        "padding_side": "left",
    }
    card = read(write_files(siglip_files(tokenizer)))
    assert (card.lowercase, card.strip, card.drop_punctuation) == (lowers, False, False)
    assert card.padding == TextPadding(token="<pad>", length=64, side="left")


@pytest.mark.parametrize("family", ["clip", "siglip", "chinese_clip", "altclip"])
def test_what_a_configuration_leaves_out_is_the_library_s_default(write_files: Any, family: str):
    config = transformers.CONFIG_MAPPING[family]()
    names = {
        "clip": "CLIPModel",
        "siglip": "SiglipModel",
        "chinese_clip": "ChineseCLIPModel",
        "altclip": "AltCLIPModel",
    }
    images = {"image_processor_type": "SiglipImageProcessor" if family == "siglip" else "CLIPImageProcessor"}
    card = read(
        write_files(
            {
                "config.json": {"model_type": family, "architectures": [names[family]]},
                "preprocessor_config.json": images,
                "tokenizer_config.json": {},
            }
        )
    )
    text, vision = config.text_config, config.vision_config
    width = text.projection_size if family == "siglip" else config.projection_dim
    assert (card.vocab_size, card.max_sequence_length, card.dims) == (
        text.vocab_size, text.max_position_embeddings, {"dense": width},
    )  # fmt: skip
    assert card.image is not None
    assert (card.image.patch, card.image.height) == (vision.patch_size, vision.image_size)
    kind = transformers.SiglipImageProcessorPil if family == "siglip" else transformers.CLIPImageProcessorPil
    processor = kind()
    assert card.image.mean == tuple(processor.image_mean)
    assert card.image.std == tuple(processor.image_std)
    assert (card.image.resample, card.image.rescale_factor) == (processor.resample, processor.rescale_factor)


def test_nested_settings_of_new_files_win(write_files: Any):
    nested = {**SIGLIP_IMAGES, "image_mean": 0.25, "do_pad": None}
    files = siglip_files(SIGLIP_TOKENIZER, **{"processor_config.json": {"image_processor": nested}})
    image = read(write_files(files)).image
    assert image is not None
    assert image.mean == (0.25, 0.25, 0.25)


def test_steps_that_are_turned_off_leave_the_values_alone(write_files: Any):
    images = {**SIGLIP_IMAGES, "do_rescale": False, "do_normalize": False}
    image = read(write_files(siglip_files(SIGLIP_TOKENIZER, **{"preprocessor_config.json": images}))).image
    assert image is not None
    assert (image.rescale_factor, image.mean, image.std) == (1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_pad": True}, "do_pad"),
        ({"size": {"longest_edge": 224}}, "longest_edge"),
        ({"size": {"shortest_edge": 0}}, "size"),
        ({"do_center_crop": False}, "do_center_crop"),
        ({"crop_size": 336}, "crop_size"),
        ({"crop_size": {"height": 200, "width": 200}}, "200 x 200 pixels, its vision_config wants 224"),
        ({"resample": 9}, "resample 9"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [1, 0, 1]}, "image_std"),
        ({"feature_extractor_type": "BitImageProcessor"}, "BitImageProcessor"),
    ],
)
def test_images_that_cannot_be_read_exactly_are_refused_by_their_key(write_files: Any, changes: Any, named: str):
    files = clip_files(**{"preprocessor_config.json": {**OLD_CLIP_IMAGES, **changes}})
    assert named in refusal(write_files(files))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"preprocessor_config.json": None}, "preprocessor_config.json"),
        ({"config.json": {**CLIP, "architectures": ["CLIPForImageClassification"]}}, "CLIPForImageClassification"),
        ({"config.json": {**CLIP, "vision_config": {"num_channels": 1}}}, "num_channels"),
        ({"config.json": {**CLIP, "vision_config": {"image_size": [224, 224]}}}, "image_size"),
        ({"modules.json": [{"path": "", "type": "sentence_transformers.models.Transformer"},
                           {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]}, "Pooling"),
        ({"sentence_bert_config.json": {"modality_config": {"image": {"method": "forward"}}}}, "modality_config"),
        ({"sentence_bert_config.json": {"processing_kwargs": {"text": {"padding": "longest"}}}}, "processing_kwargs"),
        ({"model.safetensors": None, "pytorch_model.bin": b""}, "pickled"),
    ],
)  # fmt: skip
def test_what_would_give_other_vectors_is_refused(write_files: Any, files: dict[str, Any], named: str):
    assert named in refusal(write_files(clip_files(**files)))


@pytest.mark.parametrize("path", ["", "0_CLIPModel"])
@pytest.mark.parametrize("normalize", [[], [{"path": "1_Normalize", "type": "sentence_transformers.models.Normalize"}]])
def test_sentence_transformers_layout(write_files: Any, path: str, normalize: list[Any]):
    files = clip_files(**{"tokenizer.json": {}, "tokenizer_config.json": {}, "model.safetensors": b"weights"})
    prefix = f"{path}/" if path else ""
    modules = [{"path": path, "type": "sentence_transformers.models.CLIPModel"}, *normalize]
    directory = write_files({**{prefix + name: content for name, content in files.items()}, "modules.json": modules})
    card = read(directory)
    assert card.kind == "dual-encoder"
    assert card.tokenizer_file == str(directory / path / "tokenizer.json")
