"""Known difficulties of the reference's clients, one test each. Source: SIE API reference, section 20.

Formats (its first point) are in `test_negotiation`, loads and failures (4) in `test_error_table`, the feed (8) in
`test_server_state`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.conftest import MINILM
from tests.process.harness import Server, start_server
from tests.process.wire import MSGPACK, Client, Response, dense_rows, encode, get, post_json, stub_rows, to_array

MODEL = "stub/all"
CATALOG = f"""
[models."{MODEL}".profiles.default]
[models."{MODEL}".profiles.asked.options]
query_template = "query: {{text}}"
doc_template = "passage: {{text}}"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog: Path = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(CATALOG)
    with start_server(
        "--catalog", str(catalog),
        "--model", f"{MODEL}=stub:dense=16,sparse=50,multivector=8,score,extract",
        "--frontends", "1",
    ) as running:  # fmt: skip
        yield running


def packed(server: Server, operation: str, body: dict[str, Any], model: str = MODEL) -> Response:
    with Client(server.port) as client:
        data = msgpack.packb(body)
        return client.request("POST", f"/v1/{operation}/{model}", data, {"content-type": MSGPACK})


def test_keys_of_arrays_are_bytes_and_all_others_are_text(server: Server) -> None:
    outputs = ["dense", "sparse", "multivector"]
    body = {"items": [{"text": "x"}], "params": {"output_types": outputs}}
    (item,) = packed(server, "encode", body).unpack()["items"]
    arrays = [
        item["dense"]["values"],
        item["sparse"]["indices"],
        item["sparse"]["values"],
        item["multivector"]["values"],
    ]
    for array in arrays:
        assert list(array) == [b"nd", b"type", b"kind", b"shape", b"data"]
        assert to_array(array).size
    assert [array[b"type"] for array in arrays] == ["<f4", "<i4", "<f4", "<f4"]
    assert item.keys() == set(outputs)
    assert all(isinstance(key, str) for output in outputs for key in item[output])
    assert arrays[3][b"shape"] == [item["multivector"]["num_tokens"], item["multivector"]["token_dims"]]


def test_encode_echoes_ids_and_the_others_invent_them(server: Server) -> None:
    items = [{"text": "a"}, {"text": "b", "id": "mine"}]
    encoded = packed(server, "encode", {"items": items}).unpack()["items"]
    assert [item.get("id") for item in encoded] == [None, "mine"]
    assert "id" not in encoded[0]
    extracted = packed(server, "extract", {"items": items}).unpack()["items"]
    assert [item["id"] for item in extracted] == ["item-0", "mine"]
    scored = packed(server, "score", {"query": {"text": "q"}, "items": items}).unpack()
    assert {entry["item_id"] for entry in scored["scores"]} == {"item-0", "mine"}
    assert scored["query_id"] is None
    named = packed(server, "score", {"query": {"text": "q", "id": "it"}, "items": items}).unpack()
    assert named["query_id"] == "it"


def test_is_query_lies_in_the_options_of_encode(server: Server) -> None:
    entry = f"{MODEL}:asked"
    asked = encode(server.port, entry, ["x"], options={"is_query": True})
    assert np.array_equal(dense_rows(asked), stub_rows(["query: x"], 16))
    elsewhere = encode(server.port, entry, ["x"], is_query=True)
    assert np.array_equal(dense_rows(elsewhere), stub_rows(["passage: x"], 16)), "an unknown field is ignored"


def test_instruction_and_options_of_score_lie_beside_its_items(server: Server) -> None:
    def score(**fields: Any) -> float:
        body = {"query": {"text": "q"}, "items": [{"text": "d"}], **fields}
        return packed(server, "score", body).unpack()["scores"][0]["score"]

    plain = score()
    assert score(instruction="do") != plain
    assert score(options={"profile": "asked"}) != plain
    assert score(params={"instruction": "do", "options": {"profile": "asked"}}) == plain, "unknown to score"


def test_binary_and_ubinary_are_the_same_and_keep_the_width(server: Server) -> None:
    found = [
        packed(server, "encode", {"items": [{"text": "x"}], "params": {"output_dtype": name}}).unpack()["items"]
        for name in ("binary", "ubinary")
    ]
    assert found[0] == found[1]
    dense = found[0][0]["dense"]
    assert (dense["dims"], dense["dtype"]) == (16, "binary")
    bits = to_array(dense["values"])
    assert (bits.dtype, bits.shape) == (np.uint8, (2,))
    assert np.array_equal(bits, np.packbits(stub_rows(["x"], 16)[0] > 0))


def test_int8_is_scaled_by_row_and_the_scale_is_not_sent(server: Server) -> None:
    body = {"items": [{"text": "x"}], "params": {"output_types": ["dense", "multivector"], "output_dtype": "int8"}}
    (item,) = packed(server, "encode", body).unpack()["items"]
    assert item["dense"].keys() == {"dims", "dtype", "values"}
    assert item["multivector"].keys() == {"token_dims", "num_tokens", "dtype", "values"}
    for values in (item["dense"]["values"], item["multivector"]["values"]):
        rows = np.atleast_2d(to_array(values)).astype(int)
        assert (np.abs(rows).max(axis=1) == 127).all()


def test_metrics_are_served(server: Server) -> None:
    assert get(server.port, "/metrics").status == 200


def test_profiles_are_models_in_the_list(server: Server) -> None:
    assert [info["name"] for info in get(server.port, "/v1/models").json()["models"]] == [MODEL, f"{MODEL}:asked"]


@pytest.mark.parametrize("operation", ["encode", "score", "extract"])
def test_schema_faults_are_400_but_422_on_the_openai_route(server: Server, operation: str) -> None:
    response = post_json(server.port, f"/v1/{operation}/{MODEL}", {"items": 1, "query": 1})
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    openai = post_json(server.port, "/v1/embeddings", {"model": MODEL, "input": {}})
    assert openai.status == 422
    fault = openai.json()["detail"][0]
    assert fault.keys() >= {"type", "loc", "msg"}
    assert fault["loc"] == ["body", "input"]


@pytest.mark.parametrize("name", ["float8", "FLOAT32", " float32", "Binary"])
def test_unknown_output_dtype_is_refused(server: Server, name: str) -> None:
    response = encode(server.port, MODEL, ["x"], output_dtype=name)
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert response.json()["detail"]["message"] == f"Unsupported output_dtype: {name}"


def test_text_over_the_models_limit_is_cut_without_a_word(minilm_server: Server) -> None:
    """MiniLM reads 256 tokens, the two special ones included."""
    responses = [encode(minilm_server.port, MINILM, ["river " * count]) for count in (254, 255, 3000)]
    first, *others = [dense_rows(response) for response in responses]
    for rows in others:
        np.testing.assert_allclose(rows, first, atol=1e-5)
    assert [response.unpack()["usage"]["input_tokens"] for response in responses] == [256] * 3
