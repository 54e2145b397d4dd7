"""The document at `/openapi.json` and its page: complete, valid, and true to the server's settings."""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from sie.catalog import options
from sie.config.limits import Limits
from sie.frontend.dialects.openai import embeddings
from sie.frontend.http.html import page_headers
from sie.frontend.openapi import docs_page, document, document_json, schemas
from sie.frontend.routes.table import TABLE
from sie.values import errors
from sie.values.errors import ClientGone, SieError

LIMITS = Limits(max_items=7, max_candidates=8, max_labels=9)
INFERENCE = [route for route in TABLE if route.label not in ("", "infer", "generate")]


@pytest.fixture(scope="module")
def described():
    return msgspec.json.decode(document_json(TABLE, LIMITS))


@pytest.fixture(scope="module")
def html():
    return docs_page.page(TABLE, LIMITS, is_gateway=True).decode()


def operation(described, template):
    (found,) = described["paths"][template].values()
    return found


def test_document_is_valid_openapi(described):
    assert not [error.message for error in OpenAPIV31SpecValidator(described).iter_errors()]


def test_every_route_has_its_row_and_method(described):
    assert {(path, method.upper()) for path, methods in described["paths"].items() for method in methods} == {
        (route.template, method) for route in TABLE for method in route.methods
    }


def test_every_type_and_field_is_described(described):
    bare = [
        f"{name}.{field}"
        for name, schema in described["components"]["schemas"].items()
        for field, part in schema["properties"].items()
        if not part.get("description")
    ]
    assert not bare, f"words.toml does not say what these mean: {bare}"


def test_words_speak_of_nothing_that_is_not_there(described):
    known = described["components"]["schemas"]
    shared = {field for schema in known.values() for field in schema["properties"]}
    for name, words in schemas.read_words().items():
        fields = known[name]["properties"] if name in known else shared  # of several structs, or of a base of some
        assert set(words) - {"_"} <= set(fields), name


def test_every_option_that_is_looked_at_is_described(described):
    known = described["components"]["schemas"]
    shown = {option for name in known if name.endswith("Options") for option in known[name]["properties"]}
    assert {*options._TYPES, *options._JUDGED_ELSEWHERE, "profile"} == shown


def test_limits_are_those_of_the_settings(described):
    known = described["components"]["schemas"]
    assert known["EncodeBody"]["properties"]["items"]["maxItems"] == 7
    assert known["RerankBody"]["properties"]["documents"]["maxItems"] == 8
    (labels,) = [part for part in known["ExtractParams"]["properties"]["labels"]["anyOf"] if part["type"] == "array"]
    assert labels["maxItems"] == 9
    assert document(TABLE, Limits())["components"]["schemas"]["EncodeBody"]["properties"]["items"]["maxItems"] == 2048


def test_unknown_fields_are_refused_only_where_the_decoder_refuses_them(described):
    known = described["components"]["schemas"]
    strict = {name for name in known if name.endswith("Body") and known[name].get("additionalProperties") is False}
    assert strict == {
        "RerankBody", "RerankV2Body", "TextsBody", "ClassifyBody", "PairsBody", "GenerateBody", "PoolBody",
        "ResolveBody",
    }  # fmt: skip
    assert known["Audio"]["additionalProperties"] is False
    assert "additionalProperties" not in known["Item"]


@pytest.mark.parametrize("route", INFERENCE, ids=lambda route: route.template)
def test_every_error_of_the_tree_is_among_an_inference_routes_answers(described, route):
    responses = operation(described, route.template)["responses"]
    tree = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, SieError)]
    for cls in set(tree) - {SieError, ClientGone, errors.Forbidden}:
        code = embeddings.wire_code(cls.code) if route.envelope == "openai" else cls.code
        assert f"`{code}`" in responses[str(cls.http_status)]["description"], cls.__name__


def test_retryable_refusals_document_retry_after(described):
    for route in INFERENCE:
        assert "Retry-After" in operation(described, route.template)["responses"]["503"]["headers"]


def test_page_shows_every_operation_and_type(described, html):
    for methods in described["paths"].values():
        for operation in methods.values():
            assert f'id="{operation["operationId"]}"' in html
    for name in described["components"]["schemas"]:
        assert f'id="type-{name}"' in html
    links = set(re.findall(r'href="#([^"]+)"', html))
    assert not {link for link in links if f'id="{link}"' not in html}, "a link leads nowhere"


def test_page_of_a_server_on_its_own_leaves_out_the_routes_of_a_cluster(described, html):
    alone = docs_page.page(TABLE, LIMITS, is_gateway=False).decode()
    operations = re.compile(r'<details class="panel operation" id="(\w+)"')
    left_out = set(operations.findall(html)) - set(operations.findall(alone))
    assert left_out == {
        operation["operationId"]
        for methods in described["paths"].values()
        for operation in methods.values()
        if operation["tags"] == ["Cluster"]
    }
    assert "Cluster" in html
    assert "<summary>Cluster" not in alone


def test_each_trial_names_its_scope_and_the_document_does_not(described, html):
    scopes = dict(re.findall(r'data-path="([^"]+)" data-needs="[^"]*" data-scope="(\w+)"', html))
    assert scopes["/v1/embeddings"] == "infer"
    assert scopes["/v1/models/load"] == "admin"
    assert scopes["/metrics"] == "metrics"
    assert scopes["/healthz"] == "open"
    assert not any("x-scope" in operation for methods in described["paths"].values() for operation in methods.values())


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("/v2/models/{model}", "tensor any"),
        ("/v2/models/{model}/stats", "tensor any"),
        ("/v2/models/{model}/infer", "tensor dense"),
        ("/v2/models/{model}/generate_stream", "generate"),
        ("/v1/models/load", "any"),
        ("/healthz", ""),
    ],
)
def test_examples_name_a_model_that_answers_there(html, path, needs):
    assert f'data-path="{path}" data-needs="{needs}"' in html


def test_page_is_self_contained(html):
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', html)
    assert "@import" not in html
    policy = dict(page_headers(html.encode()))["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2, "one script, one style"


def test_page_escapes_what_the_document_says():
    hostile = {
        "info": {"version": "<1>", "description": "a & b"},
        "tags": [{"name": "<t>", "description": "`<code>`"}],
        "paths": {
            "/<path>": {
                "get": {
                    "operationId": "x",
                    "tags": ["<t>"],
                    "summary": "<script>alert(1)</script>",
                    "responses": {},
                    "x-scope": "<s>",
                }
            }
        },
        "components": {"schemas": {}},
    }
    html = docs_page.render(hostile, "$version $about $nav $operations $types")
    assert "<script>" not in html
    assert "<code>&lt;code&gt;</code>" in html
    assert "/&lt;path&gt;" in html
    assert "<s>" not in html
