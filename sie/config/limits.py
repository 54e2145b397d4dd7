"""The section of settings that bounds a client's requests: sizes, counts and times. See `sie.config.settings`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

MIB = 1 << 20


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one request, and of waiting work."""

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
        Meta(ge=1, le=1 << 20, description="Most items times labels for a model that reads each pair; over it is 400."),
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
            description="Most spans of a window over the threshold, from which GLiNER chooses entities; over it is 400.",
        ),
    ] = 16384
    max_relation_candidates: Annotated[
        int,
        Meta(
            ge=2,
            le=4096,
            description="Number of first entities of a window between which GLiNER looks for relations; most entities of an item for GLiREL.",
        ),
    ] = 100
    max_relation_scores: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 30,
            description="Most scores of a request to GLiREL: the pairs of each item's entities, both ways, times labels; over "
            "it is 400.",
        ),
    ] = 1 << 21
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
    max_image_bytes: Annotated[int, Meta(ge=1, le=256 * MIB, description="Largest image file; over it is 400.")] = (
        20 * MIB
    )
    max_image_pixels: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 30,
            description="Most pixels of an image, checked before it is decoded; for a model without one fixed image size, "
            "of a request's images together. Decoding takes up to 16 bytes a pixel and thread.",
        ),
    ] = 1 << 25
    max_queued_images: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Most images waiting to be decoded in a frontend; a request over it gets 503 QUEUE_FULL.",
        ),
    ] = 1024
    max_depth: Annotated[int, Meta(ge=4, le=500, description="Deepest nesting of a JSON or msgpack body.")] = 64
    max_compression_ratio: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Most times a compressed body may grow beyond 1 MiB (tensor routes only)."),
    ] = 100
    max_tensor_values: Annotated[
        int,
        Meta(ge=1, le=1 << 30, description="Most elements of a request's tensors in JSON, or typed over gRPC."),
    ] = 1 << 22
    max_client_regions: Annotated[
        int,
        Meta(
            ge=0,
            le=65536,
            description="Most regions of shared memory that the clients with one API key may register (docs/tensors.md); 0: "
            "none, and tensors cross in requests only.",
        ),
    ] = 0
    max_client_region_bytes: Annotated[
        int, Meta(ge=1, le=1 << 40, description="Largest region of shared memory that a client may register.")
    ] = 1024 * MIB
    client_region_users: Annotated[
        tuple[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], ...],
        Meta(
            description="Number of a user, other than the server's own, whose shared memory clients may register; repeatable.",
            extra={"form": "UID"},
        ),
    ] = field(default=(), name="client_region_user")
    max_reply_bytes: Annotated[
        int, Meta(ge=4096, le=1024 * MIB, description="Largest reply, measured as the bytes of its vectors.")
    ] = 64 * MIB
    max_queued_tokens: Annotated[
        int,
        Meta(
            ge=1, le=1 << 32, description="Most tokens waiting for one worker; a request over it gets 503 QUEUE_FULL."
        ),
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
            description="Lowest average speed of a request body that takes over `body_idle_timeout_s`; below it is 408.",
        ),
    ] = 1024
    unread_timeout_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=600,
            description="Longest time that an HTTP client may read nothing of an answer; then it is cut.",
        ),
    ] = 30.0
    max_held_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 40,
            description="Most bytes of HTTP request bodies and unread answers in a frontend; over it the connection with "
            "most bytes is cut.",
        ),
    ] = 512 * MIB
