"""Judges how long a tokenizer file's own rules may take. Pure.

A file's regular expressions may backtrack: `(x+x+)+y` takes 0.3 s for 400 characters, and time that doubles with each
further one. The library has no limit of time. So only expressions that are known to take linear time are matched in a
frontend without a trial (`sie.frontend.inputs.guarded_tokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import tokenizers

_MAX_STEPS: Final = 128
"""Each step costs up to 0.4 ms for 1,000 characters. Real tokenizers have under 20."""
_MAX_QUICK_STEPS: Final = 24
_MAX_PATTERN_CHARS: Final = 65_536
_MAX_WORD_CHARS: Final = 200
"""WordPiece takes the square of a word's length; BERT's longest word has 100 characters."""
_MARKS: Final = r"'(?:[sdmt]|ll|ve|re)"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS: Final = "'s|'t|'re|'ve|'m|'ll|'d"
_KNOWN: Final = frozenset((
    rf"{_WORDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    rf"{_MARKS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    rf"{_WORDS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+",
    rf"<\|startoftext\|>|<\|endoftext\|>|{_WORDS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+",
    *(
        rf"{marks}|{_LETTERS}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
        for marks in (rf"(?i:{_WORDS})", rf"(?i:{_MARKS})", _MARKS)
        for digits in (r"\p{N}{1,3}", r"\p{N}{1,2}", r"\p{N}", r"\p{N}+")
    ),
    *(
        rf"{_LETTERS}{_UPPER}*{_LOWER}+{marks}|{_LETTERS}{_UPPER}+{_LOWER}*{marks}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_SPACES}"
        for marks in (rf"(?i:{_WORDS})?", "")
        for digits in (r"\p{N}{1,3}", r"\p{N}{1,2}", r"\p{N}", r"\p{N}+")
        for ends in (r"[\r\n]*", r"[\r\n/]*")
    ),
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
))  # fmt: skip
"""Expressions of the tokenizers of GPT-2, CLIP, Llama 3, Qwen, GPT-4o, Mistral, DeepSeek and their like."""
_ITEM: Final = r"(?:\[\^?(?:\\.|[^\[\]\\&])+\]|\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|[^\\\[\](){}|?*+.^$])"
"""One character or class of a regular expression."""
_ITEMS: Final = re.compile(rf"(?:{_ITEM}\?)?{_ITEM}(?P<count>[+*?]|\{{\d{{1,2}}(?:,\d{{0,3}})?\}})?|{_ITEM}{{2,9}}")
"""An item, perhaps repeated, behind an optional one, or a few items: little of a text is tried twice."""


class RulesError(ValueError):
    """A tokenizer's rules may take longer than any real tokenizer's do."""


def rules_to_try(tokenizer: tokenizers.Tokenizer) -> bytes:
    """Return the rules that may take long for a text, as JSON of (normalizer, pre_tokenizer); empty for quick rules.

    Raises RulesError for rules that must not be tried at all.
    """
    normalizer, splitter, decoder = (
        None if part is None else msgspec.json.decode(part.__getstate__())
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    )
    steps = [step for part in (normalizer, splitter) for step in _steps(part)]
    if len(steps) > _MAX_STEPS:
        raise RulesError(f"it has {len(steps)} rules, and at most {_MAX_STEPS} are read")
    if getattr(tokenizer.model, "max_input_chars_per_word", 0) > _MAX_WORD_CHARS:
        raise RulesError(f"max_input_chars_per_word is over {_MAX_WORD_CHARS}")
    if not all(map(is_linear, _patterns(_steps(decoder)))):
        raise RulesError("its decoder has a regular expression")
    patterns = list(_patterns(steps))
    if any(len(pattern) > _MAX_PATTERN_CHARS for pattern in patterns):
        raise RulesError(f"a regular expression has over {_MAX_PATTERN_CHARS} characters")
    if len(steps) <= _MAX_QUICK_STEPS and all(map(is_linear, patterns)):
        return b""
    return msgspec.json.encode((normalizer, splitter))


def is_linear(pattern: str) -> bool:
    """Return whether a regular expression is known to take time in proportion to a text's length."""
    return pattern in _KNOWN or _ITEMS.fullmatch(pattern) is not None


def least_chars(pattern: str) -> int:
    """Return the fewest characters that a match of a regular expression can have; 0 if that is not known."""
    found = _ITEMS.fullmatch(pattern)
    if found is None:
        return 0
    count = found["count"] or ""
    return int(count[1:-1].partition(",")[0]) if count.startswith("{") else int(count not in ("*", "?"))


def _steps(form: Any) -> Iterator[Any]:
    """Yield the steps of a part, including those of nested sequences."""
    if form is None:
        return
    nested = next((form[name] for name in ("normalizers", "pretokenizers", "decoders") if name in form), None)
    if nested is None:
        yield form
        return
    for step in nested:
        yield from _steps(step)


def _patterns(steps: Any) -> Iterator[str]:
    for step in steps:
        pattern = step.get("pattern")
        if isinstance(pattern, dict) and "Regex" in pattern:
            yield pattern["Regex"]
