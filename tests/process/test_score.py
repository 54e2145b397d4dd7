"""Scores on a running server: `/v1/score`, `/v1/rerank`, and the unmodified SDK."""

from __future__ import annotations

import hashlib
import struct
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
from sie_sdk import SIEClient
from sie_sdk.client import RequestError

from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.wire import MSGPACK, Client, Response, dense_rows, get, post_json, stub_rows, total, wait_no_extents
from tests.tiny_models import POISON, save_cross_encoder

MAX_CANDIDATES = 40
DOCUMENTS = ["alpha", "β", "", "the fourth text is a little longer than the others", "alpha"]
WORDS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10", "w11 w1 w2"]


def stub_score(query: str, document: str) -> float:
    """Return what a stub must answer. Source: the stub runner's docstring."""
    head = query.encode()
    digest = hashlib.shake_256(struct.pack("<I", len(head)) + head + document.encode()).digest(3)
    return int.from_bytes(digest, "little") / 2**24


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("cross-encoder"))


@pytest.fixture(scope="module")
def server(cross_encoder: Path) -> Iterator[Server]:
    with start_server(
        "--model", "stub/both=stub:score=1,dense=16",
        "--model", "stub/dense=stub:dense=16",
        "--model", f"tiny/ce={cross_encoder}",
        "--dtype", "float32",
        "--max-candidates", str(MAX_CANDIDATES),
        "--max-item-text-bytes", "65536",
        "--max-step-items", "7",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


def score(server: Server, model: str, query: str, documents: list[str], **fields: object) -> Response:
    body = {"query": {"text": query}, "items": [{"text": text} for text in documents], **fields}
    return post_json(server.port, f"/v1/score/{model}", body)


def scores_by_index(response: Response) -> list[float]:
    assert response.status == 200, response.body[:500]
    entries = {entry["item_id"]: entry["score"] for entry in response.json()["scores"]}
    return [entries[f"item-{index}"] for index in range(len(entries))]


def message(response: Response, status: int = 400) -> str:
    assert response.status == status, response.body[:500]
    assert response.headers["content-type"] == "application/json"
    return response.json()["detail"]["message"]


def test_json_reply_is_ranked_and_names_items_that_have_no_id(server: Server) -> None:
    response = score(server, "stub/both", "q", DOCUMENTS)
    expected = [stub_score("q", document) for document in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    body = response.json()
    assert list(body) == ["model", "query_id", "scores", "usage"]
    assert (body["model"], body["query_id"]) == ("stub/both", None)
    assert body["scores"] == [
        {"item_id": f"item-{index}", "score": expected[index], "rank": rank} for rank, index in enumerate(order)
    ]
    assert list(body["usage"]) == ["input_tokens"]
    first, second = (entry["rank"] for entry in body["scores"] if entry["item_id"] in ("item-0", "item-4"))
    assert second == first + 1  # equal texts keep their order
    assert order.index(0) < order.index(4)


def test_msgpack_reply_holds_float64_and_echoes_ids(server: Server) -> None:
    body = {"query": {"id": "mine", "text": "q"}, "items": [{"text": "a", "id": "x"}, {"text": "b"}]}
    with Client(server.port) as client:
        response = client.request(
            "POST", "/v1/score/stub/both", msgpack.packb(body), {"content-type": MSGPACK, "accept": "*/*"}
        )
    assert response.headers["content-type"] == MSGPACK
    unpacked = response.unpack()
    assert unpacked["query_id"] == "mine"
    assert {entry["item_id"]: entry["score"] for entry in unpacked["scores"]} == {
        "x": stub_score("q", "a"),
        "item-1": stub_score("q", "b"),
    }
    assert response.body.count(b"\xa5score\xcb") == 2


def test_headers_tell_the_times_and_the_server(server: Server) -> None:
    headers = score(server, "stub/both", "q", ["a"]).headers
    for name in ("x-queue-time", "x-tokenization-time", "x-inference-time", "x-total-time"):
        assert float(headers[name]) >= 0
    assert headers["x-sie-served-by"] == "local"
    assert len(headers["x-sie-runtime-instance"]) == 64
    assert headers["x-sie-server-version"] == "0.10.1"


@pytest.mark.parametrize("fields", [{"instruction": "Find"}, {"options": {"instruction": "Find"}}])
def test_instruction_is_put_before_the_query(server: Server, fields: dict[str, object]) -> None:
    assert scores_by_index(score(server, "stub/both", "q", ["a"], **fields)) == [stub_score("Find q", "a")]


def test_cross_encoder_equals_sentence_transformers(server: Server, cross_encoder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import CrossEncoder

        oracle = CrossEncoder(str(cross_encoder), device="cpu", local_files_only=True)
    documents = [" ".join(WORDS[: i % 4 + 1] * (i + 1)) for i in range(MAX_CANDIDATES)]  # the longest are cut
    expected = oracle.predict([("w20 w21 w22", document) for document in documents])
    scores = scores_by_index(score(server, "tiny/ce", "w20 w21 w22", documents))
    assert np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-4)


def test_score_that_is_not_finite_fails_its_own_request_only(server: Server) -> None:
    good: list[Response] = []
    neighbours = [
        threading.Thread(target=lambda: good.append(score(server, "tiny/ce", "w1", WORDS * 8))) for _ in range(3)
    ]
    for thread in neighbours:
        thread.start()
    bad = score(server, "tiny/ce", "w1", [*WORDS, POISON])
    for thread in neighbours:
        thread.join(WAIT_S)
    assert message(bad, 500) == "Model 'tiny/ce' produced non-finite scores"
    assert bad.code() == "INFERENCE_ERROR"
    alone = scores_by_index(score(server, "tiny/ce", "w1", WORDS))
    assert len(good) == 3
    for response in good:
        np.testing.assert_allclose(scores_by_index(response), alone * 8, rtol=1e-3, atol=1e-4)


def test_one_model_encodes_and_scores_at_once(server: Server) -> None:
    faults: list[str] = []

    def ask(seed: int) -> None:
        with Client(server.port) as client:
            for number in range(20):
                texts = [f"{seed} {number} {i}" for i in range(9)]
                if (seed + number) % 2:
                    rows = dense_rows(client.encode("stub/both", texts))
                    if not np.array_equal(rows, stub_rows(texts, 16)):
                        faults.append(f"rows of {seed} {number}")
                else:
                    found = scores_by_index(score(server, "stub/both", str(seed), texts))
                    if found != [stub_score(str(seed), text) for text in texts]:
                        faults.append(f"scores of {seed} {number}")

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not faults


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"items": []}, "Field 'items' must not be empty"),
        ({"items": [{"text": "x"}] * (MAX_CANDIDATES + 1)}, f"at most {MAX_CANDIDATES} items"),
        ({"items": [{"text": 1}]}, "$.items[0].text"),
        ({"query": None}, "$.query"),
        ({"query": {}}, "requires text input - at `$.query`"),
        ({"items": [{"text": "x"}, {"id": "y"}]}, "requires text input - at `$.items[1]`"),
        ({"query": {"text": "x" * 70_000}}, "Field 'query' must hold at most 65536 bytes"),
        ({"items": [{"text": "x" * 70_000}]}, "Field 'items[0]' must hold at most 65536 bytes"),
        ({"query": {"text": "x", "metadata": 5}}, "$.query.metadata"),
        ({"instruction": 5}, "$.instruction"),
        ({"options": []}, "$.options"),
        ({"options": {"instruction": 5}}, "$.options.instruction"),
        ({"options": {"profile": "fast"}}, "Profile 'fast' not found"),
        ({"options": {"lora_id": "x"}}, "does not support option 'lora_id'"),
    ],
)
def test_bad_request_is_named(server: Server, fields: dict[str, object], part: str) -> None:
    body = {"query": {"text": "q"}, "items": [{"text": "a"}], **fields}
    response = post_json(server.port, "/v1/score/stub/both", body)
    assert part in message(response)
    assert response.code() == "INVALID_INPUT"


def test_query_beside_every_document_counts_as_often(server: Server) -> None:
    body = {"query": {"text": "q"}, "instruction": "i" * 1_000_000, "items": [{"text": "x"}] * MAX_CANDIDATES}
    response = post_json(server.port, "/v1/score/stub/both", body)
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert "characters of the texts, over max_body_bytes" in response.json()["detail"]["message"]


def test_missing_fields_are_named(server: Server) -> None:
    assert "query" in message(post_json(server.port, "/v1/score/stub/both", {"items": [{"text": "a"}]}))
    assert "items" in message(post_json(server.port, "/v1/score/stub/both", {"query": {"text": "a"}}))


def test_model_that_cannot_do_it_is_refused(server: Server) -> None:
    assert message(score(server, "stub/dense", "q", ["a"])).startswith("Model 'stub/dense' does not support scoring. ")
    response = post_json(server.port, "/v1/encode/tiny/ce", {"items": [{"text": "a"}]})
    assert message(response) == "Model 'tiny/ce' does not support output type 'dense'. Available: ['score']"


def test_body_is_judged_before_the_model(server: Server) -> None:
    assert post_json(server.port, "/v1/score/none", {"items": 5}).status == 400
    unknown = score(server, "stub/bot", "q", ["a"])
    assert unknown.code() == "MODEL_NOT_FOUND"
    assert message(unknown, 404).startswith("Model 'stub/bot' not found Did you mean 'stub/both'")


def test_model_list_shows_the_output(server: Server) -> None:
    shown = {info["name"]: info for info in get(server.port, "/v1/models").json()["models"]}
    assert shown["stub/both"]["outputs"] == ["dense", "score"]
    assert (shown["tiny/ce"]["outputs"], shown["tiny/ce"]["dims"]) == (["score"], {})
    assert shown["tiny/ce"]["max_sequence_length"] == 64


def rerank(server: Server, **fields: object) -> Response:
    body = {"model": "stub/both", "query": "q", "documents": DOCUMENTS, **fields}
    return post_json(server.port, "/v1/rerank", body)


def test_rerank_answers_in_coheres_shape(server: Server) -> None:
    expected = [stub_score("q", document) for document in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    body = rerank(server).json()
    assert list(body) == ["model", "results", "usage"]
    assert body["results"] == [{"index": index, "relevance_score": expected[index]} for index in order]
    short = rerank(server, top_n=2, return_documents=True).json()["results"]
    assert [(result["index"], result["document"]) for result in short] == [
        (index, {"text": DOCUMENTS[index]}) for index in order[:2]
    ]
    assert len(rerank(server, top_n=99).json()["results"]) == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({"rank_fields": ["text"]}, 400, "rank_fields"),
        ({"documents": []}, 400, "must not be empty"),
        ({"documents": ["x"] * (MAX_CANDIDATES + 1)}, 400, f"at most {MAX_CANDIDATES} entries"),
        ({"documents": [{"title": "x"}]}, 400, "$.documents[0]"),
        ({"documents": ["x" * 70_000]}, 400, "documents[0]"),
        ({"query": ""}, 400, "Field 'query' must not be empty"),
        ({"model": ""}, 400, "Field 'model' must not be empty"),
        ({"model": None}, 400, "$.model"),
        ({"top_n": 0}, 400, "$.top_n"),
        ({"options": {"profile": "fast"}}, 400, "Profile 'fast' not found"),
        ({"model": "stub/dense"}, 400, "does not support scoring"),
        ({"model": "nobody"}, 404, "nobody"),
        ({"model": "default"}, 404, "stub/both"),
    ],
)
def test_rerank_refusals_have_openais_envelope(
    server: Server, fields: dict[str, object], status: int, part: str
) -> None:
    response = rerank(server, **fields)
    assert response.status == status, response.body
    error = response.json()["error"]
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"
    is_long = part == "documents[0]"
    assert error["code"] == ("MODEL_NOT_FOUND" if status == 404 else "INPUT_TOO_LONG" if is_long else "INVALID_INPUT")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"rank_fields": ["text"]}, "rank_fields"),
        ({"query": None}, "query"),
        ({"documents": ["x", 1]}, "documents"),
        ({"documents": []}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"query": ""}, "query"),
        ({"model": ""}, "model"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_rerank_names_the_field_that_it_refuses(server: Server, fields: dict[str, object], param: str) -> None:
    assert rerank(server, **fields).json()["error"]["param"] == param


def test_rerank_wants_a_model(server: Server) -> None:
    response = post_json(server.port, "/v1/rerank", {"query": "q", "documents": DOCUMENTS})
    error = response.json()["error"]
    assert (response.status, error["code"], error["param"]) == (400, "INVALID_INPUT", "model")


def test_texts_beside_images_are_scored(server: Server) -> None:
    plain = post_json(server.port, "/v1/score/stub/both", {"query": {"text": "q"}, "items": [{"text": "a"}]}).json()
    image = {"images": [{"data": "AAAA"}]}
    body = {"query": {"text": "q", **image}, "items": [{"text": "a", **image}]}
    assert post_json(server.port, "/v1/score/stub/both", body).json()["scores"] == plain["scores"]


def test_metrics_count_both_routes_as_score(server: Server) -> None:
    before = total(server.port, "sie_requests_total", model="stub/both", endpoint="score", status="success")
    score(server, "stub/both", "q", ["a"])
    rerank(server)
    eventually(
        lambda: (
            total(server.port, "sie_requests_total", model="stub/both", endpoint="score", status="success")
            == before + 2
        ),
        "two more",
    )


def test_sdk_scores(server: Server) -> None:
    with SIEClient(server.url, timeout_s=WAIT_S) as client:
        result = client.score("stub/both", {"text": "q"}, [{"text": "a", "id": "first"}, {"text": "b"}])
        expected = {"first": stub_score("q", "a"), "item-1": stub_score("q", "b")}
        assert {entry["item_id"]: entry["score"] for entry in result["scores"]} == expected
        assert [entry["rank"] for entry in result["scores"]] == [0, 1]
        assert result["scores"][0]["score"] == max(expected.values())
        with pytest.raises(RequestError, match="does not support scoring"):
            client.score("stub/dense", {"text": "q"}, [{"text": "a"}])
