"""Builds the card of a GGUF file whose architecture has a row in `gguf_architectures`, and the files beside its weights.

The cache gets what a checkpoint has beside its weights: a `config.json`, a `tokenizer.json`, and the layers behind the
pooling. So a worker builds the model as it builds any other, with the tensors of the GGUF file as its weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from sie.catalog.files import refuse
from sie.catalog.generation import kv_token_bytes, make_rule
from sie.catalog.gguf_architectures import Row, weight_rules
from sie.catalog.gguf_bpe import convert_bpe
from sie.catalog.gguf_config import read_config
from sie.catalog.gguf_contents import GgufContents
from sie.catalog.gguf_tokenizer import convert_pieces, convert_word_pieces
from sie.catalog.tokenizer import keep_bytes, keep_tokenizer
from sie.values.card import ModelCard, PipelineStep
from sie.values.generate import GenerateRule

FOLDER: Final = "gguf"
SPECIALS: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS: Final = ("eos", "eot", "eom")
"""Names of the token ids that end an answer: end of text, of a turn, of a message."""
_POOLINGS: Final = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Source: llama.cpp, include/llama.h, `llama_pooling_type`. 0 is none, and 4 is the score of a pair."""
_RANK: Final = 4
_DENSE: Final = ("dense_2.weight", "dense_3.weight")


def read_row_card(file: GgufContents, row: Row, cache_dir: str, pooling: str | None) -> ModelCard:
    """Return the card of a file with a row, and write what belongs to it into the cache.

    pooling is the operator's, for an encoder whose metadata have none. Raises ModelLoadFailed.
    """
    modes = _pooling(file, row, pooling)
    config = read_config(file, row)
    text = msgspec.json.encode(config)
    folder = Path(cache_dir, FOLDER, _digest(text))  # it also depends on a tensor
    keep_bytes(file.model_id, folder / "config.json", text, "configuration")
    tokenizer = keep_tokenizer(
        file.model_id, cache_dir, file.fingerprint, lambda: _convert_tokenizer(file, row, config["vocab_size"])
    )
    length: int = file.fields[f"{file.architecture}.context_length"]
    card = ModelCard(
        id=file.model_id,
        kind="encoder" if modes else "generator",
        directory=str(folder),
        architecture=file.architecture,
        max_sequence_length=min(length, config["max_position_embeddings"] - row.first_position),
        vocab_size=config["vocab_size"],
        tokenizer_file=tokenizer,
        gguf_file=file.path,
        weight_names=weight_rules(row),
    )
    if not modes:
        rule = read_rule(file, length, config)
        return msgspec.structs.replace(card, outputs=("generate",), generate=rule)
    steps, width = _steps(file, folder, modes, config["hidden_size"])
    return msgspec.structs.replace(card, dims={"dense": width}, pipeline=steps, normalize=True)


def read_rule(file: GgufContents, context_length: int, config: dict[str, Any]) -> GenerateRule:
    """Return the rule of a generating model; config has the numbers of its layers and heads."""
    ends = [file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    template = file.fields.get("tokenizer.chat_template", "")
    rule = make_rule(
        file.model_id,
        template=template if isinstance(template, str) else "",
        tool_template="",
        specials={known: file.fields[name] for name, known in SPECIALS.items() if name in file.fields},
        context_length=context_length,
        eos_token_ids=tuple(dict.fromkeys(number for number in ends if isinstance(number, int))),
        defaults={},
    )
    return msgspec.structs.replace(rule, kv_token_bytes=kv_token_bytes(config))


def _pooling(file: GgufContents, row: Row, wanted: str | None) -> str:
    """Return how an encoder pools; empty for a model that generates."""
    key = f"{file.architecture}.pooling_type"
    kind = file.fields.get(key, 0)
    if kind == _RANK:
        raise refuse(
            file.model_id, f"its GGUF metadata set {key} to {kind} (rank); rerankers are not read from GGUF files"
        )
    if not isinstance(kind, int) or not 0 <= kind < _RANK:
        raise refuse(file.model_id, f"its GGUF metadata set {key} to {kind!r}, which is not known")
    mode = _POOLINGS.get(kind, wanted or "" if row.encodes else "")
    if row.encodes and not mode:
        reason = f"its GGUF metadata do not say how it pools ({key})"
        raise refuse(file.model_id, f"{reason}; set pooling in its section of the file of models")
    return mode


def _steps(file: GgufContents, folder: Path, mode: str, width: int) -> tuple[tuple[PipelineStep, ...], int]:
    """Return the pooling and the layers behind it, which are written as files of their own, and the width after them."""
    from safetensors.numpy import save

    steps = [PipelineStep(kind="pooling", config={"modes": [mode]})]
    for name in _DENSE:
        if name not in file.shapes:
            continue
        weight = file.read_tensor(name)
        if weight.ndim != 2 or weight.shape[1] != width:
            raise refuse(
                file.model_id, f"its tensor {name!r} has the shape {list(weight.shape)}; {width} values arrive"
            )
        data = save({"linear.weight": weight})
        directory = folder / _digest(data)
        keep_bytes(file.model_id, directory / "model.safetensors", data, "layer")
        config = {"in_features": width, "out_features": len(weight), "bias": False, "use_residual": False}
        steps.append(PipelineStep(kind="dense", directory=str(directory), config={**config, "activation": "Identity"}))
        width = len(weight)
    return tuple(steps), width


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _convert_tokenizer(file: GgufContents, row: Row, num_rows: int) -> str:
    kind = file.fields.get("tokenizer.ggml.model")
    tokens = file.texts("tokens")
    if not tokens:
        raise refuse(file.model_id, "its GGUF metadata have no tokenizer.ggml.tokens")
    if len(tokens) > num_rows:
        reason = f"tokenizer.ggml.tokens has {len(tokens)} tokens, and 'token_embd.weight' {num_rows} rows"
        raise refuse(file.model_id, f"its GGUF metadata do not fit its tensors: {reason}")
    if kind == "bert":
        return convert_word_pieces(file.model_id, file.fields, tokens, file.token_types())
    if row.first_position:
        return convert_pieces(file, tokens)
    if "position_embd" in row.tables:  # RoBERTa, too, counts its positions from another number
        raise refuse(
            file.model_id,
            f"its GGUF metadata set tokenizer.ggml.model to {kind!r}; models of its architecture need 'bert'",
        )
    return convert_bpe(file, row.model_type)
