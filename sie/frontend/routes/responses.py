"""Creates, stores, shows and cancels the responses of `/v1/responses`. Must show a stored response only to its owner.

`sie.frontend.routes.generate` has the routes. Handlers raise; the app's error boundary answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

import msgspec

from sie.agents.loop.agent_run import AgentRun
from sie.frontend.access.key_use import KeyHolder
from sie.frontend.dialects.openai.text_fields import renamed
from sie.frontend.dialects.responses.items import (
    Item,
    StoredOutput,
    find_items,
    name_kept_files,
    read_kept,
    referred_ids,
    response_of,
)
from sie.frontend.dialects.responses.page import read_page, read_stream_query
from sie.frontend.dialects.responses.reply import (
    RUNNING,
    ResponseRecord,
    ResponseWriter,
    encode_count,
    encode_deleted,
)
from sie.frontend.dialects.responses.request import ResponsesCall
from sie.frontend.generation.interface import TextRun
from sie.frontend.generation.reply_size import events_bytes
from sie.frontend.generation.sampling_fields import wrong
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import JSON, Answer
from sie.frontend.http.stream import Streamed
from sie.frontend.http.threads import offload
from sie.frontend.process import FrontendProcess
from sie.frontend.responses.follow import POLL_S, ResponseFollower
from sie.frontend.responses.jobs import Job, cancelled
from sie.frontend.responses.response_store import Followed, Kept, ResponseFile, ResponseStore, StoreLimits
from sie.frontend.routes.conversations import Conversations
from sie.frontend.routes.text_service import TextService
from sie.ipc.messages import ModelEntry
from sie.values.errors import NotFound, Overloaded, RateLimited, Unavailable
from sie.values.generate import ChatMessage, GenerateEvent, InputFile

_to_json: Final = msgspec.json.Encoder().encode
_NAMES: Final = {"messages": "input", "truncate_sequence": "truncation"}
"""This route's names for fields in the errors of the generation core."""
_MANY_EVENTS: Final = 256
Start = Callable[[ModelEntry], Coroutine[Any, Any, TextRun | AgentRun]]


class Responses:
    """The handlers of one process, and its responses under way."""

    def __init__(
        self, process: FrontendProcess, texts: TextService, pool: ThreadPoolExecutor, conversations: Conversations
    ) -> None:
        self._process = process
        self._conversations = conversations
        self._texts = texts
        self._pool = pool
        limits = process.settings.generation
        self._max_jobs = limits.max_background_responses
        self._max_stream_bytes = limits.max_response_stream_bytes
        self._store = ResponseStore(
            process.settings.server.state_dir,
            StoreLimits(limits.max_responses, limits.max_responses_bytes, limits.max_response_age_s),
        )
        self._jobs: dict[str, Job] = {}
        self._beginning: list[str] = []
        """The owners of the background responses that are not among the jobs yet."""
        self._watcher: asyncio.Task[None] | None = None
        self._unkept: dict[str, _Unkept] = {}
        """States of ended responses that could not be stored; the watcher tries again. At most _max_jobs."""

    async def create(self, exchange: Exchange, call: ResponsesCall) -> Answer | Streamed:
        """Create a response: at once, as a stream or in the background."""
        with self._place(exchange) if call.is_background else contextlib.nullcontext():
            return await self._create(exchange, call)

    async def _create(self, exchange: Exchange, call: ResponsesCall) -> Answer | Streamed:
        entry = self._texts.find(exchange, call.request)
        history = await self._join_history(call, exchange.owner)
        record = ResponseRecord(
            f"resp_{secrets.token_hex(16)}", int(time.time()), call, entry.card.id,
            max_kept_bytes=self._max_stream_bytes if self._store.is_on else 0,
        )  # fmt: skip
        record.is_kept = call.stores and self._store.is_on
        with renamed(_NAMES):
            if call.is_background:
                return await self._make_in_background(exchange, call, record, entry, history)
            if call.request.stream:
                return await self._make_as_stream(exchange, call, record, entry, history)
            events = await self._gather(exchange, call, entry)
        size = events_bytes(events)
        await offload(self._pool, size, record.apply, events, int(time.time()))
        await self._add(exchange.owner, record, call, history, size)
        return [JSON], await offload(self._pool, size, record.to_json)

    async def count(self, exchange: Exchange, call: ResponsesCall) -> Answer:
        """Return the number of tokens in a request's prompt, including the previous conversation."""
        entry = self._texts.find(exchange, call.request)
        await self._join_history(call, exchange.owner)
        entry = await self._process.models.wait_serving(entry, exchange.deadline_ns)
        with renamed(_NAMES):
            (ids,) = await self._texts.prompt_ids(entry, call.request)
        return [JSON], encode_count(len(ids))

    async def show(self, exchange: Exchange) -> Answer | Streamed:
        """Return the current state of a response, or stream its events after the one that the query names."""
        after = read_stream_query(_query(exchange))
        if after is None:
            return [JSON], (await self._find(exchange)).body
        response_id, owner = exchange.model, exchange.owner

        async def look(after: int) -> Followed | None:
            return await self._store.do(lambda file: file.follow(response_id, owner, after))

        if not self._store.is_on or await look(after) is None:
            raise _not_found(response_id)
        follower = ResponseFollower(look, after, self._pool)
        return Streamed(follower, follower)

    async def delete(self, exchange: Exchange) -> Answer:
        """Delete a response, and stop it if it is under way."""
        response_id, owner = exchange.model, exchange.owner
        if not (self._store.is_on and await self._store.do(lambda file: file.delete(response_id, owner))):
            raise _not_found(response_id)
        self._stop(response_id)
        return [JSON], encode_deleted(response_id)

    async def cancel(self, exchange: Exchange) -> Answer:
        """Cancel a response that is under way, or show one that was cancelled before. Raises NotFound if it has ended."""
        kept = await self._find(exchange, ResponseFile.cancel)
        if kept.status != "cancelled":
            text = f"Response '{exchange.model[:80]}' has ended already; it is {kept.status}"
            raise NotFound(text, code="RESPONSE_ENDED", extras={"param": "response_id"})
        self._stop(exchange.model)
        return [JSON], kept.body

    async def list_items(self, exchange: Exchange) -> Answer:
        """Return one page of the input items of a response."""
        kept = await self._find(exchange)
        return [JSON], await offload(self._pool, len(kept.input), read_page, kept.input, _query(exchange))

    # --- creating -------------------------------------------------------------------------------------------------

    async def _gather(self, exchange: Exchange, call: ResponsesCall, entry: ModelEntry) -> list[GenerateEvent]:
        """Return all events of a finished run."""

        async def gather(entry: ModelEntry) -> list[GenerateEvent]:
            run = await self._texts.start(exchange, entry, call.request)
            try:
                return await run.gather()
            finally:
                run.give_up(cancelled())

        return await self._process.models.serve(entry, exchange.deadline_ns, gather)

    async def _make_as_stream(
        self, exchange: Exchange, call: ResponsesCall, record: ResponseRecord, entry: ModelEntry, history: bytes
    ) -> Streamed:
        run = await self._process.models.serve(
            entry, exchange.deadline_ns, lambda entry: self._texts.start(exchange, entry, call.request)
        )
        with _given_up_on_failure(run):
            await self._add(exchange.owner, record, call, history)
        job = Job(record, exchange.owner, self._update, self._pool, outlives=False)
        self._begin(job, job.stream(run))
        return Streamed(job.follower, ResponseWriter(record))

    async def _make_in_background(
        self, exchange: Exchange, call: ResponsesCall, record: ResponseRecord, entry: ModelEntry, history: bytes
    ) -> Answer | Streamed:
        generator, request, salt = self._texts.generator, call.request, exchange.owner.encode()
        deadline_ns = exchange.began_ns + int(self._process.settings.generation.generation_timeout_s * 1e9)

        plan = await self._texts.plan(request)
        job = Job(record, exchange.owner, self._update, self._pool, outlives=True)

        async def start(entry: ModelEntry) -> TextRun | AgentRun:
            if plan is not None:
                run = await self._texts.start_agent(entry, plan, deadline_ns, owner=exchange.owner)
            else:
                run = await generator.start(entry, request, deadline_ns, salt=salt)
            job.follower.run = run
            return run

        # If the model is loaded, errors of the request are reported now.
        run = await start(entry) if entry.workers and entry.state == "loaded" else None
        with _given_up_on_failure(run):
            await self._add(exchange.owner, record, call, history)
        answer = record.to_json()
        self._begin(job, _charged(exchange.holder, job, self._work(job, deadline_ns, entry, start, run)))
        if request.stream:
            return Streamed(job.follower, ResponseWriter(record))
        return [JSON], answer

    async def _work(
        self, job: Job, deadline_ns: int, entry: ModelEntry, start: Start, first: TextRun | AgentRun | None
    ) -> list[GenerateEvent]:
        """Run a background response, whose first run may have begun. Return the last of its events."""
        record = job.record

        async def follow(run: TextRun | AgentRun) -> list[GenerateEvent]:
            try:
                record.status = "in_progress"
                await self._update(record)
                return await (job.stream(run) if record.is_streamed else run.gather())
            finally:
                run.give_up(cancelled())

        async def make(entry: ModelEntry) -> list[GenerateEvent]:
            return await follow(await start(entry))

        try:
            if first is not None:
                return await follow(first)
        except Unavailable as error:
            entry = self._process.models.reloaded(entry, error)
        return await self._process.models.serve(entry, deadline_ns, make)

    # --- responses under way --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _place(self, exchange: Exchange) -> Generator[None]:
        """Keep a place for a background response until its job has begun. Raises an error if there is none."""
        self._check_background(exchange)
        self._beginning.append(exchange.owner)
        try:
            yield
        finally:
            self._beginning.remove(exchange.owner)

    def _check_background(self, exchange: Exchange) -> None:
        """Raise an error if no more background responses are allowed.

        Background responses do not count as requests of their key. Otherwise a key with max_concurrent 1 could never ask
        for the state of its response.
        """
        if not self._store.is_on:
            raise wrong("background", "needs responses to be kept, and the setting max_responses is 0")
        if len(self._jobs) + len(self._beginning) >= self._max_jobs:
            text = f"As many responses are being made as max_background_responses allows ({self._max_jobs})"
            raise Overloaded(text, retry_after_s=1)
        limit = exchange.holder.key.max_concurrent if exchange.holder is not None else None
        owners = [*self._beginning, *(job.owner for job in self._jobs.values() if job.outlives)]
        if limit is not None and owners.count(exchange.owner) >= limit:
            text = f"API key '{exchange.owner}' has as many responses in the background as its max_concurrent ({limit})"
            raise RateLimited(text, retry_after_s=1)

    def _begin(self, job: Job, work: Coroutine[Any, Any, list[GenerateEvent]]) -> None:
        response_id = job.record.id
        self._jobs[response_id] = job
        job.start(work, lambda: self._jobs.pop(response_id, None))
        self._keep_watch()

    def _keep_watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def _stop(self, response_id: str) -> None:
        job = self._jobs.get(response_id)
        if job is not None:
            job.stop(cancelled())

    async def _watch(self) -> None:
        """Store the events of running jobs, and stop jobs that were cancelled or deleted through another process."""
        while self._jobs or self._unkept:
            await asyncio.sleep(POLL_S)
            kept = [job for job in self._jobs.values() if job.record.is_kept]
            ids = [job.record.id for job in kept]
            with contextlib.suppress(Unavailable):
                # Nobody else can read a response that ends with its client's stream, so its events are stored in bulk.
                await self._keep([one.record for one in kept if one.outlives or one.record.num_unkept >= _MANY_EVENTS])
                for response_id in await self._store.do(lambda file, ids=ids: file.stopped(ids)) if ids else ():
                    self._stop(response_id)
                await self._keep_late()

    # --- stored responses -----------------------------------------------------------------------------------------

    async def _find(
        self, exchange: Exchange, look: Callable[[ResponseFile, str, str], Kept | None] = ResponseFile.get
    ) -> Kept:
        response_id, owner = exchange.model, exchange.owner
        kept = await self._store.do(lambda file: look(file, response_id, owner)) if self._store.is_on else None
        if kept is None:
            raise _not_found(response_id)
        return self._latest(kept)

    def _latest(self, kept: Kept) -> Kept:
        """Return a stored response with its last state, which this process may have been unable to store."""
        late = self._unkept.get(kept.id)
        if late is None or kept.status not in RUNNING:
            return kept
        return msgspec.structs.replace(kept, status=late.status, body=late.body)

    async def _join_history(self, call: ResponsesCall, owner: str) -> bytes:
        """Put the conversation before a call, and the list of all files, into its request. Return the stored items."""
        if ids := referred_ids(call.items):
            call.resolve(await self._read_referred(ids, owner))
        history, before, files = await self._read_history(call, owner)
        call.begin(before)
        call.request.files = [*files, *call.request.files]
        kept = await self._conversations.prepare(owner, call.request)
        name_kept_files(call.items, [(file.id, file.name) for file in kept[len(files) :] if file is not None])
        return history

    async def _read_referred(self, ids: Sequence[str], owner: str) -> dict[str, Item]:
        """Return the stored items with these ids."""
        if not self._store.is_on:
            return {}
        responses = dict.fromkeys(map(response_of, ids))
        max_bytes = self._process.settings.generation.max_generation_body_bytes
        return await self._store.do(lambda file: find_items(file.bodies(responses, owner), frozenset(ids), max_bytes))

    async def _read_history(self, call: ResponsesCall, owner: str) -> tuple[bytes, list[ChatMessage], list[InputFile]]:
        """Return the conversation before a call: the stored items, the messages, and the files that it names."""
        previous_id = call.previous_id
        if previous_id is None:
            return b"[]", [], []
        kept = await self._store.do(lambda file: file.get(previous_id, owner)) if self._store.is_on else None
        if kept is None:
            text = f"Previous response '{previous_id[:80]}' not found"
            raise NotFound(text, code="PREVIOUS_RESPONSE_NOT_FOUND", extras={"param": "previous_response_id"})
        kept = self._latest(kept)
        if kept.status in RUNNING:
            raise wrong("previous_response_id", "names a response that has not ended yet")
        return await offload(self._pool, len(kept.history) + len(kept.input) + len(kept.body), _read_conversation, kept)

    async def _add(
        self, owner: str, record: ResponseRecord, call: ResponsesCall, history: bytes, size: int = 0
    ) -> None:
        """Store a response of about this size if its request asks for it. Raises Unavailable only for a background response."""
        if not record.is_kept:
            return
        kept = Kept(
            id=record.id, status=record.status, body=await offload(self._pool, size, record.to_json), input=_to_json(call.items), history=history,
            stream=record.stream_form,
        )  # fmt: skip
        try:
            await self._store.do(lambda file: file.add(owner, kept))
        except Unavailable:
            if call.is_background:
                raise
            record.is_kept = False
            record.stop_keeping()

    async def _update(self, record: ResponseRecord) -> None:
        """Store the last state of a response, now or as soon as the store can be written again."""
        if not record.is_kept:
            return
        try:
            await self._keep([record], is_update=True)
        except Unavailable:  # the store has logged it; until it is stored, other processes show the status before this
            self._unkept[record.id] = _Unkept(record.status, record.to_json(), record.is_newly_cut)
            if len(self._unkept) > self._max_jobs:
                del self._unkept[next(iter(self._unkept))]
            self._keep_watch()

    async def _keep_late(self) -> None:
        """Store the states that could not be stored when their responses ended. Raises Unavailable."""
        late = list(self._unkept.items())
        if not late:
            return

        def keep(file: ResponseFile) -> None:
            for response_id, state in late:
                if state.is_cut:  # ORDER: before the status, as in `_keep`
                    file.events.cut(response_id)
                file.update(response_id, state.status, state.body)

        await self._store.do(keep)
        for response_id, state in late:
            if self._unkept.get(response_id) is state:  # else a later state failed to be stored meanwhile
                del self._unkept[response_id]

    async def _keep(self, records: Sequence[ResponseRecord], *, is_update: bool = False) -> None:
        """Store the new events of streams; with is_update, also the states of their responses.

        Raises Unavailable; then the rest of these streams is not stored.
        """
        news = [
            (record.id, number, events) for record in records for number, events in [record.take_unkept()] if events
        ]
        cut = [record for record in records if record.is_newly_cut]
        states = [(record.id, record.status, record.to_json()) for record in records if is_update]

        def keep(file: ResponseFile) -> None:
            # ORDER: before the status; readers in `ResponseFile.follow` read no more events after an end status.
            file.events.add(news)
            for record in cut:
                file.events.cut(record.id)
            for state in states:
                file.update(*state)

        if not (news or cut or states):
            return
        try:
            await self._store.do(keep)
        except Unavailable:
            for record in records:
                record.stop_keeping()
            raise
        for record in cut:
            record.is_newly_cut = False


class _Unkept(NamedTuple):
    """The last state of a response that could not be stored when it ended."""

    status: str
    body: bytes
    is_cut: bool
    """Whether events of its stream are lost, so that the stored ones must be deleted."""


def _read_conversation(kept: Kept) -> tuple[bytes, list[ChatMessage], list[InputFile]]:
    items = [
        *msgspec.json.decode(kept.history, type=list[msgspec.Raw]),
        *msgspec.json.decode(kept.input, type=list[msgspec.Raw]),
        *msgspec.json.decode(kept.body, type=StoredOutput).output,
    ]
    history = _to_json(items)
    return history, *read_kept(history)


def _query(exchange: Exchange) -> dict[str, list[str]]:
    return parse_qs(exchange.scope.query_string, keep_blank_values=True)


def _not_found(response_id: str) -> NotFound:
    text = f"Response '{response_id[:80]}' not found"
    return NotFound(text, code="RESPONSE_NOT_FOUND", extras={"param": "response_id"})


async def _charged(
    holder: KeyHolder | None, job: Job, work: Coroutine[Any, Any, list[GenerateEvent]]
) -> list[GenerateEvent]:
    """Do the work of a background response, and charge its tokens to its key, however it ends."""
    try:
        return await work
    finally:
        if holder is not None and job.follower.run is not None:
            usage = job.follower.run.usage()
            assert usage is not None
            holder.spend(usage.prompt_tokens + usage.completion_tokens, time.monotonic_ns())


@contextlib.contextmanager
def _given_up_on_failure(run: TextRun | AgentRun | None) -> Generator[None]:
    """Give up a run if the body of the `with` statement fails, because nobody will read its events."""
    try:
        yield
    except BaseException:
        if run is not None:
            run.give_up(cancelled())
        raise
