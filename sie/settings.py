"""Owns every setting: name, type, default, bounds and one line of documentation, each in one place.

A key `max_body_bytes` of the section `limits` is the flag `--max-body-bytes`, the variable `SIE_MAX_BODY_BYTES`, the
TOML key `max_body_bytes` under `[limits]` and a row of docs/settings.md; names are unique over the whole tree. Order:
default < file < environment < flag. An unknown or bad key stops the start. Nothing else reads the environment, and only
a reload changes settings after the start (`sie.live_settings`). Imports nothing slow: every `sie` command waits for it.
`sie.config_sources` reads the values. Over 400 lines, because all settings in one place are easier to find than lines.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from sie.config_sources import (
    CONFIG_VARIABLE,
    Key,
    SettingsError,
    Source,
    describe_key,
    read_environment,
    read_file,
    read_flags,
)

MIB = 1 << 20

_ORIGIN = r"^(\*|https?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:.]+\](:[0-9]{1,5})?)\Z"
_DEVICES = r"^(auto|cpu(:[1-9][0-9]{0,2})?|cuda(:[0-9]+(,cuda:[0-9]+)*)?)\Z"


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Listening, logging and identity."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it.")] = 8080
    grpc_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the gRPC listener (docs/tensors.md); 0 has none.")
    ] = 0
    grpc_host: Annotated[str, Meta(description="Address of the gRPC listener; empty takes `host`.")] = ""
    frontends: Annotated[
        int, Meta(ge=0, le=256, description="HTTP processes; 0 takes one for every four usable cores.")
    ] = 0
    backlog: Annotated[int, Meta(ge=128, le=65535, description="Connections the kernel queues for a frontend.")] = 1024
    name: Annotated[str, Meta(max_length=200, description="Name shown in `/ws/status`; empty takes the host name.")] = (
        field(default="", name="server_name")
    )
    drain_timeout_s: Annotated[
        float, Meta(ge=0, le=3600, description="Longest time accepted requests get to finish after SIGTERM.")
    ] = 25.0
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Log lines for people or, one object a line, for machines.")
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least important log lines to write.")
    ] = "info"
    access_log: Annotated[
        float, Meta(ge=0, le=1, description="Share of requests that get a log line when they end; 0 writes none.")
    ] = 0.0
    image_threads: Annotated[int, Meta(ge=1, le=64, description="Threads of each frontend that decode images.")] = 4
    runtime_dir: Annotated[
        str,
        Meta(description="Lock file and control socket; empty takes systemd's, the user's or a temporary directory."),
    ] = ""
    machine_profile: Annotated[
        str, Meta(description="What `X-SIE-MACHINE-PROFILE` must match; empty takes the type of the GPU.")
    ] = ""
    admin_from: Annotated[
        Literal["loopback", "nobody", "everybody"],
        Meta(
            description="Who may load and unload models; loopback: clients on this host, not through a proxy. With "
            "`api_keys`, whoever has a key with the scope admin, unless it is nobody."
        ),
    ] = "loopback"
    pool_name: Annotated[str, Meta(description="Pool this server says it belongs to.")] = ""
    bundle: Annotated[str, Meta(description="Bundle this server says it serves.")] = ""


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may ask, and how connections are protected (docs/security.md)."""

    api_keys: Annotated[
        str,
        Meta(description="TOML file of API keys, as `sie keys new` writes it; empty asks nobody for a key."),
    ] = ""
    open_metrics: Annotated[
        bool, Meta(description="Answer `/metrics` and `/ws/status` without a key where others need one.")
    ] = False
    tls_cert: Annotated[
        str, Meta(description="PEM file of the server's certificate and its chain; HTTPS and nothing else is served.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file of the private key that belongs to `tls_cert`.")] = ""
    tls_client_ca: Annotated[
        str, Meta(description="PEM file of authorities; only clients with a certificate of theirs get a connection.")
    ] = ""
    uds: Annotated[
        str, Meta(max_length=107, description="Path of a Unix socket to listen on, instead of `host` and `port`.")
    ] = ""
    uds_mode: Annotated[
        str, Meta(pattern=r"^0?[0-7]{3}\Z", description="Mode of that socket.", extra={"form": "three octal digits"})
    ] = "660"
    cors_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...],
        Meta(
            description="Origin whose pages may use this server from a browser; repeatable; none may by default.",
            extra={"form": "https://app.example or *"},
        ),
    ] = field(default=(), name="cors_origin")


class Models(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is served, and how it is loaded."""

    preload: Annotated[
        tuple[str, ...],
        Meta(
            description="Model to load before the server is ready; repeatable.",
            extra={"form": "ID[=DIR][@REVISION] or ID=stub:[key=value,...]"},
        ),
    ] = field(default=(), name="model")
    lazy: Annotated[
        tuple[str, ...],
        Meta(
            description="Model to load when it is first asked for; repeatable.",
            extra={"form": "ID[=DIR][@REVISION] or ID=stub:[key=value,...]"},
        ),
    ] = field(default=(), name="lazy_model")
    catalog: Annotated[
        str, Meta(description="TOML file of models to serve and of their profiles (docs/models.md); empty has none.")
    ] = ""
    default_model: Annotated[
        str, Meta(description="Model for OpenAI requests that name none; empty takes the only able one.")
    ] = ""
    repositories: Annotated[
        tuple[str, ...],
        Meta(
            description="Directory of tensor models, NAME/VERSION/model.onnx or model.pt2 (docs/tensors.md); repeatable.",
            extra={"form": "DIR"},
        ),
    ] = field(default=(), name="model_repository")
    repository_control: Annotated[
        Literal["none", "explicit"],
        Meta(description="none loads all models of the repositories at the start; explicit only when it is asked to."),
    ] = "none"
    strict_readiness: Annotated[
        bool, Meta(description="Whether `/api/health/ready` waits for every version of every tensor model.")
    ] = True
    default_max_batch_size: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Most rows that a tensor model with a batch dimension and no configuration runs at once; 0: it "
            "has no batch dimension.",
        ),
    ] = 64
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Number format of the weights; auto is bfloat16 where the device computes in it."),
    ] = "auto"
    cache_dir: Annotated[
        str, Meta(description="Converted tokenizers; empty takes systemd's, else the user's, cache directory.")
    ] = ""
    load_timeout_s: Annotated[float, Meta(ge=1, le=86400, description="Longest time one model's load may take.")] = (
        900.0
    )
    load_retry_s: Annotated[
        float, Meta(ge=1, le=1800, description="Wait before a failed load may be tried again; doubles each time.")
    ] = 30.0
    loading_retry_after_s: Annotated[int, Meta(ge=1, le=60, description="`Retry-After` of 503 MODEL_LOADING.")] = 5
    wait_for_load: Annotated[
        bool, Meta(description="Native requests wait for a model that loads, instead of 503 MODEL_LOADING at once.")
    ] = False
    loras: Annotated[
        tuple[str, ...],
        Meta(
            description="LoRA adapter that requests to a model may name; loaded when first asked for; repeatable.",
            extra={"form": "MODEL=ID[=DIR][@REVISION] or MODEL=ID=stub:[load_ms=N]"},
        ),
    ] = field(default=(), name="lora")
    max_loras: Annotated[
        int, Meta(ge=1, le=256, description="Most adapters of one model in memory; the least recently used one goes.")
    ] = 10
    idle_unload_s: Annotated[
        float, Meta(ge=0, le=604800, description="Unload a lazy model unused for this long; 0 never does.")
    ] = 0.0
    pinned: Annotated[
        tuple[str, ...],
        Meta(
            description="Lazy model that only a request to unload it takes away once it is loaded; repeatable.",
            extra={"form": "the ID of a lazy_model"},
        ),
    ] = field(default=(), name="pinned_model")
    memory_pressure_pct: Annotated[
        float,
        Meta(
            ge=1,
            le=100,
            description="Share of a device's memory over which lazy models go, least recently used first.",
        ),
    ] = 95.0
    max_model_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 50, description="Most memory that the models of one device take; 0: what the device has."),
    ] = 0


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where models run: one worker process for each device."""

    devices: Annotated[
        str,
        Meta(
            pattern=_DEVICES,
            description="Devices to use; cpu:N is N workers that share the cores out.",
            extra={"form": "auto, cpu, cpu:N, cuda or cuda:0,cuda:1"},
        ),
    ] = "auto"
    threads_per_worker: Annotated[
        int, Meta(ge=0, le=1024, description="Compute threads of a CPU worker; 0 takes one for each of its cores.")
    ] = 0
    resolve_timeout_s: Annotated[
        float, Meta(ge=1, le=600, description="Longest time `--devices auto` may take to find the devices.")
    ] = 60.0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request may ask for, and how much may wait."""

    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=1024 * MIB, description="Largest request body; over it is 413 INPUT_TOO_LONG.")
    ] = 34 * MIB
    max_grpc_message_bytes: Annotated[
        int,
        Meta(ge=1024, le=1024 * MIB, description="Largest message that a gRPC client may send; over it is an error."),
    ] = 34 * MIB
    max_items: Annotated[
        int, Meta(ge=1, le=65536, description="Most items in one request; over it is 400, never retryable.")
    ] = 2048
    max_candidates: Annotated[
        int, Meta(ge=1, le=65536, description="Most documents in one score or rerank request; over it is 400.")
    ] = 1000
    max_labels: Annotated[
        int, Meta(ge=1, le=65536, description="Most labels in one extract request; over it is 400.")
    ] = 1000
    max_label_pairs: Annotated[
        int,
        Meta(ge=1, le=1 << 20, description="Most items times labels where a model reads each pair; over it is 400."),
    ] = 16384
    max_label_chars: Annotated[
        int, Meta(ge=1, le=65536, description="Longest label, in characters, that GLiNER reads; over it is 400.")
    ] = 128
    max_prompt_tokens: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Most tokens of a request's labels that GLiNER reads; over it is 400.")
    ] = 1024
    max_text_windows: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Most windows of words in which GLiNER reads one text; over it is 400 INPUT_TOO_LONG.",
        ),
    ] = 128
    max_span_candidates: Annotated[
        int,
        Meta(
            ge=256,
            le=1 << 20,
            description="Spans of a window over the threshold from which GLiNER may choose its entities; over it is 400.",
        ),
    ] = 16384
    max_relation_candidates: Annotated[
        int,
        Meta(
            ge=2, le=4096, description="Entities of a window, the first ones, between which GLiNER looks for relations."
        ),
    ] = 100
    max_schema_depth: Annotated[int, Meta(ge=1, le=500, description="Deepest nesting of an output_schema.")] = 128
    max_schema_values: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Most values in an output_schema, objects and arrays included.")
    ] = 100_000
    max_item_text_bytes: Annotated[
        int, Meta(ge=1, le=256 * MIB, description="Largest item, its UTF-8 text and metadata together.")
    ] = 2 * MIB
    max_tensor_strings: Annotated[
        int, Meta(ge=1, le=1 << 28, description="Most elements of a request's BYTES tensors together; over it is 400.")
    ] = 1 << 20
    max_images: Annotated[int, Meta(ge=1, le=65536, description="Most images in one request; over it is 400.")] = 256
    max_item_images: Annotated[int, Meta(ge=1, le=64, description="Most images in one item; over it is 400.")] = 16
    max_image_bytes: Annotated[
        int, Meta(ge=1, le=256 * MIB, description="Largest image, as the file it is sent as; over it is 400.")
    ] = 20 * MIB
    max_image_pixels: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 30,
            description="Most pixels of an image, read before it is decoded; of a request's images together, for a "
            "model without one size for all. Decoding takes up to 16 bytes a pixel and thread.",
        ),
    ] = 1 << 25
    max_queued_images: Annotated[
        int,
        Meta(
            ge=1, le=1 << 20, description="Most images waiting to be decoded in a frontend; over it is 503 QUEUE_FULL."
        ),
    ] = 1024
    max_depth: Annotated[int, Meta(ge=4, le=500, description="Deepest nesting of a JSON or msgpack body.")] = 64
    max_compression_ratio: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Most times a compressed body may grow beyond 1 MiB (tensor routes alone)."),
    ] = 100
    max_tensor_values: Annotated[
        int,
        Meta(
            ge=1, le=1 << 30, description="Most elements of a request's tensors that come as JSON, or typed over gRPC."
        ),
    ] = 1 << 22
    max_reply_bytes: Annotated[
        int, Meta(ge=4096, le=1024 * MIB, description="Largest reply, counted as the bytes of its vectors.")
    ] = 64 * MIB
    max_queued_tokens: Annotated[
        int, Meta(ge=1, le=1 << 32, description="Most tokens waiting for one worker; over it is 503 QUEUE_FULL.")
    ] = 1 << 20
    oom_retry_after_s: Annotated[
        int, Meta(ge=1, le=60, description="`Retry-After` of 503 RESOURCE_EXHAUSTED: no memory for an item even alone.")
    ] = 5
    request_timeout_s: Annotated[
        float, Meta(ge=0.001, le=3600, description="Deadline of a request; a header may only lower it.")
    ] = 60.0
    body_idle_timeout_s: Annotated[
        float, Meta(ge=0.1, le=600, description="Longest pause within a request body before its connection is cut.")
    ] = 15.0
    min_body_bytes_per_s: Annotated[
        int,
        Meta(
            ge=0,
            le=256 * MIB,
            description="Slowest request body, on average, once it takes longer than `body_idle_timeout_s`; else 408.",
        ),
    ] = 1024


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory between processes; all but `max_large_bytes` and `max_pending_reply_bytes` is reserved at the start."""

    request_segment_bytes: Annotated[int, Meta(ge=MIB, le=1 << 36, description="Request segment of each frontend.")] = (
        64 * MIB
    )
    reply_segment_bytes: Annotated[
        int, Meta(ge=MIB, le=1 << 36, description="Reply segment of each pair of worker and frontend.")
    ] = 32 * MIB
    large_extent_bytes: Annotated[
        int, Meta(ge=65536, le=1 << 32, description="A payload over this size gets a segment of its own.")
    ] = 8 * MIB
    max_large_bytes: Annotated[
        int, Meta(ge=0, le=1 << 36, description="All such segments of this server together.")
    ] = 512 * MIB
    max_pending_reply_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 36,
            description="Sparse and multivector outputs that a worker keeps until their reply is whole and has room.",
        ),
    ] = 256 * MIB
    ring_capacity: Annotated[int, Meta(ge=8, le=65536, description="Descriptors in each ring; a power of two.")] = 4096
    counter_page_bytes: Annotated[int, Meta(ge=16384, le=64 * MIB, description="Metrics page of each process.")] = (
        256 * 1024
    )


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How waiting sequences become steps."""

    max_step_tokens: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Token budget of a step; 0 takes 1024 on a CPU and 16384 on a GPU.")
    ] = 0
    max_step_items: Annotated[int, Meta(ge=1, le=65536, description="Most sequences in a step.")] = 1024
    max_age_ms: Annotated[
        float, Meta(ge=0, le=60000, description="Age from which a sequence runs before any that fit better.")
    ] = 250.0
    max_tensor_step_ms: Annotated[
        float, Meta(ge=0, le=60000, description="Longest step that tensor requests are put together for; 0 for any.")
    ] = 100.0


class Supervisor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Starting, watching and restarting the other processes."""

    start_timeout_s: Annotated[
        float, Meta(ge=1, le=3600, description="Longest time a process may take to start, model loads not counted.")
    ] = 120.0
    watchdog_s: Annotated[
        float, Meta(ge=1, le=3600, description="Time past a step's own allowance after which a worker is killed.")
    ] = 30.0
    tick_timeout_s: Annotated[
        float, Meta(ge=0.5, le=600, description="A frontend that does not answer for this long is killed.")
    ] = 3.0
    restart_budget: Annotated[
        int, Meta(ge=0, le=1000, description="Starts in a row that may fail before the server gives up.")
    ] = 5
    restart_window_s: Annotated[
        float, Meta(ge=1, le=86400, description="Only failed starts of this last period count.")
    ] = 60.0
    restart_backoff_s: Annotated[
        float, Meta(ge=0, le=600, description="Wait after the first failed start; doubles with each.")
    ] = 0.5


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The live feed at `/ws/status`."""

    interval_ms: Annotated[int, Meta(ge=20, le=60000, description="Time between two frames of `/ws/status`.")] = field(
        default=200, name="status_interval_ms"
    )
    max_watchers: Annotated[int, Meta(ge=0, le=10000, description="Most status connections of this host.")] = 64


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Traces of requests, for a collector that speaks OTLP over gRPC; needs `sie[otel]`."""

    enabled: Annotated[bool, Meta(description="Write a trace of requests: one span for each phase.")] = field(
        default=False, name="tracing"
    )
    endpoint: Annotated[
        str, Meta(pattern=r"^https?://[^/\s]+/?\Z", description="Where the collector listens; https is with TLS.")
    ] = field(default="http://localhost:4317", name="otlp_endpoint")
    share: Annotated[
        float, Meta(ge=0, le=1, description="Share of requests to trace where their `traceparent` does not decide.")
    ] = field(default=1.0, name="trace_share")


class Testing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Breaking this server on purpose. Nothing here belongs on a server that anyone relies on."""

    test: Annotated[bool, Meta(description="Allow failpoints, and stub models that fail on purpose.")] = False
    failpoints: Annotated[
        tuple[str, ...],
        Meta(
            description="Point at which to break a process; repeatable; refused without `test`.",
            extra={"form": "POINT=kill|stop|spin|raise|exit:STATUS|sleep:MILLISECONDS|leak:KIB[@COUNT]"},
        ),
    ] = ()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree. It encodes with msgspec, so that a process can be handed it."""

    server: Server = Server()
    access: Access = Access()
    models: Models = Models()
    devices: Devices = Devices()
    limits: Limits = Limits()
    memory: Memory = Memory()
    scheduler: Scheduler = Scheduler()
    supervisor: Supervisor = Supervisor()
    status: Status = Status()
    tracing: Tracing = Tracing()
    testing: Testing = Testing()


class Loaded(msgspec.Struct, frozen=True):
    """Settings together with the source of each, by the name of its key."""

    settings: Settings
    sources: dict[str, Source]

    def value(self, key: Key) -> Any:
        """Return the value of `key`."""
        return getattr(getattr(self.settings, key.section), key.attribute)


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """Return every setting in the order of the tree."""
    return tuple(
        describe_key(section.name, item)
        for section in msgspec.structs.fields(Settings)
        for item in msgspec.structs.fields(section.type)
    )


def load_settings(config_file: str | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Return the settings that file, environment and flags give together.

    config_file may be None: then `SIE_CONFIG` names it, if set. flags are by key name, text (lists: a sequence of
    texts) as given on the command line. Raises SettingsError for the first thing that is unknown or wrong.
    """
    keys = all_keys()
    path = config_file or environ.get(CONFIG_VARIABLE)
    values: dict[str, dict[str, Any]] = {section: {} for section in Settings.__struct_fields__}
    sources = {key.name: Source("default") for key in keys}
    layers = (read_file(keys, path) if path else (), read_environment(keys, environ), read_flags(keys, flags))
    for key, value, source in itertools.chain(*layers):
        values[key.section][key.attribute] = value
        sources[key.name] = source
    for key, directory, source in _system_directories(keys, environ):
        if not values[key.section].get(key.attribute):
            values[key.section][key.attribute] = directory
            sources[key.name] = source
    sections = {section.name: section.type(**values[section.name]) for section in msgspec.structs.fields(Settings)}
    settings = Settings(**sections)
    _check_together(settings, sources)
    return Loaded(settings, sources)


def _system_directories(keys: tuple[Key, ...], environ: Mapping[str, str]) -> Iterator[tuple[Key, str, Source]]:
    """Yield what an empty directory stands for; systemd's variables may hold several, colon-separated.

    The last resort for runtime_dir lies where every user may write: who makes it must refuse another owner's.
    """
    by_name = {key.name: key for key in keys}
    shared = Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108  # the system's own name for it
    private_cache = Path(environ.get("HOME") or "/", ".cache")
    for name, systemd, user, fallback in (
        ("runtime_dir", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", shared / f"sie-{os.getuid()}"),
        ("cache_dir", "CACHE_DIRECTORY", "XDG_CACHE_HOME", private_cache / "sie"),
    ):
        if environ.get(systemd):
            yield by_name[name], environ[systemd].split(":")[0], Source("default", systemd)
        elif environ.get(user):
            yield by_name[name], f"{environ[user]}/sie", Source("default", user)
        else:
            yield by_name[name], str(fallback), Source("default")


def _check_together(settings: Settings, sources: Mapping[str, Source]) -> None:
    """Refuse values that are each allowed but not with one another."""
    memory, limits, access = settings.memory, settings.limits, settings.access
    smallest = min(memory.request_segment_bytes, memory.reply_segment_bytes)
    problems = (
        ("ring_capacity", memory.ring_capacity & (memory.ring_capacity - 1) != 0, "must be a power of two"),
        ("large_extent_bytes", memory.large_extent_bytes > smallest, f"must fit into every segment ({smallest} bytes)"),
        (
            "max_item_text_bytes",
            limits.max_item_text_bytes > limits.max_body_bytes,
            f"must not be over max_body_bytes ({limits.max_body_bytes})",
        ),
        ("tls_cert", bool(access.tls_cert) and not access.tls_key, "needs tls_key beside it"),
        ("tls_key", bool(access.tls_key) and not access.tls_cert, "needs tls_cert beside it"),
        ("tls_client_ca", bool(access.tls_client_ca) and not access.tls_cert, "needs tls_cert and tls_key beside it"),
        ("uds", bool(access.uds) and bool(access.tls_cert), "a Unix socket takes no TLS; leave tls_cert out"),
        ("failpoints", bool(settings.testing.failpoints) and not settings.testing.test, "are refused without `test`"),
        (
            "max_queued_images",
            limits.max_queued_images < limits.max_images,
            f"must not be under max_images ({limits.max_images}), or such a request would never be taken",
        ),
    )
    for name, is_wrong, reason in problems:
        if is_wrong:
            raise SettingsError(f"{name} (from {sources[name]}): {reason}")
