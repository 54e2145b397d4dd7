"""Completes a GLiNER or GLiREL checkpoint that only names its encoders: adds their configurations and tokenizers.

The library takes these from a hub when it loads a model. Source: gliner 0.2.29 model.py, `_load_tokenizer` and
`_resize_token_embeddings`; modeling/encoder.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sie.catalog.files import Checkpoint, open_checkpoint, refuse
from sie.catalog.gli import GLINER_CONFIG, GLIREL_CONFIG, LABELS_TOKENIZER
from sie.values.glirel_items import RELATION_MARK, TEXT_MARK

Encoders = Callable[[str], str]
"""Returns the directory of an encoder by the name that a checkpoint gives it. Raises ModelLoadFailed."""

ENCODER_FILES: Final = ["config.json", "token*.json", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model"]
"""The files of an encoder that are needed; its weights are the checkpoint's own."""
_PARTS: Final = (("model_name", "encoder_config"), ("labels_encoder", "labels_encoder_config"))
_UNKNOWN: Final = -1
_FIRST_MARK: Final = "[FLERT]"
_MARKS: Final = {"ent_token": "<<ENT>>", "sep_token": "<<SEP>>"}
"""Keys of the configuration with the tokens before a label and before the text, and the library's defaults."""
_LABEL_FROM_END: Final = 2
_ENTITY_MARKS: Final = ("[E]", "[/E]")
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")


def lacks_encoder(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint is a GLiNER or GLiREL model without an encoder's configuration or tokenizer."""
    config = checkpoint.read_object(GLINER_CONFIG) or checkpoint.read_object(GLIREL_CONFIG)
    if not config:
        return False
    named = [key for name, key in _PARTS if config.get(name) is not None]
    return any(not isinstance(config.get(key), dict) for key in named) or not _has_tokenizer(checkpoint.root)


def add_encoders(checkpoint: Checkpoint, staged: Path, encoders: Encoders) -> None:
    """Write what is missing to the directory `staged`, which has the checkpoint's other files.

    Raises ModelLoadFailed for a checkpoint that names no encoder, or a tokenizer that cannot be made.
    """
    if checkpoint.find(GLIREL_CONFIG) is not None:
        _add_glirel_encoder(checkpoint, staged, encoders)
    else:
        _add_gliner_encoders(checkpoint, staged, encoders)


def _add_gliner_encoders(checkpoint: Checkpoint, staged: Path, encoders: Encoders) -> None:
    config = checkpoint.read_object(GLINER_CONFIG)
    for name, key in _PARTS:
        if config.get(name) is not None and not isinstance(config.get(key), dict):
            config[key] = _configuration(checkpoint, encoders, config[name])
    if not _has_tokenizer(staged) or _needs_marks(config):
        has_own = (staged / _TOKENIZER[1]).is_file()
        source = staged if has_own else Path(_find(checkpoint, encoders, config.get("model_name")))
        config |= _write_tokenizer(checkpoint.id, source, staged, config)
    if config.get("vocab_size", _UNKNOWN) != _UNKNOWN:
        config["encoder_config"]["vocab_size"] = config["vocab_size"]
    if config.get("labels_encoder") is not None and not _has_tokenizer(staged / LABELS_TOKENIZER):
        labels = _load_tokenizer(checkpoint.id, Path(_find(checkpoint, encoders, config["labels_encoder"])))
        labels.save_pretrained(staged / LABELS_TOKENIZER)
    _replace_text(staged / GLINER_CONFIG, json.dumps(config, indent=2))


def _add_glirel_encoder(checkpoint: Checkpoint, staged: Path, encoders: Encoders) -> None:
    """Source: glirel 1.2.1, modules/token_rep.py: the tokens that it adds, and the size of the table for all tokens."""
    config = checkpoint.read_object(GLIREL_CONFIG)
    name = config.get("model_name")
    tokenizer = _load_tokenizer(checkpoint.id, Path(_find(checkpoint, encoders, name)))
    if _FIRST_MARK not in tokenizer.get_vocab():
        tokenizer.add_tokens([_FIRST_MARK], special_tokens=True)
    tokenizer.add_tokens([RELATION_MARK, TEXT_MARK, *_ENTITY_MARKS])
    tokenizer.save_pretrained(staged)
    config["encoder_config"] = {**_configuration(checkpoint, encoders, name), "vocab_size": len(tokenizer)}
    _replace_text(staged / GLIREL_CONFIG, json.dumps(config, indent=2))


def _has_tokenizer(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _TOKENIZER)


def _configuration(checkpoint: Checkpoint, encoders: Encoders, name: Any) -> dict[str, Any]:
    found = open_checkpoint(checkpoint.id, _find(checkpoint, encoders, name)).read_object("config.json")
    if not found.get("model_type"):
        raise refuse(checkpoint.id, f"its encoder {name!r} has no config.json with a model_type")
    return found


def _find(checkpoint: Checkpoint, encoders: Encoders, name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise refuse(checkpoint.id, f"{GLINER_CONFIG} does not name its encoder")
    return encoders(name)


def _needs_marks(config: dict[str, Any]) -> bool:
    """Tell whether the library would count its marks among the encoder's tokens: bi-encoders read labels without them."""
    return not _is_known(config) and config.get("labels_encoder") is None


def _is_known(config: dict[str, Any]) -> bool:
    return all(config.get(key, _UNKNOWN) != _UNKNOWN for key in ("class_token_index", "vocab_size"))


def _write_tokenizer(model_id: str, source: Path, staged: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Write the encoder's tokenizer with the library's marks; return the numbers in the configuration that follow."""
    tokenizer = _load_tokenizer(model_id, source)
    changes: dict[str, Any] = {}
    if not _is_known(config):
        marks = [str(config.get(key) or default) for key, default in _MARKS.items()]
        tokenizer.add_tokens([_FIRST_MARK, *marks], special_tokens=True)
    if _needs_marks(config):
        changes = {"class_token_index": len(tokenizer) - _LABEL_FROM_END, "vocab_size": len(tokenizer)}
    tokenizer.save_pretrained(staged)
    return changes


def _load_tokenizer(model_id: str, directory: Path) -> Any:
    from transformers import AutoTokenizer

    load: Callable[..., Any] = AutoTokenizer.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        return load(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each family raises different errors for missing files
        raise refuse(model_id, f"the tokenizer of its encoder cannot be read: {error}") from error


def _replace_text(path: Path, text: str) -> None:
    """Write a file that is this directory's own: a copy, never a link to the source's."""
    path.unlink()
    path.write_text(text, encoding="utf-8")
