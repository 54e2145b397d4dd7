"""Handles `/v1/sessions`: shows, replaces and deletes stored conversations. A session exists for its owner only.

Must be imported only by the first such request. Handlers raise, as those of `sie.frontend.routes.generate` do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

from sie.agents.store.files import KeptFile
from sie.agents.store.keeping import keep_file
from sie.agents.store.listing import made_files
from sie.agents.store.names import clean_name, format_of, is_textual, media_type
from sie.agents.store.sessions import Session
from sie.agents.store.store import file_limit
from sie.config.store_settings import Store as StoreSettings
from sie.frontend.dialects.openai.agent_fields import check_session_id
from sie.frontend.dialects.store import openai_files as files
from sie.frontend.dialects.store import sessions
from sie.frontend.dialects.store.bodies import FileField, FileOrigin
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.threads import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.store_requests import Shown, not_found
from sie.values.errors import InputTooLong

_MAX_INLINE_BYTES: Final = 32 << 20
"""Most bytes of bodies in one answer: later ones are left out, like large ones."""
_PREVIEW_BYTES: Final = 4 * files.PREVIEW_CHARS


class Sessions:
    """The handlers of one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process

    async def show(self, exchange: Exchange) -> Shown:
        """Answer `GET /v1/sessions/{session_id}`. The session and its files live on as if they were just used."""
        session_id, owner, process, store = exchange.model, exchange.owner, self._process, self._process.store
        session = await store.change(lambda opened: opened.sessions.use(owner, session_id, opened.now_s()))
        if session is None:
            raise not_found("Session", session_id, "SESSION_NOT_FOUND")
        messages = await offload(process.decode_pool, len(session.messages), sessions.read_session, session.messages)
        made = await offload(process.decode_pool, len(session.messages), made_files, messages)
        ids = list(dict.fromkeys([*session.files, *made]))
        found = await self._find_files(owner, ids[max(0, len(ids) - store.settings.max_request_files) :])
        shown = await store.run(self._show_files, found)
        return await offload(process.decode_pool, len(session.messages) + len(shown), sessions.encode_session,
                             session.messages, shown)  # fmt: skip

    async def replace(self, exchange: Exchange) -> Shown:
        """Answer `PUT /v1/sessions/{session_id}`."""
        session_id, owner, process = exchange.model, exchange.owner, self._process
        check_session_id(session_id)
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        body = await exchange.read_body(process.text_bodies)
        kind = exchange.headers.get("content-type")
        decode = functools.partial(sessions.decode_session, body, kind, process.settings.limits)
        messages, given = await offload(process.decode_pool, len(body), decode)
        check_size(messages, process.settings.store.max_session_bytes)
        most = process.settings.store.max_request_files
        if len(given) > most:
            raise wrong("files", f"has {len(given)} entries, more than max_request_files ({most})")
        for number, file in enumerate(given):
            await self._keep_file(owner, file, f"files[{number}]")
        session = Session(messages=messages, files=tuple(dict.fromkeys(file.id for file in given)))
        await process.store.change(lambda opened: opened.sessions.put(owner, session_id, session, opened.now_s()))
        return b""

    async def delete(self, exchange: Exchange) -> Shown:
        """Answer `DELETE /v1/sessions/{session_id}`, whether there is one or not."""
        session_id, owner = exchange.model, exchange.owner
        await self._process.store.change(lambda opened: opened.sessions.delete(owner, session_id))
        return b""

    async def _find_files(self, owner: str, ids: Sequence[str]) -> list[KeptFile]:
        """Return those files of a session that are still kept, and renew them."""
        if not ids:
            return []

        def find(opened: Any) -> list[KeptFile]:
            now_s = opened.now_s()
            opened.files.renew(owner, ids, now_s)
            found = (opened.files.find(owner, file_id, now_s) for file_id in ids)
            return [file for file in found if file is not None]

        return await self._process.store.change(find)

    def _show_files(self, found: Sequence[KeptFile]) -> list[dict[str, Any]]:
        """Return the Files of an answer, with their bodies where these are small. Blocks."""
        store = self._process.store
        left = _MAX_INLINE_BYTES
        shown: list[dict[str, Any]] = []
        for file in found:
            is_whole = file.num_bytes <= min(store.settings.max_inline_file_bytes, left)
            wanted = file.num_bytes if is_whole else _PREVIEW_BYTES if file.is_text else 0
            head = store.blobs.read(file.blob, file.num_bytes, wanted)
            left -= len(head or b"")
            shown.append(files.file_object(file, head, is_whole=is_whole))
        return shown

    async def _keep_file(self, owner: str, given: FileField, path: str) -> None:
        store, now_s = self._process.store, self._process.store.now_s()
        body = sessions.body_of(given, path)
        if body is not None:
            check_file_size(store.settings, owner, len(body), path)
        name = clean_name(given.name)
        kind = media_type(given.mime_type, name)
        source = given.source or FileOrigin()
        await keep_file(store, owner, KeptFile(
            id=given.id, name=name, format=format_of(name), mime_type=kind,
            num_bytes=given.bytes if body is None else len(body), created_s=now_s,
            expires_s=now_s + store.settings.max_file_age_s, purpose=given.purpose, tool=source.tool,
            round=source.round, turn=source.turn, is_text=given.text is not None or is_textual(kind),
            code=given.code or "", message=given.message or "",
        ), body)  # fmt: skip


def check_file_size(settings: StoreSettings, owner: str, num_bytes: int, field: str) -> None:
    """Raise InputTooLong (413) for a file that is too large to be kept for this owner."""
    setting = file_limit(settings, owner)
    most = getattr(settings, setting)
    if num_bytes > most:
        raise InputTooLong(f"Field '{field}' is over {setting} ({most})", http_status=413, extras={"param": field})


def check_size(messages: bytes, max_bytes: int) -> None:
    """Raise InputTooLong (413) for a conversation that is too large to be kept."""
    if len(messages) > max_bytes:
        text = f"The conversation has {len(messages)} bytes, more than max_session_bytes ({max_bytes})"
        raise InputTooLong(text, http_status=413, extras={"param": "messages"})
