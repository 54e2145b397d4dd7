"""Defines the metric families of a cluster: those of gateways (`sie_gateway_*`) and of a host's puller.

Names and labels of gateways are the wire contract (SIE API reference, section 14). Every gateway process sees the whole
cluster, so its gauges about hosts merge by maximum, and those about its own requests by sum.
"""

from __future__ import annotations

from sie.metrics.family import Family

_LATENCY_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_ITEM_BOUNDS = tuple(float(1 << power) for power in range(12))

GATEWAY_REQUESTS = Family(
    name="sie_gateway_requests_total",
    kind="counter",
    help="Requests for inference that a gateway has answered, by status (success, error) and the machine profile they asked for.",
    labels=("endpoint", "status", "machine_profile"),
)
GATEWAY_LATENCY = Family(
    name="sie_gateway_request_latency_seconds",
    kind="histogram",
    help="Time from a request's headers to its answer, or to the end of its stream, at a gateway.",
    labels=("endpoint", "machine_profile"),
    bounds=_LATENCY_BOUNDS,
)
GATEWAY_PROVISIONING = Family(
    name="sie_gateway_provisioning_responses_total",
    kind="counter",
    help="Requests that were told to wait for a host (PROVISIONING).",
    labels=("machine_profile",),
)
GATEWAY_DEMAND = Family(
    name="sie_gateway_pending_demand",
    kind="gauge",
    help="Work that waits or runs: unanswered items, and requests that found no host within the last minute. For autoscalers.",
    labels=("machine_profile", "bundle"),
)
GATEWAY_REJECTED = Family(
    name="sie_gateway_rejected_requests_total",
    kind="counter",
    help="Requests for inference that a gateway has refused because of its hosts' or its own state, by error code.",
    labels=("machine_profile", "bundle", "reason"),
)
GATEWAY_WORKERS = Family(
    name="sie_gateway_workers",
    kind="gauge",
    help="Hosts by status: healthy, draining, or silent for more than two seconds.",
    labels=("status",),
    merge="max",
)
GATEWAY_WORKER_QUEUE = Family(
    name="sie_gateway_worker_queue_depth",
    kind="gauge",
    help="Work items that a host has taken and not answered; hosts without a name are `unnamed`, together.",
    labels=("worker", "machine_profile", "bundle"),
    merge="max",
)
GATEWAY_WORKER_MEMORY = Family(
    name="sie_gateway_worker_memory_used_bytes",
    kind="gauge",
    help="Memory of the models that a host has loaded.",
    labels=("worker", "machine_profile", "bundle"),
    merge="max",
)
GATEWAY_MODEL_WORKERS = Family(
    name="sie_gateway_model_workers",
    kind="gauge",
    help="Hosts that serve the model.",
    labels=("model",),
    merge="max",
)
GATEWAY_PUBLISH = Family(
    name="sie_gateway_queue_publish_seconds",
    kind="histogram",
    help="Time until NATS had confirmed a message with work items.",
    labels=("operation",),
    bounds=_LATENCY_BOUNDS,
)
GATEWAY_ITEMS = Family(
    name="sie_gateway_queue_items_published",
    kind="histogram",
    help="Work items of a request.",
    bounds=_ITEM_BOUNDS,
)
GATEWAY_RESULT_WAIT = Family(
    name="sie_gateway_queue_result_wait_seconds",
    kind="histogram",
    help="Time from the submission of a request to the result of its last item.",
    bounds=_LATENCY_BOUNDS,
)
GATEWAY_LEASED = Family(
    name="sie_gateway_active_lease_gpus",
    kind="gauge",
    help="GPUs of the hosts that leased pools have; a host without GPUs counts as one.",
    merge="max",
)
GATEWAY_WARM_FLOOR = Family(
    name="sie_gateway_pool_warm_floor",
    kind="gauge",
    help="Hosts that an autoscaler should keep for a leased pool (minimum_worker_count), summed over the pools of a queue pool.",
    labels=("pool",),
    merge="max",
)
GATEWAY_DEAD_LETTERS = Family(
    name="sie_gateway_dlq_events_total",
    kind="counter",
    help="Work items that this gateway gave up, because three hosts were lost with them.",
    labels=("stream", "consumer"),
)
GATEWAY_CONNECTED = Family(
    name="sie_gateway_nats_connected",
    kind="gauge",
    help="Gateway processes that are connected to NATS.",
)
GATEWAY_EPOCH = Family(
    name="sie_gateway_config_epoch",
    kind="gauge",
    help="Epoch of the shared configuration that the gateway knows.",
    merge="max",
)
WORKER_ITEMS = Family(
    name="sie_worker_items_total",
    kind="counter",
    help="Work items that a host took from NATS, by outcome: answered, failed, returned to NATS, or expired before they ran.",
    labels=("model", "outcome"),
)
WORKER_ITEMS_RUNNING = Family(
    name="sie_worker_items_running",
    kind="gauge",
    help="Work items that a host has taken and not answered.",
)
WORKER_TEXTS_RUNNING = Family(
    name="sie_worker_texts_running",
    kind="gauge",
    help="Answers that a host generates for gateways.",
)
WORKER_CONNECTED = Family(
    name="sie_worker_nats_connected",
    kind="gauge",
    help="1 while the host is connected to NATS, else 0.",
)
WORKER_CONFIGS_REFUSED = Family(
    name="sie_worker_configs_refused",
    kind="gauge",
    help="Models of the shared configuration that this host does not take.",
)
PULL_ROOM = Family(
    name="sie_pull_loop_room",
    kind="gauge",
    help="Work items that the host's engine has room for now, beside those that run.",
)
PULL_ASKED = Family(
    name="sie_pull_loop_asked",
    kind="gauge",
    help="Work items that the host has asked NATS for, and that may still come.",
)
PULL_DURATION = Family(
    name="sie_pull_loop_duration_seconds",
    kind="histogram",
    help="Time of one turn of the loop that asks NATS for work.",
    bounds=_LATENCY_BOUNDS,
)

CLUSTER_FAMILIES: tuple[Family, ...] = (
    GATEWAY_REQUESTS, GATEWAY_LATENCY, GATEWAY_PROVISIONING, GATEWAY_DEMAND, GATEWAY_REJECTED, GATEWAY_WORKERS,
    GATEWAY_WORKER_QUEUE, GATEWAY_WORKER_MEMORY, GATEWAY_MODEL_WORKERS, GATEWAY_PUBLISH, GATEWAY_ITEMS,
    GATEWAY_RESULT_WAIT, GATEWAY_LEASED, GATEWAY_WARM_FLOOR, GATEWAY_DEAD_LETTERS, GATEWAY_CONNECTED, GATEWAY_EPOCH,
    WORKER_ITEMS, WORKER_ITEMS_RUNNING, WORKER_TEXTS_RUNNING, WORKER_CONNECTED, WORKER_CONFIGS_REFUSED, PULL_ROOM,
    PULL_ASKED, PULL_DURATION,
)  # fmt: skip
