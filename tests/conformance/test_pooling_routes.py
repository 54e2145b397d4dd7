"""The routes that users of vLLM, Text Embeddings Inference, Jina and Cohere bring, with Cohere's unmodified client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import pytest
import torch
import transformers
from cohere.core.api_error import ApiError

from tests.process.harness import Server, start_server
from tests.process.wire import Response, post_json, wait_no_extents
from tests.tiny_models import MAX_TOKENS, WORDS, save_classifier, save_cross_encoder

LABELS = ["joy", "anger", "fear"]
QUERY = "w1 w2 w3"
DOCUMENTS = ["w4", "w5 w6 w7 w8 w9 w10", "w11 w1 w2", "w4 w20"]
LONG = " ".join(WORDS)
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pooling")
    auto = transformers.AutoModelForSequenceClassification
    save_classifier(folder / "classes", auto, LABELS)
    save_classifier(folder / "nli", auto, ["contradiction", "neutral", "entailment"])
    save_classifier(folder / "one", auto, ["LABEL_0"])
    save_cross_encoder(folder / "ce")
    (folder / "models.toml").write_text(
        '[models."tiny/one"]\ndirectory = "one"\npreload = true\ntask = "text-classification"\n'
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with start_server(
        "--model", f"tiny/classes={folder / 'classes'}",
        "--model", f"tiny/nli={folder / 'nli'}",
        "--model", f"tiny/ce={folder / 'ce'}",
        "--model", "stub/vectors=stub:dense=16",
        "--catalog", str(folder / "models.toml"),
        "--dtype", "float32",
        "--default-model", "tiny/ce",
        "--max-items", "8",
        "--max-candidates", "8",
        "--max-item-text-bytes", "65536",
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


@pytest.fixture(scope="module")
def logits(folder: Path) -> list[float]:
    """The cross-encoder's own logits of QUERY with DOCUMENTS."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "ce")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "ce").eval()
    with torch.no_grad():
        pairs = [tokenizer(QUERY, document, return_tensors="pt") for document in DOCUMENTS]
        return [model(**pair).logits.item() for pair in pairs]


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def ok(response: Response) -> Any:
    assert response.status == 200, response.body[:500]
    return response.json()


# --- classes ----------------------------------------------------------------------------------------------------------


def oracle(folder: Path, name: str) -> Any:
    return transformers.pipeline("text-classification", model=str(folder / name), device="cpu")  # type: ignore[call-overload]


def test_classify_answers_as_vllm_with_the_classes_of_the_pipeline(server: Server, folder: Path) -> None:
    texts = ["w1", "w2 w3 w4", "w59"]
    body = ok(post_json(server.port, "/classify", {"model": "tiny/classes", "input": texts}))
    assert list(body) == ["id", "object", "created", "model", "data", "usage"]
    assert body["id"].startswith("classify-")
    assert (body["object"], body["model"]) == ("list", "tiny/classes")
    assert body["usage"] == {
        "prompt_tokens": 11, "total_tokens": 11, "completion_tokens": 0, "prompt_tokens_details": None,
    }  # fmt: skip
    for index, (found, expected) in enumerate(
        zip(body["data"], oracle(folder, "classes")(texts, top_k=None), strict=True)
    ):
        assert list(found) == ["index", "label", "probs", "num_classes"]
        assert (found["index"], found["label"], found["num_classes"]) == (index, expected[0]["label"], 3)
        by_label = {one["label"]: one["score"] for one in expected}
        np.testing.assert_allclose(found["probs"], [by_label[label] for label in LABELS], atol=TOLERANCE)


def test_classify_takes_a_text_a_pair_and_logits(server: Server, folder: Path) -> None:
    pair = {"text": "w1", "text_pair": "w2"}
    (found,) = ok(post_json(server.port, "/classify", {"model": "tiny/nli", "input": pair}))["data"]
    (expected,) = oracle(folder, "nli")([pair], top_k=None)
    assert found["label"] == expected[0]["label"]
    (raw,) = ok(post_json(server.port, "/classify", {"model": "tiny/nli", "input": pair, "use_activation": False}))[
        "data"
    ]
    exponents = np.exp(raw["probs"])
    np.testing.assert_allclose(found["probs"], exponents / exponents.sum(), atol=TOLERANCE)


def test_a_reranker_with_a_task_of_its_own_classifies(server: Server, folder: Path) -> None:
    body = {"items": [{"text": "w1"}]}
    (item,) = ok(post_json(server.port, "/v1/extract/tiny/one", body))["items"]
    ((expected,),) = oracle(folder, "one")(["w1"], top_k=None)
    assert item["classifications"] == [{"label": "LABEL_0", "score": pytest.approx(expected["score"], abs=TOLERANCE)}]
    assert (
        post_json(server.port, "/v1/score/tiny/one", {"query": {"text": "x"}, "items": [{"text": "y"}]}).status == 400
    )


def test_extract_reads_texts_and_pairs_best_class_first(server: Server, folder: Path) -> None:
    items = [{"text": "w1 w2"}, {"id": "p", "text": "w3", "text_pair": "w4 w5"}, {"text": LONG}]
    body = {"items": items, "params": {"options": {"top_k": 2}}}
    found = ok(post_json(server.port, "/v1/extract/tiny/classes", body))["items"]
    assert [item.get("truncated") for item in found] == [None, None, True]
    ask = oracle(folder, "classes")
    for item, given in zip(found, items, strict=True):
        given.pop("id", None)
        expected = ask([given], top_k=2, truncation=True)[0]
        assert [one["label"] for one in item["classifications"]] == [one["label"] for one in expected]
        scores = [one["score"] for one in item["classifications"]]
        np.testing.assert_allclose(scores, [one["score"] for one in expected], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"input": []}, 400, "'input' must not be empty"),
        ({"input": ["x"] * 9}, 400, "at most 8 entries"),
        ({"input": "x" * 65537}, 400, "at most 65536 bytes"),
        ({"input": [1, 2]}, 400, "$.input"),
        ({"input": "x", "chat_template": "x"}, 400, "chat_template"),
        ({"input": LONG}, 400, f"more than the {MAX_TOKENS} tokens"),
        ({"input": "w1", "model": "no/model"}, 404, "no/model"),
        ({"input": "w1", "model": "tiny/ce"}, 400, "does not support extraction"),
    ],
)
def test_classify_refuses_in_vllm_s_form(server: Server, body: dict[str, Any], status: int, reason: str) -> None:
    response = post_json(server.port, "/classify", {"model": "tiny/classes", **body})
    error = response.json()["error"]
    assert (response.status, error["code"]) == (status, status)
    assert reason in error["message"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


def test_classify_cuts_a_text_if_the_request_says_so(server: Server) -> None:
    for limit, tokens in ((-1, MAX_TOKENS), (7, 7)):
        body = {"model": "tiny/classes", "input": LONG, "truncate_prompt_tokens": limit}
        assert ok(post_json(server.port, "/classify", body))["usage"]["total_tokens"] == tokens


def test_options_of_classifiers_are_checked(server: Server) -> None:
    for params, reason in (
        ({"labels": ["rage"]}, "no label 'rage'"),
        ({"options": {"function_to_apply": "relu"}}, "function_to_apply"),
        ({"options": {"top_k": 0}}, "top_k"),
        ({"options": {"stride": 3}}, "does not support 'stride'"),
    ):
        response = post_json(server.port, "/v1/extract/tiny/classes", {"items": [{"text": "w1"}], "params": params})
        assert response.status == 400
        assert reason in response.json()["detail"]["message"]
    body = {"items": [{"text": "w1", "text_pair": "w2"}], "params": {"labels": ["a"]}}
    response = post_json(server.port, "/v1/extract/tiny/nli", body)
    assert "does not read pairs" in response.json()["detail"]["message"]


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_cohere_s_client_ranks_with_version_2(server: Server, logits: list[float]) -> None:
    with cohere.ClientV2(api_key="unused", base_url=server.url) as client:
        answer = client.rerank(model="tiny/ce", query=QUERY, documents=DOCUMENTS, top_n=3)
        assert answer.id
        assert answer.meta is not None
        assert answer.meta.api_version is not None
        assert answer.meta.api_version.version == "2"
        order = sorted(range(4), key=lambda index: -logits[index])[:3]
        assert [result.index for result in answer.results] == order
        scores = [result.relevance_score for result in answer.results]
        np.testing.assert_allclose(scores, [sigmoid(logits[index]) for index in order], atol=TOLERANCE)
        cut = client.rerank(model="tiny/ce", query=QUERY, documents=["w4 w20 w21", "w4"], max_tokens_per_doc=1)
        assert cut.results[0].relevance_score == cut.results[1].relevance_score
        with pytest.raises(ApiError) as refused:
            client.rerank(model="no/model", query=QUERY, documents=DOCUMENTS)
        assert refused.value.status_code == 404
        assert "no/model" in refused.value.body["message"]


def test_cohere_s_client_ranks_with_version_1(server: Server, logits: list[float]) -> None:
    with cohere.Client(api_key="unused", base_url=server.url) as client:
        documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}]
        answer = client.rerank(model="tiny/ce", query=QUERY, documents=documents, return_documents=True)
        best = 0 if logits[0] > logits[1] else 1
        assert [result.index for result in answer.results] == [best, 1 - best]
        assert answer.results[0].document is not None
        assert answer.results[0].document.text == DOCUMENTS[best]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_may_be_objects_as_in_jina_s_form(server: Server, path: str) -> None:
    body = {"model": "tiny/ce", "query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2}
    found = ok(post_json(server.port, path, body))
    plain = ok(post_json(server.port, "/v1/rerank", {**body, "documents": DOCUMENTS}))
    assert found == plain
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] > 0


@pytest.mark.parametrize("is_raw", [False, True])
def test_rerank_answers_as_text_embeddings_inference(server: Server, logits: list[float], is_raw: bool) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": is_raw, "return_text": is_raw, "truncate": True}
    found = ok(post_json(server.port, "/rerank", body))
    order = sorted(range(4), key=lambda index: -logits[index])
    assert [rank["index"] for rank in found] == order
    expected = [logits[index] if is_raw else sigmoid(logits[index]) for index in order]
    np.testing.assert_allclose([rank["score"] for rank in found], expected, atol=TOLERANCE)
    assert [rank.get("text") for rank in found] == [DOCUMENTS[index] if is_raw else None for index in order]


def test_errors_of_ranks_have_the_form_of_their_api(server: Server) -> None:
    response = post_json(server.port, "/rerank", {"query": QUERY, "texts": []})
    assert response.status == 400
    assert response.json() == {
        "error": "Field 'texts' must not be empty",
        "error_type": "Validation",
        "code": "INVALID_INPUT",
    }
    long = post_json(server.port, "/rerank", {"query": QUERY, "texts": [" ".join(WORDS * 3)], "truncate": False})
    assert (long.status, long.json()["error_type"]) == (400, "Validation")
    response = post_json(
        server.port, "/v2/rerank", {"model": "tiny/ce", "query": QUERY, "documents": ["x"], "priority": 3}
    )
    assert (response.status, sorted(response.json())) == (400, ["code", "id", "message"])
    assert "priority" in response.json()["message"]


def test_score_answers_as_vllm_for_one_text_with_many_and_for_pairs(server: Server, logits: list[float]) -> None:
    for sides in (
        {"queries": QUERY, "documents": DOCUMENTS},
        {"text_1": [QUERY], "text_2": DOCUMENTS},
        {"queries": [QUERY] * 4, "items": DOCUMENTS},
        {"data_1": [QUERY] * 4, "data_2": DOCUMENTS},
    ):
        body = ok(post_json(server.port, "/score", {"model": "tiny/ce", **sides}))
        assert list(body) == ["id", "object", "created", "model", "data", "usage"]
        assert [(one["index"], one["object"]) for one in body["data"]] == [(index, "score") for index in range(4)]
        found = [one["score"] for one in body["data"]]
        np.testing.assert_allclose(found, [sigmoid(number) for number in logits], atol=TOLERANCE)
    raw = ok(post_json(server.port, "/score", {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}))
    np.testing.assert_allclose([one["score"] for one in raw["data"]], logits, atol=TOLERANCE)
    swapped = ok(post_json(server.port, "/score", {"queries": [QUERY, "w9"], "documents": [DOCUMENTS[0], "w8 w7"]}))
    alone = ok(post_json(server.port, "/score", {"queries": "w9", "documents": "w8 w7"}))
    assert swapped["data"][1]["score"] == pytest.approx(alone["data"][0]["score"], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"queries": "x"}, "A body has two sides"),
        ({"queries": "x", "text_2": "y"}, "A body has two sides"),
        ({"queries": ["x", "y"], "documents": ["a", "b", "c"]}, "as many as 'documents' (3), got 2"),
        ({"queries": [], "documents": ["a"]}, "'queries' must not be empty"),
        ({"queries": "x", "documents": ["a"] * 9}, "at most 8 entries"),
        ({"queries": "x", "documents": "a", "max_tokens_per_query": 4}, "max_tokens_per_query"),
    ],
)
def test_score_refuses_other_sides_in_vllm_s_form(server: Server, body: dict[str, Any], reason: str) -> None:
    response = post_json(server.port, "/score", body)
    assert response.status == 400
    assert reason in response.json()["error"]["message"]
