"""Extraction on a running server: `/v1/extract`, and the unmodified SDK."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import transformers
from sie_langchain.extractors import SIEExtractor
from sie_sdk import SIEClient
from sie_sdk.client import RequestError
from sie_sdk.client.errors import InputTooLongError

from tests.process.harness import Server, eventually, start_server
from tests.process.wire import MSGPACK, Client, Response, get, post_json, total, wait_no_extents
from tests.tiny_models import MAX_TOKENS, WORDS, save_classifier

LIMIT = MAX_TOKENS
TEXT = "w1 w2  😀 w3"
LONG = " ".join(WORDS)
RESULT_KEYS = ["id", "entities", "relations", "classifications", "objects", "data"]


@pytest.fixture(scope="module")
def ner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(
        tmp_path_factory.mktemp("ner"), transformers.AutoModelForTokenClassification, ["O", "B-A", "I-A", "B"]
    )


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = ["contradiction", "neutral", "entailment"]
    return save_classifier(tmp_path_factory.mktemp("nli"), transformers.AutoModelForSequenceClassification, labels)


@pytest.fixture(scope="module")
def server(ner: Path, nli: Path) -> Iterator[Server]:
    with start_server(
        "--model", "stub/all=stub:dense=16,score,extract",
        "--model", "stub/dense=stub:dense=16",
        "--model", f"tiny/ner={ner}",
        "--model", f"tiny/nli={nli}",
        "--dtype", "float32",
        "--max-label-pairs", "30",
        "--max-reply-bytes", "8192",
        "--max-step-items", "7",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


def extract(server: Server, model: str, texts: list[str], **params: object) -> Response:
    body = {"items": [{"text": text} for text in texts], "params": params}
    return post_json(server.port, f"/v1/extract/{model}", body)


def items(response: Response) -> list[dict[str, Any]]:
    assert response.status == 200, response.body[:500]
    return response.json()["items"]


def stub_entities(text: str, labels: list[str]) -> list[dict[str, Any]]:
    """Return what a stub must find. Source: `sie.catalog.stub`."""
    found: list[dict[str, Any]] = []
    for word in re.finditer(r"\S+", text):
        digest = hashlib.shake_256(b"extract" + word[0].encode()).digest(5)
        if digest[0] < 128:
            score = int.from_bytes(digest[2:], "little") / 2**24
            label = labels[digest[1] % len(labels)]
            found.append({"text": word[0], "label": label, "score": score, "start": word.start(), "end": word.end(),
                          "bbox": None})  # fmt: skip
    return found


def test_reply_has_every_key_and_says_nothing_of_time(server: Server) -> None:
    texts = [TEXT, "", "naïve Ångström 😀😀 and nine more words to find one in"]
    response = extract(server, "stub/all", texts, labels=["a", "b"])
    body = response.json()
    assert list(body) == ["model", "items", "usage"]
    assert [item["id"] for item in body["items"]] == ["item-0", "item-1", "item-2"]
    for item, text in zip(body["items"], texts, strict=True):
        assert list(item) == RESULT_KEYS
        assert item["entities"] == stub_entities(text, ["a", "b"])
        assert {fit["label"] for fit in item["classifications"]} == {"a", "b"}
        assert item["classifications"][0]["score"] >= item["classifications"][1]["score"]
    assert body["items"][2]["entities"]
    headers = response.headers
    for name in ("x-queue-time", "x-tokenization-time", "x-inference-time", "x-total-time"):
        assert float(headers[name]) >= 0
    assert headers["x-sie-served-by"] == "local"
    assert "x-sie-runtime-instance" not in headers
    assert len(extract(server, "stub/dense", ["x"]).headers["x-sie-runtime-instance"]) == 64


def test_msgpack_reply_echoes_ids_and_holds_float64(server: Server) -> None:
    body = {"items": [{"id": "mine", "text": TEXT}, {"text": TEXT}], "params": {"options": {"threshold": 0.0}}}
    with Client(server.port) as client:
        response = client.request(
            "POST", "/v1/extract/stub/all", msgpack.packb(body), {"content-type": MSGPACK, "accept": "*/*"}
        )
    assert response.headers["content-type"] == MSGPACK
    unpacked = response.unpack()
    assert [item["id"] for item in unpacked["items"]] == ["mine", "item-1"]
    assert unpacked["items"][0]["entities"] == stub_entities(TEXT, ["word"])


def test_models_call_the_output_json(server: Server) -> None:
    assert get(server.port, "/v1/models/stub/all").json()["outputs"] == ["dense", "score", "json"]
    assert get(server.port, "/v1/models/tiny/ner").json()["outputs"] == ["json"]
    assert get(server.port, "/v1/models/tiny/ner").json()["max_sequence_length"] == LIMIT


def test_requests_are_counted_under_their_endpoint(server: Server) -> None:
    labels = {"model": "stub/all", "endpoint": "extract", "status": "success"}
    before = total(server.port, "sie_requests_total", **labels)
    items(extract(server, "stub/all", ["x"]))
    # At least: an earlier test's answer may be counted only now.
    eventually(lambda: total(server.port, "sie_requests_total", **labels) >= before + 1, "one more")


@pytest.mark.parametrize(
    ("model", "params", "message"),
    [
        ("stub/dense", {}, "Model 'stub/dense' does not support extraction."),
        ("stub/all", {"output_schema": {"type": "object"}}, "does not support 'output_schema'"),
        ("tiny/ner", {"labels": ["PER"]}, "Model 'tiny/ner' has no label 'PER'. Available: ['A', 'B']"),
        ("tiny/ner", {"options": {"flat_ner": True}}, "does not support 'flat_ner'"),
        ("tiny/ner", {"options": {"stride": LIMIT}}, "Option 'stride' must be under the 18 tokens"),
        ("tiny/nli", {}, "Model 'tiny/nli' needs labels"),
        ("tiny/nli", {"labels": [f"l{i}" for i in range(31)]}, "over max_label_pairs (30)"),
        ("stub/all", {"labels": ["l"] * 1001}, "must hold at most 1000 labels"),
        ("stub/all", {"labels": ["l" * 2000] * 600}, "at most 524288 - at `$.params`"),
    ],
)
def test_what_cannot_be_served_is_a_400_with_its_name(server: Server, model: str, params: Any, message: str) -> None:
    response = extract(server, model, [LONG], **params)
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert message in response.json()["detail"]["message"]


def test_a_reply_that_would_be_too_large_is_refused_before_it_is_computed(server: Server) -> None:
    response = extract(server, "tiny/ner", [LONG] * 20)
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert "max_reply_bytes (8192)" in response.json()["detail"]["message"]
    response = extract(server, "stub/all", [" ".join(WORDS * 30)])  # known only when it is whole
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert "max_reply_bytes (8192)" in response.json()["detail"]["message"]


def test_lone_surrogate_is_the_clients_fault(server: Server) -> None:
    item = b'{"items": [{"text": "\\ud800"}]}'
    label = b'{"items": [{"text": "x"}], "params": {"labels": ["\\ud800"]}}'
    for model, body in (("tiny/ner", item), ("stub/all", item), ("stub/all", label), ("tiny/nli", label)):
        with Client(server.port) as client:
            response = client.request("POST", f"/v1/extract/{model}", body, {"content-type": "application/json"})
        assert (response.status, response.code()) == (400, "INVALID_INPUT"), (model, response.body)


def test_entities_are_those_of_the_pipeline_in_one_request_of_many_steps(server: Server, ner: Path) -> None:
    oracle = transformers.pipeline("token-classification", model=str(ner), tokenizer=str(ner), device="cpu",
                                   aggregation_strategy="simple", stride=4)  # type: ignore[call-overload]  # fmt: skip
    texts = [TEXT, LONG, "w9 w8", LONG[::-1], *WORDS[:9]]
    found = items(extract(server, "tiny/ner", texts, options={"stride": 4}))
    for text, item in zip(texts, found, strict=True):
        expected = oracle(text)
        assert [(e["label"], e["start"], e["end"], e["text"]) for e in item["entities"]] == [
            (e["entity_group"], e["start"], e["end"], text[e["start"] : e["end"]]) for e in expected
        ]
        assert [e["score"] for e in item["entities"]] == pytest.approx([e["score"] for e in expected], abs=1e-4)
    assert sum(len(item["entities"]) for item in found) > len(texts)


def test_classifications_are_those_of_the_pipeline(server: Server, nli: Path) -> None:
    oracle = transformers.pipeline("zero-shot-classification", model=str(nli), tokenizer=str(nli), device="cpu")  # type: ignore[call-overload]
    labels = ["w4", "w5 w6", "w7"]
    texts = [TEXT, LONG, "w9 w8"]
    for multi_label in (False, True):
        found = items(extract(server, "tiny/nli", texts, labels=labels, options={"multi_label": multi_label}))
        for text, item in zip(texts, found, strict=True):
            expected = oracle(text, labels, hypothesis_template="This text is about {}.", multi_label=multi_label)
            assert [fit["label"] for fit in item["classifications"]] == expected["labels"]
            scores = [fit["score"] for fit in item["classifications"]]
            assert scores == pytest.approx(expected["scores"], abs=1e-4)


def test_langchain_tool_extracts(server: Server) -> None:
    tool = SIEExtractor(base_url=server.url, model="tiny/ner", labels=["A", "B"])
    found = tool.invoke(LONG)
    assert [entity["text"] for entity in found["entities"]] == [
        entity["text"] for entity in items(extract(server, "tiny/ner", [LONG]))[0]["entities"]
    ]


def test_sdk_extracts_and_raises_its_own_errors(server: Server) -> None:
    with SIEClient(server.url) as client:
        one = client.extract("stub/all", {"text": TEXT}, labels=["a", "b"], options={"threshold": 0.0})
        assert one["entities"] == stub_entities(TEXT, ["a", "b"])
        many = client.extract("tiny/ner", [{"id": "x", "text": TEXT}, {"text": LONG}])
        assert [result["id"] for result in many] == ["x", "item-1"]
        with pytest.raises(InputTooLongError):
            client.extract("tiny/ner", [{"text": LONG}], options={"overflow_policy": "error"})
        with pytest.raises(RequestError) as caught:
            client.extract("stub/all", {"text": "x"}, output_schema={"type": "object"})
        assert (caught.value.status_code, caught.value.code) == (400, "INVALID_INPUT")
