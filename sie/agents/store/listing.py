"""Writes the text by which a model learns of the files of a conversation, and finds the files that its tools made. Pure.

Source: generation API reference, section 7.4.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from sie.agents.store.files import KeptFile
from sie.agents.store.skill_folders import FOLDER
from sie.agents.tools import PYTHON, SHELL, SURFACE
from sie.values.agent import MountedFile
from sie.values.generate import ChatMessage

_INSTRUCTIONS: Final = frozenset({"system", "developer"})
_MAKERS: Final = frozenset({PYTHON, SHELL, SURFACE})
"""The tools whose results name files."""
_HEAD: Final = "The user attached these files:"
_MAX_STEM_BYTES: Final = 180


class _Made(msgspec.Struct):
    name: str
    id: str = ""


class _Result(msgspec.Struct):
    """The part of a result that names the files of its call; placeholders have no id."""

    files: list[_Made] = []


class ListedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a conversation and the beginning of its text. Without a file, it is no longer kept."""

    id: str
    file: KeptFile | None
    text: str | None = None
    """More characters than are shown of it, if it has more. None if it is not a text, or its bytes are not kept."""
    path: str = ""
    """Its name in the working directory of the tools, if they have one."""


def list_files(files: Sequence[ListedFile], max_chars: int, max_all_chars: int) -> str:
    """Return the list of the files with at most max_chars characters of each, and max_all_chars of all."""
    left = max_all_chars
    parts = [_HEAD]
    for listed in files:
        if listed.file is None:
            parts.append(f"[{listed.id}] is no longer available.")
            continue
        head = _head(listed.file, listed.path)
        if listed.text is None:
            parts.append(head if listed.path else f"{head}\nIt cannot be shown.")
            continue
        shown = listed.text[: min(max_chars, left)]
        left -= len(shown)
        parts.append(_entry(head, listed.file.name, shown, is_cut=len(shown) < len(listed.text)))
    return "\n\n".join(parts)


def made_files(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the ids of the files that tools made in a conversation, oldest first: of those with one name the latest."""
    latest: dict[str, str] = {}
    for message in messages:
        if message.role == "tool" and message.name in _MAKERS:
            for file in _files_of(message.content or ""):
                latest.pop(file.name, None)
                latest[file.name] = file.id
    return [file_id for file_id in latest.values() if file_id]


def _files_of(result: str) -> Sequence[_Made]:
    try:
        return msgspec.json.decode(result.partition("\n")[0], type=_Result).files  # a note may follow
    except (msgspec.MsgspecError, RecursionError):
        return ()


def with_list(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """Return a conversation that begins with this text: at the end of its instructions, or as a system message."""
    first = messages[0] if messages else None
    if first is None or first.role not in _INSTRUCTIONS:
        return [ChatMessage(role="system", content=text), *messages]
    content = f"{first.content}\n\n{text}" if first.content else text
    return [msgspec.structs.replace(first, content=content), *messages[1:]]


def _entry(head: str, name: str, text: str, *, is_cut: bool) -> str:
    if is_cut and not text:
        return f"{head}\nIts text is not shown."
    if is_cut:
        return f"{head}\nThe first {len(text)} characters of its text:\n{text}\n[The rest of {name} is not shown.]"
    return f"{head}\nIts text:\n{text}\n[End of {name}.]"


def _head(file: KeptFile, path: str) -> str:
    head = f"[{file.id}] {file.name} ({file.mime_type}, {file.num_bytes} bytes)"
    return f"{head} is {path!r} in the working directory" if path else head


def mount_files(files: Sequence[KeptFile]) -> tuple[MountedFile, ...]:
    """Return the files with their names in a working directory, each file once.

    The first of several files with one name has it. Others get a part of their id, so that names stay as turns are added.
    """
    taken = {FOLDER}
    mounted: dict[str, MountedFile] = {}
    for file in files:
        if file.id in mounted or not file.blob:
            continue
        path = file.name if file.name not in taken else _own_path(file)
        taken.add(path)
        mounted[file.id] = MountedFile(id=file.id, path=path, blob=file.blob, num_bytes=file.num_bytes)
    return tuple(mounted.values())


def _own_path(file: KeptFile) -> str:
    stem, dot, extension = file.name.rpartition(".")
    kept = (stem if dot and stem else file.name).encode()[:_MAX_STEM_BYTES].decode("utf-8", "ignore")
    mark = hashlib.sha256(file.id.encode()).hexdigest()[:8]
    return f"{kept}-{mark}{f'.{extension[:16]}' if dot and stem else ''}"
