"""Sparse and token vectors on a running server, with the unmodified SDK."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from sie_sdk import SIEClient
from sie_sdk.client import RequestError

from sie.values.muvera import Muvera
from sie.workers.requests.fixed_encoding import fixed_encoding
from tests.process.harness import WAIT_S, Server, start_server
from tests.process.wire import post_json, stub_rows, wait_no_extents

TEXTS = ["hello", "", "a text of some more tokens, ü"]
ALL = ["dense", "sparse", "multivector"]
WIDE = 4096
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "stub/all=stub:dense=8,sparse=1000,multivector=4",
        "--model", f"stub/wide=stub:multivector={WIDE}",
        "--model", "stub/dense=stub:dense=8",
        "--max-step-items", "2",
        "--reply-segment-bytes", str(MIB), "--request-segment-bytes", str(MIB), "--large-extent-bytes", str(MIB // 2),
        "--max-large-bytes", str(8 * MIB), "--max-pending-reply-bytes", str(16 * MIB), "--max-reply-bytes", str(12 * MIB),
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture(scope="module")
def client(server: Server) -> SIEClient:
    return SIEClient(f"http://127.0.0.1:{server.port}")


def stub_entries(text: str) -> list[int]:
    """Return a stub's sparse indices. Source: sie/catalog/stub.py."""
    digest = hashlib.shake_256(b"sparse" + text.encode()).digest(64)
    return sorted({int.from_bytes(digest[i : i + 4], "little") % 1000 for i in range(0, 64, 4)})


def stub_vectors(text: str) -> NDArray[np.float32]:
    encoded = text.encode()
    num_tokens = max(1, -(-len(encoded) // 4))
    digests = [hashlib.shake_256(row.to_bytes(4, "little") + encoded).digest(4) for row in range(num_tokens)]
    rows = np.frombuffer(b"".join(digests), np.int8).reshape(-1, 4).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("outputs", [ALL, ["sparse"], ["multivector"], ["multivector", "dense"], ["dense"]])
def test_sdk_gets_what_it_asked_for_and_nothing_else(client: SIEClient, outputs: list[str]) -> None:
    results = client.encode("stub/all", [{"text": text} for text in TEXTS], output_types=outputs)
    for text, result in zip(TEXTS, results, strict=True):
        assert [name for name in ALL if result.get(name) is not None] == [name for name in ALL if name in outputs]
        if "dense" in outputs:
            np.testing.assert_allclose(result["dense"], stub_rows([text], 8)[0], rtol=1e-6)
        if "sparse" in outputs:
            assert result["sparse"]["indices"].tolist() == stub_entries(text)
            expected = [(1 + index % 127) / 127 for index in stub_entries(text)]
            np.testing.assert_allclose(result["sparse"]["values"], expected, rtol=1e-6)
        if "multivector" in outputs:
            np.testing.assert_allclose(result["multivector"], stub_vectors(text), rtol=1e-5)


@pytest.mark.parametrize("is_query", [True, False], ids=["query", "document"])
def test_multivectors_become_one_dense_vector_by_option(client: SIEClient, is_query: bool) -> None:
    muvera = Muvera(num_repetitions=3, projection_dim=2)
    options = {"muvera": {"num_repetitions": 3, "projection_dim": 2}, "is_query": is_query}
    results = client.encode("stub/all", [{"text": text} for text in TEXTS], options=options)
    expected = [fixed_encoding(stub_vectors(text), muvera, is_query=is_query) for text in TEXTS]
    np.testing.assert_allclose([result["dense"] for result in results], expected, atol=1e-6)
    with pytest.raises(RequestError, match="does not support option 'muvera'"):
        client.encode("stub/dense", {"text": "a"}, options={"muvera": {}})


def test_json_holds_the_same_as_msgpack(server: Server, client: SIEClient) -> None:
    body = {"items": [{"id": "x", "text": TEXTS[2]}], "params": {"output_types": ALL, "output_dtype": "float16"}}
    [item] = post_json(server.port, "/v1/encode/stub/all", body).json()["items"]
    packed = client.encode("stub/all", {"text": TEXTS[2]}, output_types=ALL, output_dtype="float16")
    assert list(item) == ["id", *ALL]
    assert item["dense"]["values"] == packed["dense"].tolist()
    assert item["sparse"]["values"] == packed["sparse"]["values"].tolist()
    assert item["multivector"]["values"] == packed["multivector"].tolist()
    assert (item["multivector"]["token_dims"], item["multivector"]["num_tokens"]) == (4, 8)


def test_output_that_a_model_lacks_is_refused(client: SIEClient) -> None:
    with pytest.raises(
        RequestError, match=r"'stub/dense' does not support output type 'sparse'. Available: \['dense'\]"
    ):
        client.encode("stub/dense", {"text": "x"}, output_types=["sparse"])


def test_reply_over_its_limit_is_refused_and_the_next_one_served(server: Server) -> None:
    over = {"items": [{"text": "x" * 4000}], "params": {"output_types": ["multivector"]}}
    response = post_json(server.port, "/v1/encode/stub/wide", over)
    assert (response.status, response.json()["detail"]["code"]) == (400, "INVALID_INPUT")
    assert "max_reply_bytes" in response.json()["detail"]["message"]
    over["items"] = [{"text": "x"}]
    assert post_json(server.port, "/v1/encode/stub/wide", over).status == 200


def test_more_replies_than_memory_wait_or_are_refused_and_all_comes_back(server: Server) -> None:
    """Thirty replies of 3 MiB, with room for two of them and for five more in the worker."""
    answers: list[tuple[int, str | None, str | None]] = []
    body = {"items": [{"text": "x" * 800}], "params": {"output_types": ["multivector"]}}

    def ask() -> None:
        response = post_json(server.port, "/v1/encode/stub/wide", body)
        code = None if response.status == 200 else response.json()["detail"]["code"]
        answers.append((response.status, response.headers.get("retry-after"), code))

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(answers) == 30
    assert answers.count((200, None, None)) >= 2
    assert set(answers) <= {(200, None, None), (503, "5", "RESOURCE_EXHAUSTED")}
    wait_no_extents(server.port)
    assert post_json(server.port, "/v1/encode/stub/wide", body).status == 200
