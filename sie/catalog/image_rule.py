"""Reads an image processor's settings from `processor_config.json` or `preprocessor_config.json`, old and new.

Follows transformers' processors on Pillow. A setting that would change a pixel and is not supported is refused by name.
Source: transformers 5.23 image_processing_base.py (get_image_processor_dict), image_processing_backends.py
(PilBackend), and the defaults of each family's image_processing_pil_*.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.values.card import ImageRule

_CLIP: dict[str, Any] = {
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SIGLIP: dict[str, Any] = {
    "size": {"height": 224, "width": 224},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_OWL: dict[str, Any] = {"image_mean": _CLIP["image_mean"], "image_std": _CLIP["image_std"]}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIP": _CLIP,
    "ChineseCLIP": _CLIP,
    "Siglip": _SIGLIP,
    "OwlViT": {**_OWL, "size": {"height": 768, "width": 768}},
    "Owlv2": {**_OWL, "size": {"height": 960, "width": 960}, "do_pad": True, "resample": 2},
    "GroundingDino": {
        "size": {"shortest_edge": 800, "longest_edge": 1333},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "do_pad": True,
        "resample": 2,
    },
    "Donut": {**_SIGLIP, "size": {"height": 2560, "width": 1920}, "resample": 2},
}
_SUFFIXES = ("Pil", "Fast", "ImageProcessor", "FeatureExtractor")
_BICUBIC = 3
_NUM_FILTERS = 6


def read_image_rule(checkpoint: Checkpoint, default_type: str) -> ImageRule:
    """Return the rule to resize, cut, rescale and normalise a checkpoint's images.

    default_type is the processor class when the file does not name one.

    Raises ModelLoadFailed when the settings are missing or cannot be followed exactly.
    """
    config = read_settings(checkpoint, default_type)
    if config.get("do_pad"):
        raise refuse(checkpoint.id, "its image processor has do_pad, which cannot be run")
    resize, keep_aspect = _resize(checkpoint, config["size"])
    height, width = _cut(checkpoint, config, resize, keep_aspect)
    rule = read_values(checkpoint, config)
    return msgspec.structs.replace(rule, height=height, width=width, resize=resize, keep_aspect=keep_aspect)


def read_settings(checkpoint: Checkpoint, default_type: str) -> dict[str, Any]:
    """Return the settings of a checkpoint's image processor, with the defaults of its class.

    Raises ModelLoadFailed as `read_image_rule` does.
    """
    nested = checkpoint.read_object("processor_config.json").get("image_processor")
    given: dict[str, Any] = nested if isinstance(nested, dict) else checkpoint.read_object("preprocessor_config.json")
    if not given:
        raise refuse(checkpoint.id, "there is no preprocessor_config.json that says how images are read")
    config = {
        **_defaults(checkpoint, given, default_type),
        **{key: value for key, value in given.items() if value is not None},
    }
    if not config.get("do_resize", True):
        raise refuse(checkpoint.id, "its image processor has do_resize false: images of any size cannot be run")
    return config


def read_values(checkpoint: Checkpoint, config: dict[str, Any]) -> ImageRule:
    """Return a rule without sizes: the resize filter, and the scale and normalisation of channel values."""
    resample = config.get("resample", _BICUBIC)
    if not isinstance(resample, int) or not 0 <= resample < _NUM_FILTERS:
        raise refuse(checkpoint.id, f"its image processor has resample {resample!r}, which is not a Pillow filter")
    normalizes = config.get("do_normalize", True)
    return ImageRule(
        resample=resample,
        rescale_factor=float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
        mean=_channels(checkpoint, config, "image_mean") if normalizes else (0.0, 0.0, 0.0),
        std=_channels(checkpoint, config, "image_std") if normalizes else (1.0, 1.0, 1.0),
    )


def _defaults(checkpoint: Checkpoint, given: dict[str, Any], default_type: str) -> dict[str, Any]:
    """Return the default settings of the processor's class."""
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type") or default_type)
    family = name
    for suffix in _SUFFIXES:
        family = family.removesuffix(suffix)
    if family not in _DEFAULTS:
        raise refuse(checkpoint.id, f"its image_processor_type is {name!r}; only {', '.join(_DEFAULTS)} can be run")
    return _DEFAULTS[family]


def _resize(checkpoint: Checkpoint, size: Any) -> tuple[tuple[int, int], bool]:
    """Return (height, width) to resize to, and whether only the shorter side gets this length.

    A plain number, the oldest form, is the shorter side.
    """
    if isinstance(size, int) and size > 0:
        return (size, size), True
    if isinstance(size, dict):
        named = {key: value for key, value in size.items() if value is not None}
        if all(isinstance(value, int) and value > 0 for value in named.values()):
            if named.keys() == {"shortest_edge"}:
                return (named["shortest_edge"], named["shortest_edge"]), True
            if named.keys() == {"height", "width"}:
                return (named["height"], named["width"]), False
    raise refuse(checkpoint.id, f"its image processor has size {size!r}, which cannot be run")


def _cut(checkpoint: Checkpoint, config: dict[str, Any], resize: tuple[int, int], keep_aspect: bool) -> tuple[int, int]:
    """Return (height, width) of the image after the centre crop."""
    if not config.get("do_center_crop", False):
        if keep_aspect:
            raise refuse(checkpoint.id, "its image processor has do_center_crop false: sizes would differ")
        return resize
    crop = config.get("crop_size")
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    if not isinstance(crop, dict) or not all(isinstance(crop.get(key), int) for key in ("height", "width")):
        raise refuse(checkpoint.id, f"its image processor has crop_size {crop!r}, which cannot be run")
    height, width = crop["height"], crop["width"]
    if not (0 < height <= resize[0] and 0 < width <= resize[1]):
        raise refuse(checkpoint.id, f"its image processor has crop_size {crop!r}, over its size {list(resize)}")
    return height, width


def _channels(checkpoint: Checkpoint, config: dict[str, Any], key: str) -> tuple[float, float, float]:
    value = config[key]
    values = [value] * 3 if isinstance(value, int | float) else value
    is_good = isinstance(values, list) and len(values) == 3 and all(isinstance(each, int | float) for each in values)
    if not is_good or (key == "image_std" and not all(values)):
        raise refuse(checkpoint.id, f"its image processor has {key} {value!r}")
    return float(values[0]), float(values[1]), float(values[2])
