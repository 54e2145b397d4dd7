"""Builds prompts for models that fill a gap: the texts before and after it, with the marks of their training.

The marks are tokens, found by their names. The model writes the text of the gap after the last mark.
Sources: arXiv 2207.14255 (fill in the middle, prefix first) and the model cards of CodeLlama, Qwen2.5-Coder, CodeGemma,
StarCoder, SantaCoder and DeepSeek-Coder.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sie.frontend.generation.vocabulary import Vocabulary
from sie.values.errors import BadRequest

_NAMES: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
_ENDS: Final = (
    "\u2581<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_sep|>", "<file_sep>",
    "<|file_separator|>", "<|repo_name|>",
)  # fmt: skip
"""Tokens with which some models end the filled-in text, besides their end-of-text token."""


class GapMarks(NamedTuple):
    """The ids of a tokenizer's marks, of the tokens that end a filling, and of those before every text (begin)."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]
    begin: tuple[int, ...] = ()


def find_marks(vocabulary: Vocabulary) -> GapMarks | None:
    """Return a tokenizer's marks, or None if its model cannot fill gaps."""
    for names in _NAMES:
        prefix, suffix, middle = map(vocabulary.token_id, names)
        if prefix is not None and suffix is not None and middle is not None:
            ends = [token_id for token_id in map(vocabulary.token_id, _ENDS) if token_id is not None]
            return GapMarks(prefix, suffix, middle, (prefix, suffix, middle, *ends), _beginning(vocabulary))
    return None


def _beginning(vocabulary: Vocabulary) -> tuple[int, ...]:
    plain, whole = (vocabulary.encode("x", whole=is_whole) for is_whole in (False, True))
    return tuple(whole[: next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)])


def require_marks(vocabulary: Vocabulary, model: str) -> GapMarks:
    """Return a tokenizer's marks. Raises BadRequest if it has none."""
    marks = find_marks(vocabulary)
    if marks is None:
        text = f"Field 'suffix' is not served by '{model}': its tokenizer has no tokens for the texts around a gap"
        raise BadRequest(text, extras={"param": "suffix"})
    return marks


def gap_ids(text: str, suffix: str, vocabulary: Vocabulary, marks: GapMarks) -> list[int]:
    """Return the prompt for the gap between two texts. Raises BadRequest for invalid Unicode."""
    before, behind = vocabulary.encode_behind(text), vocabulary.encode_behind(suffix)
    return [*marks.begin, marks.prefix, *before, marks.suffix, *behind, marks.middle]
