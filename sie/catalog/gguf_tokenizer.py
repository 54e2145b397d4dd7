"""Makes the `tokenizer.json` of a GGUF file whose architecture has a row of its own. Imports tokenizers when called."""

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
_LLAMA3: Final = "llama-bpe"
_SAME_SPLITS: Final = {"glm4": _LLAMA3, "chatglm-bpe": _LLAMA3, "hunyuan": "qwen2", "stablelm2": "qwen2"}
"""The splits into words that are those of a name which transformers knows. Source: llama.cpp, src/llama-vocab.cpp."""
_GPT2: Final = ("", "default", "gpt-2", "phi-2", "exaone4", "olmo", "mpt", "jais", "trillion", "granite-docling")
"""The names of GPT-2's own split, and those of older files, which do not say."""
_DIGITS: Final = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b")
"""The vocabularies of GPT-2's kind in which each digit is a word. transformers 5.23 does not know them by these names."""
_CASED: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""The letters with capitals that DeepSeek V2's expression lists."""
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_SPLITS: Final = {
    "hunyuan-dense": _DEEPSEEK_V3,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-llm": (
        "[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
        "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"),
}  # fmt: skip
"""Splits that transformers does not know: one expression after the other. Source: llama.cpp, src/llama-vocab.cpp.

There `deepseek-llm` does not split digits, but its vocabulary has none that are joined.
"""


def splits_digits(fields: dict[str, Any]) -> bool:
    """Tell whether each digit is a word of its own in a vocabulary of GPT-2's kind."""
    return fields.get("tokenizer.ggml.pre") in _DIGITS


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

    scores, types = ([one[0] for one in file.vocabulary(name)] for name in ("scores", "token_type"))
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
    marked = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    added = [
        AddedToken(one, normalized=False, special=True, lstrip=one == _MASK) for one in dict.fromkeys([*ends, *marked])
    ]
    tokenizer.add_special_tokens(added)
    return tokenizer.to_str()


def convert_with_library(model_id: str, path: str, fields: dict[str, Any], model_type: str) -> str:
    """Return the text of the `tokenizer.json` of another vocabulary, which transformers converts.

    Raises ModelLoadFailed, also for a split into words that is not known here.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as library

    pre = str(fields.get("tokenizer.ggml.pre", ""))
    is_known = pre in (*library.GGUF_PRE_TOKENIZER_SPLITS, *_SAME_SPLITS, *_GPT2, *_DIGITS, *_SPLITS)
    if fields.get("tokenizer.ggml.model") == "gpt2" and not is_known:
        raise refuse(model_id, f"its GGUF metadata set tokenizer.ggml.pre to {pre!r}, which is not known here")
    try:
        _, parts, settings = library.get_gguf_tokenizer(path)
        parts["pre_tokenizer_type"] = _SAME_SPLITS.get(pre, pre)
        backend, _ = library.convert_gguf_tokenizer(_KINDS.get(model_type, model_type), parts)
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    except Exception as error:  # each family fails in its own way
        raise refuse(model_id, f"its GGUF tokenizer cannot be converted: {error}") from error
    if pre in _DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = digits_apart()
    if pre in _SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = _split_by(_SPLITS[pre])
    if fields.get("tokenizer.ggml.add_space_prefix") is False:
        _begin_without_space(tokenizer.backend_tokenizer)
    return tokenizer.backend_tokenizer.to_str()


_KINDS: Final = {"gemma3_text": "gemma3"}
"""Architectures whose vocabulary transformers converts as it does another's."""


def _begin_without_space(tokenizer: Any) -> None:
    """Let texts of a SentencePiece vocabulary begin as they are: the library adds a space, whatever the file says."""
    from tokenizers import decoders, pre_tokenizers

    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace):
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
        )


def digits_apart() -> Any:
    """Return the split of the vocabularies in which each digit is a word."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])  # pyright: ignore[reportArgumentType]


def _split_by(patterns: tuple[str, ...]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # pyright: ignore[reportArgumentType]
