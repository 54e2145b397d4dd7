"""The section of settings for text generation. See `sie.config.settings`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from sie.config.limits import MIB

MAX_TENSOR_PARALLEL: Final = 16
GPU_PREFILL_TOKENS: Final = 4096
"""`max_prefill_tokens` on a GPU."""


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Generating text: memory, steps, streams and limits (docs/generation.md)."""

    weights: Annotated[
        Literal["auto", "float32", "bfloat16", "int8", "int4"],
        Meta(description="Format of a generating model's weights; auto uses the format of `dtype`."),
    ] = "auto"
    tensor_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_TENSOR_PARALLEL,
            description="Number of devices that each hold a part of a generating model and run its steps together; a section "
            "of `catalog` sets it for one model (docs/generation.md).",
        ),
    ] = 1
    kv_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 42,
            description="Key/value cache of each generating model; 0 uses 1 GiB on a CPU, and on a GPU "
            "`kv_cache_share` of the memory that the largest step leaves, below `memory_pressure_pct`, divided among the "
            "models that are to be there.",
        ),
    ] = 0
    kv_cache_share: Annotated[
        float,
        Meta(
            ge=0.05,
            le=0.98,
            description="Share of a GPU's memory for key/value caches, of what the largest step leaves free.",
        ),
    ] = 0.85
    kv_cache_min_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description="Tokens for which a generating model's cache must have room on a GPU, or its whole context if that is "
            "shorter: with less free, other models are unloaded first, or the load is refused.",
        ),
    ] = 8192
    kv_cache_lazy_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.95,
            description="Most of a GPU's memory that a key/value cache leaves to lazy models, of what is free beside the models "
            "that are wanted now; lazy models that do not fit in it unload others. 0 leaves none.",
        ),
    ] = 0.5
    kv_block_tokens: Annotated[
        int, Meta(ge=8, le=256, description="Tokens of a key/value cache block, the unit of sharing.")
    ] = 32
    prefix_cache: Annotated[bool, Meta(description="Share the cache blocks of equal beginnings between prompts.")] = (
        True
    )
    max_sequences: Annotated[
        int, Meta(ge=1, le=4096, description="Most choices of a model that run at once; others wait.")
    ] = 64
    max_prefill_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 20, description="Most prompt tokens in a step beside running choices; 0 uses 256 on a CPU, "
             "512 there while none is running, and 4096 on a GPU."),
    ] = 0  # fmt: skip
    token_gap_ms: Annotated[
        float,
        Meta(ge=0, le=60_000, description="Time that a step with running choices may take because of prompts beside them: their "
             "chunks become smaller until it does not take longer; 0 sets no time."),
    ] = 250.0  # fmt: skip
    first_token_ms: Annotated[
        float,
        Meta(ge=0, le=600_000, description="Wait for a first token after which `token_gap_ms` no longer makes chunks smaller."),
    ] = 2000.0  # fmt: skip
    max_context_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 24, description="Most tokens of a prompt and its answer; 0 uses the model's own limit."),
    ] = 0
    max_choices: Annotated[int, Meta(ge=1, le=64, description="Most choices (`n`) of a request; over it is 400.")] = 16
    max_logprobs: Annotated[
        int,
        Meta(ge=0, le=256, description="Most alternatives reported beside each chosen token; over it is 400."),
    ] = 20
    max_answer_logprobs: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 32,
            description="Most log probabilities of an answer: its tokens, and with `echo` those of its prompts for each choice, "
            "times 1 + the alternatives that are asked for. Over it is 400; an answer without `max_tokens` ends at it.",
        ),
    ] = 1 << 20
    prompt_logits_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 36,
            description="Memory for a step's prompt logits, for requests of prompt log probabilities (`echo` with "
            "`logprobs`); with less, such prompts have smaller prefill chunks.",
        ),
    ] = 64 * MIB
    max_stop_strings: Annotated[int, Meta(ge=0, le=1024, description="Most stop strings; over it is 400.")] = 16
    max_stop_chars: Annotated[
        int, Meta(ge=1, le=65536, description="Longest stop string, in characters; over it is 400.")
    ] = 256
    max_tools: Annotated[int, Meta(ge=0, le=4096, description="Most tools of a request; over it is 400.")] = 128
    max_messages: Annotated[int, Meta(ge=1, le=65536, description="Most messages of a chat; over it is 400.")] = 2048
    max_generation_body_bytes: Annotated[
        int, Meta(ge=1024, le=1024 * MIB, description="Largest body of a generation request; over it is 413.")
    ] = 50 * MIB
    max_grammar_bytes: Annotated[
        int, Meta(ge=64, le=16 * MIB, description="Largest schema or grammar; over it is 400.")
    ] = 256 * 1024
    grammar_timeout_s: Annotated[
        float, Meta(ge=0.1, le=60, description="Longest time a grammar may take to compile; over it is 400.")
    ] = 5.0
    template_timeout_s: Annotated[
        float, Meta(ge=0.1, le=60, description="Longest time a chat template may take; over it is 400.")
    ] = 2.0
    generation_timeout_s: Annotated[
        float, Meta(ge=1, le=86400, description="Longest time from the first token to the last.")
    ] = 3600.0
    stream_idle_timeout_s: Annotated[
        float, Meta(ge=1, le=3600, description="Longest time between two tokens; over it the request fails.")
    ] = 60.0
    keep_alive_interval_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Time without an event after which a stream gets a comment; the variable `KEEP_ALIVE_INTERVAL` "
            "also sets it, if it is a valid number.",
            extra={"known_as": "KEEP_ALIVE_INTERVAL"},
        ),
    ] = 10_000
    stream_backlog_bytes: Annotated[
        int,
        Meta(
            ge=65536,
            le=1 << 30,
            description="Most bytes that a client may leave unread before its stream is cut; a part over an eighth of it, such as a prompt that `echo` repeats, does not count.",
        ),
    ] = 8 * MIB
    chat_template: Annotated[
        str,
        Meta(
            description="Jinja file with the chat template for models without their own; empty uses a plain transcript."
        ),
    ] = ""
    max_responses: Annotated[
        int,
        Meta(ge=0, le=1 << 24, description="Responses kept for `/v1/responses/{id}`; the oldest that ended go first."),
    ] = 10_000
    max_responses_bytes: Annotated[
        int,
        Meta(
            ge=MIB, le=1 << 44, description="Disk space of all kept responses together; the oldest that ended go first."
        ),
    ] = 4096 * MIB
    max_response_stream_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 30,
            description="Most bytes of events kept of a streamed response for a later read; over it none are kept.",
        ),
    ] = 4 * MIB
    max_background_responses: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Responses that a frontend generates at once; over it a background response is 503.",
        ),
    ] = 1024
    max_response_age_s: Annotated[float, Meta(ge=1, le=1e9, description="How long a response is kept.")] = 30 * 86400.0
