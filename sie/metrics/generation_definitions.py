"""Defines the metric families of text generation. See `sie.metrics.definitions`."""

from __future__ import annotations

from sie.metrics.family import HTTP_DURATION_BOUNDS, STEP_DURATION_BOUNDS, Family

SEQUENCES_RUNNING = Family(
    name="sie_sequences_running",
    kind="gauge",
    help="Choices of generation requests that are running.",
    labels=("model",),
)
SEQUENCES_WAITING = Family(
    name="sie_sequences_waiting",
    kind="gauge",
    help="Choices of generation requests that wait in the workers for blocks, or for their grammar.",
    labels=("model",),
)
SEQUENCES_COMPLETED = Family(
    name="sie_sequences_completed_total",
    kind="counter",
    help="Choices that ended, by reason (stop, length, stopped by a stop string, cancelled, failed).",
    labels=("model", "reason"),
)
PREEMPTIONS = Family(
    name="sie_preemptions_total",
    kind="counter",
    help="Choices that were preempted because older ones needed their blocks; their tokens are computed again.",
    labels=("model",),
)
KV_BLOCKS = Family(
    name="sie_kv_cache_blocks",
    kind="gauge",
    help="Key/value cache blocks in total.",
    labels=("model",),
)
KV_BLOCKS_USED = Family(
    name="sie_kv_cache_blocks_used",
    kind="gauge",
    help="Key/value cache blocks used by running choices.",
    labels=("model",),
)
PREFIX_LOOKUPS = Family(
    name="sie_prefix_cache_lookups_total",
    kind="counter",
    help="Prompts whose beginning was looked up in the cache.",
    labels=("model",),
)
PREFIX_HITS = Family(
    name="sie_prefix_cache_hits_total",
    kind="counter",
    help="Prompts whose beginning was at least partly in the cache.",
    labels=("model",),
)
PREFIX_EVICTIONS = Family(
    name="sie_prefix_cache_evictions_total",
    kind="counter",
    help="Cached blocks that were reused for other tokens.",
    labels=("model",),
)
PROMPT_TOKENS = Family(
    name="sie_prompt_tokens_total",
    kind="counter",
    help="Prefilled prompt tokens, without those from the cache.",
    labels=("model",),
)
GENERATED_TOKENS = Family(
    name="sie_generated_tokens_total",
    kind="counter",
    help="Tokens that were generated.",
    labels=("model",),
)
GENERATION_STEP = Family(
    name="sie_generation_step_seconds",
    kind="histogram",
    help="Time of one step of a generating model.",
    labels=("model",),
    bounds=STEP_DURATION_BOUNDS,
)
FIRST_TOKEN = Family(
    name="sie_time_to_first_token_seconds",
    kind="histogram",
    help="Time from a request's submission to its first token.",
    labels=("model",),
    bounds=HTTP_DURATION_BOUNDS,
)
TOKEN_GAP = Family(
    name="sie_inter_token_latency_seconds",
    kind="histogram",
    help="Time between the tokens of two steps of a request.",
    labels=("model",),
    bounds=STEP_DURATION_BOUNDS,
)
