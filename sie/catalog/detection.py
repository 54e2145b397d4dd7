"""Builds the card of a checkpoint that detects objects in images: OWL-ViT, OWLv2 and Grounding DINO.

Reads only bare directories. Their configurations leave out default values, so the defaults are kept here.
Source: transformers 5.23 configuration_owlvit.py, configuration_owlv2.py, configuration_grounding_dino.py,
modeling_swin.py, and image_processing_pil_owlvit.py, image_processing_pil_owlv2.py, image_processing_pil_grounding_dino.py.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.image_rule import read_image_rule, read_settings, read_values
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import check_weights
from sie.values.card import ImageRule, ModelCard
from sie.values.extract import Detection

_ARCHITECTURES: Final = {
    "owlvit": "OwlViTForObjectDetection",
    "owlv2": "Owlv2ForObjectDetection",
    "grounding-dino": "GroundingDinoForObjectDetection",
}
_OWL_MAX_TOKENS: Final = 16
_OWL_VOCAB_SIZE: Final = 49_408
_OWL_PATCH: Final = {"owlvit": 32, "owlv2": 16}
_BERT_VOCAB_SIZE: Final = 30_522
_BERT_MAX_TOKENS: Final = 512
_MAX_TEXT_LEN: Final = 256
_DINO_PATCH: Final = 16
"""Pixels a side of an image token for the scheduler; the model's features have several sizes."""
_LARGEST_EDGE: Final = 4096
_MAX_LEVELS: Final = 64


def read_detector(spec: ModelSpec, checkpoint: Checkpoint) -> ModelCard | None:
    """Return the card of a detector, or None for other models. Raises ModelLoadFailed if it cannot be run."""
    config = checkpoint.read_object("config.json")
    model_type = str(config.get("model_type"))
    expected = _ARCHITECTURES.get(model_type)
    if expected is None:
        return None
    architecture = str((config.get("architectures") or [expected])[0])
    if architecture != expected:
        raise refuse(spec.id, f"{architecture} has no boxes; only {expected} can be run")
    check_weights(checkpoint)
    if model_type == "grounding-dino":
        rule, image, limit, vocab_size = _read_grounding(checkpoint, config)
    else:
        rule, image, limit, vocab_size = _read_owl(checkpoint, config, model_type)
    tokenizer = checkpoint.find("tokenizer.json")
    return ModelCard(
        id=spec.id,
        kind="extractor",
        directory=str(checkpoint.root),
        revision=spec.revision,
        architecture=architecture,
        inputs=("image",),
        outputs=("extract",),
        max_sequence_length=limit,
        vocab_size=vocab_size,
        tokenizer_file=str(tokenizer) if tokenizer else "",
        image=image,
        extract=rule,
    )


def _read_owl(checkpoint: Checkpoint, config: dict[str, Any], model_type: str) -> tuple[Detection, ImageRule, int, int]:
    """Return the rules, the most tokens of a label, and the size of the vocabulary."""
    text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
    size, patch = vision.get("image_size", 768), vision.get("patch_size", _OWL_PATCH[model_type])
    if not isinstance(size, int) or not isinstance(patch, int) or not 0 < patch <= size or size % patch:
        raise refuse(checkpoint.id, f"its vision_config has image_size {size!r} and patch_size {patch!r}")
    image = _padded_rule(checkpoint) if model_type == "owlv2" else read_image_rule(checkpoint, "OwlViTImageProcessor")
    found = image.square or (image.height if image.height == image.width else 0)
    if found != size:
        raise refuse(checkpoint.id, f"its image processor makes {found} pixels a side, its vision_config wants {size}")
    positions = int(text.get("max_position_embeddings", _OWL_MAX_TOKENS))
    rule = Detection(family="owlv2" if model_type == "owlv2" else "owlvit")
    image = msgspec.structs.replace(image, patch=patch, extra_tokens=1)
    return rule, image, positions, int(text.get("vocab_size", _OWL_VOCAB_SIZE))


def _padded_rule(checkpoint: Checkpoint) -> ImageRule:
    """Return OWLv2's image rule: pad below and to the right to a square, blur, resize."""
    config = read_settings(checkpoint, "Owlv2ImageProcessor")
    size = config["size"]
    side = size.get("height") if isinstance(size, dict) else None
    if not isinstance(side, int) or not 0 < side <= _LARGEST_EDGE or size.get("width") != side:
        raise refuse(checkpoint.id, f"its image processor has size {size!r}, which cannot be run")
    rule = read_values(checkpoint, config)
    # The library passes `resample` on as the flag to blur: every filter except the first is true.
    if not config["do_pad"] or not rule.resample or not config.get("do_rescale", True):
        raise refuse(checkpoint.id, "its image processor has do_pad or do_rescale false, or resample 0")
    return msgspec.structs.replace(rule, square=side)


def _read_grounding(checkpoint: Checkpoint, config: dict[str, Any]) -> tuple[Detection, ImageRule, int, int]:
    """Return the rules, the most tokens of a text, and the size of the vocabulary."""
    text = config.get("text_config") or {}
    limit = min(
        int(config.get("max_text_len", _MAX_TEXT_LEN)), int(text.get("max_position_embeddings", _BERT_MAX_TOKENS))
    )
    rule = Detection(
        family="grounding-dino",
        strides=_strides(checkpoint, config),
        num_boxes=int(config.get("num_queries", 900)) if config.get("two_stage", True) else 0,
    )
    return rule, _fitted_rule(checkpoint), limit, int(text.get("vocab_size", _BERT_VOCAB_SIZE))


def _fitted_rule(checkpoint: Checkpoint) -> ImageRule:
    """Return Grounding DINO's image rule: resize to the shorter side, or less when the longer side would be too long.

    do_pad pads the images of a batch to one size. This server batches images of equal size instead.
    """
    config = read_settings(checkpoint, "GroundingDinoImageProcessor")
    size = config["size"]
    named = {key: value for key, value in size.items() if value is not None} if isinstance(size, dict) else {}
    edges = [named.get("shortest_edge"), named.get("longest_edge")]
    if named.keys() != {"shortest_edge", "longest_edge"} or not all(
        isinstance(edge, int) and 0 < edge <= _LARGEST_EDGE for edge in edges
    ):
        raise refuse(checkpoint.id, f"its image processor has size {size!r}, which cannot be run")
    if config.get("pad_size"):
        raise refuse(checkpoint.id, f"its image processor has pad_size {config['pad_size']!r}, which cannot be run")
    shortest, longest = int(named["shortest_edge"]), int(named["longest_edge"])
    rule = read_values(checkpoint, config)
    return msgspec.structs.replace(
        rule, resize=(shortest, shortest), keep_aspect=True, longest=longest, patch=_DINO_PATCH
    )


def _strides(checkpoint: Checkpoint, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the stride in pixels of each feature level: Swin's stages first, then levels that double the stride."""
    backbone: dict[str, Any] = config.get("backbone_config") or {"out_indices": [2, 3, 4]}
    kind = backbone.get("model_type", "swin")
    if kind != "swin" or config.get("use_timm_backbone"):
        raise refuse(
            checkpoint.id, f"its backbone is {config.get('backbone') or kind}; only transformers' swin can be run"
        )
    stages, num_levels = _stages(checkpoint, backbone), config.get("num_feature_levels", 4)
    first = backbone.get("patch_size", 4)
    if not all(isinstance(number, int) and 0 < number <= _MAX_LEVELS for number in (first, num_levels)):
        raise refuse(checkpoint.id, f"its patch_size is {first!r} and its num_feature_levels {num_levels!r}")
    # The stem and the first stage have a stride of one patch; each later stage doubles it.
    strides = [first << max(stage - 1, 0) for stage in stages]
    while len(strides) < num_levels:
        strides.append(2 * strides[-1])
    return tuple(strides)


def _stages(checkpoint: Checkpoint, backbone: dict[str, Any]) -> list[int]:
    """Return the stages whose features Swin outputs: 0 is the stem; the last stage if the config names none."""
    depths, indices, names = (
        backbone.get("depths", [2, 2, 6, 2]),
        backbone.get("out_indices"),
        backbone.get("out_features"),
    )
    if not isinstance(depths, list) or not 0 < len(depths) <= _MAX_LEVELS:
        raise refuse(checkpoint.id, f"its backbone_config has depths {depths!r}")
    known = ["stem", *(f"stage{number}" for number in range(1, len(depths) + 1))]
    try:
        if indices:
            return [range(len(known))[index] for index in indices]
        return [known.index(name) for name in names or known[-1:]]
    except (IndexError, TypeError, ValueError):
        raise refuse(checkpoint.id, f"its backbone must give {indices or names!r}, but has only {known}") from None
