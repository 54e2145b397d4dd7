"""The sections of settings besides `sie.config.limits`: the type, default, bounds and description of each key.

`sie.config.settings` describes how keys become flags, variables and TOML. Never imports slow modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from sie.config.limits import MIB

_ORIGIN = r"^(\*|https?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:.]+\](:[0-9]{1,5})?)\Z"
_HOST = r"^(\*|[A-Za-z0-9._\-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?)\Z"
_PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEVICES = r"^(auto|cpu(:[1-9][0-9]{0,2})?|cuda(:[0-9]+(,cuda:[0-9]+)*)?)\Z"


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Listening, logging and identity."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 uses a free one and logs it.")] = 8080
    grpc_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the gRPC listener (docs/tensors.md); 0 turns it off.")
    ] = 0
    grpc_host: Annotated[str, Meta(description="Address of the gRPC listener; empty uses `host`.")] = ""
    frontends: Annotated[
        int, Meta(ge=0, le=256, description="HTTP processes; 0 uses one for every four usable cores.")
    ] = 0
    backlog: Annotated[int, Meta(ge=128, le=65535, description="Connections the kernel queues for a frontend.")] = 1024
    name: Annotated[str, Meta(max_length=200, description="Name shown in `/ws/status`; empty uses the host name.")] = (
        field(default="", name="server_name")
    )
    drain_timeout_s: Annotated[
        float, Meta(ge=0, le=3600, description="Longest time for accepted requests to finish after SIGTERM.")
    ] = 25.0
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Form of log lines: text for people, or json with one object a line.")
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level of log lines to write.")
    ] = "info"
    access_log: Annotated[
        float, Meta(ge=0, le=1, description="Share of requests that get a log line when they end; 0 writes none.")
    ] = 0.0
    image_threads: Annotated[int, Meta(ge=1, le=64, description="Threads of each frontend that decode images.")] = 4
    runtime_dir: Annotated[
        str,
        Meta(description="Lock file and control socket; empty uses systemd's, the user's or a temporary directory."),
    ] = ""
    state_dir: Annotated[
        str,
        Meta(
            description="Directory of stored responses, files, skills and sessions; empty uses the state directory of "
            "systemd, or else of the user."
        ),
    ] = ""
    machine_profile: Annotated[
        str, Meta(description="Value that `X-SIE-MACHINE-PROFILE` must match; empty uses the type of the GPU.")
    ] = ""
    admin_from: Annotated[
        Literal["loopback", "nobody", "everybody"],
        Meta(
            description="Clients that may load and unload models; loopback: clients on this host, not through a proxy. With "
            "`api_keys`: clients whose key has the scope admin, unless it is nobody."
        ),
    ] = "loopback"
    pool_name: Annotated[str, Meta(description="Pool name that this server reports.")] = ""
    bundle: Annotated[str, Meta(description="Bundle name that this server reports.")] = ""


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Access of clients, and protection of connections (docs/security.md)."""

    api_keys: Annotated[
        str,
        Meta(description="TOML file of API keys, as `sie keys new` writes it; empty requires no key."),
    ] = ""
    open_metrics: Annotated[
        bool, Meta(description="Answer `/metrics` and `/ws/status` without a key when other routes need one.")
    ] = False
    tls_cert: Annotated[
        str, Meta(description="PEM file of the server's certificate and its chain; then only HTTPS is served.")
    ] = ""
    tls_key: Annotated[str, Meta(description="PEM file of the private key of `tls_cert`.")] = ""
    tls_client_ca: Annotated[
        str, Meta(description="PEM file of authorities; only clients with a certificate from them may connect.")
    ] = ""
    uds: Annotated[
        str, Meta(max_length=107, description="Path of a Unix socket to listen on, instead of `host` and `port`.")
    ] = ""
    uds_mode: Annotated[
        str,
        Meta(pattern=r"^0?[0-7]{3}\Z", description="Mode of the Unix socket.", extra={"form": "three octal digits"}),
    ] = "660"
    cors_origins: Annotated[
        tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...],
        Meta(
            description="Origin whose pages may use this server from a browser; repeatable; by default none.",
            extra={"form": "https://app.example or *"},
        ),
    ] = field(default=(), name="cors_origin")
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=_HOST)], ...],
        Meta(
            description="Further host name that a server without `api_keys` on a loopback address accepts, for example "
            "behind a proxy, and whose pages may use it; repeatable; `*` accepts any.",
            extra={"form": "sie.example, without a port, or *"},
        ),
    ] = field(default=(), name="allowed_host")


class Models(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The served models, and their loading."""

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
            description="Model to load at its first request; repeatable.",
            extra={"form": "ID[=DIR][@REVISION] or ID=stub:[key=value,...]"},
        ),
    ] = field(default=(), name="lazy_model")
    catalog: Annotated[
        str, Meta(description="TOML file of models to serve and their profiles (docs/models.md); empty for none.")
    ] = ""
    default_model: Annotated[
        str,
        Meta(
            description="Model for OpenAI requests without a model; if it is empty or unsuitable, the only served model that is suitable."
        ),
    ] = ""
    repositories: Annotated[
        tuple[str, ...],
        Meta(
            description="Directory of tensor models, NAME/VERSION/model.onnx or model.pt2, or a config.json of OpenVINO Model "
            "Server (docs/tensors.md); repeatable.",
            extra={"form": "DIR or FILE"},
        ),
    ] = field(default=(), name="model_repository")
    repository_control: Annotated[
        Literal["none", "explicit"],
        Meta(
            description="none loads all models of the repositories at the start; explicit loads them on request only."
        ),
    ] = "none"
    strict_readiness: Annotated[
        bool,
        Meta(
            description="Whether the server is ready only with every model of `model`. A start that can never load one of them "
            "ends. If false, a model that fails to load is left out while another can be served. Also whether "
            "`/api/health/ready` waits for every version of every tensor model."
        ),
    ] = True
    default_max_batch_size: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Most rows of a request to a tensor model with a batch dimension, if its configuration does not set "
            "it; 0: no batch dimension.",
        ),
    ] = 64
    probe_batching: Annotated[
        bool,
        Meta(
            description="Whether to test an ONNX model with a batch dimension, whose configuration does not ask to join "
            "requests, with random rows at load; it joins requests if each row gives the same result alone and with others."
        ),
    ] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Number format of the weights; auto is bfloat16 if the device computes in it."),
    ] = "auto"
    encoder_weights: Annotated[
        Literal["auto", "int8"],
        Meta(
            description="Format of the linear layers of encoders; auto uses the format of `dtype`; int8 is for BERT-like "
            "encoders on a CPU: faster, and less exact (docs/models.md)."
        ),
    ] = "auto"
    convert: Annotated[
        bool,
        Meta(
            description="Whether to download pickled weights if a model has no others, and to convert them to safetensors "
            "without running them (docs/models.md)."
        ),
    ] = False
    cache_dir: Annotated[
        str,
        Meta(
            description="Directory of converted tokenizers, converted checkpoints and prepared weights; empty uses the cache "
            "directory of systemd, or else of the user."
        ),
    ] = ""
    share_weights: Annotated[
        bool,
        Meta(
            description="Whether CPU workers share one copy of a model's weights: a file in `weights_dir`, made at the "
            "first load, from which later loads take milliseconds (docs/operations.md)."
        ),
    ] = True
    weights_dir: Annotated[
        str, Meta(description="Directory of prepared weights; empty uses `weights` in `cache_dir`.")
    ] = ""
    max_weights_bytes: Annotated[
        int,
        Meta(
            ge=0, le=1 << 50,
            description="Disk space of all prepared weights together; those used least recently are removed.",
        ),
    ] = 64 << 30  # fmt: skip
    min_shared_weights_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 50, description="A smaller checkpoint is not prepared: each worker loads its own copy."),
    ] = 16 << 20
    load_timeout_s: Annotated[
        float, Meta(ge=1, le=86400, description="Longest time to load one model, or without progress of its download.")
    ] = 900.0
    load_retry_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1800,
            description="Wait before a failed load may be retried; doubles each time. 0: it is not tried again.",
        ),
    ] = 30.0
    loading_retry_after_s: Annotated[int, Meta(ge=1, le=60, description="`Retry-After` of 503 MODEL_LOADING.")] = 5
    wait_for_load: Annotated[
        bool, Meta(description="Native requests wait for a loading model, instead of 503 MODEL_LOADING at once.")
    ] = False
    loras: Annotated[
        tuple[str, ...],
        Meta(
            description="LoRA adapter that requests to a model may name; loaded at its first request; repeatable.",
            extra={"form": "MODEL=ID[=DIR][@REVISION] or MODEL=ID=stub:[load_ms=N]"},
        ),
    ] = field(default=(), name="lora")
    max_loras: Annotated[
        int,
        Meta(ge=1, le=256, description="Most adapters of one model in memory; the least recently used one is removed."),
    ] = 10
    idle_unload_s: Annotated[
        float, Meta(ge=0, le=604800, description="Time without use after which a lazy model is unloaded; 0 for never.")
    ] = 0.0
    pinned: Annotated[
        tuple[str, ...],
        Meta(
            description="Lazy model that, after loading, only an unload request unloads; repeatable.",
            extra={"form": "the ID of a lazy_model"},
        ),
    ] = field(default=(), name="pinned_model")
    memory_pressure_pct: Annotated[
        float,
        Meta(
            ge=1,
            le=100,
            description="Share of a device's memory over which lazy models are unloaded, least recently used first.",
        ),
    ] = 95.0
    max_model_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 50, description="Most memory for the models of one device; 0: the device's memory."),
    ] = 0


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices that run models: one worker process for each device."""

    devices: Annotated[
        str,
        Meta(
            pattern=_DEVICES,
            description="Devices to use; cpu is one worker for each core, limited by memory; cpu:N is N workers that share "
            "the cores; auto is all GPUs, or cpu on a host without any.",
            extra={"form": "auto, cpu, cpu:N, cuda or cuda:0,cuda:1"},
        ),
    ] = "auto"
    threads_per_worker: Annotated[
        int, Meta(ge=0, le=1024, description="Compute threads of a CPU worker; 0 uses one for each of its cores.")
    ] = 0
    max_lent_cores: Annotated[
        int,
        Meta(
            ge=0,
            le=1023,
            description="Most cores of waiting CPU workers that one step of another worker uses, on the same memory node; 0 "
            "lends none.",
        ),
    ] = 15
    native_kernels: Annotated[
        bool,
        Meta(description="Whether CPU workers use the compiled kernels, if available; torch can do the same work."),
    ] = True
    fork_workers: Annotated[
        bool,
        Meta(
            description="Whether CPU workers are forked from a process that has imported the libraries once, if a model is "
            "loaded at the start that needs them; otherwise each worker imports them."
        ),
    ] = True
    resolve_timeout_s: Annotated[
        float, Meta(ge=1, le=600, description="Longest time for `--devices auto` to find the devices.")
    ] = 60.0


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shared memory; all except `max_large_bytes` and `max_pending_reply_bytes` is reserved at the start."""

    request_segment_bytes: Annotated[
        int, Meta(ge=MIB, le=1 << 36, multiple_of=64, description="Request segment of each frontend.")
    ] = 64 * MIB
    reply_segment_bytes: Annotated[
        int, Meta(ge=MIB, le=1 << 36, multiple_of=64, description="Reply segment of each pair of worker and frontend.")
    ] = 32 * MIB
    large_extent_bytes: Annotated[
        int, Meta(ge=65536, le=1 << 32, description="A payload over this size gets its own segment.")
    ] = 8 * MIB
    max_large_bytes: Annotated[
        int, Meta(ge=0, le=1 << 36, description="All large segments of this server together.")
    ] = 512 * MIB
    max_pending_reply_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 36,
            description="Sparse and multivector outputs that a worker keeps until their reply is complete and has room.",
        ),
    ] = 256 * MIB
    ring_capacity: Annotated[int, Meta(ge=8, le=65536, description="Descriptors in each ring; a power of two.")] = 4096
    counter_page_bytes: Annotated[int, Meta(ge=16384, le=64 * MIB, description="Metrics page of each process.")] = MIB


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheduling of waiting sequences into steps."""

    max_step_tokens: Annotated[
        int, Meta(ge=0, le=1 << 24, description="Token budget of a step; 0 uses 1024 on a CPU and 16384 on a GPU.")
    ] = 0
    max_step_items: Annotated[int, Meta(ge=1, le=65536, description="Most sequences in a step.")] = 1024
    max_age_ms: Annotated[
        float, Meta(ge=0, le=60000, description="Age from which a sequence runs before others that fit better.")
    ] = 250.0
    max_step_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60000,
            description="Longest time for a step of several requests, so that a new one waits no longer; 0: no limit.",
        ),
    ] = 50.0


class Supervisor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Starting, watching and restarting the other processes."""

    start_timeout_s: Annotated[
        float, Meta(ge=1, le=3600, description="Longest time for a process to start, without model loads.")
    ] = 120.0
    watchdog_s: Annotated[
        float, Meta(ge=1, le=3600, description="Time over a step's own limit after which a worker is killed.")
    ] = 30.0
    tick_timeout_s: Annotated[
        float, Meta(ge=0.5, le=600, description="A frontend that does not answer for this long is killed.")
    ] = 3.0
    restart_budget: Annotated[
        int, Meta(ge=0, le=1000, description="Failed starts in a row before the server gives up.")
    ] = 5
    restart_window_s: Annotated[
        float, Meta(ge=1, le=86400, description="Only failed starts within this period count.")
    ] = 60.0
    device_retry_s: Annotated[
        float,
        Meta(
            ge=1,
            le=3600,
            description="Wait before a device that was lost three times within a minute is retried; doubles each time.",
        ),
    ] = 60.0
    restart_backoff_s: Annotated[
        float, Meta(ge=0, le=600, description="Wait after the first failed start; doubles each time.")
    ] = 0.5


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The live feed at `/ws/status`."""

    interval_ms: Annotated[int, Meta(ge=20, le=60000, description="Time between two frames of `/ws/status`.")] = field(
        default=200, name="status_interval_ms"
    )
    max_watchers: Annotated[int, Meta(ge=0, le=10000, description="Most status connections of this host.")] = 64


class Tracing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Traces of requests, sent to a collector by OTLP; needs `ringserve[otel]`."""

    enabled: Annotated[bool, Meta(description="Write a trace of requests: one span for each phase.")] = field(
        default=False, name="tracing"
    )
    endpoint: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^/\s?#][^\s?#]*)?\Z",
            description="Address of the collector; https uses TLS. Over HTTP, `/v1/traces` is added to a path that does not "
            "end with it. Empty takes OpenTelemetry's variables, or else localhost with the protocol's port.",
            extra={"form": "http://host:port or https://host:port, over HTTP also with a path"},
        ),
    ] = field(default="", name="otlp_endpoint")
    protocol: Annotated[
        Literal["auto", "grpc", "http"],
        Meta(
            description="Protocol of the collector: gRPC (port 4317), or protobuf over HTTP (port 4318). auto takes "
            "OpenTelemetry's variables, or else gRPC."
        ),
    ] = field(default="auto", name="otlp_protocol")
    share: Annotated[
        float, Meta(ge=0, le=1, description="Share of requests to trace, if their `traceparent` does not decide.")
    ] = field(default=1.0, name="trace_share")

    def protocol_in(self, environ: Mapping[str, str]) -> str:
        """Return the protocol to use: grpc, http, or another of OpenTelemetry's, which this server does not have.

        environ has OpenTelemetry's variables, which count if the setting is auto. One for traces alone comes first.
        """
        if self.protocol != "auto":
            return self.protocol
        found = next(filter(None, map(environ.get, _PROTOCOL_VARIABLES)), "grpc")
        return "http" if found == "http/protobuf" else found


class Testing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Breaking this server on purpose. Never use these settings in production."""

    test: Annotated[bool, Meta(description="Allow failpoints, and stub models that fail on purpose.")] = False
    failpoints: Annotated[
        tuple[str, ...],
        Meta(
            description="Point at which to break a process; repeatable; refused without `test`.",
            extra={
                "form": "POINT=kill|stop|spin|raise|exit:STATUS|sleep:MILLISECONDS|hold:MILLISECONDS|leak:KIB[@COUNT]"
            },
        ),
    ] = ()
