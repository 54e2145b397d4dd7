"""Defines the interface of parsers, which split an answer's text into text, reasoning and tool calls. Pure.

A parser belongs to one choice. Text arrives in pieces of any size, and the result must not depend on them: the joined
pieces of each kind are the same for every split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from sie.values.generate import ToolCall


class Text(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before the answer."""

    text: str


Piece = Text | Reasoning | ToolCall


class OutputParser(Protocol):
    """Splits a model's text into its parts."""

    @property
    def markers(self) -> Collection[str]:
        """Texts that the parser looks for. Special tokens are removed from the text, except those among the markers."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that became certain with this text."""
        ...

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the remaining pieces after the last text. is_cut: the answer was cut, so a call may lack its end."""
        ...


class PlainText:
    """Parses an answer that is only text."""

    markers: Collection[str] = ()

    def push(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        return [Text(text)] if text else []

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """See `OutputParser`."""
        return []


ParserFactory = Callable[[], OutputParser]
"""Makes a fresh parser for each choice."""
