"""Texts over a model's limit, on a running server: each answer says which ones were cut, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgpack
import numpy as np
import openai
import pytest
import transformers
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf import text_format
from numpy.typing import NDArray
from sie_sdk import SIEClient
from sie_sdk.client.errors import InputTooLongError

from sie.proto import message_class
from tests.process.harness import WAIT_S, Server, eventually, free_port, start_server
from tests.process.test_bad_input import cpu_s
from tests.process.wire import MSGPACK, Client, Response, post_json, raw_request, send_raw, total, wait_no_extents
from tests.tiny_models import WORDS, save_classifier, save_cross_encoder, save_poisoned

HEADER = "x-sie-truncated"
LIMIT = 64
FITS = " ".join(f"w{number}" for number in range(LIMIT - 2))
"""With the two special tokens as many as `dense` and `ce` read."""
LONG = f"{FITS} w1"
ERROR = {"overflow_policy": "error"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    labels = ["contradiction", "neutral", "entailment"]
    with start_server(
        "--model", f"dense={save_poisoned(folder / 'dense', transformers.BertModel)}",
        "--model", f"ce={save_cross_encoder(folder / 'ce')}",
        "--model", f"nli={save_classifier(folder / 'nli', transformers.AutoModelForSequenceClassification, labels)}",
        "--model", "stub=stub:dense=4,sparse=50,score,extract,image,max_tokens=4",
        "--dtype", "float32", "--frontends", "1", "--grpc-port", str(free_port()),
    ) as running:  # fmt: skip
        yield running
        wait_no_extents(running.port)


def ask(server: Server, path: str, body: Any, *, is_msgpack: bool = False) -> tuple[Response, Any]:
    form = MSGPACK if is_msgpack else "application/json"
    data = msgpack.packb(body) if is_msgpack else json.dumps(body).encode()
    with Client(server.port) as client:
        response = client.request("POST", path, data, {"content-type": form, "accept": form})
    assert response.status == 200, response
    return response, response.unpack() if is_msgpack and path != "/v1/rerank" else response.json()


def items_of(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def cut(results: list[dict[str, Any]]) -> list[int]:
    assert all(result.get("truncated", True) is True for result in results)
    return [number for number, result in enumerate(results) if "truncated" in result]


@pytest.mark.parametrize("is_msgpack", [True, False])
@pytest.mark.parametrize("texts", [[LONG], [FITS, LONG, "w1", LONG * 30]])
def test_encode_says_which_items_were_cut(server: Server, texts: list[str], is_msgpack: bool) -> None:
    expected = [number for number, text in enumerate(texts) if len(text) > len(FITS)]
    response, body = ask(server, "/v1/encode/dense", {"items": items_of(*texts)}, is_msgpack=is_msgpack)
    assert cut(body["items"]) == expected
    assert response.headers[HEADER] == ",".join(map(str, expected))
    short, body = ask(server, "/v1/encode/dense", {"items": items_of(FITS)}, is_msgpack=is_msgpack)
    assert (cut(body["items"]), HEADER in short.headers) == ([], False)


def test_a_lower_limit_of_the_request_cuts_too(server: Server) -> None:
    body = {"items": items_of("w1", "w1 w2 w3 w4"), "params": {"options": {"max_seq_length": 5}}}
    assert cut(ask(server, "/v1/encode/dense", body)[1]["items"]) == [1]


def test_an_item_with_an_id_and_several_outputs_says_it_beside_them(server: Server) -> None:
    params = {"output_types": ["dense", "sparse"]}
    body = {"items": [{"id": "a", "text": "x" * 17}, {"id": "b", "text": "x" * 16}], "params": params}
    for is_msgpack in (True, False):
        first, second = ask(server, "/v1/encode/stub", body, is_msgpack=is_msgpack)[1]["items"]
        assert (list(first), list(second)) == (["id", "dense", "sparse", "truncated"], ["id", "dense", "sparse"])


@pytest.mark.parametrize("is_msgpack", [True, False])
def test_score_names_the_items_whose_pairs_were_cut(server: Server, is_msgpack: bool) -> None:
    query, fits = "w1 w2", " ".join(["w3"] * (LIMIT - 5))
    body = {"query": {"text": query}, "items": items_of(fits, f"{fits} w4", "w5")}
    response, answer = ask(server, "/v1/score/ce", body, is_msgpack=is_msgpack)
    assert {score["item_id"] for score in answer["scores"] if score.get("truncated")} == {"item-1"}
    assert response.headers[HEADER] == "1"
    body["query"] = {"text": LONG}
    response, answer = ask(server, "/v1/score/ce", body, is_msgpack=is_msgpack)
    assert len(cut(answer["scores"])) == 3, "the query leaves no pair whole"
    assert response.headers[HEADER] == "0,1,2"


@pytest.mark.parametrize(("path", "field"), [
    ("/v2/rerank", "max_tokens_per_doc"), ("/v1/rerank", "max_doc_length"), ("/score", "max_tokens_per_doc"),
])  # fmt: skip
def test_only_the_beginning_of_a_cut_document_is_read(server: Server, path: str, field: str) -> None:
    """Twelve documents of 2 MB held the frontend's interpreter lock until it was killed as hung."""
    frontends, head = server.frontends(), "w1 w2 w3 w4"
    fields = {"text_1": "w1", "text_2": ...} if path == "/score" else {"query": "w1", "documents": ...}
    before_s = cpu_s(server)
    found, expected = (
        ask(server, path, {key: [text] * 12 if value is ... else value for key, value in fields.items()}
            | {"model": "ce", field: 4})[1]
        for text in (f"{head} " * 160_000, head)
    )  # fmt: skip
    name = "data" if path == "/score" else "results"
    assert found[name] == expected[name]
    assert server.frontends() == frontends
    assert cpu_s(server) - before_s < 2.0


def test_rerank_and_embeddings_say_it_in_their_own_forms(server: Server) -> None:
    response, body = ask(server, "/v1/rerank", {"model": "ce", "query": "w1", "documents": ["w2", LONG]})
    assert {result["index"] for result in body["results"] if result.get("truncated")} == {1}
    assert response.headers[HEADER] == "1"
    response, body = ask(server, "/v1/embeddings", {"model": "dense", "input": ["w1", LONG, LONG]})
    assert (body["usage"]["sie_truncated"], response.headers[HEADER]) == ([1, 2], "1,2")
    response, body = ask(server, "/v1/embeddings", {"model": "dense", "input": FITS})
    assert ("sie_truncated" in body["usage"], HEADER in response.headers) == (False, False)


def test_extract_says_it_for_what_it_cuts(server: Server) -> None:
    body = {"items": items_of("w1", " ".join(WORDS)), "params": {"labels": ["w2"]}}
    response, answer = ask(server, "/v1/extract/nli", body)
    assert (cut(answer["items"]), response.headers[HEADER]) == ([1], "1")


def test_a_stub_that_extracts_keeps_to_its_limit(server: Server) -> None:
    text = "".join(f"{number:03} " for number in range(40))
    response, body = ask(server, "/v1/extract/stub", {"items": items_of(text, "x")})
    assert (cut(body["items"]), response.headers[HEADER]) == ([0], "0")
    assert all(entity["end"] <= 16 for entity in body["items"][0]["entities"])
    refused = post_json(server.port, "/v1/extract/stub", {"items": items_of(text), "params": {"options": ERROR}})
    assert (refused.status, refused.code()) == (400, "INPUT_TOO_LONG")


def test_images_keep_their_place_among_texts(server: Server) -> None:
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    body = {"items": [{"images": [{"data": png}]}, {"text": "x" * 17}]}
    for operation in ("encode", "extract"):
        response, answer = ask(server, f"/v1/{operation}/stub", body)
        assert (cut(answer["items"]), response.headers[HEADER]) == ([1], "1")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/encode/dense", {"items": items_of("w1", LONG), "params": {"options": ERROR}}),
        ("/v1/encode/stub", {"items": items_of("x" * 17), "params": {"options": ERROR}}),
        ("/v1/score/ce", {"query": {"text": "w1"}, "items": items_of("w1", LONG), "options": ERROR}),
        ("/v1/score/stub", {"query": {"text": "w1"}, "items": items_of("x" * 17), "options": ERROR}),
        ("/v1/extract/nli", {"items": items_of(LONG), "params": {"labels": ["w2"], "options": ERROR}}),
        ("/v1/rerank", {"model": "ce", "query": "w1", "documents": [LONG], "options": ERROR}),
        ("/v1/embeddings", {"model": "dense", "input": [LONG], **ERROR}),
    ],
)
def test_overflow_policy_error_refuses_and_names_the_model(server: Server, path: str, body: dict[str, Any]) -> None:
    response = post_json(server.port, path, body)
    assert response.status == 400, response
    error = response.json().get("detail") or response.json()["error"]
    model = body.get("model") or path.rpartition("/")[2]
    assert error["code"] == ("invalid_request" if path == "/v1/embeddings" else "INPUT_TOO_LONG")
    assert (error["model"], f"Model '{model}'" in error["message"]) == (model, True)
    fitting = json.loads(json.dumps(body).replace(LONG, "w1").replace("x" * 17, "x"))
    assert post_json(server.port, path, fitting).status == 200


def test_the_policy_of_embeddings_is_judged(server: Server) -> None:
    body = {"model": "dense", "input": LONG, "overflow_policy": "truncate_text"}
    assert post_json(server.port, "/v1/embeddings", body).status == 200
    refused = post_json(server.port, "/v1/embeddings", {**body, "overflow_policy": "cut"})
    assert (refused.status, refused.json()["error"]["param"]) == (422, "overflow_policy")


def test_clients_read_such_answers_unmodified(server: Server) -> None:
    with SIEClient(server.url, timeout_s=WAIT_S) as client:
        first, second = client.encode("dense", items_of(LONG, "w1"))
        assert first["dense"].shape == second["dense"].shape
        assert len(client.score("ce", {"text": "w1"}, items_of(LONG, "w2"))["scores"]) == 2
        assert client.extract("nli", items_of(LONG), labels=["w2"])[0]["classifications"]
        with pytest.raises(InputTooLongError):
            client.encode("dense", items_of(LONG), options=ERROR)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        raw = client.embeddings.with_raw_response.create(model="dense", input=["w1", LONG])
        assert raw.headers[HEADER] == "1"
        assert raw.parse().usage.model_extra == {"sie_token_source": "worker", "sie_truncated": [1]}
        with pytest.raises(openai.BadRequestError, match="Model 'dense'"):
            client.embeddings.create(model="dense", input=LONG, extra_body=ERROR)


def texts_input(kind: Any, name: str, *texts: str) -> Any:
    values: NDArray[Any] = np.array([text.encode() for text in texts], np.object_)
    return kind(name, [len(texts)], "BYTES").set_data_from_numpy(values)


@pytest.mark.parametrize("binary", [True, False])
def test_kserve_over_http_has_a_parameter_and_a_header(server: Server, binary: bool) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        wanted = [triton_http.InferRequestedOutput("dense", binary_data=binary)]
        inputs = [texts_input(triton_http.InferInput, "text", LONG, "w1", LONG)]
        result = client.infer("dense", inputs, outputs=wanted, request_id="r")
        assert result.get_response()["parameters"] == {"truncated": "0,2"}
        assert (result.get_response()["id"], result.as_numpy("dense").shape) == ("r", (3, 16))
        result = client.infer("dense", [texts_input(triton_http.InferInput, "text", FITS)], outputs=wanted)
        assert "parameters" not in result.get_response()
        classes = [triton_http.InferRequestedOutput("dense", binary_data=binary, class_count=2)]
        assert client.infer("dense", inputs, outputs=classes).get_response()["parameters"] == {"truncated": "0,2"}
    body = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["w1", LONG]}]}
    assert httpx.post(f"{server.url}/v2/models/dense/infer", json=body, timeout=WAIT_S).headers[HEADER] == "1"


def test_kserve_over_grpc_has_a_parameter(server: Server) -> None:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        inputs = [
            texts_input(triton_grpc.InferInput, "query", "w1"),
            texts_input(triton_grpc.InferInput, "documents", "w1", LONG),
        ]
        result = client.infer("ce", inputs, request_id="r")
        assert result.get_response().parameters["truncated"].string_param == "1"
        assert (result.get_response().id, result.as_numpy("score").shape) == ("r", (2,))
        classes = [triton_grpc.InferRequestedOutput("score", class_count=1)]
        assert client.infer("ce", inputs, outputs=classes).get_response().parameters["truncated"].string_param == "1"
        result = client.infer("dense", [texts_input(triton_grpc.InferInput, "text", FITS)])
        assert not result.get_response().parameters


def framed(*texts: str) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text.encode() for text in texts)


def test_the_v1_tensor_api_says_it_in_headers(server: Server) -> None:
    data = framed("w1", LONG)
    head = f'batch_size: 1 input {{ name: "text" dims: 2 batch_byte_size: {len(data)} }} output {{ name: "dense" }}'
    headers = {"host": "127.0.0.1", "NV-InferRequest": head}
    response = send_raw(server.port, raw_request("/api/infer/dense", data, headers))
    assert (response.status, response.headers.get(HEADER)) == (200, "1"), response
    request = message_class("trtis", "nvidia.inferenceserver.InferRequest")(model_name="dense")
    header = message_class("trtis", "nvidia.inferenceserver.InferRequestHeader")()
    request.meta_data = text_format.Parse(head, header).SerializeToString()
    request.raw_input.append(data)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary("/nvidia.inferenceserver.GRPCService/Infer")
        _, done = call.with_call(request.SerializeToString())
    assert dict(done.trailing_metadata())[HEADER] == "1"


def test_metrics_count_the_items(server: Server) -> None:
    def count(endpoint: str) -> float:
        return total(server.port, "sie_truncated_items_total", model="dense", endpoint=endpoint)

    before = {endpoint: count(endpoint) for endpoint in ("encode", "embeddings")}
    ask(server, "/v1/encode/dense", {"items": items_of(LONG, "w1", LONG)})
    ask(server, "/v1/embeddings", {"model": "dense", "input": [LONG]})
    post_json(server.port, "/v1/encode/dense", {"items": items_of(LONG), "params": {"options": ERROR}})
    eventually(lambda: count("encode") == before["encode"] + 2, "two more")
    eventually(lambda: count("embeddings") == before["embeddings"] + 1, "one more")


def test_two_long_texts_of_a_pair_cost_no_memory(server: Server) -> None:
    """The library joins each piece of the one with each of the other: this pair took 1.1 GB, and its time."""
    [frontend] = server.frontends()
    status = Path(f"/proc/{frontend}/status")

    def peak_kib() -> int:
        return int(status.read_text().partition("VmHWM:")[2].split()[0])

    before = peak_kib()
    text = "w1 " * 12_000
    ask(server, "/v1/score/ce", {"query": {"text": text}, "items": items_of(text)})
    assert peak_kib() - before < 200 << 10
