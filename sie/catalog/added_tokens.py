"""Reads a tokenizer's added tokens, which are separate from its vocabulary and include its special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sie.catalog.files import Checkpoint, refuse

SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE_NAMES: Final = ("extra_special_tokens", "additional_special_tokens")
"""Lists of further special tokens; transformers reads the second only if the first is empty."""


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens` in tokenizer.json, or of `added_tokens_decoder` in tokenizer_config.json."""

    content: str
    id: int = -1
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None

    @property
    def is_normalized(self) -> bool:
        """Whether its text is looked for in the normalised text; by default only that of special tokens is not."""
        return not self.special if self.normalized is None else self.normalized

    def reads_like(self, other: AddedToken) -> bool:
        """Tell whether two entries read the same text in the same way."""
        alike = msgspec.structs.replace(other, id=self.id, normalized=other.is_normalized)
        return msgspec.structs.replace(self, normalized=self.is_normalized) == alike


class _Tokenizer(msgspec.Struct):
    """The part of tokenizer.json that is read here; the vocabulary of several megabytes is skipped."""

    added_tokens: list[AddedToken] = []


def read_added_tokens(tokenizer_file: str) -> list[AddedToken]:
    """Return the added tokens of a tokenizer.json. Raises OSError, and msgspec's errors for a malformed file."""
    return msgspec.json.decode(Path(tokenizer_file).read_bytes(), type=_Tokenizer).added_tokens


def missing_tokens(checkpoint: Checkpoint, settings: dict[str, Any], own: Sequence[AddedToken]) -> list[AddedToken]:
    """Return the tokens that transformers adds to those of a tokenizer.json, or reads differently, in its order.

    settings are those of tokenizer_config.json, and own the tokens of tokenizer.json. Raises ModelLoadFailed for
    settings of another form. Source: transformers 5.23 tokenization_utils_base.py and tokenization_utils_tokenizers.py.
    """
    known = {token.content: token for token in own}
    try:
        if "added_tokens_decoder" not in settings:  # older files
            settings = settings | checkpoint.read_object("special_tokens_map.json")
        for token in _listed(checkpoint, settings, own):
            if token.content not in known or not token.reads_like(known[token.content]):
                known[token.content] = token
        for token in _named(settings):
            known.setdefault(token.content, token)
    except (msgspec.ValidationError, ValueError) as error:
        raise refuse(checkpoint.id, f"the added tokens in its tokenizer_config.json cannot be read: {error}") from error
    before = {id(token) for token in own}
    return [token for token in known.values() if token.content and id(token) not in before]


def _listed(checkpoint: Checkpoint, settings: dict[str, Any], own: Sequence[AddedToken]) -> list[AddedToken]:
    """Return the tokens that are listed by their ids, in this order."""
    listed = settings.get("added_tokens_decoder")
    if listed is not None:
        tokens = msgspec.convert(listed, dict[str, AddedToken])
        return [token for _, token in sorted((int(number), token) for number, token in tokens.items())]
    ids = {token.id for token in own}
    numbers = msgspec.convert(checkpoint.read_object("added_tokens.json"), dict[str, int])
    special = {token.content for token in _named(settings)}
    contents = sorted(numbers.keys() - {token.content for token in own}, key=numbers.__getitem__)
    return [AddedToken(content, special=content in special) for content in contents if numbers[content] not in ids]


def _named(settings: dict[str, Any]) -> Iterator[AddedToken]:
    """Yield the special tokens that settings name."""
    names = [*SPECIAL_NAMES, *(name for name in settings if name.endswith("_token") and name not in SPECIAL_NAMES)]
    values = [settings[name] for name in names if isinstance(settings.get(name), str | dict)]
    more = next((settings[name] for name in _MORE_NAMES if settings.get(name)), ())
    for value in (*values, *_values(more)):
        token = {"content": value} if isinstance(value, str) else value
        yield msgspec.structs.replace(msgspec.convert(token, AddedToken), special=True)


def _values(more: Any) -> Iterable[Any]:
    return more.values() if isinstance(more, dict) else more
