"""The form of a GLiREL work item, which a frontend writes and a worker reads, and the model's marks."""

from __future__ import annotations

from typing import Final

import msgspec

RELATION_MARK: Final = "[REL]"
TEXT_MARK: Final = "[SEP]"
MARKS: Final = (RELATION_MARK, TEXT_MARK)
"""The tokens before each label and before the text. The library adds them to the encoder's vocabulary."""


class GlirelItem(msgspec.Struct, array_like=True, frozen=True):
    """The words of a text, and the first and the last word of each entity."""

    words: list[str]
    spans: list[tuple[int, int]]
