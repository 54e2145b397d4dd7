"""Makes the texts of a load: lengths and words, deterministic for a seed."""

from __future__ import annotations

import random
from typing import Final

Mix = tuple[tuple[float, int], ...]
"""(weight, tokens of a text) pairs in any order; weights need not add up to 1."""

MIXED: Final = "12:0.6,64:0.3,230:0.1"
"""The meaning of `mixed`: most texts are queries, some are paragraphs, a few fill the window."""

NUM_SPECIAL_TOKENS: Final = 2  # [CLS] and [SEP]
_MAX_TOKENS = 32_768

_WORDS: Final = """
river stone market window garden winter bridge letter engine summer harbor island forest silver morning
evening city road light music paper water horse table house street field heart voice story mountain doctor
teacher village kitchen station machine captain country history science library animal flower feather journey
weather chamber college factory hospital the of and to in a is was for on with as by at from that which have
this they were about after before between under over through during without large small early late open quiet
bright simple common public modern ancient famous local strong deep cold warm green blue black white red found
built carried opened closed reached followed played wrote painted moved called named kept held brought turned
began became people children family friend company government school church member number century hundred
north south east west page line part place side end power right name
""".split()  # noqa: SIM905  # a list with one word a line would fill most of this file
"""Each word is one token of BERT's vocabulary, so a text's length in tokens is known without a tokenizer."""


def parse_mix(text: str) -> Mix:
    """Parse a mix: `12`, `12:0.6,64:0.3,230:0.1` or `mixed`. Raises ValueError with the reason."""
    parts: list[tuple[float, int]] = []
    for part in (MIXED if text == "mixed" else text).split(","):
        length, colon, weight = part.partition(":")
        try:
            parts.append((float(weight) if colon else 1.0, int(length)))
        except ValueError:
            raise ValueError(f"{part!r} is not TOKENS or TOKENS:WEIGHT") from None
        if not NUM_SPECIAL_TOKENS < parts[-1][1] <= _MAX_TOKENS:
            raise ValueError(f"{part!r}: a text has {NUM_SPECIAL_TOKENS + 1} to {_MAX_TOKENS} tokens")
        if not 0 < parts[-1][0] < float("inf"):
            raise ValueError(f"{part!r}: a weight is above 0")
    return tuple(parts)


def make_texts(mix: Mix, count: int, seed: int) -> list[str]:
    """Return count texts with the lengths of a mix, rounded to whole texts, shuffled by the seed.

    Lengths are in tokens of BERT's vocabulary, special ones included.
    """
    rng = random.Random(seed)  # noqa: S311  # a load must be repeatable
    lengths = _lengths(mix, count)
    rng.shuffle(lengths)
    return [" ".join(rng.choices(_WORDS, k=length - NUM_SPECIAL_TOKENS)) for length in lengths]


def _lengths(mix: Mix, count: int) -> list[int]:
    """Return count lengths; the remainder of rounding goes to the lengths with the largest cut."""
    total = sum(weight for weight, _ in mix)
    exact = [(count * weight / total, length) for weight, length in mix]
    lengths = [length for share, length in exact for _ in range(int(share))]
    by_rest = sorted(exact, key=lambda part: part[0] % 1, reverse=True)
    return lengths + [length for _, length in by_rest[: count - len(lengths)]]


def count_words(text: str) -> int:
    """Return the tokens of a text from `make_texts`, for servers that do not report them."""
    return text.count(" ") + 1 + NUM_SPECIAL_TOKENS
