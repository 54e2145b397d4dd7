"""Generates text on hosts: chooses one for each request, and follows its frames.

The host is chosen by load and by the first bytes of the conversation, so that turns of one conversation find the prefix
cache they filled. Until the client was sent something, a lost host's request starts again on another.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.gateway.host_directory import Host
from sie.cluster.gateway.remote_run import RemoteRun, overdue
from sie.cluster.large_payloads import pack, take
from sie.cluster.payloads import (
    VERSION,
    Cancel,
    CountWork,
    TextFrame,
    TextWork,
    count_result_decoder,
    decode,
    encode,
    text_frame_decoder,
)
from sie.cluster.subjects import Lane, answer_subject, host_subject, is_answer_of
from sie.config.generation_settings import Generation
from sie.frontend.generation.generation_run import TokenMeter
from sie.frontend.generation.start import check_request, generate_rule
from sie.ipc.messages import ModelEntry
from sie.values.errors import (
    ClientGone,
    Internal,
    ProtocolError,
    SieError,
    Unavailable,
    WorkerLost,
    from_wire,
)
from sie.values.generate import (
    GenerateRequest,
)

ChooseHosts = Callable[[str], Sequence[Host]]
"""Returns the hosts that may serve a model for the request of the running task. Raises SieErrors."""
_PREFIX_BYTES: Final = 4096
_MAX_ATTEMPTS: Final = 3
_COUNT_S: Final = 10.0
_ELSEWHERE: Final = frozenset(("SHUTTING_DOWN", "QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "WORKER_LOST"))
_NO_ANSWER: Final = "UPSTREAM_UNAVAILABLE"
_encode_prefix: Final = msgspec.msgpack.Encoder().encode


class TextClient:
    """Starts generated answers on hosts, and follows them."""

    def __init__(
        self,
        connection: Connection,
        gateway: str,
        choose_hosts: ChooseHosts,
        *,
        settings: Generation,
        meter: TokenMeter,
    ) -> None:
        self._connection = connection
        self._gateway = gateway
        self._choose_hosts = choose_hosts
        self._settings = settings
        self.meter = meter
        self._idle_ns = int(settings.stream_idle_timeout_s * 1e9)
        self._runs: dict[str, RemoteRun] = {}
        self._own: dict[str, int] = {}
        self._pools: set[str] = set()
        """The pools whose hosts have been asked."""
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """Answers that are not complete."""
        return len(self._runs)

    def by_lane(self) -> Counter[Lane]:
        """Return the answers that are not complete, by the lane of their hosts."""
        return Counter(run.lane for run in self._runs.values())

    async def start(
        self, entry: ModelEntry, request: GenerateRequest, deadline_ns: int, *, salt: bytes = b"", echoes: bool = False
    ) -> RemoteRun:
        """Have a host generate an answer; returns when the host has begun. Raises the host's errors."""
        generate_rule(entry.card)
        check_request(request, self._settings)
        host = self._choose(entry.card.id, request, set())
        work = TextWork(
            VERSION, f"{self._gateway}-t{next(self._numbers)}", self._gateway,
            answer_subject(self._gateway, host.beat.pool, "text"), self._connection.clock.to_server(deadline_ns), entry.card.id, request, salt, echoes,
        )  # fmt: skip
        run = RemoteRun(self, work, deadline_ns, host)
        self._runs[work.id] = run
        self._pools.add(run.pool)
        self._count(host.beat.host, 1)
        try:
            await self._send(run)
            await run.has_begun.wait()
        except BaseException:
            run.give_up(ClientGone("the request ended before its answer began"))
            raise
        run.raise_early()
        return run

    async def prompt_ids(self, entry: ModelEntry, request: GenerateRequest) -> list[list[int]]:
        """Return the tokens of a request's prompts, as a host counts them: another one if the first does not answer."""
        generate_rule(entry.card)
        check_request(request, self._settings)
        host, tried = self._choose(entry.card.id, request, set()), set[str]()
        while True:
            try:
                return await self._count_at(host, entry, request)
            except SieError as error:
                tried.add(host.beat.host)
                is_hosts_own = error.code in _ELSEWHERE or error.code == _NO_ANSWER
                other = self._other(entry.card.id, request, tried) if is_hosts_own else None
                if other is None:
                    raise
                host = other

    async def _count_at(self, host: Host, entry: ModelEntry, request: GenerateRequest) -> list[list[int]]:
        """Have one host count. Raises its errors, and Unavailable if it does not answer."""
        connection, pool, name = self._connection, host.beat.pool, f"{self._gateway}-c{next(self._numbers)}"
        work = CountWork(VERSION, entry.card.id, request)
        packed = await pack(connection, pool, name, work, request=GenerateRequest(model=entry.card.id))
        try:
            data = await connection.call(host_subject(pool, host.beat.host, "count"), packed, _COUNT_S)
            result = await take(connection, pool, decode(data, count_result_decoder), count_result_decoder)
        except ProtocolError as error:
            raise Internal(f"the host's answer cannot be read: {error}") from error
        if result.error is not None:
            raise from_wire(result.error)
        return result.prompts

    def close(self) -> None:
        """End every answer."""
        for run in list(self._runs.values()):
            run.give_up(Unavailable("The server is stopping", code="SHUTTING_DOWN", retry_after_s=1))

    # --- choosing -------------------------------------------------------------------------------------------------

    def _choose(self, model: str, request: GenerateRequest, tried: set[str]) -> Host:
        hosts = [host for host in self._choose_hosts(model) if host.beat.host not in tried]
        if not hosts:
            raise Unavailable(f"No host serves model '{model}' now", code="MODEL_LOADING", retry_after_s=1)
        return choose_host(hosts, prefix_of(request), self._own)

    def _other(self, model: str, request: GenerateRequest, tried: set[str]) -> Host | None:
        """Return a host for another try; None if enough were tried, or none is left."""
        if len(tried) >= _MAX_ATTEMPTS:
            return None
        try:
            return self._choose(model, request, tried)
        except SieError:
            return None

    def try_again(self, run: RemoteRun, error: SieError) -> bool:
        """Send a request to another host after a failure that is its host's own, if the client was sent nothing."""
        if error.code not in _ELSEWHERE:
            return False
        host = run.context.run(self._other, run.model, run.work.request, run.tried)
        if host is None:
            return False
        old_id, old_pool, old_host = run.work.id, run.pool, run.host
        reply_to = answer_subject(self._gateway, host.beat.pool, "text")
        work = msgspec.structs.replace(run.work, id=f"{self._gateway}-t{next(self._numbers)}", reply_to=reply_to)
        if not run.restart(work, host):
            return False
        self._runs.pop(old_id, None)
        self._count(old_host, -1)
        self._runs[work.id] = run
        self._count(host.beat.host, 1)
        self._spawn(self._cancel(old_pool, old_host, old_id))  # it may have been unreachable only
        self._spawn(self._send(run))
        return True

    async def _send(self, run: RemoteRun) -> None:
        """Send a request to its host, with the time that is left now. Raises Overloaded and Unavailable."""
        subject = host_subject(run.pool, run.host, "text")
        work = msgspec.structs.replace(run.work, deadline_ns=self._connection.clock.to_server(run.deadline_ns))
        packed = encode(work)
        run.is_sending = True
        try:
            if len(packed) > INLINE_BYTES:
                packed = encode(await self._by_reference(run, work, packed))
            if self._runs.get(work.id) is run:  # it may have ended meanwhile
                await self._connection.publish(subject, packed)
            elif run.is_done and run.stored:
                await self._connection.forget(run.pool, run.stored)
        finally:
            run.is_sending = False

    async def _by_reference(self, run: RemoteRun, work: TextWork, packed: bytes) -> TextWork:
        """Return a request whose content lies in the object store."""
        if not run.stored:
            run.stored = await self._connection.keep(run.pool, work.id, packed)
        return msgspec.structs.replace(work, request=GenerateRequest(model=work.model), stored=run.stored)

    def on_connected(self) -> None:
        """Keep large requests anew before they are sent again: a restarted server may have lost them."""
        for run in self._runs.values():
            run.stored = ""

    def on_beat(self, host: str) -> None:
        """Send a host its silent requests again: it may have lost them, or a part of their answers.

        NATS drops what is published while a host connects again. A host ignores requests that it runs.
        """
        now_ns = time.monotonic_ns()
        for run in list(self._runs.values()):
            if run.host == host and not run.is_sending and not run.held and run.asks_again(now_ns):
                self._spawn(self._send(run))

    def _count(self, host: str, change: int) -> None:
        left = self._own.get(host, 0) + change
        self._own[host] = left
        if left <= 0:
            del self._own[host]

    # --- frames and ends ------------------------------------------------------------------------------------------

    def on_frame(self, frame: TextFrame, subject: str) -> None:
        """Take in a frame of an answer."""
        run = self._runs.get(frame.id)
        if run is None:
            self._forget_late(frame, subject)
            return
        if not is_answer_of(subject, run.pool):
            return
        if run.held or frame.stored:
            run.held.append(frame)
            if len(run.held) == 1:
                self._spawn(self._feed_held(run))
        else:
            self._feed(run, frame)

    def _forget_late(self, frame: TextFrame, subject: str) -> None:
        """Delete the content of a frame that nobody waits for: it would fill the store until its age ends it."""
        for pool in self._pools if frame.stored else ():
            if is_answer_of(subject, pool):
                self._spawn(self._connection.forget(pool, frame.stored))

    def _feed(self, run: RemoteRun, frame: TextFrame) -> None:
        run.feed(frame, time.monotonic_ns(), self._idle_ns)

    async def _feed_held(self, run: RemoteRun) -> None:
        """Feed the frames that wait, each when it is there."""
        while run.held:
            frame = run.held[0]
            try:
                frame = await take(self._connection, run.pool, frame, text_frame_decoder)
            except (SieError, ProtocolError) as error:
                if self._runs.get(frame.id) is run:
                    run.lose(f"frame {frame.sequence} cannot be read: {error}")
            else:
                if self._runs.get(frame.id) is run:
                    self._feed(run, frame)
            run.held.popleft()

    def cancel(self, run: RemoteRun) -> None:
        """Tell a host that nobody waits for an answer."""
        self._spawn(self._cancel(run.pool, run.host, run.work.id))

    async def _cancel(self, pool: str, host: str, work_id: str) -> None:
        await self._connection.publish(host_subject(pool, host, "cancel"), encode(Cancel(VERSION, work_id)))

    def drop(self, run: RemoteRun) -> None:
        """Forget an answer that is over."""
        if self._runs.pop(run.work.id, None) is not None:
            self._count(run.host, -1)
            if run.stored:
                self._spawn(self._connection.forget(run.pool, run.stored))

    def expire(self, now_ns: int, reason: SieError | None = None) -> None:
        """End the answers that are overdue, with the reason if it is known."""
        for run in [run for run in self._runs.values() if run.deadline_ns <= now_ns]:
            run.fail(reason or overdue(run))

    def on_silent(self, silent: set[str]) -> None:
        """Start the answers of hosts that fell silent again elsewhere, or end them."""
        for run in [run for run in self._runs.values() if run.host in silent]:
            lost = WorkerLost("worker_lost: the host was lost while it generated; what it had sent stands")
            if not self.try_again(run, lost):
                run.fail(lost)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a message that cannot be sent: the host's silence ends the answer


def prefix_of(request: GenerateRequest) -> bytes:
    """Return the first bytes of a request's messages, which decide where its prefix may be cached."""
    if request.messages is not None:
        head: Any = [(message.role, message.content) for message in request.messages[:2]]
    else:
        head = (request.texts or request.token_lists or [""])[0]
    return _encode_prefix([request.model, head])[:_PREFIX_BYTES]


def choose_host(hosts: Sequence[Host], prefix: bytes, own: dict[str, int]) -> Host:
    """Return the host that the prefix prefers, or the least loaded one if that has much more to do.

    own counts this gateway's answers by host: heartbeats know them only later. Rendezvous hashing keeps most prefixes
    where they are when hosts come and go.
    """

    def load(host: Host) -> float:
        return max(host.beat.num_texts, own.get(host.beat.host, 0)) / max(1, host.beat.num_workers)

    def rank(host: Host) -> bytes:
        return hashlib.blake2b(prefix, key=host.beat.host.encode()[:64], digest_size=8).digest()

    preferred, least = max(hosts, key=rank), min(hosts, key=load)
    return preferred if load(preferred) <= 2 * load(least) + 2 else least
