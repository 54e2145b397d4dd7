"""Builds the card of a SigLIP model in open_clip's layout: `open_clip_config.json`, with an image tower of timm.

The library's SiglipModel computes the same, from weights under other names. A setting that it would not compute is refused
by name. Source: open_clip 3.3 model.py, transformer.py (TextTransformer), timm_model.py, transform.py, tokenizer.py; timm
1.0 vision_transformer.py, layers/attention_pool.py.
"""

from __future__ import annotations

import re
from typing import Any, Final

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.weights import check_weights, tensor_shapes, weight_files
from sie.values.card import ImageRule, ModelCard, TextPadding

CONFIG: Final = "open_clip_config.json"
_TRUNK: Final = re.compile(r"vit_(base|large)_patch\d+_siglip_\d+(?:\.\w+)?")
_HEADS: Final = {"base": 12, "large": 16}
"""The attention heads of timm's towers by the size in their name; other sizes are read from the weights."""
_VISION: Final = {"timm_model_pretrained": None, "timm_pool": "map", "timm_proj": "none", "timm_drop": None}
_TEXT: Final = {
    "context_length": None, "vocab_size": None, "hf_tokenizer_name": None, "tokenizer_kwargs": None, "width": None,
    "heads": None, "layers": None, "norm_kwargs": None, "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
}  # fmt: skip
"""The keys that may be set, each with the only value that can be computed; None: any value."""
_PREFIX: Final = "^(?:model\\.)?"
_WEIGHT_NAMES: Final = (
    (_PREFIX + "visual\\.trunk\\.", "vision_model."),
    (_PREFIX + "text\\.", "text_model."),
    (_PREFIX + "logit_", "logit_"),
    ("\\.patch_embed\\.proj\\.", ".embeddings.patch_embedding."),
    ("\\.pos_embed$", ".embeddings.position_embedding.weight[0]"),
    ("\\.positional_embedding$", ".embeddings.position_embedding.weight"),
    ("\\.token_embedding\\.", ".embeddings.token_embedding."),
    ("\\.(?:blocks|transformer\\.resblocks)\\.", ".encoder.layers."),
    ("(layers\\.\\d+)\\.(?:norm|ln_)([12])\\.", "\\1.layer_norm\\2."),
    ("\\.attn\\.(?:qkv\\.|in_proj_)", ".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
    ("\\.attn\\.(?:out_)?proj\\.", ".self_attn.out_proj."),
    ("\\.mlp\\.c_fc\\.", ".mlp.fc1."),
    ("\\.mlp\\.c_proj\\.", ".mlp.fc2."),
    ("^vision_model\\.norm\\.", "vision_model.post_layernorm."),
    ("\\.ln_final\\.", ".final_layer_norm."),
    ("\\.text_projection\\.", ".head."),
    ("\\.attn_pool\\.latent$", ".head.probe"),
    ("\\.attn_pool\\.q\\.(weight|bias)$", ".head.attention.in_proj_\\1|0"),
    ("\\.attn_pool\\.kv\\.(weight|bias)$", ".head.attention.in_proj_\\1|1"),
    ("\\.attn_pool\\.proj\\.", ".head.attention.out_proj."),
    ("\\.attn_pool\\.norm\\.", ".head.layernorm."),
    ("\\.attn_pool\\.mlp\\.", ".head.mlp."),
)
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_EPS: Final = 1e-6


def read_open_clip(checkpoint: Checkpoint) -> ModelCard | None:
    """Return the card of such a checkpoint without its revision, or None for others. Raises ModelLoadFailed."""
    whole = checkpoint.read_object(CONFIG)
    if not whole:
        return None
    model, preprocess = _part(checkpoint, whole, "model_cfg"), whole.get("preprocess_cfg") or {}
    text, vision = _part(checkpoint, model, "text_cfg"), _part(checkpoint, model, "vision_cfg")
    _check_values(checkpoint, "text_cfg", text, _TEXT)
    _check_values(checkpoint, "vision_cfg", vision, {**_VISION, "image_size": None, "timm_model_name": None})
    check_weights(checkpoint)
    tower = _vision_config(checkpoint, vision)
    if tower["hidden_size"] != model.get("embed_dim"):
        raise refuse(
            checkpoint.id,
            f"{CONFIG}: embed_dim is {model.get('embed_dim')!r}, its image tower has {tower['hidden_size']}",
        )
    length, settings = int(text["context_length"]), checkpoint.read_object("tokenizer_config.json")
    cleaning = (text.get("tokenizer_kwargs") or {}).get("clean")
    if cleaning not in (None, "whitespace", "canonicalize"):
        raise refuse(checkpoint.id, f"{CONFIG}: its texts are cleaned by {cleaning!r}, which cannot be run")
    pad = settings.get("pad_token") or "</s>"
    tokenizer = checkpoint.find("tokenizer.json")
    texts = _text_config(text, length, int(model["embed_dim"]))
    return ModelCard(
        id=checkpoint.id,
        kind="dual-encoder",
        directory=str(checkpoint.root),
        architecture="SiglipModel",
        config_changes={
            "model_type": "siglip", "architectures": ["SiglipModel"], "text_config": texts, "vision_config": tower,
        },
        weight_names=_WEIGHT_NAMES,
        inputs=("text", "image"),
        dims={"dense": int(model["embed_dim"])},
        max_sequence_length=length,
        vocab_size=texts["vocab_size"],
        tokenizer_file=str(tokenizer) if tokenizer else "",
        lowercase=cleaning == "canonicalize",
        strip=True,
        drop_punctuation=cleaning == "canonicalize",
        splits_underscores=cleaning == "canonicalize",
        padding=TextPadding(token=str(pad["content"] if isinstance(pad, dict) else pad), length=length),
        normalize=True,
        image=_image_rule(checkpoint, preprocess, tower),
    )  # fmt: skip


def _text_config(text: dict[str, Any], length: int, width: int) -> dict[str, Any]:
    """Return the `text_config` of transformers' class, for texts of length tokens and vectors of this width."""
    return {
        "vocab_size": int(text["vocab_size"]), "hidden_size": int(text["width"]), "intermediate_size": 4 * int(text["width"]),
        "num_hidden_layers": int(text["layers"]), "num_attention_heads": int(text["heads"]), "hidden_act": "gelu",
        "max_position_embeddings": length, "projection_size": width,
        "layer_norm_eps": float((text.get("norm_kwargs") or {}).get("eps", 1e-5)),
    }  # fmt: skip


def _part(checkpoint: Checkpoint, config: dict[str, Any], key: str) -> dict[str, Any]:
    part = config.get(key)
    if not isinstance(part, dict):
        raise refuse(checkpoint.id, f"{CONFIG} has no {key}")
    return part


def _check_values(checkpoint: Checkpoint, name: str, part: dict[str, Any], known: dict[str, Any]) -> None:
    for key in sorted(part.keys() | {key for key, value in known.items() if value}):
        if key not in known or known[key] not in (None, part.get(key)):
            wanted = f"; only {known[key]!r} is computed" if key in known else ", which is not computed"
            raise refuse(checkpoint.id, f"{CONFIG}: {name} has {key} {part.get(key)!r}{wanted}")


def _vision_config(checkpoint: Checkpoint, vision: dict[str, Any]) -> dict[str, Any]:
    """Return the library's configuration of the image tower, with the sizes of its weights."""
    trunk = _TRUNK.fullmatch(str(vision.get("timm_model_name")))
    if trunk is None:
        raise refuse(
            checkpoint.id,
            f"{CONFIG}: its image tower {vision.get('timm_model_name')!r} is not one of SigLIP's that can be run",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(checkpoint):
        shapes |= tensor_shapes(checkpoint.id, str(path))
    sizes = {name.partition("visual.trunk.")[2]: shape for name, shape in shapes.items()}
    patches, first = sizes.get("patch_embed.proj.weight", ()), sizes.get("blocks.0.mlp.fc1.weight", ())
    if len(patches) != 4 or len(first) != 2:
        raise refuse(checkpoint.id, "its weights are not those of an image tower of timm")
    return {
        "hidden_size": patches[0], "intermediate_size": first[0], "patch_size": patches[3],
        "num_hidden_layers": sum(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name) is not None for name in sizes),
        "num_attention_heads": _HEADS[trunk[1]], "image_size": int(vision["image_size"]), "hidden_act": "gelu",
        "layer_norm_eps": _EPS,
    }  # fmt: skip


def _image_rule(checkpoint: Checkpoint, preprocess: dict[str, Any], tower: dict[str, Any]) -> ImageRule:
    side, mode = tower["image_size"], preprocess.get("resize_mode", "shortest")
    if mode not in ("squash", "shortest") or preprocess.get("interpolation", "bicubic") != "bicubic":
        raise refuse(
            checkpoint.id, f"{CONFIG}: preprocess_cfg is {preprocess}, and only bicubic squash or shortest can be run"
        )
    mean, std = (tuple(map(float, preprocess.get(key, value))) for key, value in (("mean", _MEAN), ("std", _STD)))
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise refuse(checkpoint.id, f"{CONFIG}: preprocess_cfg has mean {mean} and std {std}")
    return ImageRule(
        height=side, width=side, resize=(side, side), keep_aspect=mode == "shortest", rescale_factor=1 / 255,
        mean=mean, std=std, patch=tower["patch_size"],
    )  # fmt: skip
