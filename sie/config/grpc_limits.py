"""The section of settings that bounds a gRPC client's connection. See `sie.config.settings`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sie.config.limits import MIB


class Grpc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one connection to the gRPC listener may hold and do; `max_grpc_message_bytes` is in `limits`."""

    max_grpc_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Most connections at a time, as far as the limit of open files allows; others are closed at once.",
        ),
    ] = 8192
    max_grpc_streams: Annotated[
        int, Meta(ge=1, le=65536, description="Most calls of one connection at a time; clients queue the rest.")
    ] = 1024
    max_grpc_metadata_bytes: Annotated[
        int, Meta(ge=1024, le=MIB, description="Largest metadata of a call, 32 bytes for each entry included.")
    ] = 64 * 1024
    max_grpc_metadata_entries: Annotated[
        int, Meta(ge=16, le=65536, description="Most entries of a call's metadata; twice that ends the connection.")
    ] = 256
    grpc_window_bytes: Annotated[
        int,
        Meta(
            ge=65_535,
            le=1024 * MIB,
            description="Bytes that a client may send of one call before they are read; of a connection four times that.",
        ),
    ] = 4 * MIB
    max_grpc_held_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 40,
            description="Most bytes of messages that are not there whole, that are being served, or that their clients "
            "have not read, of all connections; an open stream counts for 32 KiB. Over it the one that holds most is cut.",
        ),
    ] = 1024 * MIB
    grpc_unread_timeout_s: Annotated[
        float,
        Meta(ge=0.1, le=600, description="Longest time in which a client reads nothing of an answer; then it is cut."),
    ] = 30.0
    max_grpc_idle_frames_per_s: Annotated[
        int,
        Meta(
            ge=10,
            le=1 << 20,
            description="Work that brings no message, in frames (pings, resets, settings, small parts; large header blocks "
            "and settings of many calls are several), on average over ten seconds; over it the connection is ended.",
        ),
    ] = 1000
    grpc_turn_ms: Annotated[
        float,
        Meta(
            ge=0.5,
            le=1000,
            description="Time for the frames of all connections before other work goes on; the rest waits, and the "
            "connection that was served least comes first.",
        ),
    ] = 2.0
