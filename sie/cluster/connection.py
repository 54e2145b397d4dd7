"""Connects a process to NATS: publishing, streams, large payloads by reference, and the server's clock.

The connection is kept for ever: it is made again after every loss, and `on_connected` then runs. Messages that are
published meanwhile wait in a bounded buffer.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import api
from nats.js.client import JetStreamContext

from sie.cluster.server_clock import ServerClock, parse_stamp
from sie.cluster.subjects import (
    STATE_STREAM,
    all_dead,
    all_work,
    dead_stream,
    payload_bucket,
    state_subject,
    work_stream,
)
from sie.config.cluster_settings import Cluster
from sie.runtime.logs import get_logger
from sie.values.errors import Internal, Overloaded, SieError, Unavailable

_log = get_logger(__name__)
_MAX_PAYLOAD: Final = 1 << 20
INLINE_BYTES: Final = _MAX_PAYLOAD - 4096
"""Payloads over a MiB go by reference; the rest of it is left for subjects and headers."""
_BUFFER_BYTES: Final = 64 << 20
_RECONNECT_S: Final = 0.1
_PING_S: Final = 1.0
_MAX_PINGS: Final = 2
"""A server that answers no ping for this many intervals is lost: a partition sends no other sign."""
_API_S: Final = 2.0
"""A question that comes while NATS elects a leader is not answered, and must be asked again."""
_CLOSE_S: Final = 5.0
_CHUNK_S: Final = 5.0
"""How long the next part of a large payload may take."""
_DIGEST: Final = "SHA-256="
_PAYLOAD_AGE_S: Final = 600.0
_STREAM_AGE_S: Final = 3600.0
_DEAD_AGE_S: Final = 86_400.0
_DUPLICATES_S: Final = 120.0
_IN_USE: Final = 10058
"""JetStream's code for a stream that exists with another configuration."""
_FULL: Final = frozenset((10077, 10023, 10047, 10002, 10122))
"""JetStream's codes for a stream, an account or a server that can store no more."""

_WRONG_REVISION: Final = frozenset((10071, 10164))
_MAX_DOCUMENT_BYTES: Final = 1 << 20
_MAX_TOLD: Final = 100
_BY_SERVER: Final = "nats: '"
"""The beginning of an error that the server sent; the client's own errors have no quotation mark there."""

OnMessage = Callable[[Msg], Awaitable[None]]


class WrongRevisionError(Exception):
    """A key was changed by somebody else since it was read."""


def _is_seed(path: str) -> bool:
    """Return whether a file of credentials has an nkey's seed alone. Raises OSError."""
    with Path(path).open("rb") as file:
        return file.read(2).startswith(b"SU")


def reason_of(error: BaseException) -> str:
    """Return why NATS did not do something, for a log or an error; many of its errors have no text."""
    if isinstance(error, nats.js.errors.ServiceUnavailableError) and error.err_code is None:
        return "JetStream does not answer; nats-server needs the flag -js, and several of them need a leader"
    return str(error) or type(error).__name__


def _refusal(error: nats.js.errors.APIError, full: str) -> SieError:
    """Return the error for what JetStream does not store: Overloaded with the text `full` if it has no room, else Unavailable."""
    if error.err_code in _FULL:
        return Overloaded(full, retry_after_s=1)
    return Unavailable(f"NATS: {error.description}", code="UPSTREAM_UNAVAILABLE", retry_after_s=1)


class _Client(Client):
    """A client that outlives every error that the server tells of. That of nats-py is closed for ever by most of them.

    Where the error ends the connection, the server closes it, and the client connects again as after any other loss:
    credentials may be renewed, and a limit of the server may be free again.
    """

    async def _process_err(self, err_msg: str) -> None:
        await self._error_cb(nats.errors.Error(f"nats: {err_msg}"))


class Connection:
    """One process's connection to NATS."""

    def __init__(self, settings: Cluster, name: str) -> None:
        """Set up without connecting; name is shown by the server's monitoring."""
        self._settings = settings
        self._name = name
        self._nc = _Client()
        self._js: JetStreamContext
        self._pools: set[str] = set()
        self.clock = ServerClock(time.monotonic_ns)
        self.on_connected: Callable[[], Awaitable[None]] | None = None
        """Runs after each connection that is made again, when the streams are there."""
        self._restoring: asyncio.Task[None] | None = None
        self._is_opening = True
        self._is_closing = False
        self._has_waited = False
        """Whether the log says that the first connection could not be made yet."""
        self._told: set[str] = set()
        """The errors of the server that the log has: a permission is refused again with each message."""

    @property
    def is_connected(self) -> bool:
        """Whether the server answers."""
        return self._nc.is_connected

    async def open(self) -> None:
        """Connect, for as long as it takes."""
        options: dict[str, Any] = {}
        if self._settings.nats_tls_ca:
            options["tls"] = ssl.create_default_context(cafile=self._settings.nats_tls_ca)
        if self._settings.nats_credentials:
            path = self._settings.nats_credentials
            options["nkeys_seed" if _is_seed(path) else "user_credentials"] = path
        await self._nc.connect(
            servers=[url.strip() for url in self._settings.nats.split(",")],
            name=self._name,
            reconnected_cb=self._on_reconnected,
            disconnected_cb=self._on_disconnected,
            error_cb=self._on_error,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_S,  # pyright: ignore[reportArgumentType]  # it is given to asyncio.sleep
            ping_interval=_PING_S,  # pyright: ignore[reportArgumentType]  # it is given to asyncio.sleep
            max_outstanding_pings=_MAX_PINGS,
            pending_size=_BUFFER_BYTES,
            inbox_prefix=self._settings.nats_inbox_prefix,
            **options,
        )
        self._js = self._nc.jetstream(timeout=_API_S)
        self._is_opening = False
        if self._has_waited:
            _log.info("connected to NATS")
        if self._nc.max_payload < _MAX_PAYLOAD:
            text = "NATS takes messages of %d bytes (max_payload); with fewer than %d some requests cannot be served"
            _log.error(text, self._nc.max_payload, _MAX_PAYLOAD)

    async def close(self) -> None:
        """Send what is buffered, and close."""
        self._is_closing = True
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._nc.drain(), _CLOSE_S)

    async def _on_reconnected(self) -> None:
        _log.info("connected to NATS again")
        self._told.clear()
        self.clock.forget()
        if self._restoring is not None:
            self._restoring.cancel()
        self._restoring = asyncio.create_task(self._restore())

    async def _restore(self) -> None:
        """Make the streams again, which a restarted server has lost, and tell the owner."""
        while True:
            try:
                for pool in tuple(self._pools):
                    await self._make_streams(pool)
                if self.on_connected is not None:
                    await self.on_connected()
                return
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                _log.warning("NATS is not ready yet: %s", reason_of(error))
                await asyncio.sleep(_RECONNECT_S)

    async def _on_disconnected(self) -> None:
        if not self._is_closing:
            _log.warning("the connection to NATS is lost; connecting again")

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            _log.error("NATS messages were dropped, because this process was too slow: %s", error)
        elif isinstance(error, nats.errors.Error | OSError | TimeoutError):
            self._tell(error)
        else:  # a handler of a message failed
            _log.error("a message from NATS was not handled", exc_info=error)

    def _tell(self, error: Exception) -> None:
        """Log an error. The first one of a start and those that the server names are warnings, each text once."""
        text = reason_of(error)
        if self._is_opening and not self._has_waited:
            self._has_waited = True
            _log.warning("NATS does not answer yet: %s; trying again until it does", text)
        elif text.startswith(_BY_SERVER) and text not in self._told and len(self._told) < _MAX_TOLD:
            _log.warning("NATS refuses something of this process: %s", text)
        else:
            _log.debug("NATS: %s", text)
            return
        self._told.add(text)

    # --- messages -------------------------------------------------------------------------------------------------

    async def subscribe(self, subject: str, on_message: OnMessage, *, queue: str = "") -> Subscription:
        """Call on_message with each message of a subject, one after another, until the result's `drain`."""
        return await self._nc.subscribe(
            subject, queue=queue, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def flush(self) -> None:
        """Wait until the server has read everything before this."""
        await self._nc.flush(timeout=int(_API_S))

    async def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish to whoever listens. Raises Unavailable if it cannot even be buffered."""
        try:
            await self._nc.publish(subject, data, reply=reply)
        except nats.errors.Error as error:
            raise Unavailable(f"NATS does not answer: {error}", code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error

    async def call(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Return the answer to a request. Raises Unavailable without one."""
        try:
            return (await self._nc.request(subject, data, timeout=timeout_s)).data
        except (nats.errors.Error, TimeoutError) as error:
            text = "A host of the cluster did not answer"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error

    async def enqueue(self, pool: str, subject: str, data: bytes, message_id: str) -> int:
        """Store a message in its pool's stream, once for each message_id, and return its sequence number.

        Raises Overloaded if the stream is full, Internal if NATS's max_payload is too small, and Unavailable if it cannot be
        stored now for another reason.
        """
        try:
            ack = await self._js.publish(subject, data, headers={api.Header.MSG_ID.value: message_id})
        except nats.js.errors.APIError as error:
            text = f"The queue of pool '{pool}' is full (stream_max_messages, stream_max_bytes)"
            raise _refusal(error, text) from error
        except nats.errors.MaxPayloadError as error:
            raise Internal("The max_payload of NATS is too small for this request") from error
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            text = "The work could not be stored in NATS"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error
        return ack.seq

    async def remove(self, pool: str, sequence: int) -> None:
        """Remove a message from its pool's stream, if it is still there."""
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
            await self._js.delete_msg(work_stream(pool), sequence)

    # --- streams --------------------------------------------------------------------------------------------------

    async def join_pool(self, pool: str) -> None:
        """Make sure of a pool's streams, now and after each reconnect. Raises Unavailable."""
        if pool in self._pools:
            return
        try:
            await self._make_streams(pool)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            text = f"The streams of pool '{pool}' cannot be made: {reason_of(error)}"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error
        self._pools.add(pool)

    async def _make_streams(self, pool: str) -> None:
        s = self._settings
        storage = api.StorageType(s.stream_storage)
        await self._make_stream(api.StreamConfig(
            name=work_stream(pool), subjects=[all_work(pool)], retention=api.RetentionPolicy.WORK_QUEUE,
            storage=storage, num_replicas=s.stream_replicas, discard=api.DiscardPolicy.NEW, max_age=_STREAM_AGE_S,
            max_msgs=s.stream_max_messages, max_bytes=s.stream_max_bytes, duplicate_window=_DUPLICATES_S,
        ))  # fmt: skip
        await self._make_stream(api.StreamConfig(
            name=dead_stream(pool), subjects=[all_dead(pool)], storage=storage, num_replicas=s.stream_replicas,
            max_age=_DEAD_AGE_S, max_msgs=10_000, max_bytes=s.stream_max_bytes,
        ))  # fmt: skip
        bucket = payload_bucket(pool)
        await self._make_stream(api.StreamConfig(  # as `create_object_store` makes it, but it may be there already
            name=f"OBJ_{bucket}", subjects=[f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"], storage=storage,
            num_replicas=s.stream_replicas, max_age=_PAYLOAD_AGE_S, max_bytes=s.payload_store_bytes,
            discard=api.DiscardPolicy.NEW, allow_rollup_hdrs=True, allow_direct=True,
        ))  # fmt: skip
        await self.measure_clock(pool)

    async def _make_stream(self, config: api.StreamConfig) -> None:
        """Make sure of a stream. Whoever may not make it uses one that others have made."""
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self._js.stream_info(config.name or "")
            return
        try:
            await self._js.add_stream(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _IN_USE:
                raise
            _log.info("stream %s has other settings already; using it as it is", config.name)

    async def measure_clock(self, pool: str) -> None:
        """Measure the difference between the clock of the server that leads a pool's stream and ours."""
        sent_ns = time.monotonic_ns()
        message = await self._nc.request(f"$JS.API.STREAM.INFO.{work_stream(pool)}", b"", timeout=_API_S)
        received_ns = time.monotonic_ns()
        answer = json.loads(message.data)
        with contextlib.suppress(KeyError, ValueError):
            self.clock.measure(sent_ns, received_ns, parse_stamp(answer["ts"]))

    async def make_consumer(self, pool: str, config: api.ConsumerConfig) -> None:
        """Make sure of a durable consumer of a pool's work. Raises nats' errors."""
        await self._js.add_consumer(work_stream(pool), config)

    # --- shared documents -----------------------------------------------------------------------------------------

    async def subscribe_key(self, key: str, on_message: OnMessage) -> None:
        """Call on_message when somebody writes a key of the cluster's documents, or tries to."""
        await self.subscribe(state_subject(key), on_message)

    async def read_key(self, key: str) -> tuple[bytes | None, int]:
        """Return a document and its revision; None and 0 if nobody has written it. Raises Unavailable."""
        try:
            message = await self._js.get_msg(STATE_STREAM, subject=state_subject(key))
        except nats.js.errors.NotFoundError:
            return None, 0  # also where there is no bucket yet: the first change makes it
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            text = f"The document '{key}' cannot be read from NATS"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error
        return message.data or b"", message.seq or 0

    async def write_key(self, key: str, data: bytes, revision: int) -> int:
        """Write a document over the revision that was read, 0 for none, and return its new one.

        Raises WrongRevisionError if another is there, and Unavailable.
        """
        headers = {api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(revision)}
        try:
            if not revision:
                await self._make_state()
            ack = await self._js.publish(state_subject(key), data, headers=headers)
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_REVISION:
                raise WrongRevisionError from error
            text = f"The document '{key}' cannot be written to NATS: {error.description}"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            text = f"The document '{key}' cannot be written to NATS"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error
        return ack.seq

    async def _make_state(self) -> None:
        """Make the bucket of documents, as `create_key_value` does, unless it exists."""
        await self._make_stream(api.StreamConfig(
            name=STATE_STREAM, subjects=[state_subject(">")], storage=api.StorageType.FILE,
            num_replicas=self._settings.stream_replicas, max_msgs_per_subject=1, discard=api.DiscardPolicy.NEW,
            max_msg_size=_MAX_DOCUMENT_BYTES, allow_rollup_hdrs=True, deny_delete=True, allow_direct=True,
        ))  # fmt: skip

    # --- large payloads -------------------------------------------------------------------------------------------

    async def keep(self, pool: str, name: str, data: bytes | memoryview) -> str:
        """Store a large payload under a name, and return the name. Raises Overloaded if the store is full, and Unavailable."""
        try:
            store = await self._js.object_store(payload_bucket(pool))
            await store.put(name, bytes(data))
        except nats.js.errors.APIError as error:
            text = f"The store for large payloads of pool '{pool}' takes no more (payload_store_bytes): {error.description}"
            raise _refusal(error, text) from error
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            text = "A large payload could not be stored in NATS"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error
        return name

    async def fetch(self, pool: str, name: str) -> bytes:
        """Return a large payload. Raises Unavailable if it is not there."""
        try:
            store = await self._js.object_store(payload_bucket(pool))
            info = await store.get_info(name)
            data, digest = await self._read_chunks(f"$O.{payload_bucket(pool)}.C.{info.nuid}", info.size or 0)
            if base64.urlsafe_b64decode((info.digest or "").removeprefix(_DIGEST)) != digest:
                raise Unavailable("A large payload in NATS is damaged", code="UPSTREAM_UNAVAILABLE", retry_after_s=1)
            return data
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            text = "A large payload could not be read from NATS"
            raise Unavailable(text, code="UPSTREAM_UNAVAILABLE", retry_after_s=1) from error

    async def _read_chunks(self, subject: str, size: int) -> tuple[bytes, bytes]:
        """Return the bytes of a payload and their SHA-256. Raises nats' errors. The store's own `get` keeps its subscription if it fails."""
        chunks = await self._js.subscribe(subject, ordered_consumer=True)
        try:
            data, digest = bytearray(), hashlib.sha256()
            while len(data) < size:
                chunk = (await chunks.next_msg(_CHUNK_S)).data
                data += chunk
                digest.update(chunk)
            return bytes(data), digest.digest()
        finally:
            await chunks.unsubscribe()

    async def forget(self, pool: str, name: str) -> None:
        """Delete a large payload that nobody reads any more; its age would end it, too."""
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
            store = await self._js.object_store(payload_bucket(pool))
            await store.delete(name)
