"""Writes the text by which a model learns of the files of a conversation. Pure.

Source: generation API reference, section 7.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from sie.agents.store.files import KeptFile
from sie.values.generate import ChatMessage

_INSTRUCTIONS: Final = frozenset({"system", "developer"})
_HEAD: Final = "The user attached these files:"


class ListedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a conversation and the beginning of its text. Without a file, it is no longer kept."""

    id: str
    file: KeptFile | None
    text: str | None = None
    """More characters than are shown of it, if it has more. None if it is not a text, or its bytes are not kept."""


def list_files(files: Sequence[ListedFile], max_chars: int, max_all_chars: int) -> str:
    """Return the list of the files with at most max_chars characters of each, and max_all_chars of all."""
    left = max_all_chars
    parts = [_HEAD]
    for listed in files:
        if listed.file is None:
            parts.append(f"[{listed.id}] is no longer available.")
            continue
        if listed.text is None:
            parts.append(f"{_head(listed.file)}\nIt cannot be shown.")
            continue
        shown = listed.text[: min(max_chars, left)]
        left -= len(shown)
        parts.append(_entry(listed.file, shown, is_cut=len(shown) < len(listed.text)))
    return "\n\n".join(parts)


def with_list(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """Return a conversation that begins with this text: at the end of its instructions, or as a system message."""
    first = messages[0] if messages else None
    if first is None or first.role not in _INSTRUCTIONS:
        return [ChatMessage(role="system", content=text), *messages]
    content = f"{first.content}\n\n{text}" if first.content else text
    return [msgspec.structs.replace(first, content=content), *messages[1:]]


def _entry(file: KeptFile, text: str, *, is_cut: bool) -> str:
    head = _head(file)
    if is_cut and not text:
        return f"{head}\nIts text is not shown."
    if is_cut:
        return f"{head}\nThe first {len(text)} characters of its text:\n{text}\n[The rest of {file.name} is not shown.]"
    return f"{head}\nIts text:\n{text}\n[End of {file.name}.]"


def _head(file: KeptFile) -> str:
    return f"[{file.id}] {file.name} ({file.mime_type}, {file.num_bytes} bytes)"
