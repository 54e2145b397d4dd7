"""Writes the `tokenizer.json` of a GGUF file whose vocabulary is joined by merges. Pure.

transformers converts such vocabularies, too. But its versions do so in different ways, and give special tokens that are
not written as bytes, such as DeepSeek's, numbers behind the last row of the embeddings. To import it takes two seconds,
and 262,144 tokens take it four more. This module takes half a second for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from sie.catalog.files import refuse
from sie.catalog.gguf_contents import GgufContents
from sie.catalog.gguf_splits import SPLITS

_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_NORMAL: Final = 1
_USER_DEFINED: Final = 4
_ADDED: Final = (2, 3, _USER_DEFINED)
"""The types of the tokens that are found in a text before it is split: unknown, control and user-defined."""
_NAMES: Final = ("bos", "eos", "unknown", "padding")
_KINDS: Final = {"gpt2": False, "llama": True, "gemma4": False}
"""The kinds of vocabularies, and whether a file that does not say so begins texts with a token."""
_GEMMA: Final = ("gemma", "gemma2", "gemma3_text")
"""The models whose vocabulary of SentencePiece is Gemma's."""


def _split(**pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def _byte_level(*, adds_space: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": adds_space, "trim_offsets": True, "use_regex": adds_space}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


_TO_TEXT: Final = (_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"})
_STRIP: Final = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def convert_bpe(file: GgufContents, model_type: str = "") -> str:
    """Return the text of the `tokenizer.json`. model_type is the library's name of the model, if a row has it.

    Raises ModelLoadFailed that names the field at fault, also for a split into words that is not known.
    """
    kind = file.fields.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise refuse(file.model_id, f"its GGUF metadata set tokenizer.ggml.model to {kind!r}, which is not read here")
    tokens = file.texts("tokens")
    is_gemma = kind == "gemma4" or (kind == "llama" and model_type in _GEMMA)
    if is_gemma:
        spelled = [_SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
    else:
        spelled = list(tokens)
    vocabulary = {token: number for number, token in enumerate(spelled)}
    if len(vocabulary) != len(spelled):
        twice = next(token for number, token in enumerate(spelled) if vocabulary[token] != number)
        raise refuse(file.model_id, f"its GGUF metadata have {twice!r} twice in tokenizer.ggml.tokens")
    form = _gemma_form() if is_gemma else _bytes_form(file) if kind == "gpt2" else _pieces_form(file, model_type)
    ends = {name: token for name in ("bos", "eos") if (token := _end(file, spelled, name, adds=_adds(file, name)))}
    return msgspec.json.encode({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(file, tokens, vocabulary)),
        **form,
        "post_processor": _template(ends, vocabulary),
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>" if is_gemma else None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": kind != "gpt2", "byte_fallback": kind != "gpt2", "ignore_merges": False,
            "vocab": vocabulary, "merges": _find_merges(file, spelled, vocabulary, in_order=is_gemma),
        },
    }).decode()  # fmt: skip


def _bytes_form(file: GgufContents) -> dict[str, Any]:
    pre = str(file.fields.get("tokenizer.ggml.pre", ""))
    if pre not in SPLITS:
        raise refuse(file.model_id, f"its GGUF metadata set tokenizer.ggml.pre to {pre!r}, which is not known here")
    steps = [_split(Regex=pattern) for pattern in SPLITS[pre]]
    return {
        "normalizer": None,
        "pre_tokenizer": _sequence("pretokenizers", *steps, _byte_level(adds_space=False)),
        "decoder": _byte_level(adds_space=True),
    }


def _gemma_form() -> dict[str, Any]:
    return {
        "normalizer": _replace(" ", _SPACE),
        "pre_tokenizer": {**_split(String=" "), "behavior": "MergedWithPrevious"},
        "decoder": _sequence("decoders", *_TO_TEXT),
    }


def _pieces_form(file: GgufContents, model_type: str) -> dict[str, Any]:
    """Return the form of SentencePiece. Phi-3 adds a space before each part of a text, others before the first word."""
    adds_space = file.fields.get("tokenizer.ggml.add_space_prefix") is not False
    scheme = "first" if adds_space else "never"
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    is_phi = model_type == "phi3"
    return {
        "normalizer": _sequence("normalizers", *prepend, _replace(" ", _SPACE)) if is_phi else None,
        "pre_tokenizer": None if is_phi else metaspace,
        "decoder": _sequence("decoders", *_TO_TEXT, *([_STRIP] if adds_space else [])),
    }


def _find_merges(
    file: GgufContents, tokens: Sequence[str], vocabulary: Mapping[str, int], *, in_order: bool
) -> list[tuple[str, str]]:
    """Return the merges of a file, or else each way to cut a token into two others, the best token first.

    Tokens of Gemma are joined in their order, in_order, and others in that of their scores. Raises ModelLoadFailed.
    """
    if "tokenizer.ggml.merges" in file.reader.fields:
        return [_parse_merge(file, text, vocabulary) for text in file.texts("merges")]
    scores = [] if in_order else [float(one[0]) for one in file.vocabulary("scores")]
    if len(scores) == len(tokens):
        tokens = [token for _, token in sorted(zip(scores, tokens, strict=True), key=lambda pair: -pair[0])]
    elif not in_order:
        raise refuse(
            file.model_id, f"its GGUF metadata have {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens"
        )
    return list(_cut(tokens, vocabulary))


def _parse_merge(file: GgufContents, text: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    first, second = text[: (place := text.find(" ", 1))], text[place + 1 :]
    if any(part not in vocabulary for part in (first, second, first + second)):
        raise refuse(file.model_id, f"its GGUF metadata have {text!r} in tokenizer.ggml.merges, which makes no token")
    return first, second


def _cut(tokens: Sequence[str], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the merges: those of each token in turn, and of one token the one with the longest first part first."""
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            first = token[:cut]
            if first in vocabulary and (second := token[cut:]) in vocabulary:
                yield first, second


def _adds(file: GgufContents, name: str) -> bool:
    default = name == "bos" and _KINDS[file.fields["tokenizer.ggml.model"]]
    return bool(file.fields.get(f"tokenizer.ggml.add_{name}_token", default))


def _end(file: GgufContents, tokens: Sequence[str], name: str, *, adds: bool) -> str:
    """Return the token at an end of texts; empty if there is none."""
    field = f"tokenizer.ggml.{name}_token_id"
    number = file.fields.get(field)
    if not adds or number is None:
        return ""
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise refuse(file.model_id, f"its GGUF metadata set {field} to {number!r}, which is not one of its tokens")
    return tokens[number]


def _added(file: GgufContents, tokens: Sequence[str], vocabulary: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the tokens that are found in texts as they are written; those that a user defined are not special."""
    named = {file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMES}
    types = file.token_types()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, token in enumerate(tokens):
        kind = types[number] if number < len(types) else _NORMAL
        if token in vocabulary and (kind in _ADDED or number in named):
            yield {"id": number, "content": token, **flags, "special": kind != _USER_DEFINED}


def _template(ends: Mapping[str, str], vocabulary: Mapping[str, int]) -> dict[str, Any]:
    def part(sequence: str, kind: int) -> list[dict[str, Any]]:
        first, last = (
            [{"SpecialToken": {"id": ends[end], "type_id": kind}}] if end in ends else [] for end in ("bos", "eos")
        )
        return [*first, {"Sequence": {"id": sequence, "type_id": kind}}, *last]

    special = {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in ends.values()}
    return {
        "type": "TemplateProcessing", "single": part("A", 0), "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": special,
    }  # fmt: skip
