"""Defines the messages between the supervisor and its children, each with its sender and receiver.

`sie.ipc.channel` carries them. This module decides nothing: the supervisor and the children do.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from sie.config.settings import Settings
from sie.values.api_key import ApiKey
from sie.values.card import AdapterSpec, ModelCard, ModelState
from sie.values.errors import WireError
from sie.values.fallbacks import Fallback
from sie.values.shared_config import ModelConfig

Role = Literal["frontend", "worker", "agent"]
Protocol = Literal["http", "grpc", "nats", "gateway"]


class LentCore(msgspec.Struct, frozen=True, array_like=True):
    """A core of another worker: the kernel's number, its owner's slot, and its index on the board of cores."""

    number: int
    owner: int
    index: int


class Neighbour(msgspec.Struct, frozen=True, array_like=True):
    """The device and the cores of a worker, which a member of another worker's group uses, too."""

    device: str
    cores: tuple[int, ...] = ()


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch record on a child's command line, as JSON: where to connect, and its own identity."""

    control_path: str
    supervisor_pid: int
    role: Role
    slot: int
    incarnation: int
    protocol: Protocol = "http"
    """The protocol that a frontend serves; `nats` pulls work from a cluster, `gateway` is HTTP without workers."""
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
    lent_cores: tuple[LentCore, ...] = ()
    """For a worker: the cores of others that its steps may use while these wait for work, the best first."""
    neighbours: tuple[Neighbour, ...] = ()
    """For a worker: the workers after it, whose devices the groups that it leads use."""
    streams_together: int = 0
    """For a frontend: how many of its streams of a model go to one worker before another gets one; 0 spreads them."""
    max_step_tokens: int = 0
    """For a worker whose predecessor was killed for lack of memory: the first limit of its steps; 0: the setting."""
    without_graphs: bool = False
    """For a worker whose predecessor could not undo a failed capture of a CUDA graph: capture none."""
    max_large_bytes: int = 0
    """This process's share of the setting of that name."""
    started_s: float = 0.0
    """When the server started, on CLOCK_MONOTONIC."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor: the first message on every connection."""

    role: Role
    slot: int
    incarnation: int


class Configure(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to child: the reply to `Hello`; sent again without descriptors after a reload of the settings.

    File descriptors, none for an agent process: the child's own counter page; for a worker then its in-flight page and
    the board of cores; for a frontend then the board of cores and every other counter page, read-only.
    """

    settings: Settings


class Keys(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: the API keys, right after `Configure` if there are any, and after each change.

    problem is the reason why the latest version of the key file was refused; keys are then the previous ones.
    """

    keys: tuple[ApiKey, ...]
    secret: bytes
    """Signs watch tickets; created at each start of the server."""
    problem: str = ""


class Certificates(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: the certificate, key and client CAs in force from now on, PEM.

    HTTP frontends ignore it, because they are replaced.
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
    """Frontend to supervisor: a request needs a model that is not loaded."""

    model: str


class CacheRoom(msgspec.Struct, frozen=True):
    """The part of a GPU's memory that a generating model's keys and values may take. CPU workers ignore it."""

    pressure_pct: float = 100.0
    """The device stays below this share of its memory while a step runs."""
    reserved_bytes: int = 0
    """These stay free for models that are not loaded yet."""
    share: float = 1.0
    """This model's share of the rest; the others belong to the caches of models that load after it."""


class Load(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: load this model beside the step loop."""

    card: ModelCard
    room: CacheRoom = CacheRoom()


class Unload(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: finish the queued requests of this model, then free it."""

    model: str


class Stage(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: load this beside the serving model of the same id; answered by `Staged`.

    The staged model replaces the old one with a `Load` of the same card, after the old model's `Unload`.
    """

    number: int
    card: ModelCard
    room: CacheRoom = CacheRoom()


class Unstage(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: drop this model's staged successor, also one that is still loading."""

    model: str


class Staged(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: the result of the `Stage` with this number; without error the successor is loaded."""

    number: int
    model: str
    error: WireError | None = None


class ModelReport(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: a model changed its state here, or its load made progress."""

    model: str
    state: ModelState
    device: str = ""
    memory_bytes: int = 0
    dtype: str = ""
    progress: float | None = None
    detail: str = ""
    error: WireError | None = None
    fallbacks: tuple[Fallback, ...] = ()
    cache_tokens: int = 0
    """Tokens that its key/value cache holds, if it generates."""


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: how far the load of a model is, on the worker that is furthest; empty before it has begun on any.

    fraction is from 0 to 1, or None if unknown.
    """

    model: str
    fraction: float | None
    stage: str
    worker: str


ManageAction = Literal["load", "unload", "reload"]


class Manage(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: an administrator's action on a model. Answered by `Managed` with its number."""

    number: int
    action: ManageAction
    model: str


class TakeConfigs(msgspec.Struct, tag=True, frozen=True):
    """Puller to supervisor: these are the models that the cluster shares now. Answered by `TookConfigs`."""

    hash: str
    configs: tuple[ModelConfig, ...]


class TookConfigs(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to puller: the configuration with this hash is in force, except for the models that are refused."""

    hash: str
    refused: dict[str, str]
    """The reason for each model that this host does not take."""


class Managed(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: the action has begun (the new state is in the `Models` just before), or it failed.

    models: the ids of the versions that will be loaded when the load or reload of a repository ends. has_changed: the
    action found something to load, to load again or to remove.
    """

    number: int
    error: WireError | None = None
    models: tuple[str, ...] = ()
    has_changed: bool = False


class ManageRepository(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: an administrator's action on a model repository.

    load and unload apply to the model `name`; load reads it again. reload reads all repositories again; name is then
    empty. Answered by `Managed` with its number, and with the error if it could not begin.
    """

    number: int
    action: Literal["load", "unload", "reload"]
    name: str = ""


class MemoryReport(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor, about once a second: its device's memory over all processes; total 0: unknown."""

    total_bytes: int
    available_bytes: int


class MemoryShort(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: a step of this model ran out of memory, so another model may have to be evicted."""

    model: str


class WantAdapter(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: a request needs an adapter that is not loaded."""

    model: str
    adapter: str


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: load this adapter, whose files are on this machine, beside the step loop."""

    spec: AdapterSpec


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to worker: finish the queued requests of this adapter, then free it."""

    model: str
    adapter: str


class AdapterReport(msgspec.Struct, tag=True, frozen=True):
    """Worker to supervisor: an adapter changed its state here."""

    model: str
    adapter: str
    state: ModelState
    memory_bytes: int = 0
    error: WireError | None = None


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One declared adapter of a model, for every frontend; recovering as for a model."""

    state: ModelState
    workers: tuple[int, ...] = ()
    error: WireError | None = None
    recovering: bool = False


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model, for every frontend.

    recovering: it was loaded, its workers died, and they are being restarted; its requests wait. reloading: it was
    loaded and is being loaded again on request. While it is missing, its requests wait, too, and the new copy serves
    them. is_outdated: its changed files could not be loaded (error), and it serves the old copy. dismissed: it was
    unloaded on request. is_read: whether the card describes the model; the card of a model that is still on the hub has
    little more than its id.
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
    fallbacks: tuple[Fallback, ...] = ()
    """Those of any worker that has it."""
    cache_tokens: int = 0
    """Tokens that the smallest key/value cache of its workers holds; 0: it does not generate."""
    error: WireError | None = None
    adapters: dict[str, AdapterEntry] = {}


class Models(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: all models, after each change."""

    entries: tuple[ModelEntry, ...]
    ready: bool
    reason: str = ""
    workers: tuple[WorkerEntry, ...] = ()
    config_error: str = ""
    """The reason why the latest reload of the settings was refused."""
    tls_error: str = ""
    """The reason why the latest version of the TLS files was refused."""


HISTORY_POINTS: Final = 240
"""Points of an hour, the most that anybody keeps."""


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The load of the server over a few seconds: rates, sequences that wait, and the latency of all but generated text."""

    requests_per_s: float
    generated_per_s: float
    """Tokens of generated text."""
    queued: float
    p50_s: float | None
    """None without requests."""
    p95_s: float | None


class History(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: the load of the last hour when it joins, then each new point, oldest first."""

    points: tuple[LoadPoint, ...]


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One worker slot for the status page."""

    slot: int
    device: str
    pid: int
    state: Literal["starting", "ready", "lost", "dead"]
    restarts: int


class WorkerDown(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: a worker died, or its end of the attachment is closed. Drain its ring, then resubmit its work.

    suspects are this frontend's request ids in the fatal step, if they may have caused the death.
    """

    slot: int
    generation: int
    suspects: tuple[int, ...]


class WorkerLate(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: a worker's step is over its allowance by more than a second, or it no longer is.

    running are this frontend's request ids in that step.
    """

    slot: int
    generation: int
    is_late: bool
    running: tuple[int, ...] = ()


class Spilled(msgspec.Struct, tag=True, frozen=True):
    """Either direction: the message is too long for the socket and is in the last descriptor, a memfd."""

    nbytes: int


class Quarantine(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor, and from there to every frontend: this input killed two workers."""

    digest: bytes


class PeerFault(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor: the peer in this slot broke the shared-memory protocol; only its death repairs that."""

    slot: int


class Detached(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: this attachment to a worker failed or has ended. If the worker lives, a new one repairs that."""

    slot: int
    generation: int


class Touch(msgspec.Struct, tag=True, frozen=True):
    """Frontend to supervisor: models and adapters used since the last touch (for idle unloading and eviction)."""

    models: tuple[str, ...]
    adapters: tuple[tuple[str, str], ...] = ()
    """(model, adapter), in the order of their last use."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend or agent process: answer with the same number from the event loop."""

    number: int


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Frontend or agent process to supervisor: the event loop is alive."""

    number: int


class Silence(msgspec.Struct, tag=True, frozen=True):
    """Child to supervisor: its loop may stall for this many seconds without counting as hung; 0: the stall is over."""

    seconds: int


class Retire(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: another frontend replaces you; keep answering, and make clients reconnect."""

    newest: int | None
    """The position of the newest listener, which takes new connections meanwhile; None if that is yours or unknown."""


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: accept no new requests, and finish the accepted ones."""


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Supervisor to frontend: you no longer listen; exit when nothing is in flight, as the signal with it says."""


Message = (
    Hello | Configure | Attach | Ready | LoadModel | Load | Unload | ModelReport | LoadProgress | Models | WorkerDown | Quarantine
    | PeerFault | Detached | Spilled | Touch | Ping | Pong | Silence | Retire | Drain | Finish | Manage | Managed | MemoryReport | MemoryShort
    | WantAdapter | LoadAdapter | UnloadAdapter | AdapterReport | ManageRepository | Keys | Certificates
    | Stage | Unstage | Staged | WorkerLate | TakeConfigs | TookConfigs | History
)  # fmt: skip
