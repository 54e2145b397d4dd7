"""Turns files of a working directory into what the wire shows: content or preview, kind, and placeholders."""

from __future__ import annotations

import base64
import mimetypes
import time
from collections.abc import Sequence
from typing import Any, Final

from sie.agents.host.sessions import Session
from sie.agents.host.workdir import look, read_file
from sie.values.agent import AgentFile

_MAX_FILES: Final = 64
"""Most files of one call that are shown; others stay in the working directory."""
_PREVIEW_CHARS: Final = 1024
_MAX_NAME_CHARS: Final = 1024
_MAX_INLINE_OF_CALL: Final = 64 << 20
_TEXTUAL: Final = ("text/", "application/json", "application/xml", "application/javascript")
MODEL_PREVIEW_CHARS: Final = 1024


class FileReader:
    """Reads the files that calls make. max_inline_bytes: the largest content that an answer holds."""

    def __init__(self, max_inline_bytes: int, max_file_bytes: int, max_files: int) -> None:
        self._max_inline_bytes = max_inline_bytes
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files

    def show_news(
        self, session: Session, place: tuple[str, int, int], tool: str, named: Sequence[str]
    ) -> list[AgentFile]:
        """Return the files that are new or changed since the last call, and those named, with placeholders for missing ones.

        place: run, round and turn of the call.
        """
        now = look(session.work, self._max_files)
        changed = [name for name, seen in sorted(now.items()) if session.seen.get(name) != seen]
        session.seen = now
        plain = {name: _plain(name) for name in named}
        names = list(dict.fromkeys([*plain.values(), *changed]))[:_MAX_FILES]
        asked = set(plain.values())
        return self._read_all(session, place, tool, names, asked)

    def show(self, session: Session, place: tuple[str, int, int], tool: str, names: Sequence[str]) -> list[AgentFile]:
        """Return the files with these names, with placeholders for missing ones."""
        plain = [_plain(name) for name in names[:_MAX_FILES]]
        return self._read_all(session, place, tool, list(dict.fromkeys(plain)), set(plain))

    def _read_all(
        self, session: Session, place: tuple[str, int, int], tool: str, names: Sequence[str], asked: set[str]
    ) -> list[AgentFile]:
        run, number, turn = place
        source = {"tool": tool, "round": number, "turn": turn}
        shown: list[AgentFile] = []
        inline_bytes = 0
        for name in names:
            index = session.num_shown.get((run, number), 0)
            file_id = f"file_{run}_r{number}_{index}"
            room = self._max_inline_bytes if inline_bytes < _MAX_INLINE_OF_CALL else 0
            try:
                file = self._read(session, name, file_id, source, room)
            except OSError:
                if name not in asked:  # it was removed, or replaced by a link, since it was listed
                    continue
                file = _placeholder(name, file_id, source, "not_produced", "No tool made this file")
            else:
                inline_bytes += file.bytes
                session.ids[file_id] = name
            session.num_shown[run, number] = index + 1
            shown.append(file)
        return shown

    def _read(self, session: Session, name: str, file_id: str, source: dict[str, Any], max_inline: int) -> AgentFile:
        data, about = read_file(session.work, name, max_inline + 1)
        mime = mimetypes.guess_type(name)[0] or ""
        if about.st_size > self._max_file_bytes:
            return _placeholder(name, file_id, source, "too_large", f"The file has {about.st_size} bytes")
        text = _text_of(data, is_whole=len(data) == about.st_size, is_textual=mime.startswith(_TEXTUAL))
        is_inline = len(data) <= max_inline
        return AgentFile(
            id=file_id, name=name, created_at=int(time.time()), source=source, bytes=about.st_size,
            format=name.rpartition(".")[2].lower() if "." in name else "",
            mime_type=mime or ("text/plain" if text is not None else "application/octet-stream"),
            text=text if is_inline else None,
            preview=text[:_PREVIEW_CHARS] if text is not None else None,
            data_base64=base64.b64encode(data).decode() if is_inline and text is None else None,
        )  # fmt: skip


def _text_of(data: bytes, *, is_whole: bool, is_textual: bool) -> str | None:
    """Return the text of a file, or None if its bytes are not text."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        is_cut = not is_whole and error.start >= len(data) - 4
        return data[: error.start].decode() if is_cut else data.decode(errors="replace") if is_textual else None
    return None if "\0" in text else text


def _placeholder(name: str, file_id: str, source: dict[str, Any], code: str, message: str) -> AgentFile:
    return AgentFile(
        id=file_id, name=name[:_MAX_NAME_CHARS], created_at=int(time.time()), source=source, code=code, message=message
    )


def _plain(name: str) -> str:
    """Return a path within the working directory as it is listed there. Others stay, and are then not found."""
    text = name.removeprefix("/workspace/").removeprefix("./")
    return text if "\0" not in text else "?"


def for_model(file: AgentFile) -> dict[str, Any]:
    """Return what a model reads about a file."""
    if file.code is not None:
        return {"name": file.name, "code": file.code, "message": file.message}
    made = {"id": file.id, "name": file.name, "mime_type": file.mime_type, "bytes": file.bytes}
    return {**made, "preview": file.preview[:MODEL_PREVIEW_CHARS]} if file.preview is not None else made
