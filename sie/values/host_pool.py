"""Defines a client's description of a pool of hosts. Source: SIE API reference, section 15."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
Count = Annotated[int, Meta(ge=0, le=100_000)]


class PoolBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/pools`. A field that is left out keeps its value where the pool exists."""

    name: Name
    queue_pool: Name | None = None
    gpus: Annotated[dict[Name, Count], Meta(max_length=64)] | None = None
    gpu_caps: Annotated[dict[Name, Count], Meta(max_length=64)] | None = None
    bundle: Annotated[str, Meta(max_length=200)] | None = None
    ttl_seconds: Annotated[int, Meta(ge=1, le=604_800)] | None = None
    minimum_worker_count: Count | None = None
    pinned_models: Annotated[list[Annotated[str, Meta(max_length=500)]], Meta(max_length=256)] | None = None
