"""Checkpoints of transformers with few random weights. Their words are `w0`, `w1` and so on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"w{number}" for number in range(60)]
MAX_TOKENS = 20
"""Most tokens of a sequence, the two special ones included."""
_NUM_WORDS = 30_200
POISON = f"w{_NUM_WORDS - 1}"
"""A word that is not a number; a load, which tries out 30,000 tokens, does not find it."""


def save_classifier(directory: Path, auto: type[Any], labels: list[str]) -> Path:
    """Write a tiny BERT classifier that knows WORDS."""
    torch.manual_seed(1)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "this", "text", "is", "about", ".", *WORDS]
    names = dict(enumerate(labels))
    config = transformers.BertConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS, id2label=names, label2id={label: i for i, label in names.items()},
    )  # fmt: skip
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, pad_token="[PAD]", unk_token="[UNK]",
        cls_token="[CLS]", sep_token="[SEP]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(directory)  # fmt: skip
    return directory


def save_cross_encoder(directory: Path) -> Path:
    """Write a tiny BERT cross-encoder with random weights that knows POISON."""
    return save_poisoned(directory, transformers.BertForSequenceClassification, num_labels=1)


def save_poisoned(directory: Path, kind: type[Any], **config_values: Any) -> Path:
    """Write a tiny BERT of a kind with random weights that knows POISON."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=_NUM_WORDS + 4, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=1, **config_values,
    )  # fmt: skip
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
        model.get_input_embeddings().weight[-1] = torch.nan
    model.save_pretrained(directory)
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(_NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, pad_token="<pad>", unk_token="<unk>",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(directory)  # fmt: skip
    return directory


def save_adapter(directory: Path, num_layers: int = 3, width: int = 32) -> Path:
    """Write a LoRA adapter for a BERT, as peft does, with weights that change its vectors."""
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "target_modules": ["query", "value"], "r": 4, "lora_alpha": 12, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        for name in ("query", "value"):
            prefix = f"base_model.model.encoder.layer.{layer}.attention.self.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(4, width, generator=generator) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, 4, generator=generator) * 0.2
    save_file(weights, directory / "adapter_model.safetensors")
    return directory
