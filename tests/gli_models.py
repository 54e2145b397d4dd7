"""Checkpoints of the libraries `gliner`, `gliner2` and `gliclass` with few random weights, saved by the libraries themselves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = [
    "Alice", "Bob", "Carol", "met", "works", "at", "Acme", "in", "Paris", "Berlin", "and", "then", "left", "person",
    "company", "city", "lives", "sport", "news",
]  # fmt: skip
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_LETTERS = [chr(code) for code in range(33, 127)]
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": 128},
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16, "max_relative_positions": 64,
    },
    "modernbert": {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
}  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 12, "factor": 4.0,
             "short_factor": [1.0, 1.2, 1.1, 1.5], "long_factor": [3.0, 9.0, 5.0, 7.0]}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0}
for _name, _rope in (("longrope", _LONGROPE), ("dynamic", _DYNAMIC)):
    _ENCODERS[f"modernbert {_name}"] = {
        **_ENCODERS["modernbert"], "max_position_embeddings": 12,
        "rope_parameters": {"full_attention": _rope, "sliding_attention": _rope},
    }  # fmt: skip
GLINER_VARIANTS: dict[str, dict[str, Any]] = {
    "span": {},
    "token": {"span_mode": "token_level"},
    "bi-encoder": {"labels_encoder": True},
    "bi-encoder token": {"labels_encoder": True, "span_mode": "token_level"},
    "relations": {"relations_layer": "dot"},
    "relations mlp": {"relations_layer": "mlp"},
    "relations token": {"relations_layer": "dot", "span_mode": "token_level"},
}


def save_tokenizer(directory: Path, *, extra: tuple[str, ...] = (), max_length: int = 128) -> int:
    """Write a tokenizer that knows WORDS and letters; return the size of its vocabulary."""
    pieces = [*_SPECIAL, *sorted(WORDS), *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    library = tokenizers.Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    library.normalizer = normalizers.BertNormalizer(lowercase=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=max_length,
    )  # fmt: skip
    tokenizer.add_tokens(list(extra), special_tokens=True)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


def save_gliner(
    directory: Path, encoder: str = "bert", variant: str = "span", *, max_words: int = 24, **settings: Any
) -> Path:
    """Write a GLiNER checkpoint as the library does. Its scores lie on both sides of a half."""
    import gliner

    torch.manual_seed(5)
    base = directory.parent / f"{directory.name}-encoder"
    _save_encoder(base, encoder)
    choices = {**GLINER_VARIANTS[variant], **settings}
    if choices.pop("labels_encoder", False):
        choices["labels_encoder"] = str(base)
    with _quiet():
        model = gliner.GLiNER.from_config(
            {
                "model_name": str(base),
                "hidden_size": 32,
                "dropout": 0.0,
                "max_width": 4,
                "max_len": max_words,
                **choices,
            }
        )
        _spread(model.model)
        if choices.get("relations_layer") == "mlp":  # of two entities it says that they are no pair, with 0.44 to 0.48
            model.model.relations_rep_layer.relation_rep_layer.mlp[-1].bias.data -= 0.4
        model.save_pretrained(directory, safe_serialization=True)
    return directory


def save_gliner2(
    directory: Path, architecture: str = "span", encoder: str = "bert", *, max_length: int = 128, **settings: Any
) -> Path:
    """Write a GLiNER2 checkpoint as the library does."""
    import gliner2

    torch.manual_seed(5)
    size = save_tokenizer(directory, max_length=max_length)
    config = transformers.CONFIG_MAPPING[encoder](vocab_size=size, **_SMALL, **_ENCODERS[encoder])
    with _quiet():
        model = gliner2.AutoExtractor.from_config(
            gliner2.ExtractorConfig(model_name="someone/encoder", architecture=architecture, **settings),
            encoder_config=config, tokenizer=transformers.AutoTokenizer.from_pretrained(directory),
        )  # fmt: skip
        _spread(model)
        if architecture == "span":
            model.count_pred[-1].bias.data[2] += 9  # it counts two relations of each kind
        model.save_pretrained(str(directory))
    return directory


def save_gliclass(
    directory: Path, encoder: str = "bert", *, max_length: int = 128, prompt_first: bool = True, **settings: Any
) -> Path:
    """Write a GLiClass checkpoint as the library does, with its three marks behind the vocabulary."""
    import gliclass

    torch.manual_seed(6)
    markers = ("<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>")
    size = save_tokenizer(directory, extra=markers, max_length=max_length)
    encoder_config = {"model_type": encoder.split(maxsplit=1)[0], "vocab_size": size, **_SMALL, **_ENCODERS[encoder]}
    config = gliclass.GLiClassModelConfig(
        encoder_config=encoder_config, encoder_model="tiny", class_token_index=size - 3, text_token_index=size - 2,
        example_token_index=size - 1, vocab_size=size, prompt_first=prompt_first, scorer_num_heads=4,
        scorer_mlp_hidden_size=32, **settings,
    )  # fmt: skip
    with _quiet():
        model = gliclass.GLiClassModel(config)
        _spread(model)
        model.save_pretrained(directory)
    return directory


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def _save_encoder(directory: Path, encoder: str) -> None:
    size = save_tokenizer(directory)
    config = transformers.CONFIG_MAPPING[encoder.split(maxsplit=1)[0]](vocab_size=size, **_SMALL, **_ENCODERS[encoder])
    transformers.AutoModel.from_config(config).save_pretrained(directory)


def _spread(model: torch.nn.Module) -> None:
    """Move the weights far enough apart for a wrong mask or position to be seen in the scores."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
