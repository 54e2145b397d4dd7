"""Builds the card of a model from a GGUF file, and converts its tokenizer to a `tokenizer.json`.

The file's metadata contain nearly everything. `gguf_cards` interprets those of the architectures that have a row, and
transformers those of the others, whose weights it reads later too. The cache keeps what was made of them, so a later
start does not import it. Imports gguf when called. Only the prepare helper calls it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec

from sie.catalog.files import refuse, refuse_unreadable
from sie.catalog.gguf_architectures import find_row
from sie.catalog.gguf_bpe import convert_bpe
from sie.catalog.gguf_cards import FOLDER, SPECIALS, read_row_card, read_rule
from sie.catalog.gguf_contents import GgufContents
from sie.catalog.tokenizer import keep_text, keep_tokenizer
from sie.catalog.unserved import check_layers
from sie.values.card import ModelCard

SUFFIX: Final = ".gguf"
_MOST_VALUES: Final = 1024
"""Longest array that is read; longer ones belong to the vocabulary."""
_UNSERVED: Final = ("t5", "t5encoder")
"""Encoder-decoders: transformers reads them from GGUF files, but this server runs them from safetensors only."""
_SCALED: Final = ("gpt-oss",)
"""Architectures whose scaled positions transformers reads; it ignores those of others."""
_TOKENIZERS: Final = "2 "
"""The number of the way in which tokenizers are made: a cache may have those of an earlier way."""


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The values of transformers' configuration that are used here. `values` are its whole numbers."""

    context_length: int
    vocab_size: int
    values: dict[str, int]


def find_gguf(model_id: str, directory: str) -> str:
    """Return the path of the GGUF file of a spec's directory, or empty for another kind of checkpoint.

    directory is the file itself, or contains one and no config.json. Raises ModelLoadFailed when it contains several.
    """
    path = Path(directory).absolute()
    try:
        if path.suffix == SUFFIX:
            if not path.is_file():
                raise refuse(model_id, f"there is no file {path}", "STORAGE")
            return str(path)
        if not path.is_dir() or (path / "config.json").exists():
            return ""
    except OSError as error:
        raise refuse_unreadable(model_id, str(path), error) from error
    files = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise refuse(model_id, f"there are several GGUF files; write ID=DIRECTORY/{files[0]} for that one")
    return str(path / files[0]) if files else ""


def read_gguf_card(model_id: str, path: str, cache_dir: str, pooling: str | None = None) -> ModelCard:
    """Return the card of a GGUF model and convert its tokenizer; imports transformers unless the cache has both.

    pooling is the operator's, for an encoder whose metadata have none.

    Raises ModelLoadFailed for a damaged file, a split file, and an architecture that is not known.
    """
    reader = _open(model_id, path)
    fields, counts = _read_fields(model_id, reader)
    if fields.get("split.count", 0) not in (0, 1):
        raise refuse(model_id, "the GGUF file is one part of several; merge them into one")
    if (architecture := fields.get("general.architecture")) in _UNSERVED:
        raise refuse(
            model_id, f"its architecture {architecture!r} is not served from a GGUF file, but from safetensors"
        )
    check_layers(model_id, {name: value for name, value in fields.items() if name.endswith(".block_count")})
    row = find_row(fields)
    rules = _TOKENIZERS + (msgspec.json.encode(row).decode() if row else "")
    fingerprint = _fingerprint(path, int(reader.data_offset), rules)
    file = GgufContents(model_id=model_id, path=path, fields=fields, reader=reader, fingerprint=fingerprint)
    card = _read_library_card(file, cache_dir) if row is None else read_row_card(file, row, cache_dir, pooling)
    return msgspec.structs.replace(card, num_weights=sum(counts))


def _read_library_card(file: GgufContents, cache_dir: str) -> ModelCard:
    """Return the card of a file of transformers' own architectures. Raises ModelLoadFailed."""
    name = f"{file.architecture}.rope.scaling.type"
    kind = file.fields.get(name, "none")
    if kind != "none" and file.architecture not in _SCALED:
        raise refuse(file.model_id, f"its GGUF metadata set {name} to {kind!r}, which is not computed")
    config = _read_config(file.model_id, file.path, Path(cache_dir, FOLDER, f"{file.fingerprint}.json"))
    tokenizer_file = keep_tokenizer(file.model_id, cache_dir, file.fingerprint, lambda: convert_bpe(file))
    rule = read_rule(file, config.context_length, config.values)
    return ModelCard(
        id=file.model_id,
        kind="generator",
        directory=str(Path(file.path).parent),
        architecture=file.architecture,
        outputs=("generate",),
        max_sequence_length=rule.context_length,
        vocab_size=config.vocab_size,
        tokenizer_file=tokenizer_file,
        generate=rule,
        gguf_file=file.path,
    )


def _open(model_id: str, path: str) -> Any:
    from sie.catalog.gguf_reader import VocabularyReader

    try:
        return VocabularyReader(path)
    except OSError as error:
        raise refuse_unreadable(model_id, Path(path).name, error) from error
    except Exception as error:  # the library trusts the file, and fails in many ways on a damaged one
        raise refuse(model_id, f"the GGUF file is damaged: {error}") from error


def _read_fields(model_id: str, reader: Any) -> tuple[dict[str, Any], list[int]]:
    """Return the metadata without the vocabulary but with named special tokens, and each tensor's weight count."""
    name = ""
    try:
        fields: dict[str, Any] = {}
        for name, field in reader.fields.items():
            fields |= {name: field.contents()} if len(field.data) <= _MOST_VALUES else {}
        tokens = reader.fields.get("tokenizer.ggml.tokens")
        for name in SPECIALS:
            number = fields.get(f"tokenizer.ggml.{name}_token_id")
            if tokens is not None and isinstance(number, int) and 0 <= number < len(tokens.data):
                fields[name] = bytes(tokens.parts[tokens.data[number]]).decode("utf-8", "replace")
        return fields, [prod(map(int, tensor.shape)) for tensor in reader.tensors]
    except Exception as error:
        raise refuse(model_id, f"the GGUF file is damaged: {name}: {error}") from error


def _read_config(model_id: str, path: str, kept: Path) -> _Config:
    """Return what transformers makes of a file's metadata, from the cached file if it is there and whole."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(kept.read_bytes(), type=_Config)
    config = _convert_config(model_id, path)
    keep_text(model_id, kept, msgspec.json.encode(config).decode(), "configuration")
    return config


def _convert_config(model_id: str, path: str) -> _Config:
    from transformers import AutoConfig

    from sie.catalog.gguf_reader import WeightsReader, reading_with

    load: Callable[..., Any] = AutoConfig.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        with reading_with(WeightsReader):
            config = load(str(Path(path).parent), gguf_file=Path(path).name, local_files_only=True)
    except Exception as error:  # an unknown architecture is a ValueError, missing fields may raise any error
        raise refuse(model_id, f"transformers cannot read its GGUF metadata: {error}") from error
    return _Config(
        context_length=int(config.max_position_embeddings),
        vocab_size=int(config.vocab_size),
        values={
            name: value for name, value in config.to_dict().items() if type(value) is int
        },  # true is not a number here
    )


def _fingerprint(path: str, header_bytes: int, rules: str) -> str:
    """Return a digest of a file's metadata, of the library that interprets them, and of our own rules for it."""
    from importlib.metadata import version  # imports a mail parser

    digest = hashlib.blake2b(f"{rules}{version('transformers')}".encode(), digest_size=16)
    with Path(path).open("rb") as file:
        digest.update(file.read(header_bytes))
    return digest.hexdigest()
