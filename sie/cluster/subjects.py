"""Names the subjects, streams and consumers of a cluster. Pure.

    sie.v1.POOL.work.PROFILE.BUNDLE.MODEL   work items, in the stream SIE_WORK_POOL
    sie.v1.POOL.work.PROFILE.BUNDLE.MODEL.LEASE   the same, for the hosts of a leased pool (`sie.cluster.pools`)
    sie.v1.POOL.dead.PROFILE.BUNDLE.MODEL   items that are not tried again, in the stream SIE_DEAD_POOL
    sie.v1.POOL.host.HOST.beat|cards|load|text|count|cancel
    sie.v1.POOL.wake                        a gateway asks all hosts for a heartbeat now
    sie.v1.gateway.GATEWAY.beat
    sie.v1.gateway.GATEWAY.POOL.result|taken|text   answers of a pool's hosts

    $KV.SIE_STATE_v1.KEY                    documents that all share, in the stream KV_SIE_STATE_v1

Wildcards in an account's permissions so separate pools, and gateways from hosts.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final, NamedTuple

from sie.cluster.payloads import VERSION

_ROOT: Final = f"sie.v{VERSION}"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_=-]")
_MAX_TOKEN_CHARS: Final = 60
DEFAULT_POOL: Final = "default"
ANY: Final = "any"
"""The token of a machine profile or bundle that is not set."""


STATE_STREAM: Final = f"KV_SIE_STATE_v{VERSION}"
"""The stream under the bucket of the documents that all processes of a cluster share."""


class Lane(NamedTuple):
    """Hosts that are alike: those of one pool, machine profile and bundle."""

    pool: str
    profile: str
    bundle: str
    lease: str = ""
    """The leased pool that the hosts work for; empty for none."""


@lru_cache(1024)
def token(name: str) -> str:
    """Return a name as one token of a subject: `/` is `__`, `.` is `_dot_`, other special characters `_` and a hash."""
    plain = name.replace("/", "__").replace(".", "_dot_")
    safe = _UNSAFE.sub("_", plain)
    if safe == plain and len(safe) <= _MAX_TOKEN_CHARS:
        return safe or "_"
    digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return f"{safe[:_MAX_TOKEN_CHARS]}-{digest}"


def lane_of(pool: str, profile: str, bundle: str) -> Lane:
    """Return the lane of a host's settings."""
    return Lane(pool or DEFAULT_POOL, profile.lower() or ANY, bundle or ANY)


def work_subject(lane: Lane, model: str) -> str:
    """Return the subject of a model's work items."""
    return f"{_ROOT}.{token(lane.pool)}.work.{'.'.join(_place(lane, model))}"


def dead_subject(lane: Lane, model: str) -> str:
    """Return the subject of a model's dead letters."""
    return f"{_ROOT}.{token(lane.pool)}.dead.{'.'.join(_place(lane, model))}"


def all_work(pool: str) -> str:
    """Return the subjects of a pool's work."""
    return f"{_ROOT}.{token(pool)}.work.>"


def all_dead(pool: str) -> str:
    """Return the subjects of a pool's dead letters."""
    return f"{_ROOT}.{token(pool)}.dead.>"


def work_stream(pool: str) -> str:
    """Return the stream of a pool's work."""
    return f"SIE_WORK_{token(pool)}"


def dead_stream(pool: str) -> str:
    """Return the stream of a pool's dead letters."""
    return f"SIE_DEAD_{token(pool)}"


def payload_bucket(pool: str) -> str:
    """Return the object store of a pool's large payloads."""
    return f"SIE_PAYLOADS_{token(pool)}"


def consumer_name(lane: Lane, model: str) -> str:
    """Return the durable consumer of a profile, bundle and model."""
    return "~".join(_place(lane, model))  # no token has this character, so two places never have one name


def _place(lane: Lane, model: str) -> list[str]:
    """Return the tokens of a model's place in its pool."""
    names = [lane.profile, lane.bundle, model, *([lane.lease] if lane.lease else [])]
    return [token(name) for name in names]


def state_subject(key: str) -> str:
    """Return the subject of a document that all processes of a cluster share; key `>` is any."""
    return f"$KV.{STATE_STREAM.removeprefix('KV_')}.{key}"


def host_subject(pool: str, host: str, kind: str) -> str:
    """Return a subject of one host; host `*` is any."""
    return f"{_ROOT}.{token(pool)}.host.{host}.{kind}"


def any_host(kind: str) -> str:
    """Return a subject of the hosts of all pools."""
    return f"{_ROOT}.*.host.*.{kind}"


def wake_pattern() -> str:
    """Return the subject on which the hosts of all pools are asked: it has no pool, so every host listens to it."""
    return f"{_ROOT}.wake"


def gateway_beat(gateway: str) -> str:
    """Return the subject of a gateway's heartbeats; gateway `*` is any."""
    return f"{_ROOT}.gateway.{gateway}.beat"


def answer_subject(gateway: str, pool: str, kind: str) -> str:
    """Return the subject on which the hosts of a pool answer a gateway; pool `*` is any."""
    return f"{_ROOT}.gateway.{gateway}.{pool if pool == '*' else token(pool)}.{kind}"


def is_answer_of(subject: str, pool: str) -> bool:
    """Whether a message came on a subject that only the hosts of a pool may publish to."""
    return subject.split(".")[-2] == token(pool)
