"""Separates a model's reasoning, which it writes between tags, from its answer. Pure."""

from __future__ import annotations

from sie.frontend.generation.markers import common_end
from sie.frontend.generation.parsers import OutputParser, Piece, Reasoning


class ReasoningParser:
    """Returns the text between the tags as reasoning, and passes the text after them to another parser.

    Reasoning comes first or not at all. White space around it is dropped. is_open: the prompt already contains the
    opening tag. Reasoning without a closing tag lasts to the last character. A closing tag ends in a piece, which may be
    empty, so that the tokens of the tag belong to the reasoning.
    """

    def __init__(self, tags: tuple[str, str], inner: OutputParser, *, is_open: bool) -> None:
        self.markers = (*tags, *inner.markers)
        self._begin, self._end = tags
        self._inner = inner
        self._held = ""
        """Text that may become a tag, and white space that may turn out to end the reasoning."""
        self._state = "inside" if is_open else "before"
        self._has_begun = False
        self._may_repeat = is_open
        """Whether an opening tag may still come: some models repeat the one at the end of their prompt."""

    def push(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        if self._state == "behind":
            return self._inner.push(text)
        self._held += text
        pieces: list[Piece] = []
        if self._state == "before":
            pieces += self._read_before()
        if self._state == "inside":
            pieces += self._read_inside()
        if self._state == "gap":
            pieces += self._read_gap()
        return pieces

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """See `OutputParser`."""
        held, self._held = self._held, ""
        if self._state == "inside":
            # White space at the end is dropped.
            rest = held.rstrip()
            return [Reasoning(rest)] if rest else []
        pieces = self._inner.push(held) if self._state == "before" and held else []
        return [*pieces, *self._inner.flush(is_cut=is_cut)]

    def _read_before(self) -> list[Piece]:
        start = self._held.lstrip()
        if start.startswith(self._begin):
            self._held, self._state = start.removeprefix(self._begin), "inside"
            return []
        if self._begin.startswith(start):
            return []
        held, self._held, self._state = self._held, "", "behind"
        return self._inner.push(held)

    def _read_inside(self) -> list[Piece]:
        if not self._has_begun:
            self._held = self._held.lstrip()
            if self._may_repeat and self._held.startswith(self._begin):
                self._held = self._held.removeprefix(self._begin).lstrip()
            elif self._may_repeat and self._begin.startswith(self._held):
                return []
            self._may_repeat = False
        text, end, rest = self._held.partition(self._end)
        if end:
            self._held, self._state = rest, "gap"
            return [Reasoning(text.rstrip())]
        certain = text[: len(text) - common_end(text, self._end)].rstrip()
        self._has_begun = self._has_begun or bool(certain)
        self._held = text[len(certain) :]
        return [Reasoning(certain)] if certain else []

    def _read_gap(self) -> list[Piece]:
        start = self._held.lstrip()
        self._held = ""
        if not start:
            return []
        self._state = "behind"
        return self._inner.push(start)
