"""Where the tokens of a prompt stand in its text."""

from __future__ import annotations

import pytest

from sie.frontend.dialects.openai.prompt_offsets import find_offsets


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("The fox", [b"The", b" fox"], [0, 3]),
        ("The fox", [b"<bos>", b" The", b" fox"], [0, 0, 3]),
        ("The fox", [b"<bos>", b"The", b" fox", b"<eos>"], [0, 0, 3, 7]),
        ("<bos>The fox", [b"<bos>", b"The", b" fox"], [0, 5, 8]),
        ("aé😀b", [b"a", b"\xc3", b"\xa9\xf0", b"\x9f", b"\x98\x80b"], [0, 1, 1, 2, 2]),
        ("ABC DEF", [b"abc", b" def"], [0, 0]),
        ("ABC DEF GHI", [b"<s>", b"abc", b" def", b" ghi"], [0, 0, 3, 7]),
        ("a", [b"", b"xxxx", b"yyyy", b"z"], [0, 0, 1, 1]),
        ("", [b"<bos>"], [0]),
        ("\ud800", [b"?"], [0]),
    ],
)
def test_offsets_count_characters(text: str, tokens: list[bytes], offsets: list[int]) -> None:
    assert find_offsets(text, tokens) == offsets
