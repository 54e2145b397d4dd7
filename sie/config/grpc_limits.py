"""The section of settings that bounds a gRPC client's connection. See `sie.config.settings`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sie.config.limits import MIB


class Grpc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one connection to the gRPC listener; `max_grpc_message_bytes` is in `limits`."""

    max_grpc_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Most connections at a time, within the limit of open files; others are closed at once.",
        ),
    ] = 8192
    max_grpc_streams: Annotated[
        int, Meta(ge=1, le=65536, description="Most calls of one connection at a time; clients queue the rest.")
    ] = 1024
    max_grpc_metadata_bytes: Annotated[
        int, Meta(ge=1024, le=MIB, description="Largest metadata of a call, 32 bytes for each entry included.")
    ] = 64 * 1024
    max_grpc_metadata_entries: Annotated[
        int,
        Meta(ge=16, le=65536, description="Most entries of a call's metadata; twice that closes the connection."),
    ] = 256
    grpc_window_bytes: Annotated[
        int,
        Meta(
            ge=65_535,
            le=1024 * MIB,
            description="Bytes that a client may send in one call before they are read; in a connection four times that.",
        ),
    ] = 4 * MIB
    max_grpc_held_bytes: Annotated[
        int,
        Meta(
            ge=MIB,
            le=1 << 40,
            description="Most bytes of messages that are incomplete, being served or unread by their clients, of all "
            "connections; an open stream counts for 32 KiB. Over it the connection with most bytes is cut.",
        ),
    ] = 1024 * MIB
    grpc_unread_timeout_s: Annotated[
        float,
        Meta(ge=0.1, le=600, description="Longest time that a client may read nothing of an answer; then it is cut."),
    ] = 30.0
    max_grpc_idle_frames_per_s: Annotated[
        int,
        Meta(
            ge=10,
            le=1 << 20,
            description="Work without a message, in frames (pings, resets, settings, small parts; large header blocks "
            "and settings of many calls count as several), on average over ten seconds; over it the connection is closed. "
            "Time in which a client's frames wait to be read does not count.",
        ),
    ] = 1000
    grpc_turn_ms: Annotated[
        float,
        Meta(
            ge=0.5,
            le=1000,
            description="Time for the frames of all connections before other work continues; the rest waits, and the "
            "least served connection comes first.",
        ),
    ] = 2.0
