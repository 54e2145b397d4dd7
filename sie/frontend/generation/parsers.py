"""The interface between an answer's text and its parts for the client: text, reasoning and tool calls. Pure.

A parser belongs to one choice. It gets the text in whatever pieces it comes, and what it returns must not depend on
them: the pieces of each kind joined are the same for every split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from sie.values.generate import ToolCall


class Text(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before it."""

    text: str


Piece = Text | Reasoning | ToolCall


class OutputParser(Protocol):
    """What takes a model's text apart."""

    @property
    def markers(self) -> Collection[str]:
        """Texts that it looks for: where one is a special token, it is in the text all the same. Others never are."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now and was not before."""
        ...

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """Return what is left when no text follows. is_cut: the model did not end there, so a call may lack its end."""
        ...


class PlainText:
    """The parser of an answer that is text and nothing else."""

    markers: Collection[str] = ()

    def push(self, text: str) -> list[Piece]:
        """See `OutputParser`."""
        return [Text(text)] if text else []

    def flush(self, *, is_cut: bool = False) -> list[Piece]:
        """See `OutputParser`."""
        return []


ParserFactory = Callable[[], OutputParser]
"""Makes a fresh parser for each choice."""
