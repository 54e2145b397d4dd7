"""Reading of requests and writing of answers: formats, the order of error checks, and headers.

Source: SIE API reference, sections 1, 3, 12 and 13. Each rule is tried on every operation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.process.harness import Server, start_server
from tests.process.wire import MSGPACK, Client, Response, get, post_json

OPERATIONS = ("encode", "score", "extract")
JSON = "application/json"
CATALOG = """
[models."stub/all".profiles.default]
[models."stub/all".profiles.sparse.options]
output_types = ["sparse"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog: Path = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(CATALOG)
    with start_server(
        "--catalog", str(catalog),
        "--model", "stub/all=stub:dense=16,sparse=50,score,extract",
        "--model", "stub/dense=stub:dense=16",
        "--lazy-model", "stub/cold=stub:dense=16,score,extract",
        "--lora", "stub/all=late=stub:load_ms=60000",
        "--lora", "stub/cold=late=stub:",
        "--machine-profile", "L4",
        "--frontends", "1",
    ) as running:  # fmt: skip
        yield running


def body_of(operation: str, **options: Any) -> dict[str, Any]:
    if operation == "score":
        return {"query": {"text": "q"}, "items": [{"text": "x"}], "options": options}
    return {"items": [{"text": "x"}], "params": {"options": options}}


def post(server: Server, path: str, body: bytes, **headers: str) -> Response:
    """Send a body with these headers, `_` for `-`, and no others; an Accept header only when it is named."""
    with Client(server.port) as client:
        return client.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})


def tell(response: Response) -> tuple[int, str]:
    return response.status, response.json()["detail"]["message"]


def test_requests_for_one_text_get_the_same_each_time_whatever_came_between(server: Server):
    """The second and third go a way that the first made shorter; those between are none of its kind."""
    plain = {"items": [{"text": "again"}]}
    between = [
        ({"items": [{"text": "again", "id": "i"}]}, "stub/all"),
        ({"items": [{"text": "again"}], "params": {"output_dtype": "int8"}}, "stub/all"),
        (plain, "stub/all:sparse"),
        ({"items": [{"text": "again"}, {"text": "x"}]}, "stub/all"),
        (plain, "stub/absent"),
    ]
    first: dict[str, Any] = {}
    for value, model in [(plain, "stub/all"), *between, (plain, "stub/all"), (plain, "stub/all")]:
        for accept in (MSGPACK, JSON):
            response = post(server, f"/v1/encode/{model}", msgpack.packb(value), content_type=MSGPACK, accept=accept)
            if model == "stub/absent":
                assert response.status == 404
                continue
            assert response.status == 200
            read = response.json() if accept == JSON else msgpack.unpackb(response.body, raw=True)
            timing = read.pop("timing" if accept == JSON else b"timing")
            assert min(time for time in timing.values() if time is not None) >= 0
            assert set(response.headers) >= {"x-queue-time", "x-tokenization-time", "x-inference-time", "x-total-time"}
            if value is plain and model == "stub/all":
                assert read == first.setdefault(accept, read)
    faulty = post(server, "/v1/encode/stub/all", b"[]", content_type=JSON)
    assert faulty.status == 400


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("content_type", "is_msgpack"),
    [
        (MSGPACK, True),
        ("application/x-msgpack", True),
        ("Application/MsgPack; v=1", True),
        ("text/plain, application/x-msgpack", True),
        (JSON, False),
        ("application/json; charset=utf-8", False),
        ("text/plain", False),
        ("application/octet-stream", False),
        ("", False),
    ],
)
def test_content_type_says_how_the_body_is_read(
    server: Server, operation: str, content_type: str, is_msgpack: bool
) -> None:
    path, value = f"/v1/{operation}/stub/all", body_of(operation)
    packed, text = msgpack.packb(value), json.dumps(value).encode()
    right, wrong = (packed, text) if is_msgpack else (text, packed)
    assert post(server, path, right, content_type=content_type).status == 200
    refused = post(server, path, wrong, content_type=content_type)
    assert (refused.status, refused.code()) == (400, "INVALID_INPUT")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_body_without_content_type_is_json(server: Server, operation: str) -> None:
    assert post(server, f"/v1/{operation}/stub/all", json.dumps(body_of(operation)).encode()).status == 200


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, MSGPACK),
        ("", MSGPACK),
        (MSGPACK, MSGPACK),
        ("application/x-msgpack", MSGPACK),
        ("APPLICATION/MSGPACK", MSGPACK),
        ("application/json, application/msgpack;q=0.1", MSGPACK),
        (JSON, JSON),
        ("Application/JSON; q=0", JSON),
        ("text/html, application/json", JSON),
        ("*/*", MSGPACK),
        ("text/html", MSGPACK),
        ("application/*", MSGPACK),
    ],
)
def test_accept_says_how_the_answer_is_written(
    server: Server, operation: str, accept: str | None, expected: str
) -> None:
    headers = {} if accept is None else {"accept": accept}
    body = json.dumps(body_of(operation)).encode()
    response = post(server, f"/v1/{operation}/stub/all", body, **headers)
    assert (response.status, response.headers["content-type"]) == (200, expected)
    answer = response.json() if expected == JSON else response.unpack()
    assert answer["model"] == "stub/all"


@pytest.mark.parametrize("accept", [MSGPACK, "*/*", JSON])
def test_lists_and_embeddings_are_json_whatever_is_accepted(server: Server, accept: str) -> None:
    for path in ("/v1/models", "/v1/models/stub/all"):
        assert get(server.port, path, {"accept": accept}).headers["content-type"] == JSON
    answer = post_json(server.port, "/v1/embeddings", {"model": "stub/all", "input": "x"}, {"accept": accept})
    assert (answer.status, answer.headers["content-type"]) == (200, JSON)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("path", ["stub%2Fall", "stub%2fall", "stub/all%3Adefault", "stub/all:default"])
def test_path_is_decoded_to_the_id(server: Server, operation: str, path: str) -> None:
    response = post_json(server.port, f"/v1/{operation}/{path}", body_of(operation))
    assert response.status == 200


# --- the order of the checks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_faults_are_told_in_the_references_order(server: Server, operation: str) -> None:
    """Each request has the fault that is told and all those that come after it."""
    late = {"profile": "none", "lora_id": "late"}
    unable = "stub/dense" if operation != "encode" else "stub/all"
    body = json.dumps(body_of(operation, **late)).encode()
    elsewhere = {"x_sie_machine_profile": "h100", "content_type": JSON}
    asked: list[tuple[tuple[int, str], str]] = [
        (tell(post(server, f"/v1/{operation}/nobody", b"{", **elsewhere)), "machine profile"),
        (tell(post(server, f"/v1/{operation}/nobody", b"{", content_type=JSON)), "Input data was truncated"),
        (tell(post(server, f"/v1/{operation}/nobody", body, content_type=JSON)), "Model 'nobody' not found"),
        (
            tell(post(server, f"/v1/{operation}/{unable}", body)),
            "does not support" if unable != "stub/all" else "Profile",
        ),
        (tell(post(server, f"/v1/{operation}/stub/all", body)), "Profile 'none' not found"),
    ]
    statuses = [status for (status, _), _ in asked]
    assert statuses == [400, 400, 404, 400, 400]
    for (_, message), part in asked:
        assert part in message


def test_output_types_come_after_the_profile_and_before_the_load(server: Server) -> None:
    def ask(model: str, output_types: list[str], **options: Any) -> Response:
        params = {"output_types": output_types, "options": options}
        return post_json(server.port, f"/v1/encode/{model}", {"items": [{"text": "x"}], "params": params})

    assert tell(ask("stub/cold", ["multivector"], profile="none"))[1].startswith("Profile 'none' not found")
    refused = ask("stub/cold", ["multivector"], lora_id="late")
    assert tell(refused)[1].startswith("Model 'stub/cold' does not support output type")
    assert get(server.port, "/v1/models/stub/cold").json()["state"] == "available", "a bad request loads nothing"
    cold = ask("stub/cold", ["dense"], lora_id="late")
    assert (cold.status, cold.code()) == (503, "MODEL_LOADING"), "the model comes before its adapter"
    adapter = ask("stub/all", ["dense"], lora_id="late")
    assert (adapter.status, adapter.code()) == (503, "LORA_LOADING")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_machine_profile_is_compared_without_case(server: Server, operation: str) -> None:
    body = body_of(operation)
    assert post_json(server.port, f"/v1/{operation}/stub/all", body, {"x-sie-machine-profile": "l4"}).status == 200
    assert post_json(server.port, f"/v1/{operation}/stub/all", body, {"x-sie-machine-profile": ""}).status == 200
    refused = post_json(server.port, f"/v1/{operation}/stub/all", body, {"x-sie-machine-profile": "h100"})
    assert (refused.status, refused.code()) == (400, "INVALID_INPUT")
    detail = refused.json()["detail"]
    assert (detail["requested_profile"], detail["worker_identity"]) == ("h100", "L4")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_remote_can_only_be_forbidden(server: Server, operation: str) -> None:
    body = body_of(operation)
    assert post_json(server.port, f"/v1/{operation}/stub/all", body, {"x-sie-remote": "forbid"}).status == 200
    assert post_json(server.port, f"/v1/{operation}/stub/all", body, {"x-sie-remote": "allow"}).status == 400


# --- headers ----------------------------------------------------------------------------------------------------------

TIMES = {"x-queue-time", "x-tokenization-time", "x-inference-time", "x-total-time"}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("accept", [MSGPACK, JSON])
def test_answer_says_where_its_time_went(server: Server, operation: str, accept: str) -> None:
    headers = post_json(server.port, f"/v1/{operation}/stub/all", body_of(operation), {"accept": accept}).headers
    assert headers.keys() >= TIMES
    for name in TIMES | {"x-postprocessing-time"} & headers.keys():
        assert re.fullmatch(r"\d+\.\d\d", headers[name]), (name, headers[name])
    assert float(headers["x-total-time"]) > 0
    assert headers.get("x-postprocessing-time") != "0.00"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", headers["x-sie-server-version"])
    assert headers["x-sie-served-by"] == "local"
    assert "x-trace-id" not in headers
    instance = headers.get("x-sie-runtime-instance", "")
    assert re.fullmatch(r"[0-9a-f]{64}", instance) if operation != "extract" else not instance


def test_instance_is_the_same_in_answers_and_errors(server: Server) -> None:
    answers = [
        post_json(server.port, f"/v1/{operation}/stub/all", body_of(operation)) for operation in ("encode", "score")
    ]
    errors = [post_json(server.port, f"/v1/{operation}/nobody", body_of(operation)) for operation in OPERATIONS]
    instances = {response.headers["x-sie-runtime-instance"] for response in (*answers, *errors)}
    assert len(instances) == 1


def test_embeddings_have_no_times(server: Server) -> None:
    headers = post_json(server.port, "/v1/embeddings", {"model": "stub/all", "input": "x"}).headers
    assert not TIMES & headers.keys()
    assert headers["x-sie-served-by"] == "local"
