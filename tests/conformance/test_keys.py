"""API keys, TLS and refusals, with unmodified clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from sie_sdk import SIEAsyncClient, SIEClient
from sie_sdk.client import RequestError
from sie_sdk.client.errors import RateLimitError

from tests.process.harness import start_server
from tests.process.keys import ADMIN, BOTH, INFER, entry, write_keys

ONCE = "sie_test-once-0123456789abcdef"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = write_keys(
        tmp_path_factory.mktemp("keys") / "keys.toml",
        *(entry(f"once-{i}", f"{ONCE}{i}", ["infer"], requests_per_minute=1) for i in range(2)),
    )
    with start_server("--model", "stub/a=stub:dense=16,score", "--api-keys", str(path)) as running:
        yield running


def test_sie_sdk_sends_its_key(server):
    with SIEClient(server.url, api_key=INFER) as client:
        assert np.shape(client.encode("stub/a", {"text": "x"})["dense"]) == (16,)
        assert client.list_models()[0]["name"] == "stub/a"

    async def main() -> None:
        async with SIEAsyncClient(server.url, api_key=INFER) as client:
            assert (await client.score("stub/a", {"text": "q"}, [{"text": "d"}]))["scores"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("key", "status", "code"), [("", 401, "UNAUTHORIZED"), ("sie_x", 401, "UNAUTHORIZED"), (ADMIN, 403, "FORBIDDEN")]
)
def test_sie_sdk_raises_the_reason_of_a_refusal(server, key, status, code):
    with SIEClient(server.url, api_key=key) as client, pytest.raises(RequestError) as refused:
        client.encode("stub/a", {"text": "x"})
    assert (refused.value.status_code, refused.value.code) == (status, code)


@pytest.mark.parametrize(
    ("key", "status", "code"), [("", 401, "UNAUTHORIZED"), (ADMIN, 403, "FORBIDDEN"), (INFER, 404, "MODEL_NOT_FOUND")]
)
def test_sie_sdk_is_told_our_codes_on_the_routes_that_openai_s_clients_share(server, key, status, code):
    """It reads OpenAI's `error` before our `detail`, and a header before both."""
    with SIEClient(server.url, api_key=key) as client, pytest.raises(RequestError) as refused:
        client.get_model("stub/none")
    assert (refused.value.status_code, refused.value.code) == (status, code)


def test_sie_sdk_watches_with_its_key(server):
    with SIEClient(server.url, api_key=BOTH) as client, contextlib.closing(client.watch(mode="worker")) as stream:
        frames = list(itertools.islice(stream, 2))
    assert all(frame["ready"] for frame in frames)
    with SIEClient(server.url, api_key=INFER) as client, pytest.raises(Exception, match="403"):
        next(iter(client.watch(mode="worker")))


def test_sie_sdk_knows_a_rate_limit(server):
    with SIEClient(server.url, api_key=f"{ONCE}0") as client:
        began_s = time.monotonic()
        client.encode("stub/a", {"text": "x"})
        with pytest.raises(RateLimitError) as limited:
            client.encode("stub/a", {"text": "x"}, provision_timeout_s=20)  # less than it would have to wait
    assert limited.value.code == "RATE_LIMIT"
    assert 59 - (time.monotonic() - began_s) <= limited.value.retry_after <= 60


@pytest.fixture
def oai(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=INFER, max_retries=0) as client:
        yield client


def test_openai_raises_its_own_errors(oai):
    assert oai.embeddings.create(model="stub/a", input="x").data[0].embedding
    assert next(model.id for model in oai.models.list()) == "stub/a"
    stranger = oai.with_options(api_key="sk-unknown")
    with pytest.raises(openai.AuthenticationError) as unknown:
        stranger.embeddings.create(model="stub/a", input="x")
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError) as unknown:
        stranger.models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        oai.with_options(api_key=ADMIN).embeddings.create(model="stub/a", input="x")
    assert forbidden.value.code == "insufficient_permissions"


def test_openai_knows_a_rate_limit(oai):
    once, began_s = oai.with_options(api_key=f"{ONCE}1"), time.monotonic()
    answer = once.embeddings.with_raw_response.create(model="stub/a", input="x")
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError) as limited:
        once.embeddings.create(model="stub/a", input="x")
    assert limited.value.code == "rate_limit_exceeded"
    left_s = 59 - (time.monotonic() - began_s)
    assert left_s <= int(limited.value.response.headers["retry-after"]) <= 60
