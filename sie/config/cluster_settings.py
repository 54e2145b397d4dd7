"""Defines the settings of a cluster (docs/cluster.md). Never imports slow modules."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from sie.config.limits import MIB


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Many hosts behind gateways, joined over NATS JetStream (docs/cluster.md)."""

    nats: Annotated[
        str,
        Meta(
            description="Address of NATS, `nats://HOST:4222`; several separated by commas. A server with it takes work "
            "from gateways; empty for a server on its own."
        ),
    ] = ""
    nats_tls_ca: Annotated[
        str, Meta(description="PEM file of the authority of NATS's certificate; then TLS is used.")
    ] = ""
    nats_credentials: Annotated[
        str,
        Meta(
            description="File of NATS credentials: a JWT and an nkey seed, or the seed alone; needs `pip install nkeys`."
        ),
    ] = ""
    nats_inbox_prefix: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.\-]+\Z",
            description="Prefix of the subjects on which NATS answers requests.",
            extra={"form": "letters, digits, dots, hyphens and underscores"},
        ),
    ] = "_INBOX"
    stream_storage: Annotated[
        Literal["memory", "file"],
        Meta(description="Where NATS keeps the work; gateways publish again what a restarted NATS has lost."),
    ] = "memory"
    stream_replicas: Annotated[int, Meta(ge=1, le=5, description="Copies of each stream among NATS servers.")] = 1
    stream_max_messages: Annotated[
        int, Meta(ge=1, le=1 << 31, description="Most work items that a pool's stream holds; over it requests get 503.")
    ] = 100_000
    stream_max_bytes: Annotated[
        int, Meta(ge=MIB, le=1 << 40, description="Most bytes of work items that a pool's stream holds.")
    ] = 256 * MIB
    payload_store_bytes: Annotated[
        int, Meta(ge=MIB, le=1 << 40, description="Most bytes of payloads over 1 MiB that wait in a pool's store.")
    ] = 1024 * MIB
    max_in_flight: Annotated[
        int,
        Meta(
            ge=1, le=1 << 24, description="Most unanswered work items of a gateway process; over it requests get 503."
        ),
    ] = 20_000
    max_pulled: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Most work items that a host has before it asks NATS for more; a message may bring several.",
        ),
    ] = 256
    max_text_runs: Annotated[
        int, Meta(ge=1, le=65536, description="Most answers that a host generates for gateways at a time.")
    ] = 256
    pool_ttl_s: Annotated[
        int,
        Meta(ge=5, le=604_800, description="Seconds after which a pool of `/v1/pools` expires that nobody renews."),
    ] = 300
    max_pools: Annotated[int, Meta(ge=0, le=2_000, description="Most pools that clients may create.")] = 100
    weights_root: Annotated[
        str,
        Meta(
            description="Directory of a host below which the weights_path of a model of `/v1/configs` lies; empty for none."
        ),
    ] = ""
    accept_configs: Annotated[
        bool, Meta(description="Whether a host takes the models and profiles of `/v1/configs`.")
    ] = True
    provided_profiles: Annotated[
        tuple[str, ...],
        Meta(
            description="Machine profile that an autoscaler can provide, also while no host has it: a gateway names it in "
            "the metric of demand; repeatable.",
            extra={"form": "NAME"},
        ),
    ] = field(default=(), name="provided_profile")
