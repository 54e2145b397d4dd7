"""Provides a `tokenizer.json` for checkpoints without one.

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

from sie.catalog.files import refuse

_SOURCES = ("*.json", "*.txt", "*.model", "*.tiktoken")
_VOCABULARIES = ("*vocab*", "*.model", "*.tiktoken")
_FOLDER = "tokenizers"
_SENTENCEPIECE = "*.model"
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
