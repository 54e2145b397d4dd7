"""The example of permissions in `deploy/nats/sie.conf`, on a real nats-server: what each identity needs, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nats
import nkeys
import pytest

from sie.cluster.payloads import VERSION, Beat, ModelBeat, encode
from tests.process.harness import WAIT_S, Server, eventually
from tests.process.nats_harness import Nats, start_gateway, start_host, start_nats, wait_for_hosts
from tests.process.wire import encode as ask
from tests.process.wire import get, post_json

EXAMPLE = Path(__file__).parents[2] / "deploy" / "nats" / "sie.conf"
IDENTITIES = {"hosts_a": "UHOSTSOFPOOLA", "hosts_b": "UHOSTSOFPOOLB", "gateways": "UGATEWAYS"}
MODELS = ("--model", "stub/a=stub:dense=16", "--model", "text=stub:generate", "--test")


class Bed(NamedTuple):
    """NATS with the example's permissions, a gateway of pool a, a host in each pool, and the folder of their seeds."""

    nats: Nats
    gateway: Server
    home: Path


def make_identity(home: Path, name: str) -> str:
    """Write an nkey's seed to a file, and return its public key."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    (home / f"{name}.nk").write_bytes(seed)
    return nkeys.from_seed(bytearray(seed)).public_key.decode()


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    home = tmp_path_factory.mktemp("nats")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "nats.key",
            "-out", "nats.pem", "-days", "2", "-subj", "/CN=nats", "-addext", "subjectAltName=IP:127.0.0.1",
        ],
        cwd=home, check=True, capture_output=True,
    )  # fmt: skip
    text = EXAMPLE.read_text().replace("/etc/nats/", f"{home}/").replace("/var/lib/nats", str(home / "store"))
    for name, placeholder in IDENTITIES.items():
        text = text.replace(placeholder, make_identity(home, name))
    (home / "sie.conf").write_text(text)

    def identity(name: str) -> tuple[str, ...]:
        return (
            "--nats-tls-ca", str(home / "nats.pem"), "--nats-credentials", str(home / f"{name}.nk"),
            "--nats-inbox-prefix", f"_INBOX_{name}",
        )  # fmt: skip

    with start_nats("-c", str(home / "sie.conf")) as running:
        url = running.url.replace("nats://", "tls://")
        with (
            start_host(url, *MODELS, "--pool", "a", *identity("hosts_a"), is_stopped=True),
            start_host(url, *MODELS, "--pool", "b", *identity("hosts_b"), is_stopped=True),
            start_gateway(url, "--pool", "a", *identity("gateways"), is_stopped=True) as gateway,
        ):
            wait_for_hosts(gateway, 2, "stub/a")
            yield Bed(running, gateway, home)


def violations(bed: Bed) -> list[str]:
    """Return what NATS refused; a host that is there first tries to make its pool's streams, and then waits for a gateway."""
    lines = bed.nats.log.read_text().splitlines()
    return [line for line in lines if "Violation" in line and "$JS.API.STREAM.CREATE." not in line]


def test_hosts_and_gateways_do_their_work_with_these_permissions(bed: Bed):
    for pool in ("a", "b"):
        headers = {"x-sie-pool": pool}
        eventually(lambda headers=headers: ask(bed.gateway.port, "stub/a", ["x"], headers).status == 200, "an answer")
        assert ask(bed.gateway.port, "stub/a", ["word " * 300_000], headers).status == 200, "by reference"
        body: dict[str, Any] = {"model": "text", "prompt": "hello", "max_tokens": 4}
        assert post_json(bed.gateway.port, "/v1/completions", body, headers).status == 200
        body = {"model": "text", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
        assert post_json(bed.gateway.port, "/v1/messages/count_tokens", body, headers).status == 200
    made = post_json(bed.gateway.port, "/v1/pools", {"name": "mine", "queue_pool": "b", "gpus": {"any": 1}})
    assert made.status == 201
    eventually(lambda: ask(bed.gateway.port, "stub/a", ["x"], {"x-sie-pool": "mine"}).status == 200, "the lease")
    config = {"sie_id": "stub/a", "profiles": {"half": {"adapter_options": {"runtime": {"output_dtype": "float16"}}}}}
    assert post_json(bed.gateway.port, "/v1/configs/models", config).status == 201
    status = "/v1/configs/models/stub/a/status"
    eventually(lambda: get(bed.gateway.port, status).json()["acked_workers"] == 2, "both run it")
    assert violations(bed) == []


async def attempt(bed: Bed, name: str, verb: str, subject: str, reply: str = "", data: bytes = b"{}") -> str:
    """Return what NATS says to an identity that publishes or subscribes."""
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_error(error: Exception) -> None:
        # NATS ends a connection whose handshake takes it two seconds, and the client connects again.
        if "permissions violation" in (text := str(error).lower()) and not said.done():
            said.set_result(text)

    client = await nats.connect(
        f"tls://127.0.0.1:{bed.nats.port}", tls=ssl.create_default_context(cafile=str(bed.home / "nats.pem")),
        nkeys_seed=str(bed.home / f"{name}.nk"), error_cb=on_error, inbox_prefix=f"_INBOX_{name}".encode(),
        connect_timeout=WAIT_S,  # 2 s otherwise
    )  # fmt: skip
    try:
        if verb == "publish":
            await client.publish(subject, data, reply=reply)
        else:
            await client.subscribe(subject)
        await client.flush(WAIT_S)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(said, WAIT_S)
        return "nothing"
    finally:
        await client.close()


REFUSED = [
    ("hosts_a", "subscribe", "sie.v1.b.work.>"),
    ("hosts_a", "subscribe", "sie.v1.>"),
    ("hosts_a", "subscribe", ">"),
    ("hosts_a", "subscribe", "sie.v1.a.work.>"),
    ("hosts_a", "subscribe", "sie.v1.b.host.*.text"),
    ("hosts_a", "subscribe", "_INBOX_hosts_b.>"),
    ("hosts_a", "subscribe", "_INBOX_gateways.>"),
    ("hosts_a", "subscribe", "$O.SIE_PAYLOADS_b.>"),
    ("hosts_a", "subscribe", "sie.v1.gateway.*.a.result"),
    ("hosts_a", "publish", "$JS.API.CONSUMER.CREATE.SIE_WORK_b.x.sie.v1.b.work.>"),
    ("hosts_a", "publish", "$JS.API.CONSUMER.DURABLE.CREATE.SIE_WORK_b.x"),
    ("hosts_a", "publish", "$JS.API.CONSUMER.MSG.NEXT.SIE_WORK_b.any~any~stub__a"),
    ("hosts_a", "publish", "$JS.API.STREAM.MSG.GET.SIE_WORK_b"),
    ("hosts_a", "publish", "$JS.API.DIRECT.GET.OBJ_SIE_PAYLOADS_b"),
    ("hosts_a", "publish", "$JS.API.STREAM.MSG.GET.OBJ_SIE_PAYLOADS_b"),
    ("hosts_a", "publish", "$JS.API.STREAM.CREATE.COPY"),
    ("hosts_a", "publish", "$JS.API.STREAM.CREATE.SIE_WORK_a"),
    ("hosts_a", "publish", "$JS.API.STREAM.UPDATE.SIE_WORK_a"),
    ("hosts_a", "publish", "$JS.API.STREAM.DELETE.SIE_WORK_b"),
    ("hosts_a", "publish", "$JS.ACK.SIE_WORK_b.any~any~stub__a.1.1.1.1.0"),
    ("hosts_a", "publish", "sie.v1.b.host.x.beat"),
    ("hosts_a", "publish", "sie.v1.gateway.x.b.result"),
    ("hosts_a", "publish", "sie.v1.gateway.x.beat"),
    ("hosts_a", "publish", "sie.v1.a.work.any.any.stub__a"),
    ("hosts_a", "publish", "$KV.SIE_STATE_v1.pools"),
    ("hosts_a", "publish", "$KV.SIE_STATE_v1.limits.x"),
    ("hosts_a", "publish", "_INBOX_gateways.x"),
    ("gateways", "publish", "sie.v1.a.host.x.beat"),
    ("gateways", "publish", "sie.v1.gateway.x.a.result"),
    ("gateways", "publish", "$JS.API.STREAM.UPDATE.SIE_WORK_a"),
    ("gateways", "publish", "$JS.API.STREAM.DELETE.SIE_WORK_a"),
    ("gateways", "publish", "$JS.API.STREAM.CREATE.REPUBLISHED"),
    ("gateways", "publish", "$JS.API.CONSUMER.CREATE.SIE_WORK_a.x.sie.v1.a.work.>"),
    ("gateways", "publish", "$JS.API.STREAM.MSG.GET.SIE_WORK_a"),
    ("gateways", "subscribe", "sie.v1.a.work.>"),
    ("gateways", "subscribe", "_INBOX_hosts_a.>"),
]


@pytest.mark.parametrize(("name", "verb", "subject"), REFUSED)
def test_an_identity_cannot_do_what_is_not_its_work(bed: Bed, name: str, verb: str, subject: str):
    assert "permissions violation" in asyncio.run(attempt(bed, name, verb, subject)), subject


def test_a_message_that_a_consumer_delivers_on_another_subject_is_no_heartbeat(bed: Bed):
    """A consumer's deliver subject is not checked by NATS, so a gateway could have the server send what it stored there."""
    beat = Beat(VERSION, "ghost", "ghost", "a", "any", "any", "k", {"stub/a": ModelBeat("loaded", is_served=True)})

    async def forge() -> None:
        client = await nats.connect(
            f"tls://127.0.0.1:{bed.nats.port}", tls=ssl.create_default_context(cafile=str(bed.home / "nats.pem")),
            nkeys_seed=str(bed.home / "gateways.nk"), inbox_prefix=b"_INBOX_gateways",
            connect_timeout=WAIT_S,
        )  # fmt: skip
        delivered = await client.subscribe("sie.v1.a.host.ghost.beat")
        await client.flush(WAIT_S)
        stream = client.jetstream(timeout=WAIT_S)
        await stream.publish("$O.SIE_PAYLOADS_a.C.ghost", encode(beat))
        config = {
            "deliver_subject": "sie.v1.a.host.ghost.beat",
            "ack_policy": "none",
            "filter_subject": "$O.SIE_PAYLOADS_a.C.ghost",
        }
        body = {"stream_name": "OBJ_SIE_PAYLOADS_a", "config": config}
        reply = await client.request(
            "$JS.API.CONSUMER.CREATE.OBJ_SIE_PAYLOADS_a", json.dumps(body).encode(), timeout=WAIT_S
        )
        assert b"error" not in reply.data, reply.data
        assert (await delivered.next_msg(WAIT_S)).subject == "$O.SIE_PAYLOADS_a.C.ghost"
        await client.close()

    asyncio.run(forge())
    said = "a heartbeat for another host is refused"
    eventually(lambda: any(said in line for line in bed.gateway.output.lines), "the gateway refuses it")
    eventually(lambda: len(get(bed.gateway.port, "/health").json()["workers"]) == 2, "the heartbeats of both")
    assert "ghost" not in get(bed.gateway.port, "/health").body.decode()
