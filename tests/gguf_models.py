"""The small GGUF files of the tests: a Llama of random weights with a byte-level tokenizer, and the real Gemma 3 270M."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel, NemotronConfig, NemotronForCausalLM

HIDDEN, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 32, 2, 2, 64, 128
BOS, EOS = 256, 257
VOCABULARY = 260
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_PERMUTED = ("granite", "llama", "mistral3", "smollm3")
GEMMA = Path(__file__).parents[1] / "build" / "gguf" / "gemma.gguf"


def byte_texts() -> list[str]:
    """Return how GPT-2 writes each byte as a character. Source: the byte-level BPE of GPT-2."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def write_tiny_llama(path: Path, *, chat_template: str = "", **extra: Any) -> Path:
    """Write a Llama with a vocabulary of the 256 bytes, two special tokens and two merges; extra are further uint32 fields."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    add_byte_vocabulary(writer)
    if chat_template:
        writer.add_chat_template(chat_template)
    for name, value in extra.items():
        writer.add_uint32(name.replace("__", "."), value)
    random = np.random.default_rng(5)
    for name, shape in _shapes(VOCABULARY):
        ones = name.endswith("norm.weight")
        weights = np.ones(shape) if ones else random.standard_normal(shape) * 0.3
        writer.add_tensor(name, weights.astype(np.float32))
    _write(writer)
    return path


def write_tiny_nemotron(path: Path, **extra: Any) -> Path:
    """Write a Nemotron, an architecture that transformers' own table has; extra are further metadata."""
    config = NemotronConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=1, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    metadata = {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS,
        "feed_forward_length": FEED_FORWARD, "attention.head_count": HEADS, "attention.head_count_kv": 1,
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10_000.0, **extra,
    }  # fmt: skip
    return write_converted(path, "nemotron", NemotronForCausalLM(config), metadata)


def write_converted(
    path: Path,
    architecture: str,
    model: Any,
    metadata: dict[str, Any],
    *,
    pre: str = "gpt-2",
    add_vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write a model of transformers as llama.cpp's converter does: metadata without the architecture's name before them.

    weights are those that the converter reads, if they are not the model's own. Matrices are of the given kind.

    Source: conversion/llama.py, `permute`, for Granite and SmolLM3; conversion/gemma.py for Gemma; conversion/bert.py.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        adds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        adds[bool] = writer.add_bool
        adds[type(value)](f"{architecture}.{name}", value)
    if add_vocabulary is None:
        add_byte_vocabulary(writer, pre)
    else:
        add_vocabulary(writer)
    config = model.config
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    for name, weight in (model.state_dict() if weights is None else weights).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if architecture in _PERMUTED and ("q_proj." in name or "k_proj." in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        base, _, end = name.rpartition(".")
        values = np.ascontiguousarray(values, np.float32)
        own = kind if values.ndim == 2 and base != "embeddings.position_embeddings" else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(base)}.{end}", gguf.quantize(values, own), raw_dtype=own)
    _write(writer)
    return path


def apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's weights as the converter reads them: gates of experts apart, and a shared one's gate as a vector."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for part, values in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                found[name.replace("gate_up", part) + ".weight"] = values
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = weight
        else:
            found[name] = weight[0] if name.endswith("shared_expert_gate.weight") else weight
    return found


def write_bert(path: Path, directory: Path, *, pooling: int, kind: Any = gguf.GGMLQuantizationType.F32) -> Path:
    """Write the BERT of a sentence-transformers directory."""
    model = BertModel.from_pretrained(directory)
    config = model.config
    metadata = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads, "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.causal": False, "pooling_type": pooling,
    }  # fmt: skip
    weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith("pooler.")}
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return write_converted(
        path,
        "bert",
        model,
        metadata,
        add_vocabulary=lambda writer: add_word_pieces(writer, tokenizer),
        weights=weights,
        kind=kind,
    )


def add_word_pieces(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Write a WordPiece vocabulary. Source: conversion/bert.py, `phantom`."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    tokens = [str(tokenizer.id_to_token(number)) for number in range(tokenizer.get_vocab_size())]
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(
        [
            token if number in special else token[2:] if token.startswith("##") else f"{SPACE}{token}"
            for number, token in enumerate(tokens)
        ]
    )
    kinds = (gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL for number in range(len(tokens)))
    writer.add_token_types(list(kinds))
    for name, text in (("unknown", "[UNK]"), ("seperator", "[SEP]"), ("padding", "[PAD]"), ("cls", "[CLS]")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(text))


def add_sentence_pieces(writer: gguf.GGUFWriter, *, adds_space: bool = False) -> None:
    """Write a vocabulary of SentencePiece: special tokens, bytes, and the pieces of a few words."""
    pieces = [SPACE, *"acst", f"{SPACE}c", "at", f"{SPACE}cat", f"{SPACE}s", f"{SPACE}sat"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL] * 3 + [kinds.UNKNOWN] + [kinds.BYTE] * 256 + [kinds.NORMAL] * len(pieces))
    writer.add_token_scores([0.0] * 260 + [-float(place) for place in range(len(pieces))])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(adds_space)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def add_byte_vocabulary(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    """Write a vocabulary of the 256 bytes, two special tokens and two merges."""
    tokens = [*byte_texts(), "<|begin|>", "<|end|>", "th", "er"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 2)
    writer.add_token_merges(["t h", "e r"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(vocabulary: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (vocabulary, HIDDEN)),
        ("output_norm.weight", (HIDDEN,)),
        ("output.weight", (vocabulary, HIDDEN)),
    ]
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        shapes += [
            (prefix + "attn_norm.weight", (HIDDEN,)),
            (prefix + "attn_q.weight", (HIDDEN, HIDDEN)),
            (prefix + "attn_k.weight", (HIDDEN // HEADS, HIDDEN)),
            (prefix + "attn_v.weight", (HIDDEN // HEADS, HIDDEN)),
            (prefix + "attn_output.weight", (HIDDEN, HIDDEN)),
            (prefix + "ffn_norm.weight", (HIDDEN,)),
            (prefix + "ffn_gate.weight", (FEED_FORWARD, HIDDEN)),
            (prefix + "ffn_up.weight", (FEED_FORWARD, HIDDEN)),
            (prefix + "ffn_down.weight", (HIDDEN, FEED_FORWARD)),
        ]
    return shapes


def gemma_file() -> Path:
    """Return Gemma 3 270M, which `make smoke` has served."""
    assert GEMMA.exists(), "run `make build/gguf/gemma.gguf`"
    return GEMMA
