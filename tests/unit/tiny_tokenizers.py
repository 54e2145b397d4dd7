"""Small tokenizers of the kinds that models which generate have, made here; and one that counts what is read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from sie.frontend.inputs import tokenize

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and then some more of it.",
    "def f(x):\n    return {'a': [1, 2, 3], 'b': x}\n\n\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京は日本の首都です。 😀👍🏽 é è",
    "user assistant system <|im_start|> im_start im_end | <start_of_turn>",
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")


@functools.cache
def byte_level() -> Tokenizer:
    """Return one whose tokens are bytes, as those of GPT-2, Qwen and Llama 3 are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(SPECIAL),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("two words", special=False)])
    return tokenizer


@functools.cache
def byte_level_in_sequence() -> Tokenizer:
    """Return the same with its decoder as the only one of a sequence."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


@functools.cache
def byte_level_and_strip() -> Tokenizer:
    """Return the same with a decoder that also drops a space before the whole text."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


@functools.cache
def sentence_piece(*, strips: bool = True) -> Tokenizer:
    """Return one with a mark for spaces and a token for each byte, as those of Llama 2 (strips) and Gemma have."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    prepend = [normalizers.Prepend("▁")] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIAL, *byte_tokens], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    made = Tokenizer.from_str(tokenizer.to_str())
    return _without_special(made, byte_tokens)


def _without_special(tokenizer: Tokenizer, texts: list[str]) -> Tokenizer:
    """Return the tokenizer with these tokens as ordinary ones: a trainer makes every token it is given special."""
    import json

    facts = json.loads(tokenizer.to_str())
    facts["added_tokens"] = [token for token in facts["added_tokens"] if token["content"] not in texts]
    return Tokenizer.from_str(json.dumps(facts))


@functools.cache
def word_piece() -> Tokenizer:
    """Return one whose words are joined by spaces when they are decoded, as BERT's are."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def unigram() -> Tokenizer:
    """Return one that takes the likeliest pieces of each word, as those of XLM-RoBERTa and T5 do."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


class Counting:
    """A library's tokenizer, with the same methods, that counts the characters of the texts that it reads."""

    def __init__(self, library: Tokenizer) -> None:
        self._library = library
        self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def encode(self, text: str, **options: Any) -> Encoding:
        self._count([text])
        return self._library.encode(text, **options)

    def encode_batch(self, texts: Sequence[Any], **options: Any) -> list[Encoding]:
        self._count(texts)
        return self._library.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: Sequence[Any], **options: Any) -> list[Encoding]:
        self._count(texts)
        return self._library.encode_batch_fast(texts, **options)

    def _count(self, texts: Sequence[Any]) -> None:
        self.num_chars += sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)


def count_reads(monkeypatch: pytest.MonkeyPatch, tokenizer: tokenize.Tokenizer) -> Counting:
    """Have a model's tokenizer count, until the test ends, what it reads."""
    counting = Counting(tokenizer.backend)
    document: Any = tokenizer._document
    monkeypatch.setattr(tokenizer, "_document", document._replace(tokenizer=counting))
    return counting
