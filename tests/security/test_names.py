"""A name in a request is looked up among the declared models, and never becomes a path (S31)."""

from __future__ import annotations

import json

import pytest

from sie.catalog.spec import parse_adapter_spec, parse_model_spec
from sie.values.errors import BadRequest
from tests.process.harness import Server
from tests.process.wire import post_json, raw_request, send_raw

TRAVERSALS = [
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "stub/../stub/a", "stub//a", "/stub/a",
    "stub/a/..", "stub/a%00", "stub\\a", "stub/a;x", "file:///etc/passwd", "C:%5cmodels",
]  # fmt: skip
BODY = {"items": [{"text": "x"}]}


@pytest.mark.parametrize("name", TRAVERSALS)
@pytest.mark.parametrize("route", ["encode", "score", "extract"])
def test_a_name_in_a_path_is_an_unknown_model(stub_server: Server, route: str, name: str):
    body = BODY | ({"query": {"text": "q"}} if route == "score" else {})
    response = send_raw(
        stub_server.port,
        raw_request(f"/v1/{route}/{name}", json.dumps(body).encode(), {"content-type": "application/json"}),
    )
    assert response.status == 404
    assert response.json() == {"detail": "Not Found"} or response.code() == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("name", TRAVERSALS)
def test_a_path_with_an_unknown_name_opens_no_file(stub_server: Server, name: str):
    assert send_raw(stub_server.port, raw_request(f"/v1/models/{name}", method="GET")).status == 404


@pytest.mark.parametrize("name", [*TRAVERSALS, "", "x" * 5000])
@pytest.mark.parametrize("action", ["load", "unload", "reload"])
def test_nothing_is_loaded_by_a_name_that_nobody_declared(stub_server: Server, action: str, name: str):
    response = post_json(stub_server.port, f"/v1/models/{action}", {"model_id": name})
    assert response.status in (400, 404)
    assert "etc/passwd:" not in response.body.decode()


@pytest.mark.parametrize("name", TRAVERSALS)
def test_a_name_in_a_body_is_an_unknown_model(stub_server: Server, name: str):
    response = post_json(stub_server.port, "/v1/embeddings", {"model": name, "input": "x"})
    assert (response.status, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "name", ["../x", "/srv/x", "a/../b", "a//b", "a b", "a\0", "a\\b", "\N{LATIN SMALL LETTER E WITH ACUTE}", ""]
)
def test_what_no_id_may_be_stops_the_start(name: str):
    with pytest.raises(BadRequest):
        parse_model_spec(f"{name}=/srv/m")
    with pytest.raises(BadRequest):
        parse_adapter_spec(f"{name}=legal=/srv/m")
