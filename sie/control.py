"""Owns the control channel: the messages between the supervisor and its children, and the socket that carries them.

One SOCK_SEQPACKET connection per child: a datagram is one message, with any file descriptors beside it (SCM_RIGHTS).
A child connects to the supervisor's 0600 socket and says `Hello`; all else follows from there. End of file means that
the other side is gone. Nothing here decides anything: the supervisor's and the children's own files do.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from typing import Any, Literal

import msgspec

from sie.errors import WireError
from sie.settings import Settings
from sie.types import AdapterSpec, ModelCard, ModelState

MAX_INLINE_BYTES = 64 << 10
"""A longer message goes through a memfd: a socket takes no more than the host's net.core.wmem_max allows."""
MAX_MESSAGE_BYTES = 64 << 20
"""Upper bound of any message; a model card takes about a KiB."""
MAX_FDS = 250
"""The kernel passes at most 253 descriptors in one message."""
Role = Literal["frontend", "worker"]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told on its command line, as JSON: where to connect, and who it is."""

    control_path: str
    supervisor_pid: int
    role: Role
    slot: int
    incarnation: int
    host: str = ""
    port: int = 0
    backlog: int = 1024
    log_format: str = "text"
    log_level: str = "info"
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    max_large_bytes: int = 0
    """This process's share of the setting of that name."""
    started_s: float = 0.0
    """When the server started, Unix time."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor, first on every connection."""

    role: Role
    slot: int
    incarnation: int


class Configure(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to child, in answer to `Hello`.

    File descriptors: the child's own counter page; for a worker also its in-flight page; for a frontend every
    process's counter page after its own.
    """

    settings: Settings


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to both ends of a new attachment. Descriptors: one end of a socketpair, the peer's pidfd."""

    peer_slot: int
    generation: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor: a frontend accepts connections; a worker runs its loop."""


class LoadModel(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: a request came for a model that is not loaded."""

    model: str


class Load(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: load this model beside the step loop."""

    card: ModelCard


class Unload(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: finish what is queued for this model, then free it."""

    model: str


class ModelReport(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: a model changed state here, or its load moved on."""

    model: str
    state: ModelState
    device: str = ""
    memory_bytes: int = 0
    dtype: str = ""
    progress: float | None = None
    detail: str = ""
    error: WireError | None = None


ManageAction = Literal["load", "unload", "reload"]


class Manage(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: an administrator wants this done to a model. Answered by `Managed` with its number."""

    number: int
    action: ManageAction
    model: str


class Managed(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: it has begun; the model's new state was in the `Models` just before."""

    number: int


class MemoryReport(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor, about once a second: memory of its device, all processes counted; total 0: not known."""

    total_bytes: int
    available_bytes: int


class MemoryShort(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: a step of this model found no memory; another model may have to go."""

    model: str


class WantAdapter(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: a request came for an adapter that is not loaded."""

    model: str
    adapter: str


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: load this adapter, whose files are on this machine, beside the step loop."""

    spec: AdapterSpec


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: finish what is queued for this adapter, then free it."""

    model: str
    adapter: str


class AdapterReport(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: an adapter changed state here."""

    model: str
    adapter: str
    state: ModelState
    memory_bytes: int = 0
    error: WireError | None = None


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One declared adapter of a model as every frontend sees it."""

    state: ModelState
    workers: tuple[int, ...] = ()
    error: WireError | None = None


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model as every frontend sees it.

    recovering: it was loaded, its workers died, and they are being restarted; its requests wait. is_read: whether the
    card says what the model is; one that is still on the hub has hardly more than its id.
    """

    card: ModelCard
    state: ModelState
    is_read: bool = True
    recovering: bool = False
    preload: bool = False
    """Whether readiness waits for it."""
    workers: tuple[int, ...] = ()
    device: str = ""
    memory_bytes: int = 0
    error: WireError | None = None
    adapters: dict[str, AdapterEntry] = {}


class Models(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: all models, whenever one changed."""

    entries: tuple[ModelEntry, ...]
    ready: bool
    reason: str = ""
    workers: tuple[WorkerEntry, ...] = ()


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One worker slot as the status page shows it."""

    slot: int
    device: str
    pid: int
    state: Literal["starting", "ready", "dead"]
    restarts: int


class WorkerDown(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: a worker died; its last ring contents may be read, then its work goes elsewhere.

    suspects are this frontend's request ids that ran in the fatal step, when the death may have been their doing.
    """

    slot: int
    generation: int
    suspects: tuple[int, ...]


class Spilled(msgspec.Struct, tag=True, frozen=True):
    """Either way: the message itself is too long for the socket and lies in the memfd that comes last."""

    nbytes: int


class Quarantine(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor, and from there to every frontend: this input killed two workers."""

    digest: bytes


class PeerFault(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor: the peer in this slot broke the shared-memory protocol; only its death makes things whole."""

    slot: int


class Touch(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: what answered requests since the last touch (for idle unloading and for eviction)."""

    models: tuple[str, ...]
    adapters: tuple[tuple[str, str], ...] = ()
    """(model, adapter), in the order of their last use."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: answer with the same number from the event loop."""

    number: int


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: the event loop is alive."""

    number: int


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to child: accept nothing new; finish what was accepted."""


Message = (
    Hello | Configure | Attach | Ready | LoadModel | Load | Unload | ModelReport | Models | WorkerDown | Quarantine
    | PeerFault | Spilled | Touch | Ping | Pong | Drain | Manage | Managed | MemoryReport | MemoryShort
    | WantAdapter | LoadAdapter | UnloadAdapter | AdapterReport
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class ChannelClosedError(ConnectionError):
    """The other side is gone, or sent what is no message."""


class Channel:
    """One end of a control connection. `try_receive` never waits; `send` waits at most send_timeout_s for room."""

    def __init__(self, sock: socket.socket, send_timeout_s: float = 5.0) -> None:
        self._sock = sock
        self._send_timeout_s = send_timeout_s
        sock.setblocking(False)  # with a time-out, Python would wait in spite of MSG_DONTWAIT

    def fileno(self) -> int:
        """Return the socket's descriptor, for a loop to watch."""
        return self._sock.fileno()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send one message with copies of fds. Raises ChannelClosedError when the peer is gone or does not read."""
        data = _encoder.encode(message)
        if len(data) > MAX_INLINE_BYTES:
            self._spill(data, fds or [])
        else:
            self._send(data, fds or [])

    def _spill(self, data: bytes, fds: list[int]) -> None:
        spill_fd = os.memfd_create("control", os.MFD_CLOEXEC)
        try:
            os.pwrite(spill_fd, data, 0)  # a memfd takes it whole, or raises
            self._send(_encoder.encode(Spilled(len(data))), [*fds, spill_fd])
        finally:
            os.close(spill_fd)

    def _send(self, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._send_with_patience(data, rights)
        except OSError as error:
            raise ChannelClosedError(f"cannot send: {error}") from error

    def _send_with_patience(self, data: bytes, rights: list[Any]) -> None:
        if not self._wait(select.POLLOUT, self._send_timeout_s):
            raise ChannelClosedError(f"the peer read nothing for {self._send_timeout_s:g} s")
        try:
            self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise ChannelClosedError(f"cannot send: {error}") from error

    def try_receive(self) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors (now owned by the caller), or None when none waits.

        Raises ChannelClosedError at the end of file.
        """
        space = socket.CMSG_SPACE(MAX_FDS * 4)
        try:
            data, rights, flags, _ = self._sock.recvmsg(MAX_INLINE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        fds = _fds_of(rights)
        try:
            if not data:
                raise ChannelClosedError("end of file")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ChannelClosedError("a control message was cut")
            message = _decoder.decode(data)
            if isinstance(message, Spilled):
                message = _decoder.decode(_read_spilled(message, fds.pop() if fds else -1))
            return message, fds
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ChannelClosedError) as error:
            for fd in fds:
                os.close(fd)
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float) -> tuple[Message, list[int]]:
        """Wait for one message. Raises ChannelClosedError at the end of file and TimeoutError when none came."""
        received = self.try_receive()
        if received is None and self._wait(select.POLLIN, timeout_s):
            received = self.try_receive()
        if received is None:
            raise TimeoutError(f"no control message within {timeout_s} s")
        return received

    def _wait(self, event: int, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close the socket; the peer sees the end of file."""
        self._sock.close()


def connect(launch: Launch) -> Channel:
    """Connect a child to its supervisor and say hello."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(launch.control_path)
    channel = Channel(sock)
    channel.send(Hello(launch.role, launch.slot, launch.incarnation))
    return channel


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, as the kernel recorded them at connect."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _read_spilled(message: Spilled, fd: int) -> bytes:
    """Return what lies in a spilled message's memfd. Takes over fd."""
    if fd < 0:
        raise ChannelClosedError("a spilled message without its memory")
    try:
        if not 0 <= message.nbytes <= MAX_MESSAGE_BYTES:
            raise ChannelClosedError(f"a spilled message of {message.nbytes} bytes")
        return os.pread(fd, message.nbytes, 0)
    finally:
        os.close(fd)


def _fds_of(rights: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
