"""Checkpoints of dual encoders with few random weights, in the form in which real ones are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = [f"w{i}" for i in range(60)]
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION = {**TEXT, "image_size": 24, "patch_size": 8}
SIZE = {"height": 24, "width": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "clip": {
        "text": {"max_position_embeddings": 20, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        "top": {"projection_dim": 16},
    },
    "siglip": {"text": {"max_position_embeddings": 12, "pad_token_id": 1, "projection_size": 32}, "top": {}},
    "chinese_clip": {"text": {"max_position_embeddings": 20, "pad_token_id": 1}, "top": {"projection_dim": 16}},
    "altclip": {
        "text": {"max_position_embeddings": 22, "pad_token_id": 1, "project_dim": 16},
        "top": {"projection_dim": 16},
    },
}
CROPS = {"size": {"shortest_edge": 24}, "crop_size": SIZE}
PROCESSORS: dict[str, Any] = {
    "clip": (transformers.CLIPImageProcessorPil, CROPS),
    "siglip": (transformers.SiglipImageProcessorPil, {"size": SIZE}),
    "chinese_clip": (transformers.ChineseCLIPImageProcessorPil, CROPS),
    "altclip": (transformers.CLIPImageProcessorPil, CROPS),
}


def save_dual_encoder(directory: Path, family: str, **text_changes: Any) -> Path:
    """Write a model, its image processor and a tokenizer that lowercases words; return the directory."""
    torch.manual_seed(0)
    facts = FAMILIES[family]
    text = {**TEXT, "vocab_size": 4 + len(WORDS), **facts["text"], **text_changes}
    config = transformers.CONFIG_MAPPING[family](text_config=text, vision_config=VISION, **facts["top"])
    model = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            # Far from the usual 0.02: a wrong mask, pixel or position must be seen in the result.
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)
    kind, changes = PROCESSORS[family]
    kind(**changes).save_pretrained(directory)
    save_tokenizer(directory, text["max_position_embeddings"] - (2 if family == "altclip" else 0), family)
    return directory


def save_tokenizer(directory: Path, max_length: int, family: str) -> None:
    """Write a tokenizer with one token a word; SigLIP's ends its texts, the others' begins them, too."""
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<unk>", "!", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    single = "$A </s>" if family == "siglip" else "<s> $A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, bos_token="<s>", eos_token="</s>",
        pad_token="</s>", unk_token="<unk>",
    ).save_pretrained(directory)  # fmt: skip
