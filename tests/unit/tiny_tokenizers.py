"""Small tokenizers of the kinds that models which generate have, made here."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
