"""Makes the `tokenizer.json` of a GGUF file with a WordPiece or Unigram vocabulary. Imports tokenizers when called."""

from __future__ import annotations

from typing import Any, Final

from sie.catalog.files import refuse
from sie.catalog.gguf_contents import GgufContents

_MASK: Final = "<mask>"
_CONTROL: Final = 3
"""The type of a special token."""
_WORD_START: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_SPECIALS: Final = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]"}
"""The tokens of a WordPiece vocabulary that its texts need, by their keys in the metadata, which are spelled so."""


def convert_word_pieces(model_id: str, fields: dict[str, Any], tokens: list[str], types: list[int]) -> str:
    """Return the text of the `tokenizer.json` of a BERT vocabulary.

    Its tokens are in llama.cpp's form: a token that begins a word has a mark, which BERT's own has not, and one that
    continues a word lacks BERT's `##`. Texts are in lower case if no token has one of the capitals A to Z.

    Raises ModelLoadFailed that names the field at fault.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces = [
        _piece(token, is_special=number < len(types) and types[number] == _CONTROL)
        for number, token in enumerate(tokens)
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        twice = next(piece for number, piece in enumerate(pieces) if vocabulary[piece] != number)
        raise refuse(model_id, f"its GGUF metadata have {twice!r} twice in tokenizer.ggml.tokens")
    special = {key: _special(model_id, fields, pieces, key, text) for key, text in _SPECIALS.items()}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unknown"], max_input_chars_per_word=100))
    has_capitals = any("A" <= letter <= "Z" for piece in pieces if not _is_bracketed(piece) for letter in piece)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not has_capitals)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.WordPiece()  # pyright: ignore[reportAttributeAccessIssue]
    first, last = special["cls"], special["seperator"]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, vocabulary[token]) for token in (first, last)],
    )
    marked = [piece for piece, kind in zip(pieces, types, strict=False) if kind == _CONTROL]
    added = dict.fromkeys([*special.values(), *marked])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in added])
    return tokenizer.to_str()


def _piece(token: str, *, is_special: bool) -> str:
    if token.startswith(_WORD_START) and not is_special:
        return token.removeprefix(_WORD_START)
    return token if is_special or _is_bracketed(token) else f"##{token}"


def _is_bracketed(token: str) -> bool:
    """Tell whether a token is written like [CLS]; older files mark such tokens in no other way."""
    return len(token) > 2 and token.startswith("[") and token.endswith("]")


def _special(model_id: str, fields: dict[str, Any], pieces: list[str], key: str, text: str) -> str:
    field = f"tokenizer.ggml.{key}_token_id"
    number = fields.get(field, fields.get("tokenizer.ggml.bos_token_id") if key == "cls" else None)
    if number is None and text in pieces:
        return text
    if not isinstance(number, int) or not 0 <= number < len(pieces):
        raise refuse(model_id, f"its GGUF metadata set {field} to {number!r}, which is not one of its tokens")
    return pieces[number]


def convert_pieces(file: GgufContents, tokens: list[str]) -> str:
    """Return the text of the `tokenizer.json` of XLM-RoBERTa's vocabulary, as transformers 5.23 makes it.

    Raises ModelLoadFailed that names the field at fault.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    scores = [one[0] for one in file.vocabulary("scores")]
    unknown = file.fields.get("tokenizer.ggml.unknown_token_id")
    if len(scores) != len(tokens):
        raise refuse(
            file.model_id, f"its GGUF metadata have {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens"
        )
    ends = [_special(file.model_id, file.fields, tokens, key, "") for key in ("bos", "eos", "unknown")]
    pieces = [(token, float(score)) for token, score in zip(tokens, scores, strict=True)]
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, byte_fallback=False))
    charsmap = bytes(int(one[0]) & 0xFF for one in file.vocabulary("precompiled_charsmap"))
    if charsmap:
        tokenizer.normalizer = normalizers.Precompiled(charsmap)  # pyright: ignore[reportAttributeAccessIssue]
    scheme = "never" if file.fields.get("tokenizer.ggml.add_space_prefix") is False else "always"
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)  # pyright: ignore[reportAttributeAccessIssue]
    first, last, _ = ends
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(token, tokens.index(token)) for token in (first, last)],
    )
    marked = [token for token, kind in zip(tokens, file.token_types(), strict=False) if kind == _CONTROL]
    added = [
        AddedToken(one, normalized=False, special=True, lstrip=one == _MASK) for one in dict.fromkeys([*ends, *marked])
    ]
    tokenizer.add_special_tokens(added)
    return tokenizer.to_str()
