"""Provides a `tokenizer.json` for checkpoints without one, or whose settings override their own.

transformers converts the tokenizer of a checkpoint without that file once. The cache keeps the result under a hash of
all its sources, so it is never stale. Frontends read only `tokenizer.json`, so they do not need another library.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from sie.catalog.files import open_checkpoint, refuse
from sie.values.card import ModelCard

_SOURCES = ("*.json", "*.txt", "*.model", "*.tiktoken")
_VOCABULARIES = ("*vocab*", "*.model", "*.tiktoken")
_FOLDER = "tokenizers"
_SENTENCEPIECE = "*.model"
_BERT_NAMES = ("Bert", "DistilBert", "Electra", "LayoutLM", "MPNet", "MobileBert", "SqueezeBert")
_BERT_CLASSES = {f"{name}Tokenizer{suffix}" for name in _BERT_NAMES for suffix in ("", "Fast")}
_BERT_TYPES = {"bert", "distilbert", "electra", "layoutlm", "mobilebert", "mpnet", "nomic_bert", "squeezebert"}
"""Values of `model_type` with such a tokenizer, where no file names its class."""
_LETTERS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
"""Settings of tokenizer_config.json for a BERT's normalizer, and their defaults."""
_MAX_PIECE_CHARS = 64
"""A Unigram model looks at each place of a text for pieces of every length. SentencePiece makes pieces of up to 16."""


class _UnigramForm(msgspec.Struct, frozen=True):
    """The vocabulary, which is a list only in a Unigram model."""

    vocab: msgspec.Raw = msgspec.Raw()


class _ModelForm(msgspec.Struct, frozen=True):
    model: _UnigramForm = _UnigramForm()


class _TokenizerForm(msgspec.Struct):
    """The beginning and end of a `tokenizer.json`: decoding it finds a cut file, without its objects."""

    model: msgspec.Raw


def convert_tokenizer(model_id: str, directory: str, cache_dir: str) -> str:
    """Return the path of a `tokenizer.json` made from a checkpoint's slow tokenizer.

    Imports transformers unless the cache has it. Raises ModelLoadFailed, with `error_class` DEPENDENCY when a library
    that the conversion needs is not installed.
    """
    return keep_tokenizer(model_id, cache_dir, _fingerprint(directory), lambda: _convert(model_id, directory))


def with_tokenizer_settings(card: ModelCard, cache_dir: str) -> ModelCard:
    """Return a card whose tokenizer reads letters as tokenizer_config.json says, even if its own file disagrees.

    A tokenizer of BERT takes lower case, accents and Chinese characters from tokenizer_config.json. Source:
    transformers 5.23 tokenization_bert.py, and 4.57 tokenization_bert_fast.py. Writes a `tokenizer.json` to the cache
    if the card's own differs. Raises ModelLoadFailed, also for an encoder or a reranker that cuts a text's beginning.
    """
    try:
        data = Path(card.tokenizer_file).read_bytes()
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        form, truncation = (msgspec.json.decode(parts.get(n, b"null")) for n in ("normalizer", "truncation"))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return card  # the frontends refuse it
    checkpoint = open_checkpoint(card.id, card.directory)
    settings = {} if card.static_vectors else checkpoint.read_object("tokenizer_config.json")
    _check_side(card, settings, truncation or {})
    wanted = {} if card.static_vectors else _letters(card.id, settings, checkpoint.read_object("config.json"))
    if not isinstance(form, dict) or form.get("type") != "BertNormalizer" or form | wanted == form:
        return card
    parts["normalizer"] = msgspec.Raw(msgspec.json.encode(form | wanted))
    text = msgspec.json.encode(parts)
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return msgspec.structs.replace(card, tokenizer_file=keep_tokenizer(card.id, cache_dir, digest, text.decode))


def _check_side(card: ModelCard, settings: dict[str, Any], truncation: dict[str, Any]) -> None:
    """Refuse a tokenizer that keeps the end of a long text. Generators and extractors do not cut texts by it."""
    name, side = "truncation_side in tokenizer_config.json", settings.get("truncation_side")
    if side is None:
        name, side = "direction of truncation in tokenizer.json", truncation.get("direction", "right")
    if str(side).lower() != "right" and card.kind not in ("generator", "extractor"):
        raise refuse(card.id, f"its {name} is {side!r}; only 'right' can be run, which keeps a text's beginning")


def _letters(model_id: str, settings: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the normalizer's fields that a tokenizer of BERT sets; empty for other tokenizers."""
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if str(name) not in _BERT_CLASSES if name else config.get("model_type") not in _BERT_TYPES:
        return {}
    read = {name: settings.get(name, default) for name, default in _LETTERS.items()}
    for name, value in read.items():
        if not isinstance(value, bool) and not (name == "strip_accents" and value is None):
            raise refuse(model_id, f"tokenizer_config.json sets {name} to {value!r}")
    lowercase, strip_accents, handle_chinese_chars = read.values()
    return {"lowercase": lowercase, "strip_accents": strip_accents, "handle_chinese_chars": handle_chinese_chars}


def keep_tokenizer(model_id: str, cache_dir: str, fingerprint: str, convert: Callable[[], str]) -> str:
    """Return the path of the cached `tokenizer.json` of a fingerprint; convert makes its text if it is missing.

    A cut or damaged file is written again. Raises ModelLoadFailed when it cannot be written, and the errors of
    convert.
    """
    path = Path(cache_dir, _FOLDER, f"{fingerprint}.json")
    if not _is_whole(path):
        keep_text(model_id, path, convert(), "tokenizer")
    return str(path)


def keep_text(model_id: str, path: Path, text: str, what: str) -> None:
    """Write a file of the cache as `keep_bytes` does."""
    keep_bytes(model_id, path, text.encode(), what)


def keep_bytes(model_id: str, path: Path, content: bytes, what: str) -> None:
    """Write a file of the cache atomically; what names it in the ModelLoadFailed that is raised if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave the name without the bytes
                Path(file.name).replace(path)  # ORDER: after the last byte; a reader sees the whole file or no file
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise refuse(model_id, f"its {what} cannot be written to {path}: {error.strerror}", "STORAGE") from error


def check_pieces(model_id: str, tokenizer_file: str) -> None:
    """Raise ModelLoadFailed for a Unigram tokenizer with pieces so long that a text would take seconds."""
    try:
        vocab = msgspec.json.decode(Path(tokenizer_file).read_bytes(), type=_ModelForm).model.vocab
        pieces = msgspec.json.decode(vocab, type=list[tuple[str, float]]) if bytes(vocab).startswith(b"[") else []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return  # the frontends refuse it
    longest = max((len(piece) for piece, _ in pieces), default=0)
    if longest > _MAX_PIECE_CHARS:
        reason = f"its tokenizer has a piece of {longest} characters, and at most {_MAX_PIECE_CHARS} are read"
        raise refuse(model_id, reason)


def _is_whole(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        msgspec.json.decode(path.read_bytes(), type=_TokenizerForm)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _fingerprint(directory: str) -> str:
    from importlib.metadata import version  # imports a mail parser

    digest = hashlib.blake2b(version("transformers").encode(), digest_size=16)
    for path in sorted({path for pattern in _SOURCES for path in Path(directory).glob(pattern)}):
        content = path.read_bytes()
        digest.update(b"\0%s\0%d\0" % (os.fsencode(path.name), len(content)))
        digest.update(content)
    return digest.hexdigest()


def _convert(model_id: str, directory: str) -> str:
    if not any(path for pattern in _VOCABULARIES for path in Path(directory).glob(pattern)):
        # Without a vocabulary, transformers makes a tokenizer that knows only special tokens.
        raise refuse(model_id, "there is neither a tokenizer.json nor a vocabulary to make one from")
    from transformers import AutoTokenizer

    load: Callable[..., Any] = AutoTokenizer.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        tokenizer = load(directory, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise refuse(model_id, f"its tokenizer cannot be converted: {error}", "DEPENDENCY") from error
    except Exception as error:  # each family raises different errors for missing files
        if any(Path(directory).glob(_SENTENCEPIECE)) and find_spec("sentencepiece") is None:
            # transformers then assumes that the file is tiktoken's, and requires that library instead.
            reason = "there is no tokenizer.json, and to make one of its SentencePiece model takes a library"
            raise refuse(model_id, f"{reason}: `pip install 'ringserve[sentencepiece]'`", "DEPENDENCY") from error
        raise refuse(model_id, f"there is no tokenizer.json, and none can be made: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise refuse(model_id, f"there is no tokenizer.json, and a {type(tokenizer).__name__} cannot become one")
    return backend.to_str()
