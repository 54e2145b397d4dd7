"""Defines the name, type, labels, buckets and help of every metric family, so that writers and readers agree.

Frontends, workers and the supervisor write samples of these families into their own counter pages; any frontend adds
them up. The first seven are the wire contract (SIE API reference, section 14): their names, types, labels and buckets
never change. The `http_*` families count every dialect (generation API reference, section 11). The others are ours.
"""

from __future__ import annotations

from sie.metrics.cluster_definitions import CLUSTER_FAMILIES
from sie.metrics.family import DURATION_BOUNDS, HTTP_DURATION_BOUNDS, STEP_DURATION_BOUNDS, Family
from sie.metrics.generation_definitions import (
    FIRST_TOKEN,
    GENERATED_TOKENS,
    GENERATION_STEP,
    KV_BLOCKS,
    KV_BLOCKS_USED,
    PREEMPTIONS,
    PREFIX_EVICTIONS,
    PREFIX_HITS,
    PREFIX_LOOKUPS,
    PROMPT_TOKENS,
    SEQUENCES_COMPLETED,
    SEQUENCES_RUNNING,
    SEQUENCES_WAITING,
    TOKEN_GAP,
)

_HTTP_BODY_BOUNDS = (
    128.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0, 52428800.0, 104857600.0,
)  # fmt: skip
_STEP_TOKEN_BOUNDS = tuple(float(1 << power) for power in range(4, 17))
_LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GPU_LABELS = ("device", "index", "name", "gpu_type", "uuid")

REQUESTS = Family(
    name="sie_requests_total",
    kind="counter",
    help="Requests that ended, by model, endpoint and status (success, error, queue_full, cancelled: the client left).",
    labels=("model", "endpoint", "status"),
)
REQUEST_DURATION = Family(
    name="sie_request_duration_seconds",
    kind="histogram",
    help="Time of a request by phase (total, queue, tokenize, inference; failed: total time of a failed tensor request); a "
    "phase that took no time is left out.",
    labels=("model", "endpoint", "phase"),
    bounds=DURATION_BOUNDS,
)
BATCH_SIZE = Family(
    name="sie_batch_size",
    kind="histogram",
    help="Sequences (or rows of tensors) of one model that ran in one step.",
    labels=("model",),
    bounds=tuple(float(1 << power) for power in range(11)),
)
TOKENS_PROCESSED = Family(
    name="sie_tokens_processed_total",
    kind="counter",
    help="Tokens that a model processed.",
    labels=("model",),
)
QUEUE_DEPTH = Family(
    name="sie_queue_depth",
    kind="gauge",
    help="Sequences waiting in the workers for a step.",
    labels=("model",),
)
MODEL_LOADED = Family(
    name="sie_model_loaded",
    kind="gauge",
    help="1 while the model is loaded on a device of this kind, else 0.",
    labels=("model", "device"),
    merge="max",
)
MODEL_FAILED = Family(
    name="sie_model_failed",
    kind="gauge",
    help="1 after a failed load until the model is loaded or unloaded (see last_error in /v1/models), else 0.",
    labels=("model",),
    merge="max",
)
MODEL_MEMORY = Family(
    name="sie_model_memory_bytes",
    kind="gauge",
    help="Memory of the model's weights, summed over its workers.",
    labels=("model", "device"),
)
MODEL_FALLBACK = Family(
    name="sie_model_fallback",
    kind="gauge",
    help="1 while a worker runs the model in a slower way (see fallbacks in /v1/models), else 0.",
    labels=("model", "device", "fallback"),
    merge="max",
)
OOM_ATTEMPTED = Family(
    name="sie_oom_recoveries_attempted_total",
    kind="counter",
    help="Steps that ran out of memory.",
    labels=("model",),
)
OOM_SUCCEEDED = Family(
    name="sie_oom_recoveries_succeeded_total",
    kind="counter",
    help="Steps that ran out of memory, but whose items all ran in the end, in smaller steps.",
    labels=("model",),
)
OOM_FAILED = Family(
    name="sie_oom_terminal_failures_total",
    kind="counter",
    help="Steps with an item that ran out of memory even alone (503 RESOURCE_EXHAUSTED).",
    labels=("model",),
)
OOM_CACHE_CLEARS = Family(
    name="sie_oom_cache_clears_total",
    kind="counter",
    help="Times unused memory was released because a step ran out of memory.",
    labels=("model",),
)
OOM_EVICTIONS = Family(
    name="sie_oom_evictions_triggered_total",
    kind="counter",
    help="Times the model was unloaded because a step of another model ran out of memory.",
    labels=("model",),
)
OOM_SPLITS = Family(
    name="sie_oom_batch_splits_total",
    kind="counter",
    help="Times a step was split because it ran out of memory.",
    labels=("model",),
)
IDLE_EVICTIONS = Family(
    name="sie_idle_evictions_total",
    kind="counter",
    help="Times the model was unloaded because it was not used.",
    labels=("model",),
)
PRESSURE_EVICTIONS = Family(
    name="sie_pressure_evictions_total",
    kind="counter",
    help="Times the model was unloaded because memory was short, or another model needed it to load.",
    labels=("model",),
)
NON_FINITE = Family(
    name="sie_non_finite_total",
    kind="counter",
    help="Sequences of requests that failed because the model produced a value that is not finite.",
    labels=("model",),
)
NON_FINITE_SHARE = Family(
    name="sie_non_finite_share",
    kind="gauge",
    help="Share of sequences with a value that is not finite, among about the latest thousand, on the worker with the highest share.",
    labels=("model",),
    merge="max",
)
LORAS_LOADED = Family(
    name="sie_loras_loaded",
    kind="gauge",
    help="LoRA adapters of the model in memory, on the worker with the most.",
    labels=("model",),
    merge="max",
)
LAST_INFERENCE = Family(
    name="sie_last_inference_timestamp_seconds",
    kind="gauge",
    help="Unix time of the last answer to a tensor request to this model.",
    labels=("model",),
    merge="max",
)
HTTP_IN_FLIGHT = Family(
    name="http_requests_in_flight",
    kind="gauge",
    help="Generation requests being answered, streams until their end.",
    labels=("method", "path", "model"),
)
TRUNCATED = Family(
    name="sie_truncated_items_total",
    kind="counter",
    help="Items of answered requests whose texts were cut because they were longer than the model's limit.",
    labels=("model", "endpoint"),
)
REFUSALS = Family(
    name="sie_refusals_total",
    kind="counter",
    help="Requests refused before any work, by reason.",
    labels=("reason",),
)
AUTH_FAILURES = Family(
    name="sie_auth_failures_total",
    kind="counter",
    help="Requests refused for their API key, by reason (missing, unknown, expired, scope, rate, concurrency).",
    labels=("reason",),
)
KEY_REQUESTS = Family(
    name="sie_api_key_requests_total",
    kind="counter",
    help="Accepted requests, by the name of their API key.",
    labels=("key",),
)
KEY_TOKENS = Family(
    name="sie_api_key_tokens_total",
    kind="counter",
    help="Tokens that requests read and generated, by the name of their API key.",
    labels=("key",),
)
KEY_RUNNING = Family(
    name="sie_api_key_running",
    kind="gauge",
    help="Running requests, by the name of their API key; only keys with a limit.",
    labels=("key",),
)
API_KEYS = Family(
    name="sie_api_keys",
    kind="gauge",
    help="API keys in the file that is in force, expired ones too; absent when keys are not required.",
    merge="max",
)
KEY_EXPIRY = Family(
    name="sie_api_key_expiry_timestamp_seconds",
    kind="gauge",
    help="Unix time at which an API key expires, by its name; only keys that do. +Inf after it was removed or renewed without end.",
    labels=("key",),
    merge="max",
)
API_KEYS_REFUSED = Family(
    name="sie_api_keys_refused",
    kind="gauge",
    help="1 while the file of API keys is missing or wrong and the old keys stay active, else 0.",
    merge="max",
)
WORKER_RESTARTS = Family(
    name="sie_worker_restarts_total",
    kind="counter",
    help="Times a worker was restarted after it died.",
    labels=("worker",),
)
WORKER_UP = Family(
    name="sie_worker_up",
    kind="gauge",
    help="1 while a worker runs, else 0; the sum is the number of usable devices.",
    labels=("worker",),
    merge="max",
)
DEVICE_LOST = Family(
    name="sie_device_lost",
    kind="gauge",
    help="1 while a worker's device is not used because workers lost it repeatedly, else 0.",
    labels=("worker",),
    merge="max",
)
CONFIG_RELOADS = Family(
    name="sie_config_reloads_total",
    kind="counter",
    help="Reloads of the settings, by result (applied, refused).",
    labels=("result",),
)
CONFIG_REFUSED = Family(
    name="sie_config_refused",
    kind="gauge",
    help="1 while the latest reload of the settings was refused and the old settings stay active, else 0.",
    merge="max",
)
STEP_DURATION = Family(
    name="sie_step_duration_seconds",
    kind="histogram",
    help="Time of one step; the rate of its sum is the share of time in which the worker is busy.",
    labels=("worker",),
    bounds=STEP_DURATION_BOUNDS,
)
MODEL_BUSY = Family(
    name="sie_model_busy_seconds_total",
    kind="counter",
    help="Time of the model's steps; its rate, compared between models, is each model's share of the workers' time.",
    labels=("model",),
)
STEP_TOKENS = Family(
    name="sie_step_tokens",
    kind="histogram",
    help="Tokens of one step.",
    labels=("worker",),
    bounds=_STEP_TOKEN_BOUNDS,
)
EXTENTS_IN_USE = Family(
    name="sie_extents_in_use",
    kind="gauge",
    help="Shared-memory extents under a lease, by segment kind (request, reply).",
    labels=("segment",),
)
HELD_BYTES = Family(
    name="sie_held_bytes",
    kind="gauge",
    help="Bytes of request bodies and unread answers in the frontends.",
    labels=(),
)
HELD_CUTS = Family(
    name="sie_held_bytes_cuts_total",
    kind="counter",
    help="Connections that were cut because a frontend held too much (max_held_bytes, max_grpc_held_bytes).",
    labels=(),
)
LOOP_LAG = Family(
    name="sie_event_loop_lag_seconds",
    kind="histogram",
    help="Delay of a timer in the frontends' event loops.",
    bounds=_LAG_BOUNDS,
)
LOOP_LAG_LATEST = Family(
    name="sie_event_loop_lag_latest_seconds",
    kind="gauge",
    help="The latest event-loop lag of the slowest frontend.",
    merge="max",
)
STATUS_WATCHERS = Family(
    name="sie_status_watchers",
    kind="gauge",
    help="Open /ws/status connections.",
)
AGENTS_RUNNING = Family(
    name="sie_agents_running",
    kind="gauge",
    help="Requests whose tools the server runs, between their first round of generation and the end of their answers.",
)
GRPC_CONNECTIONS = Family(
    name="sie_grpc_connections",
    kind="gauge",
    help="Open connections of gRPC clients.",
)
GRPC_ENDED = Family(
    name="sie_grpc_connections_ended_total",
    kind="counter",
    help="Connections of gRPC clients that the server ended, by reason (work: too much work without a message; "
    "protocol, slow, unread; memory: max_grpc_held_bytes; connections: max_grpc_connections).",
    labels=("reason",),
)
GRPC_WAITS = Family(
    name="sie_grpc_waits_total",
    kind="counter",
    help="Times that frames of a gRPC client had to wait, because other clients had used the time (grpc_turn_ms).",
)
HTTP_REQUESTS = Family(
    name="http_requests_total",
    kind="counter",
    help="HTTP requests of every dialect, by route.",
    labels=("method", "path", "model", "status"),
)
HTTP_DURATION = Family(
    name="http_request_duration_seconds",
    kind="histogram",
    help="Time from a request's headers to the end of its response.",
    labels=("method", "path", "model", "status"),
    bounds=HTTP_DURATION_BOUNDS,
)
HTTP_BODY = Family(
    name="http_request_body_bytes",
    kind="histogram",
    help="Size of request bodies.",
    labels=("method", "path", "model"),
    bounds=_HTTP_BODY_BOUNDS,
)
DROPPED = Family(
    name="sie_metrics_dropped_total",
    kind="counter",
    help="Series that are not counted because a counter page was full.",
)
GPU_UTILIZATION = Family(
    name="sie_gpu_utilization_percent",
    kind="gauge",
    help="Share of time in which a kernel ran; absent if the device does not report it (MIG).",
    labels=_GPU_LABELS,
    merge="max",
)
GPU_MEMORY_USED = Family(
    name="sie_gpu_memory_used_bytes",
    kind="gauge",
    help="Device memory in use by all processes.",
    labels=_GPU_LABELS,
    merge="max",
)
GPU_MEMORY_TOTAL = Family(
    name="sie_gpu_memory_total_bytes",
    kind="gauge",
    help="Device memory.",
    labels=_GPU_LABELS,
    merge="max",
)
GPU_TEMPERATURE = Family(
    name="sie_gpu_temperature_celsius",
    kind="gauge",
    help="Temperature of the device.",
    labels=_GPU_LABELS,
    merge="max",
)
GPU_UP = Family(
    name="sie_gpu_up",
    kind="gauge",
    help="1 while the device answers its driver, 0 after it is lost.",
    labels=_GPU_LABELS,
    merge="max",
)
GPU_SAMPLED = Family(
    name="sie_gpu_sample_timestamp_seconds",
    kind="gauge",
    help="Unix time of the device's latest complete sample; an old one means that the driver's call is stuck.",
    labels=_GPU_LABELS,
    merge="max",
)

FAMILIES: tuple[Family, ...] = (
    REQUESTS, REQUEST_DURATION, BATCH_SIZE, TOKENS_PROCESSED, QUEUE_DEPTH, MODEL_LOADED, MODEL_FAILED, MODEL_MEMORY, MODEL_FALLBACK, OOM_ATTEMPTED,
    OOM_SUCCEEDED, OOM_FAILED, OOM_CACHE_CLEARS, OOM_EVICTIONS, OOM_SPLITS, IDLE_EVICTIONS, PRESSURE_EVICTIONS,
    NON_FINITE, NON_FINITE_SHARE, LORAS_LOADED, SEQUENCES_RUNNING, SEQUENCES_WAITING, SEQUENCES_COMPLETED,
    PREEMPTIONS, KV_BLOCKS, KV_BLOCKS_USED, PREFIX_LOOKUPS, PREFIX_HITS, PREFIX_EVICTIONS, PROMPT_TOKENS,
    GENERATED_TOKENS, GENERATION_STEP, FIRST_TOKEN, TOKEN_GAP, LAST_INFERENCE, TRUNCATED, REFUSALS, AUTH_FAILURES,
    KEY_REQUESTS, KEY_TOKENS, KEY_RUNNING, API_KEYS, KEY_EXPIRY, API_KEYS_REFUSED, WORKER_RESTARTS, WORKER_UP, DEVICE_LOST, CONFIG_RELOADS, CONFIG_REFUSED,
    STEP_DURATION, MODEL_BUSY, STEP_TOKENS, EXTENTS_IN_USE, HELD_BYTES, HELD_CUTS, LOOP_LAG, LOOP_LAG_LATEST, STATUS_WATCHERS, AGENTS_RUNNING, GRPC_CONNECTIONS,
    GRPC_ENDED, GRPC_WAITS, HTTP_REQUESTS, HTTP_IN_FLIGHT, HTTP_DURATION, HTTP_BODY, DROPPED, GPU_UTILIZATION, GPU_MEMORY_USED, GPU_MEMORY_TOTAL,
    GPU_TEMPERATURE, GPU_UP, GPU_SAMPLED, *CLUSTER_FAMILIES,
)  # fmt: skip
