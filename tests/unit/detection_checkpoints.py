"""Checkpoints of detectors with few random weights, in the form in which real ones are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ["a", "photo", "of", "cat", "dog", "red", "remote", "control", "handbag", "leather", "sofa", "on", "the"]
CHARACTERS = ["红", "色", "猫"]
OWL_SIDE = 48
OWL_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 10, "vocab_size": 3 + len(WORDS) + 1,
    "bos_token_id": 1, "eos_token_id": 3 + len(WORDS), "pad_token_id": 0,
}  # fmt: skip
OWL_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": OWL_SIDE, "patch_size": 8,
}  # fmt: skip
# The model knows [CLS], [SEP], `.` and `?` by their numbers in BERT's vocabulary.
BERT_IDS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, ".": 1012, "?": 1029}
BERT_VOCAB_SIZE = 1100
EDGES = {"shortest_edge": 64, "longest_edge": 107}
GROUNDING: dict[str, Any] = {
    "backbone_config": {
        "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 3,
        "image_size": 64, "out_features": ["stage2", "stage3", "stage4"], "out_indices": [2, 3, 4],
    },
    "text_config": {
        "model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": BERT_VOCAB_SIZE, "max_position_embeddings": 64,
    },
    "d_model": 64, "num_queries": 20, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_text_len": 32,
}  # fmt: skip
PROCESSORS: dict[str, Any] = {
    "owlvit": (transformers.OwlViTImageProcessorPil, {"size": {"height": OWL_SIDE, "width": OWL_SIDE}}),
    "owlv2": (transformers.Owlv2ImageProcessorPil, {"size": {"height": OWL_SIDE, "width": OWL_SIDE}}),
    "grounding-dino": (transformers.GroundingDinoImageProcessorPil, {"size": EDGES}),
}
FAMILIES = tuple(PROCESSORS)


def save_detector(directory: Path, family: str, **changes: Any) -> Path:
    """Write a model, its image processor and a tokenizer of lowercased words; return the directory."""
    torch.manual_seed(0)
    facts = (
        GROUNDING
        if family == "grounding-dino"
        else {"text_config": OWL_TEXT, "vision_config": OWL_VISION, "projection_dim": 32}
    )
    config = transformers.CONFIG_MAPPING[family](**{**facts, **changes})
    model: Any = transformers.AutoModelForZeroShotObjectDetection.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Far from the usual 0.02: a wrong pixel, place or token must be seen in the boxes. But boxes and scores that
            # all lie at an end of their range would show nothing.
            if any(head in name for head in ("box_head", "bbox_embed", "logit_s")):
                torch.nn.init.normal_(weight, std=0.15)
            elif name == "model.decoder.layer_norm.weight":
                weight.fill_(0.3)
            else:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(directory)
    kind, settings = PROCESSORS[family]
    kind(**settings).save_pretrained(directory)
    if family == "grounding-dino":
        save_bert_tokenizer(directory)
    else:
        save_owl_tokenizer(directory)
    return directory


def save_owl_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose end token is the highest id, as CLIP's is."""
    words = ["!", "<s>", "<unk>", *WORDS, "</s>"]
    end = len(words) - 1
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("<s>", 1), ("</s>", end)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=OWL_TEXT["max_position_embeddings"], bos_token="<s>",
        eos_token="</s>", pad_token="!", unk_token="<unk>",
    ).save_pretrained(directory)  # fmt: skip


def save_bert_tokenizer(directory: Path) -> None:
    """Write a tokenizer with BERT's numbers for what Grounding DINO looks at."""
    vocabulary = {**BERT_IDS, **{word: 200 + number for number, word in enumerate([*WORDS, *CHARACTERS])}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 101), ("[SEP]", 102)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
        unk_token="[UNK]",
    ).save_pretrained(directory)  # fmt: skip
