"""Keeps the files that tools made in the store, where any frontend finds them by their ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

from sie.agents.host.sessions import Session
from sie.agents.host.shown_files import ShownFile, not_kept
from sie.agents.store.blobs import BlobWriter
from sie.agents.store.files import KeptFile
from sie.agents.store.keeping import keep_written
from sie.agents.store.names import clean_name, is_textual
from sie.agents.store.store import Store
from sie.values.agent import AgentFile
from sie.values.errors import Unavailable

_RENEW_S: Final = 60.0
"""How often the files of a session in use are told to live on; less than any useful `max_file_age_s`."""


class FileKeeper:
    """The agent process's way to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def keep(self, owner: str, shown: Iterator[ShownFile]) -> list[AgentFile]:
        """Keep files, and return them as the wire shows them. A placeholder stands for one that cannot be kept.

        Each is kept before the next one is read, on a thread: so the store's limits hold for the files of one call, too.
        """
        kept: list[AgentFile] = []
        while (one := await asyncio.to_thread(next, shown, None)) is not None:
            kept.append(await self._keep(owner, *one))
        return kept

    async def renew(self, session: Session) -> None:
        """Let the files of a session in use live on."""
        now_s = time.monotonic()
        if not session.ids or now_s - session.renewed_s < min(_RENEW_S, self._store.settings.max_file_age_s / 4):
            return
        session.renewed_s = now_s
        ids = list(session.ids)
        try:
            await self._store.change(lambda opened: opened.files.renew(session.owner, ids, opened.now_s()))
        except Unavailable:  # the store has logged it; the call itself needs no store
            return

    async def _keep(self, owner: str, file: AgentFile, writer: BlobWriter | None) -> AgentFile:
        try:
            await keep_written(self._store, owner, self._row(file, writer), writer)
        except Unavailable:
            return file if file.code is not None else not_kept(file)
        finally:
            if writer is not None:
                await self._store.run(writer.discard)
        return file

    def _row(self, file: AgentFile, writer: BlobWriter | None) -> KeptFile:
        now_s, source = self._store.now_s(), file.source
        return KeptFile(
            id=file.id, name=clean_name(file.name), format=file.format, mime_type=file.mime_type, num_bytes=file.bytes,
            created_s=now_s, expires_s=now_s + self._store.settings.max_file_age_s, purpose=file.purpose,
            tool=source["tool"], round=source["round"], turn=source["turn"],
            is_text=writer is not None and (writer.is_utf8 or is_textual(file.mime_type)),
            code=file.code or "", message=file.message or "",
        )  # fmt: skip
