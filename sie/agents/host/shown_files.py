"""Turns files of a working directory into what the wire shows, and into blobs for the store of clients' files.

A file is read once, so the shown and the kept bytes are the same.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from sie.agents.host.sessions import Session
from sie.agents.host.workdir import copy_file, look
from sie.agents.store.blobs import BlobFolder, BlobWriter
from sie.agents.store.names import OCTETS, format_of, is_textual, media_type
from sie.values.agent import AgentFile

_MAX_FILES: Final = 64
"""Most files of one call that are shown; others stay in the working directory."""
_PREVIEW_CHARS: Final = 1024
_MAX_NAME_CHARS: Final = 1024
_MAX_INLINE_OF_CALL: Final = 64 << 20
MODEL_PREVIEW_CHARS: Final = 1024


class ShownFile(NamedTuple):
    """A file as the wire shows it, and its bytes, to be committed or discarded. A placeholder has none."""

    file: AgentFile
    writer: BlobWriter | None = None


class _Room(NamedTuple):
    """The bytes that a file may have in the answer, and in the store."""

    inline: int
    kept: int


class FileReader:
    """Reads the files that calls make, each when the one before it was taken.

    max_inline_bytes: the largest content that an answer holds; max_call_bytes: the most of one call that is kept, by the
    length of the files. A sparse file is short on the sandbox's disk, and as long as it says in the store.
    """

    def __init__(
        self, blobs: BlobFolder, max_inline_bytes: int, *, max_file_bytes: int, max_call_bytes: int, max_files: int
    ) -> None:
        self._blobs = blobs
        self._max_inline_bytes = max_inline_bytes
        self._max_file_bytes = max_file_bytes
        self._max_call_bytes = max_call_bytes
        self._max_files = max_files

    def show_news(
        self, session: Session, place: tuple[str, int, int], tool: str, named: Sequence[str]
    ) -> Iterator[ShownFile]:
        """Yield the files that are new or changed since the last call, and those named, with placeholders for missing ones.

        place: run, round and turn of the call.
        """
        now = look(session.work, self._max_files)
        changed = [name for name, seen in sorted(now.items()) if session.seen.get(name) != seen]
        session.seen = now
        plain = {name: _plain(name) for name in named}
        names = list(dict.fromkeys([*plain.values(), *changed]))[:_MAX_FILES]
        asked = set(plain.values())
        return self._read_all(session, place, tool, names, asked)

    def show(
        self, session: Session, place: tuple[str, int, int], tool: str, names: Sequence[str]
    ) -> Iterator[ShownFile]:
        """Yield the files with these names, with placeholders for missing ones."""
        plain = [_plain(name) for name in names[:_MAX_FILES]]
        return self._read_all(session, place, tool, list(dict.fromkeys(plain)), set(plain))

    def _read_all(
        self, session: Session, place: tuple[str, int, int], tool: str, names: Sequence[str], asked: set[str]
    ) -> Iterator[ShownFile]:
        run, number, turn = place
        source = {"tool": tool, "round": number, "turn": turn}
        inline_bytes, left = 0, self._max_call_bytes
        for name in names:
            file_id = f"file_{run}_r{number}_{session.num_shown(run, number)}"
            inline = self._max_inline_bytes if inline_bytes < _MAX_INLINE_OF_CALL else 0
            room = _Room(inline, min(self._max_file_bytes, left))
            try:
                found, num_bytes = self._read(session, name, file_id, source, room)
            except OSError:
                if name not in asked:  # it was removed, or replaced by a link, since it was listed
                    continue
                found = ShownFile(_placeholder(name, file_id, source, "not_produced", "No tool made this file"))
            else:
                left -= num_bytes
                inline_bytes += found.file.bytes
                session.know(file_id, name)
            session.count_shown(run, number)
            yield found

    def _read(
        self, session: Session, name: str, file_id: str, source: dict[str, Any], room: _Room
    ) -> tuple[ShownFile, int]:
        """Return a file, and the number of its bytes that were copied, kept or not. Raises OSError."""
        spool = _Spool(self._blobs, room.inline + 1)
        try:
            about = copy_file(session.work, name, spool.write, room.kept, is_whole=True)
            if about.st_size > room.kept:
                spool.discard()
                text = f"The file has {about.st_size} bytes, and {room.kept} of this call may still be shown"
                return ShownFile(_placeholder(name, file_id, source, "too_large", text)), 0
        except BaseException:
            spool.discard()
            raise
        if spool.writer is None:
            lost = AgentFile(id=file_id, name=name, created_at=int(time.time()), source=source)
            return ShownFile(not_kept(lost)), spool.num_bytes
        return ShownFile(_shown(name, file_id, source, spool, room.inline), spool.writer), spool.num_bytes


class _Spool:
    """Takes the bytes of a file: its beginning in memory, and all of them in a blob, unless the disk fails."""

    def __init__(self, blobs: BlobFolder, max_head: int) -> None:
        self.head = bytearray()
        self.num_bytes = 0
        self._max_head = max_head
        try:
            self.writer: BlobWriter | None = blobs.begin()
        except OSError:
            self.writer = None

    def write(self, data: bytes) -> None:
        """Take bytes. Without a blob they are only counted."""
        self.num_bytes += len(data)
        self.head += data[: self._max_head - len(self.head)]
        if self.writer is not None:
            try:
                self.writer.write(data)
            except OSError:
                self.discard()

    def discard(self) -> None:
        """Delete the blob."""
        if self.writer is not None:
            self.writer.discard()
            self.writer = None


def _shown(name: str, file_id: str, source: dict[str, Any], spool: _Spool, max_inline: int) -> AgentFile:
    media, data = media_type(None, name), bytes(spool.head)
    text = _text_of(data, is_whole=len(data) == spool.num_bytes, is_textual=is_textual(media))
    is_inline = len(data) <= max_inline
    return AgentFile(
        id=file_id, name=name, created_at=int(time.time()), source=source, bytes=spool.num_bytes, format=format_of(name),
        mime_type="text/plain" if media == OCTETS and text is not None else media,
        text=text if is_inline else None,
        preview=text[:_PREVIEW_CHARS] if text is not None else None,
        data_base64=base64.b64encode(data).decode() if is_inline and text is None else None,
    )  # fmt: skip


def not_kept(file: AgentFile) -> AgentFile:
    """Return the placeholder of a file that the store could not take."""
    return _placeholder(file.name, file.id, file.source, "not_kept", "The server could not keep this file")


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
    """Return a path as the working directory lists it. A path outside of it stays as it is, and is not found then."""
    text = name.removeprefix("/workspace/").removeprefix("./")
    return text if "\0" not in text else "?"


def for_model(file: AgentFile) -> dict[str, Any]:
    """Return what a model reads about a file."""
    if file.code is not None:
        return {"name": file.name, "code": file.code, "message": file.message}
    made = {"id": file.id, "name": file.name, "mime_type": file.mime_type, "bytes": file.bytes}
    return {**made, "preview": file.preview[:MODEL_PREVIEW_CHARS]} if file.preview is not None else made
