"""Builds the card of a checkpoint that generates texts about images: Florence-2 and Donut.

Florence-2 comes in two layouts: transformers' own, and that of its authors, whose code on the hub is replaced by the
library's class (`remote_code.toml`), with other values here and with a tokenizer that gets the tokens its code adds.
Source: transformers 5.23 configuration_florence2.py, processing_florence2.py, generation/utils.py; 4.57
convert_florence2_original_pytorch_to_hf.py; processing_florence2.py and configuration_florence2.py of
https://huggingface.co/microsoft/Florence-2-base.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, Final

import msgspec

from sie.catalog.added_tokens import AddedToken, read_added_tokens
from sie.catalog.files import Checkpoint, refuse
from sie.catalog.generation_config import is_off
from sie.catalog.image_rule import read_image_rule, read_settings, read_values
from sie.catalog.spec import ModelSpec
from sie.catalog.tokenizer import keep_tokenizer
from sie.catalog.weights import check_weights
from sie.values.card import ImageRule, ModelCard
from sie.values.extract import ImageToText

_ARCHITECTURES: Final = {
    "florence2": "Florence2ForConditionalGeneration",
    "vision-encoder-decoder": "VisionEncoderDecoderModel",
}
_MAX_NEW_TOKENS: Final = 1024
_LARGEST_EDGE: Final = 4096
_TEXT_VALUES: Final = (
    "vocab_size", "d_model", "encoder_layers", "encoder_ffn_dim", "encoder_attention_heads", "decoder_layers",
    "decoder_ffn_dim", "decoder_attention_heads", "activation_function", "scale_embedding", "max_position_embeddings",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
)  # fmt: skip
_VISION_VALUES: Final = (
    "patch_size", "patch_stride", "patch_padding", "patch_prenorm", "num_heads", "num_groups", "depths", "window_size",
    "projection_dim",
)  # fmt: skip
_AUTHORS_EXPECT: Final = {
    "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
    "image_pos_embed.type": "learned_abs_2d",
    "visual_temporal_embedding.type": "COSINE",
    "normalize_before": False,
    "add_final_layer_norm": False,
}
"""Values of the authors' layout that the library's class computes; other ones are refused."""
_NOT_COMPUTED: Final = (
    "repetition_penalty", "encoder_repetition_penalty", "min_length", "min_new_tokens", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "exponential_decay_length_penalty",
    "encoder_no_repeat_ngram_size", "guidance_scale",
)  # fmt: skip
"""Settings of generation that would change the likeliest token."""
_VISION_DEFAULTS: Final[dict[str, Any]] = {
    "patch_size": (7, 3, 3, 3), "patch_stride": (4, 2, 2, 2), "patch_padding": (3, 1, 1, 1),
}  # fmt: skip
_NUM_PLACES: Final = 1000
_PLACE: Final = "<loc_0>"
TASK_TOKENS: Final = (
    "<od>", "</od>", "<ocr>", "</ocr>", *(f"<loc_{place}>" for place in range(_NUM_PLACES)), "<cap>", "</cap>",
    "<ncap>", "</ncap>", "<dcap>", "</dcap>", "<grounding>", "</grounding>", "<seg>", "</seg>", "<sep>",
    "<region_cap>", "</region_cap>", "<region_to_desciption>", "</region_to_desciption>", "<proposal>", "</proposal>",
    "<poly>", "</poly>", "<and>",
)  # fmt: skip
"""The tokens that the authors' processor adds to BART's, in order, as they are spelt there."""


def read_image_to_text(spec: ModelSpec, checkpoint: Checkpoint) -> ModelCard | None:
    """Return the card of a Florence-2 or a Donut, or None for other models. Raises ModelLoadFailed if it cannot be run."""
    config = checkpoint.read_object("config.json")
    model_type = str(config.get("model_type"))
    expected = _ARCHITECTURES.get(model_type)
    if expected is None:
        return None
    architecture = str((config.get("architectures") or [expected])[0])
    if architecture != expected:
        raise refuse(spec.id, f"{architecture} generates no text; only {expected} can be run")
    if model_type == "florence2":
        rule, image, limit, changes, vocab_size = _read_florence(checkpoint, config)
    else:
        rule, image, limit, changes, vocab_size = _read_donut(checkpoint, config)
    check_weights(checkpoint)
    tokenizer = checkpoint.find("tokenizer.json")
    return ModelCard(
        id=spec.id,
        kind="extractor",
        directory=str(checkpoint.root),
        revision=spec.revision,
        architecture=architecture,
        config_changes=changes,
        inputs=("image",),
        outputs=("extract",),
        max_sequence_length=limit,
        vocab_size=vocab_size,
        tokenizer_file=str(tokenizer) if tokenizer else "",
        image=image,
        extract=rule,
    )


def finish_image_to_text(card: ModelCard, cache_dir: str) -> ModelCard:
    """Return the card with what its tokenizer says: a Florence-2's with all its tokens, and Donut's unknown token.

    Raises ModelLoadFailed for a tokenizer whose tokens are not the model's.
    """
    rule = card.extract
    if not isinstance(rule, ImageToText):
        return card
    try:
        tokens = read_added_tokens(card.tokenizer_file)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise refuse(card.id, f"tokenizer.json cannot be read: {error}") from error
    if rule.family == "florence2":
        return card if _PLACE in {token.content for token in tokens} else _with_places(card, cache_dir)
    unknown = tuple(token.id for token in tokens if _is_unknown(token))
    return msgspec.structs.replace(card, extract=msgspec.structs.replace(rule, forbidden_ids=unknown))


def _is_unknown(token: AddedToken) -> bool:
    """Tell whether a token is the unknown one, which Donut's authors forbid (`bad_words_ids`)."""
    return token.content == "<unk>"


def _with_places(card: ModelCard, cache_dir: str) -> ModelCard:
    import tokenizers  # the supervisor imports this module, and must not import that library

    data = Path(card.tokenizer_file).read_bytes()

    def extend() -> str:
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise refuse(card.id, f"tokenizer.json cannot be read: {error}") from error
        tokenizer.add_special_tokens(list(TASK_TOKENS))
        if (found := tokenizer.get_vocab_size()) != card.vocab_size:
            raise refuse(
                card.id,
                f"its tokenizer has {found} tokens with those of Florence-2, but the model has {card.vocab_size}",
            )
        return tokenizer.to_str()

    digest = hashlib.blake2b(
        b"florence2\0" + tokenizers.__version__.encode() + b"\0" + data, digest_size=16
    ).hexdigest()
    path = keep_tokenizer(card.id, cache_dir, digest, extend)
    return msgspec.structs.replace(card, tokenizer_file=path)


_Read = tuple[ImageToText, ImageRule, int, dict[str, Any], int]
"""Rule, image rule, most tokens of a prompt, changes of the configuration, size of the vocabulary."""


def _read_florence(checkpoint: Checkpoint, config: dict[str, Any]) -> _Read:
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    changes = {}
    if "dim_embed" in vision:
        _check_authors_values(checkpoint, {**vision, **text})
        changes = {"vision_config": _vision_values(vision), "text_config": _text_values(text)}
        vision = changes["vision_config"]
    image = read_image_rule(checkpoint, "CLIPImageProcessor")
    positions, vocab_size = int(text.get("max_position_embeddings", 1024)), int(text.get("vocab_size", 50_265))
    strides: list[int] = list(vision.get("patch_stride", _VISION_DEFAULTS["patch_stride"]))
    num_seen = 1 + _side(vision, image.height) * _side(vision, image.width)
    if num_seen >= positions:
        raise refuse(checkpoint.id, f"an image takes {num_seen} of its {positions} positions, which leaves no prompt")
    settings = _generation(checkpoint, text)
    start = _optional(settings.get("decoder_start_token_id"))
    first = settings.get("forced_bos_token_id")
    rule = ImageToText(
        family="florence2",
        max_new_tokens=min(_MAX_NEW_TOKENS, positions),
        start_ids=(2 if start is None else start, *(() if first is None else (int(first),))),
        end_ids=_end_ids(settings),
        last_id=_optional(settings.get("forced_eos_token_id")),
        no_repeat_ngram=int(settings.get("no_repeat_ngram_size") or 0),
    )
    image = msgspec.structs.replace(image, patch=math.prod(strides), extra_tokens=1)
    return rule, image, positions - num_seen, changes, vocab_size


def _side(vision: dict[str, Any], pixels: int) -> int:
    """Return the number of places along a side of the image after the convolutions before each stage."""
    parts = (vision.get(name, default) for name, default in _VISION_DEFAULTS.items())
    for size, stride, padding in zip(*parts, strict=True):
        pixels = (pixels + 2 * padding - size) // stride + 1
    return pixels


def _check_authors_values(checkpoint: Checkpoint, values: dict[str, Any]) -> None:
    for path, expected in _AUTHORS_EXPECT.items():
        name, _, inner = path.partition(".")
        value = values.get(name, expected)
        value = value.get(inner) if inner and isinstance(value, dict) else value
        if value != expected:
            raise refuse(checkpoint.id, f"config.json sets {path} to {value!r}; only {expected!r} is computed")


def _vision_values(vision: dict[str, Any]) -> dict[str, Any]:
    """Return the library's vision_config of the authors' one."""
    own = {name: vision[name] for name in _VISION_VALUES if name in vision}
    own |= {"model_type": "florence_vision", "embed_dim": vision["dim_embed"]}
    if places := vision.get("image_pos_embed"):
        own["max_position_embeddings"] = places["max_pos_embeddings"]
    if times := vision.get("visual_temporal_embedding"):
        own["max_temporal_embeddings"] = times["max_temporal_embeddings"]
    return own


def _text_values(text: dict[str, Any]) -> dict[str, Any]:
    """Return the library's text_config of the authors' one; settings of generation are not among its values."""
    return {"model_type": "bart", **{name: text[name] for name in _TEXT_VALUES if name in text}}


def _read_donut(checkpoint: Checkpoint, config: dict[str, Any]) -> _Read:
    encoder, decoder = config.get("encoder") or {}, config.get("decoder") or {}
    kinds = encoder.get("model_type"), decoder.get("model_type")
    if kinds != ("donut-swin", "mbart"):
        reason = f"its encoder is {kinds[0]!r} and its decoder {kinds[1]!r}; only Donut (donut-swin, mbart) can be run"
        raise refuse(checkpoint.id, reason)
    positions = int(decoder.get("max_position_embeddings", 1024))
    settings = _generation(checkpoint, decoder)
    image = _framed_rule(checkpoint)
    patch = encoder.get("patch_size", 4)
    stages = len(encoder.get("depths", (2, 2, 6, 2)))
    rule = ImageToText(
        family="donut",
        max_new_tokens=positions - 1,
        end_ids=_end_ids(settings),
        last_id=_optional(settings.get("forced_eos_token_id")),
        no_repeat_ngram=int(settings.get("no_repeat_ngram_size") or 0),
    )
    image = msgspec.structs.replace(image, patch=int(patch) << (stages - 1))
    return rule, image, positions - 1, {}, int(decoder.get("vocab_size", 50_265))


def _framed_rule(checkpoint: Checkpoint) -> ImageRule:
    """Return Donut's image rule: resize to fit into a frame, and fill the frame with black around it."""
    config = read_settings(checkpoint, "DonutImageProcessor")
    size = config["size"]
    # Older versions wrote a list, with the width first.
    sides: list[Any] = [size.get("height"), size.get("width")] if isinstance(size, dict) else [*reversed(size)]
    if len(sides) != 2 or not all(isinstance(side, int) and 0 < side <= _LARGEST_EDGE for side in sides):
        raise refuse(checkpoint.id, f"its image processor has size {size!r}, which cannot be run")
    wanted = {"do_thumbnail": True, "do_align_long_axis": False, "do_pad": True, "do_center_crop": False}
    for name, value in wanted.items():
        if bool(config.get(name, value)) != value:
            raise refuse(checkpoint.id, f"its image processor has {name} {config[name]!r}, which cannot be run")
    height, width = map(int, sides)
    shortest = min(height, width)
    return msgspec.structs.replace(
        read_values(checkpoint, config),
        height=height, width=width, resize=(shortest, shortest), keep_aspect=True, frames=True,
    )  # fmt: skip


def _generation(checkpoint: Checkpoint, decoder: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of generation: generation_config.json over those that older configurations had.

    Raises ModelLoadFailed for one that would change the likeliest token and is not computed.
    """
    own = checkpoint.read_object("generation_config.json")
    settings = {**decoder, **{name: value for name, value in own.items() if value is not None}}
    for name in _NOT_COMPUTED:
        if not is_off(name, settings.get(name)):
            raise refuse(checkpoint.id, f"its generation sets {name} to {settings[name]!r}, which is not computed")
    return settings


def _end_ids(settings: dict[str, Any]) -> tuple[int, ...]:
    end = settings.get("eos_token_id")
    end = 2 if end is None else end
    return tuple(int(token) for token in (end if isinstance(end, list) else [end]))


def _optional(token: Any) -> int | None:
    return int(token[0] if isinstance(token, list) else token) if token not in (None, []) else None
