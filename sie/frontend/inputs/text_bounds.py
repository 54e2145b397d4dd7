"""Limits the text that a tokenizer library reads: one end of a long text, in parts of a bounded size.

The library needs 100 bytes for each character of a text, and up to 0.5 us, even for tokens that are cut off afterwards.
A tokenizer file's own rules may also make a text longer before it is split. Pure, apart from the library's calls.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final

import msgspec
import tokenizers

from sie.frontend.inputs.text_rules import least_chars
from sie.values.card import Side
from sie.values.errors import InputTooLong

_MAX_GROWTH: Final = 4096
"""Real tokenizers stay under 1,500: two Unicode forms, a charsmap and a mark for each space in one sequence."""
_MAX_GROWN_BYTES: Final = 32 << 20
_MAX_CHARS: Final = 8 << 20
_CHARS_A_TOKEN: Final = 8
_MORE_CHARS: Final = 1024
_MARGIN: Final = 128
"""Tokens beyond the limit that a text's end must have: where it was cut, its tokens may not be the whole text's."""
_DIGITS_AT_ONCE: Final = 4096
_CHARS_AT_ONCE: Final = 1 << 20
_FIXED_GROWTH: Final = {
    "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "StripAccents": 1, "Strip": 1, "Nmt": 1,
    "ByteLevel": 2, "BertNormalizer": 8, "Fuse": 1, "ByteFallback": 3, "Metaspace": 1, "WordPiece": 2, "BPEDecoder": 1,
    "CTC": 2,
}  # fmt: skip
"""How many bytes a byte may become. Source of the Unicode forms: Unicode Standard Annex 15, section 12."""
_UNKNOWN_GROWTH: Final = 11
_LONGEST_KEY: Final = 3
"""UTF-8 bytes of the characters that the charsmaps of SentencePiece replace by their longest texts."""


class GrowthError(ValueError):
    """A tokenizer's rules may make a text longer than any real tokenizer's do."""


def max_chars(tokenizer: tokenizers.Tokenizer) -> int:
    """Return the most characters of one text that a tokenizer may read. Raises GrowthError."""
    growth = 1.0
    for part in (tokenizer.normalizer, tokenizer.decoder):
        most = 1.0 if part is None else _growth(msgspec.json.decode(part.__getstate__()))
        if most > _MAX_GROWTH:
            raise GrowthError(f"it may make a text {most:.3g} times as long")
        growth = max(growth, most)
    return min(_MAX_CHARS, int(_MAX_GROWN_BYTES / growth))


def check_chars(model_id: str, texts: Sequence[str], most: int) -> None:
    """Raise InputTooLong for a text of more characters than a tokenizer may read."""
    for index, text in enumerate(texts):
        if len(text) > most:
            raise InputTooLong(
                f"Model '{model_id}': text {index} has {len(text)} characters, and at most {most} of one can be read",
                extras={"model": model_id},
            )


def shorten(
    model_id: str,
    tokenizer: tokenizers.Tokenizer,
    texts: Sequence[str],
    limit: int | None,
    most: int,
    *,
    side: Side = "right",
) -> Sequence[str]:
    """Return the texts, long ones cut on a side to more than limit tokens: the rest cannot matter.

    Only texts with over 16 characters for each token of the limit are cut. Raises InputTooLong when limit tokens need
    more than `most` characters, and TypeError for a text that is not valid Unicode.
    """
    size = _MORE_CHARS + _CHARS_A_TOKEN * limit if limit is not None else most
    if max(map(len, texts), default=0) <= min(2 * size, most):
        return texts
    short = [text if len(text) <= 2 * size else _cut(tokenizer, text, limit, size, most, side=side) for text in texts]
    check_chars(model_id, short, most)
    return short


def groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the texts in order, in groups that are small enough for one call of the library."""
    if sum(map(len, texts)) <= _CHARS_AT_ONCE:
        yield texts
        return
    first = num_chars = 0
    for index, text in enumerate(texts):
        num_chars += len(text)
        if num_chars > _CHARS_AT_ONCE and index > first:
            yield texts[first:index]
            first, num_chars = index, len(text)
    yield texts[first:]


def _cut(tokenizer: tokenizers.Tokenizer, text: str, limit: int | None, size: int, most: int, *, side: Side) -> str:
    """Return a beginning or an end of the text that holds all tokens within the limit, or the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TypeError from error
    while limit is not None:
        size = min(size, most)
        part = text[: _behind_number(text, size)] if side == "right" else text[_before_number(text, len(text) - size) :]
        if len(part) >= len(text):
            break
        [encoding] = tokenizer.encode_batch_fast([part], add_special_tokens=False)
        if len(encoding) + sum(map(len, encoding.overflowing)) >= limit + _MARGIN:
            return part
        if size >= most:
            break
        size *= 8
    return text


def _behind_number(text: str, place: int) -> int:
    """Return a place that is not inside a number: some tokenizers group digits from a number's end."""
    if text[place - 1 : place].isnumeric():
        while text[place : place + _DIGITS_AT_ONCE].isnumeric():
            place += _DIGITS_AT_ONCE
        while text[place : place + 1].isnumeric():
            place += 1
    return place


def _before_number(text: str, place: int) -> int:
    """Return a place at or before this one that is not inside a number: many tokenizers group digits from its start."""
    place = max(0, place)
    while place >= _DIGITS_AT_ONCE and text[place - _DIGITS_AT_ONCE : place + 1].isnumeric():
        place -= _DIGITS_AT_ONCE
    while place and text[place - 1 : place + 1].isnumeric():
        place -= 1
    return place


def _growth(form: Any) -> float:
    """Return how many bytes a byte may become in a step of a tokenizer file: a normalizer or a decoder."""
    kind = form.get("type")
    if kind == "Sequence":
        return prod(_growth(step) for step in form.get("normalizers") or form.get("decoders") or ())
    if kind == "Prepend":
        return 1 + len(form["prepend"].encode())
    if kind == "Replace":
        pattern, content = form["pattern"], len(form["content"].encode())
        least = len(pattern.get("String", "").encode()) or least_chars(pattern.get("Regex", ""))
        # An expression that is not known may match nothing, between any two bytes.
        return max(1.0, content / least) if least else 1.0 + content
    if kind == "Precompiled":
        return _longest_text(form.get("precompiled_charsmap") or "") / _LONGEST_KEY
    return _FIXED_GROWTH.get(kind, _UNKNOWN_GROWTH)


def _longest_text(charsmap: str) -> int:
    """Return the bytes of the longest text that a charsmap puts in. Source: sentencepiece, normalizer.cc."""
    data = base64.b64decode(charsmap)
    end = 4 + int.from_bytes(data[:4], "little")
    return max(_LONGEST_KEY, *map(len, data[end:].split(b"\0")), _LONGEST_KEY)
