"""Puts stored sessions and files into requests that generate, and stores the conversation at the end of an answer.

A model reads the beginning of a text file, in a list at the front of the conversation. Tools have the files themselves in
their working directory. Source: generation API reference, sections 7.4 and 8.7.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from sie.agents.fetch.http import Client, FetchError
from sie.agents.loop.agent_run import AgentRun
from sie.agents.store.files import OF_REQUEST, KeptFile
from sie.agents.store.keeping import USER_DATA, content_id, keep_upload
from sie.agents.store.listing import ListedFile, list_files, made_files, mount_files, with_list
from sie.agents.store.sessions import Session
from sie.agents.store.splicing import splice
from sie.agents.store.store import StoreFile
from sie.frontend.dialects.openai.chat_messages import name_results
from sie.frontend.dialects.store import sessions
from sie.frontend.generation.generation_run import add_event
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.http.stream import EventSource
from sie.frontend.http.threads import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.routes.files import file_gone
from sie.frontend.routes.run_skills import add_skills
from sie.frontend.routes.sessions import check_file_size, check_size
from sie.values.errors import BadRequest, NotFound, SieError
from sie.values.generate import (
    ChatMessage,
    ChoiceReply,
    GenerateEvent,
    GenerateRequest,
    GenerateUsage,
    InputFile,
    with_answer,
)
from sie.values.inference import Timing

_OK: Final = 200
_MAX_CHAR_BYTES: Final = 4
_NUM_FETCHES: Final = 4
_MAX_REDIRECTS: Final = 3


class Turn:
    """One turn of a session: the conversation up to the answer."""

    def __init__(
        self, process: FrontendProcess, owner: str, request: GenerateRequest, messages: Sequence[ChatMessage],
        files: Sequence[str],
    ) -> None:  # fmt: skip
        self._store = process.store
        self._pool = process.decode_pool
        self._owner = owner
        self._session_id = request.session_id
        self._continues = request.continues
        self._messages = messages
        self._files = tuple(files)

    async def end(self, said: Sequence[ChatMessage]) -> None:
        """Store the conversation with the messages of its answer (`said_by`). Raises Unavailable."""
        encoded = await self._encode(said)
        if len(said) > 1 and len(encoded) > self._store.settings.max_session_bytes:
            # With the results of tools it would be too large to be continued.
            encoded = await self._encode([_without_tools(said)])
        session = Session(messages=encoded, files=self._files)
        owner, session_id = self._owner, self._session_id
        await self._store.change(lambda opened: opened.sessions.put(owner, session_id, session, opened.now_s()))

    async def _encode(self, said: Sequence[ChatMessage]) -> bytes:
        messages = with_answer(self._messages, said, continues=self._continues)
        return await offload(self._pool, _size(messages), sessions.encode_messages, messages)


def said_by(run: EventSource, answer: ChoiceReply) -> Sequence[ChatMessage]:
    """Return the messages of a run that has ended: its answer, after the rounds of the server's tools if there were any."""
    return run.said if isinstance(run, AgentRun) else [answer.to_message()]


def _without_tools(said: Sequence[ChatMessage]) -> ChatMessage:
    """Return the answer that a client of a stream saw."""
    text = "".join(message.content or "" for message in said if message.role == "assistant")
    return msgspec.structs.replace(said[-1], content=text)


class StoredRun:
    """A run whose answer is stored before its last events are sent. See `sie.frontend.http.stream.EventSource`."""

    def __init__(self, run: EventSource, turn: Turn) -> None:
        self.is_over = False
        self._run = run
        self._turn = turn
        self._answer = {0: ChoiceReply()}

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s. Raises the error that ended the stream."""
        events = await self._run.wait(timeout_s)
        for event in events:
            add_event(self._answer, event)
        if self._run.is_over:
            await self._turn.end(said_by(self._run, self._answer[0]))
            self.is_over = True
        return events

    def give_up(self, error: SieError) -> None:
        """Abandon the stream."""
        self._run.give_up(error)

    def timing(self, began_ns: int) -> Timing | None:
        """Return the timing of the run."""
        return self._run.timing(began_ns)

    def usage(self) -> GenerateUsage | None:
        """Return the usage of the run."""
        return self._run.usage()


class Conversations:
    """The stored part of the conversations of one process."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._fetches = ThreadPoolExecutor(_NUM_FETCHES, "fetch")

    @functools.cached_property
    def _client(self) -> Client:
        """The client of `file_url`. It reads all certificates of the host, so it is made with the first such file."""
        store = self._process.settings.store
        return Client(timeout_s=store.file_url_timeout_s, max_bytes=store.max_file_bytes, max_redirects=_MAX_REDIRECTS)

    async def begin(self, owner: str, request: GenerateRequest) -> Turn | None:
        """Complete a request with its session and the list of its files. Return the turn to end, if it has a session.

        Raises BadRequest and NotFound naming the field.
        """
        if not request.session_id:
            await self.prepare(owner, request)
            return None
        self._check_kept_here("session_id")
        store, session_id = self._process.store, request.session_id
        stored = await store.change(lambda opened: opened.sessions.use(owner, session_id, opened.now_s()))
        past = stored.files if stored is not None else ()
        messages = request.messages or []
        if stored is not None:
            before = await offload(
                self._process.decode_pool, len(stored.messages), sessions.read_session, stored.messages
            )
            if made := await offload(self._process.decode_pool, len(stored.messages), made_files, before):
                await self._renew(owner, made)
            messages = splice(before, messages)
        request.messages = messages = name_results(messages, "messages")
        encoded = await offload(self._process.decode_pool, _size(messages), sessions.encode_messages, messages)
        check_size(encoded, store.settings.max_session_bytes)
        request.files = [*(InputFile(field="", file_id=file_id, is_past=True) for file_id in past), *request.files]
        kept = await self.prepare(owner, request)
        # The model learns once that a file is gone; the session does not name the file again.
        files = tuple(dict.fromkeys(file.id for file in kept if file is not None))
        return Turn(self._process, owner, request, messages, files)

    async def prepare(self, owner: str, request: GenerateRequest) -> list[KeptFile | None]:
        """Put its skills and the list of its files in front of a request, and into the task of its agent.

        Return the files; None for one of the past that is gone.
        """
        await add_skills(self._process, owner, request)
        return await self._list_files(owner, request)

    async def _list_files(self, owner: str, request: GenerateRequest) -> list[KeptFile | None]:
        if not request.files:
            return []
        self._check_kept_here(request.files[0].field)
        store = self._process.store
        most = store.settings.max_request_files
        if len({file.file_id or file.field for file in request.files}) > most:
            text = f"The conversation has more than {most} files (max_request_files)"
            raise BadRequest(text, extras={"param": request.files[-1].field or "session_id"})
        mounts = request.agent is not None and request.agent.has_directory
        kept = [await self._keep(owner, file, mounts=mounts) for file in request.files]
        await self._renew(owner, [file.id for file in kept if file is not None])
        paths = self._mount(request, [file for file in kept if file is not None])
        listed: dict[str, ListedFile] = {}
        for given, file in zip(request.files, kept, strict=True):
            file_id = file.id if file is not None else given.file_id
            if file_id not in listed:
                shown = await self._read(given, file, file_id)
                listed[file_id] = msgspec.structs.replace(shown, path=paths.get(file_id, ""))
        limits = store.settings
        text = list_files([*listed.values()], limits.max_preview_chars, limits.max_request_preview_chars)
        request.messages = with_list(request.messages or [], text)
        return kept

    def _mount(self, request: GenerateRequest, files: Sequence[KeptFile]) -> dict[str, str]:
        """Give the files to the tools of a request. Return the path of each by its id. Raises BadRequest."""
        task = request.agent
        if task is None or not task.has_directory:
            return {}
        inputs, most = mount_files(files), self._process.settings.agents.sandbox_disk_bytes
        if sum(file.num_bytes for file in inputs) > most:
            text = f"The conversation's files take more than sandbox_disk_bytes ({most})"
            raise BadRequest(text, extras={"param": request.files[-1].field or "session_id"})
        request.agent = msgspec.structs.replace(task, inputs=inputs)
        return {file.id: file.path for file in inputs}

    def _check_kept_here(self, field: str) -> None:
        """Refuse a field on a gateway. The next request may reach another gateway, which would not have the stored data."""
        if self._process.remote is not None:
            raise wrong(field, "is not served by a gateway, which keeps no files and sessions; ask a host itself")

    async def _keep(self, owner: str, given: InputFile, *, mounts: bool) -> KeptFile | None:
        """Return a file that a request names, or store one that it contains. Without mounts the file must be a text."""
        if given.file_id:
            return await self._find(owner, given, mounts=mounts)
        if given.url:
            return await self._fetch(owner, given, mounts=mounts)
        field = f"{given.field}.file_data"
        data = await offload(self._process.decode_pool, len(given.data), sessions.decode_base64, given.data, field)
        media = given.data[5:].partition(";")[0] if given.data.startswith("data:") else None
        return await self._keep_data(owner, given.name, media, data, field, mounts=mounts)

    async def _find(self, owner: str, given: InputFile, *, mounts: bool) -> KeptFile | None:
        file_id, field = given.file_id, f"{given.field}.file_id"
        file = await self._process.store.read(lambda opened: opened.files.find(owner, file_id, opened.now_s()))
        if file is None and not given.is_past:
            text = f"Field '{field}': file '{file_id[:80]}' not found"
            raise NotFound(text, code="FILE_NOT_FOUND", extras={"param": field})
        if file is None or given.is_past:
            return file
        if file.is_placeholder:
            raise wrong(field, "names a file that could not be made")
        _check_text(file.name, file.mime_type, field, is_text=file.is_text or mounts)
        return file

    async def _fetch(self, owner: str, given: InputFile, *, mounts: bool) -> KeptFile:
        limits, field = self._process.settings.store, f"{given.field}.file_url"
        if not limits.file_urls:
            raise wrong(field, "is not served: the setting file_urls is off; give the file's data, or upload it")
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._fetches, self._client.get, given.url)
        except FetchError as error:
            raise wrong(field, f"cannot be fetched: {error}") from None
        if found.status != _OK:
            raise wrong(field, f"was answered with status {found.status}")
        if found.is_cut:
            raise wrong(field, f"is larger than {limits.max_file_bytes} bytes (max_file_bytes)")
        name, media = given.name or found.name, found.kind or None
        return await self._keep_data(owner, name, media, found.body, field, mounts=mounts)

    async def _keep_data(
        self, owner: str, name: str, media: str | None, data: bytes, field: str, *, mounts: bool
    ) -> KeptFile:
        """Keep the bytes of a file that came with a request, once for the same name and bytes."""
        store = self._process.store
        check_file_size(store.settings, owner, len(data), field)
        file_id = await offload(self._process.decode_pool, len(data), content_id, name, data)
        known = await store.read(lambda opened: opened.find_held(owner, file_id))
        if known is not None:
            _check_text(known.name, known.mime_type, field, is_text=known.is_text or mounts)
            return known
        writer = await store.run(store.blobs.add, data)
        try:
            _check_text(name, media or "unknown", field, is_text=writer.is_utf8 or mounts)
            return await keep_upload(
                store, owner, writer, name, media, purpose=USER_DATA, file_id=file_id, tool=OF_REQUEST
            )
        finally:
            await store.run(writer.discard)

    async def _renew(self, owner: str, ids: Sequence[str]) -> None:
        """Let the files of a conversation live on as long as if they were made now."""

        def renew(opened: StoreFile) -> None:
            opened.files.renew(owner, ids, opened.now_s())

        await self._process.store.change(renew)

    async def _read(self, given: InputFile, file: KeptFile | None, file_id: str) -> ListedFile:
        """Return a file with a little more of its text than may be shown."""
        if file is None:
            return ListedFile(id=file_id, file=None)
        if not file.is_text or file.is_placeholder:
            return ListedFile(id=file_id, file=file)
        store = self._process.store
        wanted = _MAX_CHAR_BYTES * (store.settings.max_preview_chars + 1)
        head = await store.run(store.blobs.read, file.blob, file.num_bytes, wanted)
        if head is None and not given.is_past:
            raise file_gone(file_id)
        text = head.decode("utf-8", "ignore" if len(head) < file.num_bytes else "replace") if head is not None else None
        return ListedFile(id=file_id, file=file, text=text)


def _check_text(name: str, media: str, field: str, *, is_text: bool) -> None:
    if not is_text:
        reason = "models read text files, in UTF-8, alone; tools for code or commands have every file"
        raise wrong(field, f"names {name[:80]!r} ({media[:80]}), which cannot be read: {reason}")


def _size(messages: Sequence[ChatMessage]) -> int:
    return sum(len(message.content or "") for message in messages)
