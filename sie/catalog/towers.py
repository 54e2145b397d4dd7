"""Builds the card of a checkpoint with a text tower and an image tower: CLIP, SigLIP and related models.

Reads a bare directory, or one of sentence-transformers with a CLIPModel, or a Transformer for both, and perhaps a
Normalize. Their configurations leave out default values, so the defaults are kept here.
Source: transformers 5.23 configuration_clip.py, configuration_siglip.py, configuration_chinese_clip.py,
configuration_altclip.py; sentence_transformers 6.2 modules/clip_model.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.image_rule import read_image_rule
from sie.catalog.modules import Module
from sie.catalog.open_clip import read_open_clip
from sie.values.card import ImageRule, ModelCard, TextPadding


class _Family(NamedTuple):
    """The defaults that a model_type's configuration leaves out."""

    architecture: str
    vocab_size: int
    max_positions: int
    """Most tokens of a text, special ones included."""
    dims: int
    patch: int
    processor: str = "CLIPImageProcessor"
    has_class_token: bool = True
    """Whether an image has one more token beside its patches."""
    pads: bool = False
    """Whether every text is padded to max_positions, and attends to its padding."""


_FAMILIES = {
    "clip": _Family("CLIPModel", 49_408, 77, 512, 32),
    "siglip": _Family("SiglipModel", 32_000, 64, 768, 16, "SiglipImageProcessor", has_class_token=False, pads=True),
    "chinese_clip": _Family("ChineseCLIPModel", 30_522, 512, 512, 32),
    "altclip": _Family("AltCLIPModel", 250_002, 514, 768, 32),
}
_IMAGE_SIZE = 224
_TRANSFORMER_MODULES = ("CLIPModel", "Transformer")
_FEATURES = {
    kind: {"method": f"get_{kind}_features", "method_output_name": "pooler_output"} for kind in ("text", "image")
}
_HARMLESS_SETTINGS = {"transformer_task", "max_seq_length", "modality_config", "module_output_name", "do_lower_case"}


def read_towers(checkpoint: Checkpoint, transformer: Checkpoint, modules: list[Module] | None) -> ModelCard | None:
    """Return the card of a dual encoder without its revision, or None for another kind of checkpoint.

    Raises ModelLoadFailed if it cannot be run exactly as its own library runs it.
    """
    config = transformer.read_object("config.json")
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return read_open_clip(checkpoint) if modules is None else None
    architecture = str((config.get("architectures") or [family.architecture])[0])
    if architecture != family.architecture:
        raise refuse(checkpoint.id, f"{architecture} is not a model of texts and images")
    _check_modules(checkpoint, transformer, modules)
    text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
    settings = transformer.read_object("tokenizer_config.json")
    limit = _max_sequence_length(transformer, settings, int(text.get("max_position_embeddings", family.max_positions)))
    tokenizer = transformer.find("tokenizer.json")
    tokenizer_class = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    return ModelCard(
        id=checkpoint.id,
        kind="dual-encoder",
        directory=str(transformer.root),
        architecture=architecture,
        inputs=("text", "image"),
        dims={"dense": _width(config, text, family)},
        max_sequence_length=limit,
        vocab_size=int(text.get("vocab_size", family.vocab_size)),
        tokenizer_file=str(tokenizer) if tokenizer else "",
        # These two classes change a text before their tokenizer.json sees it.
        lowercase=bool(
            tokenizer_class in ("SiglipTokenizer", "Siglip2Tokenizer") and settings.get("do_lower_case", True)
        ),
        strip=tokenizer_class == "SiglipTokenizer",
        drop_punctuation=tokenizer_class == "SiglipTokenizer",
        padding=_padding(transformer, settings, limit) if family.pads else None,
        normalize=True,
        image=_image_rule(transformer, vision, family),
    )


def _check_modules(checkpoint: Checkpoint, transformer: Checkpoint, modules: list[Module] | None) -> None:
    names = [module.name for module in modules or ()]
    if modules is not None and (not names or names[0] not in _TRANSFORMER_MODULES or set(names[1:]) - {"Normalize"}):
        raise refuse(checkpoint.id, f"modules.json names {names}; a model of texts and images may only be normalised")
    settings = transformer.read_object("sentence_bert_config.json")
    modalities: dict[str, Any] = settings.get("modality_config") or {}
    for kind, method in _FEATURES.items():
        if modalities.get(kind, method) != method:
            raise refuse(checkpoint.id, f"its modality_config reads {kind} in a way that cannot be run")
    for key in sorted(settings.keys() - _HARMLESS_SETTINGS):
        if settings[key]:
            raise refuse(checkpoint.id, f"sentence_bert_config.json sets {key}, which cannot be run")


def _width(config: dict[str, Any], text: dict[str, Any], family: _Family) -> int:
    if family.architecture == "SiglipModel":
        return int(text.get("projection_size") or text.get("hidden_size", family.dims))
    return int(config.get("projection_dim", family.dims))


def _max_sequence_length(transformer: Checkpoint, settings: dict[str, Any], positions: int) -> int:
    """Return the limit in tokens: the tokenizer's own, at most the number of positions."""
    limit = settings.get("model_max_length") or positions
    if not isinstance(limit, int | float) or limit < 1:
        raise refuse(transformer.id, f"its maximum sequence length is {limit!r}")
    return int(min(limit, positions))


def _padding(transformer: Checkpoint, settings: dict[str, Any], length: int) -> TextPadding:
    """Return the padding of SigLIP's texts; its text tower was trained with padding, reads it and pools its last token.

    Source: transformers 5.23 docs of SiglipModel (padding="max_length").
    """
    token = settings.get("pad_token") or transformer.read_object("special_tokens_map.json").get("pad_token") or "</s>"
    text = token.get("content") if isinstance(token, dict) else token
    is_left = settings.get("padding_side", "right") == "left"
    return TextPadding(token=str(text), length=length, side="left" if is_left else "right")


def _image_rule(transformer: Checkpoint, vision: dict[str, Any], family: _Family) -> ImageRule:
    if vision.get("num_channels", 3) != 3:
        raise refuse(transformer.id, f"its images have num_channels {vision['num_channels']}")
    image_size, patch = vision.get("image_size", _IMAGE_SIZE), vision.get("patch_size", family.patch)
    if not isinstance(image_size, int) or not isinstance(patch, int) or patch < 1:
        raise refuse(transformer.id, f"its vision_config has image_size {image_size!r} and patch_size {patch!r}")
    rule = read_image_rule(transformer, family.processor)
    if (rule.height, rule.width) != (image_size, image_size):
        raise refuse(
            transformer.id,
            f"its image processor makes {rule.height} x {rule.width} pixels, its vision_config wants {image_size}",
        )
    return msgspec.structs.replace(rule, patch=patch, extra_tokens=int(family.has_class_token))
