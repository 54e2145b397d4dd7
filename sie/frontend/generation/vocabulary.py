"""Turns text into token ids for a generating model, and gives the text of each token.

A model with a tokenizer file has the tokens of that file. A stub has no file: its tokens are bytes
(`sie.catalog.stub`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import msgspec
import tokenizers
from tokenizers import decoders

from sie.frontend.generation.detokenise import ByteDecoder, TextDecoder, TokenDecoder
from sie.frontend.inputs.text_bounds import check_chars, max_chars
from sie.frontend.inputs.tokenize import unicode_error
from sie.frontend.inputs.tokenizer_files import own_pool
from sie.values.card import ModelCard
from sie.values.errors import BadRequest

_NUM_BYTES: Final = 256
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHORS: Final = ("\n", "|", "x")
_SPACE: Final = "\u2581"
"""SentencePiece's character for a space."""


class _DecoderForm(msgspec.Struct):
    """The decoder section of a tokenizer file."""

    type: str
    decoders: list[_DecoderForm] = []


class Vocabulary(Protocol):
    """The tokens of one model. Safe to use from several threads at once."""

    size: int
    """Ids are 0 to size - 1."""
    pool: ThreadPoolExecutor | None
    """The thread on which all texts must be read, or None: short texts may be read on the event loop."""

    def encode(self, text: str, *, whole: bool) -> list[int]:
        """Return a text's ids; special texts become special tokens.

        whole: adds the tokens that the tokenizer puts around every text. Raises BadRequest for invalid Unicode.
        """
        ...

    def encode_behind(self, text: str, *, plain: bool = False) -> list[int]:
        """Return the ids of a text that continues another. plain: reads a special token's text as plain text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        ...

    def decoder(self, kept: Collection[str] = ()) -> TokenDecoder:
        """Return a decoder for the tokens of one answer, which leaves out all special tokens except those in kept."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; they may be an incomplete character."""
        ...

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with this name, or None."""
        ...


class StubVocabulary:
    """The tokens of a stub: bytes, then the special tokens in the order of its card."""

    def __init__(self, card: ModelCard) -> None:
        rule = card.generate
        self._texts = rule.special_texts if rule is not None else ()
        self.pool: ThreadPoolExecutor | None = None
        self.size = card.vocab_size or _NUM_BYTES + len(self._texts)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    def encode(self, text: str, *, whole: bool) -> list[int]:
        """See `Vocabulary`."""
        ids: list[int] = []
        start = 0
        for found in self._pattern.finditer(text):
            ids += self.encode_behind(text[start : found.start()], plain=True)
            ids.append(_NUM_BYTES + self._texts.index(found[0]))
            start = found.end()
        return ids + self.encode_behind(text[start:], plain=True)

    def encode_behind(self, text: str, *, plain: bool = False) -> list[int]:
        """See `Vocabulary`."""
        if not plain:
            return self.encode(text, whole=False)
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise BadRequest("a text of the request is not valid Unicode") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Vocabulary`."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def decoder(self, kept: Collection[str] = ()) -> TokenDecoder:
        """See `Vocabulary`."""
        special = range(_NUM_BYTES, self.size)
        found = {_NUM_BYTES + self._texts.index(text) for text in kept if text in self._texts}
        return ByteDecoder(self.token_bytes, frozenset(special) - found if found else special)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary`."""
        if token_id < _NUM_BYTES:
            return bytes((token_id,))
        number = token_id - _NUM_BYTES
        return self._texts[number].encode() if number < len(self._texts) else b""

    def token_id(self, name: str) -> int | None:
        """See `Vocabulary`."""
        return _NUM_BYTES + self._texts.index(name) if name in self._texts else None


class FileVocabulary:
    """The tokens of a tokenizer file."""

    def __init__(self, card: ModelCard, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.pool = own_pool(tokenizer)
        self._model, self._max_chars = card.id, max_chars(tokenizer)
        self.size = card.vocab_size or tokenizer.get_vocab_size()
        steps = _decoder_steps(tokenizer.decoder)
        self._is_byte_level = "ByteLevel" in steps
        """Whether each character of a token stands for a byte."""
        self._only_joins_bytes = steps == ["ByteLevel"]
        self._special_ids = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self._special = frozenset(self._special_ids.values())
        self._bytes_of = _byte_tokens(tokenizer) if "ByteFallback" in steps else {}
        self._anchors = [(text, self._ids(text, whole=False)) for text in _ANCHORS]
        # Not a method: that would make a reference cycle, which only the garbage collector frees.
        spell = functools.partial(_token_bytes, tokenizer, self._is_byte_level)
        self.token_bytes = functools.lru_cache(maxsize=65536)(spell)

    def encode(self, text: str, *, whole: bool) -> list[int]:
        """See `Vocabulary`."""
        return self._ids(text, whole=whole)

    def encode_behind(self, text: str, *, plain: bool = False) -> list[int]:
        """See `Vocabulary`. With plain, the text is read in two parts, so that it never is a special token.

        The text is read after a short text that does not merge with it, because a tokenizer may put a space before the
        beginning of a text. Idea: transformers 5.23 utils/chat_template_utils.py.
        """
        parts = (text[:1], text[1:]) if plain else (text,)
        return [token_id for part in parts if part for token_id in self._behind(part)]

    def _behind(self, text: str) -> list[int]:
        for anchor, ids in self._anchors:
            behind = self._ids(anchor + text, whole=False)
            if behind[: len(ids)] == ids:
                return behind[len(ids) :]
        return self._ids(text, whole=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Vocabulary`."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def decoder(self, kept: Collection[str] = ()) -> TokenDecoder:
        """See `Vocabulary`."""
        found = {self._special_ids[text] for text in kept if text in self._special_ids}
        skipped = self._special - found if found else self._special
        if self._only_joins_bytes:
            return ByteDecoder(self.token_bytes, skipped)

        def decode(ids: Sequence[int]) -> str:
            shown = [token_id for token_id in ids if token_id not in skipped] if found else list(ids)
            return self._tokenizer.decode(shown, skip_special_tokens=not found)

        return TextDecoder(decode, self._bytes_of, skipped)

    def token_id(self, name: str) -> int | None:
        """See `Vocabulary`."""
        found = self._tokenizer.token_to_id(name)
        return found if found is not None and found < self.size else None

    def _ids(self, text: str, *, whole: bool) -> list[int]:
        check_chars(self._model, [text], self._max_chars)
        try:
            # Only the batch call releases the GIL meanwhile.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=whole)[0].ids
        except TypeError as error:
            raise unicode_error([text], error) from None


def _token_bytes(tokenizer: tokenizers.Tokenizer, is_byte_level: bool, token_id: int) -> bytes:
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    if is_byte_level:
        alphabet = _byte_alphabet()
        values = [alphabet.get(char, -1) for char in token]
        return token.encode() if -1 in values else bytes(values)
    if (found := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes((int(found[1], 16),))
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    return (" " + text if token.startswith(_SPACE) and not text.startswith(" ") else text).encode()


def _decoder_steps(decoder: decoders.Decoder | None) -> list[str]:
    """Return the types of a decoder's steps in order, including those of nested sequences."""
    if decoder is None:
        return []

    def steps(form: _DecoderForm) -> list[str]:
        return [step for part in form.decoders for step in steps(part)] if form.type == "Sequence" else [form.type]

    return steps(msgspec.json.decode(decoder.__getstate__(), type=_DecoderForm))


def _byte_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, int]:
    """Return the byte of each byte token; empty if some bytes have no token."""
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(_NUM_BYTES)]
    found = {token_id: byte for byte, token_id in enumerate(ids) if token_id is not None}
    return found if len(found) == _NUM_BYTES else {}


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level tokens. Source: GPT-2, encoder.py (bytes_to_unicode)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(_NUM_BYTES) if byte not in set(shown)]
    return {**{chr(byte): byte for byte in shown}, **{chr(0x100 + n): byte for n, byte in enumerate(hidden)}}
