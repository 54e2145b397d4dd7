"""Special texts are found as by trying each of them, the longest first; and in a time that an attacker cannot choose."""

from __future__ import annotations

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from sie.frontend.generation.special_texts import find_special

GEMMA = ("<eos>", "<bos>", "<start_of_turn>", *(f"<unused{number}>" for number in range(6242)))
pieces = st.text(st.sampled_from("<|a-]^\\[é"), max_size=6)


@given(st.lists(pieces, max_size=8), st.lists(pieces, max_size=8), st.text(st.sampled_from("<|a-]^\\[é"), max_size=20))
def test_found_are_the_longest_at_each_place(texts: list[str], before: list[str], text: str) -> None:
    text = "".join([*texts, text, *before])
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    oracle = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert find_special(tuple(texts)).findall(text) == oracle.findall(text)


def test_deep_trees_are_tried_one_by_one() -> None:
    texts = tuple("a" * size for size in range(1, 1200))
    assert find_special(texts).findall("a" * 1199 + "b" + "aa") == ["a" * 1199, "aa"]
    (long,) = ("x" * 5000,)
    assert find_special((long,)).findall(long + "x") == [long]


def test_thousands_of_them_cost_no_more_than_one() -> None:
    """One after another they take 13 s for this text, and keep the interpreter for as long."""
    pattern = find_special(GEMMA)
    began_s = time.process_time()
    assert pattern.findall("<" * 1_000_000 + "<unused6241>") == ["<unused6241>"]
    assert time.process_time() - began_s < 2
