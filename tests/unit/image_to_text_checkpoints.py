"""Checkpoints of Florence-2 and Donut with few random weights, in the forms in which real ones are published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from sie.catalog.image_to_text import TASK_TOKENS

FLORENCE_SIDE = 64
NUM_SEEN = 5
"""Places of an image of that side after the four convolutions, and their mean."""
NUM_POSITIONS = 96
DONUT_FRAME = {"height": 96, "width": 64}
DONUT_TOKENS = (
    "<s_cord-v2>", "<s_docvqa>", "<s_rvlcdip>", "<s_question>", "</s_question>", "<s_answer>", "</s_answer>", "<s_menu>",
    "</s_menu>", "<s_nm>", "</s_nm>", "<s_class>", "</s_class>", "<sep/>", "<invoice/>",
)  # fmt: skip
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_VISION: dict[str, Any] = {
    "depths": [1, 1, 1, 1], "patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2], "patch_padding": [3, 1, 1, 1],
    "patch_prenorm": [False, True, True, True], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2],
    "window_size": 3, "projection_dim": 32,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": NUM_POSITIONS,
    "scale_embedding": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
GENERATION = {
    "no_repeat_ngram_size": 3, "num_beams": 3, "forced_bos_token_id": 0, "forced_eos_token_id": 2,
    "early_stopping": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip
_AUTHORS_NAMES = (
    (r"^model\.vision_tower\.", "vision_tower."),
    (r"(\.convs\.\d+)\.conv\.", r"\1.proj."),
    (r"\.(conv[12])\.", r".\1.fn.dw."),
    (r"\.spatial_block\.norm1\.", ".spatial_block.window_attn.norm."),
    (r"\.channel_block\.norm1\.", ".channel_block.channel_attn.norm."),
    (r"_attn\.(qkv|proj)\.", r"_attn.fn.\1."),
    (r"\.norm2\.", ".ffn.norm."),
    (r"\.ffn\.(fc[12])\.", r".ffn.fn.net.\1."),
    (r"^model\.multi_modal_projector\.image_projection\.weight$", "image_projection"),
    (r"^model\.multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
    (r"^model\.multi_modal_projector\.", ""),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
)
"""Names of weights in the repositories of Florence-2's authors, by the library's."""


def save_florence(directory: Path, *, by_authors: bool = False) -> Path:
    """Write a Florence-2 in the library's layout, or in that of its authors; return the directory."""
    torch.manual_seed(1)
    num_tokens = _save_bytes_tokenizer(directory, () if by_authors else (*TASK_TOKENS, "<image>"))
    vocab_size = num_tokens + len(TASK_TOKENS) if by_authors else num_tokens
    config: Any = transformers.Florence2Config(
        vision_config={**_VISION, "embed_dim": [16, 16, 32, 32]},
        text_config={"model_type": "bart", **_TEXT, "vocab_size": vocab_size},
        image_token_id=num_tokens - 1,
    )
    model: Any = transformers.Florence2ForConditionalGeneration(config)
    _spread(model)
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    model.save_pretrained(directory)
    side = {"height": FLORENCE_SIDE, "width": FLORENCE_SIDE}
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    transformers.CLIPImageProcessorPil(
        size=side, do_center_crop=False, crop_size=side, image_mean=mean, image_std=std
    ).save_pretrained(directory)
    if by_authors:
        _to_authors_layout(directory, vocab_size)
    return directory


def authors_name(name: str) -> str:
    """Return the name of a weight in the authors' layout, by the library's."""
    for pattern, replacement in _AUTHORS_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _to_authors_layout(directory: Path, vocab_size: int) -> None:
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        own = authors_name(name)
        weights[own] = weight.T.contiguous() if own == "image_projection" else weight
    weights["language_model.final_logits_bias"] = torch.zeros(1, vocab_size)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "generation_config.json").unlink()
    vision = {
        **_VISION, "model_type": "davit", "dim_embed": [16, 16, 32, 32], "enable_checkpoint": False,
        "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 100},
        "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 50},
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
    }  # fmt: skip
    text = {
        **_TEXT, **GENERATION, "model_type": "florence2_language", "vocab_size": vocab_size,
        "normalize_before": False, "add_final_layer_norm": False, "is_encoder_decoder": True,
    }  # fmt: skip
    config = {
        "model_type": "florence2", "architectures": ["Florence2ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_florence2.Florence2Config",
            "AutoModelForCausalLM": "modeling_florence2.Florence2ForConditionalGeneration",
        },
        "vision_config": vision, "text_config": text, "vocab_size": vocab_size, "is_encoder_decoder": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def save_donut(directory: Path) -> Path:
    """Write a Donut; return the directory."""
    torch.manual_seed(2)
    vocab_size = _save_bytes_tokenizer(directory, DONUT_TOKENS)
    encoder = transformers.DonutSwinConfig(
        image_size=[96, 64], embed_dim=16, depths=[1, 1, 1], num_heads=[2, 2, 2], window_size=3
    )
    decoder = transformers.MBartConfig(
        **{**_TEXT, "scale_embedding": True}, vocab_size=vocab_size, is_decoder=True, add_cross_attention=True,
        is_encoder_decoder=False, forced_eos_token_id=2,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model: Any = transformers.VisionEncoderDecoderModel(config)
    _spread(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=2, pad_token_id=1, decoder_start_token_id=2, forced_eos_token_id=2
    )
    model.save_pretrained(directory)
    values = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": DONUT_FRAME}
    transformers.DonutImageProcessorPil(**values).save_pretrained(directory)
    return directory


def _spread(model: Any) -> None:
    """Move the weights far from the usual 0.02: a wrong pixel, place or token must be seen in the answer."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight) * (1.0 if "embed_tokens" in name or "shared" in name else 0.2))


def _save_bytes_tokenizer(directory: Path, added: tuple[str, ...]) -> int:
    """Write a tokenizer of bytes, as BART's without its merges, with added tokens; return the number of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *alphabet, "<mask>"))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.add_special_tokens([*_SPECIAL, "<mask>"])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    names: dict[str, Any] = {"extra_special_tokens": {"image_token": "<image>"}} if "<image>" in added else {}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        mask_token="<mask>", **names,
    ).save_pretrained(directory)  # fmt: skip
    return tokenizer.get_vocab_size()
