"""Owns the messages between the supervisor and its children, each with who says it to whom.

`sie.ipc.channel` carries them. Nothing here decides anything: the supervisor's and the children's own files do.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sie.config.settings import Settings
from sie.values.api_key import ApiKey
from sie.values.card import AdapterSpec, ModelCard, ModelState
from sie.values.errors import WireError

Role = Literal["frontend", "worker"]
Protocol = Literal["http", "grpc"]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told on its command line, as JSON: where to connect, and who it is."""

    control_path: str
    supervisor_pid: int
    role: Role
    slot: int
    incarnation: int
    protocol: Protocol = "http"
    """What a frontend serves."""
    host: str = ""
    port: int = 0
    listen_fd: int = -1
    """A listening Unix socket to serve instead of host and port, or -1."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    backlog: int = 1024
    log_format: str = "text"
    log_level: str = "info"
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    max_step_tokens: int = 0
    """Of a worker whose predecessor was killed for want of memory: its steps begin no larger than this; 0: as set."""
    max_large_bytes: int = 0
    """This process's share of the setting of that name."""
    started_s: float = 0.0
    """When the server started, on CLOCK_MONOTONIC."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor, first on every connection."""

    role: Role
    slot: int
    incarnation: int


class Configure(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to child, in answer to `Hello`, and again without descriptors when settings were reloaded.

    File descriptors: the child's own counter page; for a worker also its in-flight page; for a frontend every
    process's counter page after its own.
    """

    settings: Settings


class Keys(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend, right after `Configure` where there are API keys, and whenever they changed.

    problem says why the file of keys was not taken over when it last changed; then keys are those from before.
    """

    keys: tuple[ApiKey, ...]
    secret: bytes
    """Signs watch tickets; made anew at each start of the server."""
    problem: str = ""


class Certificates(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: the certificate, its key and the authorities of clients that are in force from now on, PEM.

    HTTP frontends ignore it: they are replaced.
    """

    cert: bytes
    key: bytes
    client_ca: bytes = b""


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


class Stage(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: load this beside the model of the same id, which goes on serving; answered by `Staged`.

    What stands takes the model's place with a `Load` of the same card, after the model's `Unload`.
    """

    number: int
    card: ModelCard


class Unstage(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: let go what was staged for this model, or is about to be."""

    model: str


class Staged(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor, with the number of a `Stage`: it stands, or there is the reason why not."""

    number: int
    model: str
    error: WireError | None = None


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
    """Supervisor to frontend: it has begun; the model's new state was in the `Models` just before. Or it could not."""

    number: int
    error: WireError | None = None


class ManageRepository(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: an administrator wants a repository's model loaded (read anew) or unloaded, or all of the
    repositories read anew (reload; name is empty).

    Answered by `Managed` with its number, and with the error that kept it from beginning.
    """

    number: int
    action: Literal["load", "unload", "reload"]
    name: str = ""


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
    """One declared adapter of a model as every frontend sees it; recovering as for a model."""

    state: ModelState
    workers: tuple[int, ...] = ()
    error: WireError | None = None
    recovering: bool = False


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model as every frontend sees it.

    recovering: it was loaded, its workers died, and they are being restarted; its requests wait. reloading: it was
    loaded and is being loaded anew, on request; while it is not there, its requests wait, too, and are read by the new
    one. is_outdated: its files changed, could not be loaded (error), and it serves what was loaded before. dismissed: it was
    unloaded on request. is_read: whether the
    card says what the model is; one that is still on the hub has hardly more than its id.
    """

    card: ModelCard
    state: ModelState
    is_read: bool = True
    recovering: bool = False
    reloading: bool = False
    is_outdated: bool = False
    dismissed: bool = False
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
    config_error: str = ""
    """Why the latest reload of the settings changed nothing."""
    tls_error: str = ""
    """Why the TLS files were not taken over when they last changed."""


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One worker slot as the status page shows it."""

    slot: int
    device: str
    pid: int
    state: Literal["starting", "ready", "lost", "dead"]
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


class Silence(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor: its loop may stand still for so long from now, and is no hang then; 0: that is over."""

    seconds: int


class Retire(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: another one takes your place; answer as ever, and have clients connect anew."""


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to child: accept nothing new; finish what was accepted."""


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: you no longer listen; go when nothing is in flight, as the signal says that comes with it."""


Message = (
    Hello | Configure | Attach | Ready | LoadModel | Load | Unload | ModelReport | Models | WorkerDown | Quarantine
    | PeerFault | Spilled | Touch | Ping | Pong | Silence | Retire | Drain | Finish | Manage | Managed | MemoryReport | MemoryShort
    | WantAdapter | LoadAdapter | UnloadAdapter | AdapterReport | ManageRepository | Keys | Certificates
    | Stage | Unstage | Staged
)  # fmt: skip
