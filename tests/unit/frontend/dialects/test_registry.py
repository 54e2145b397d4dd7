"""The descriptions of all dialects fit together."""

from __future__ import annotations

import msgspec
import pytest

from sie.frontend.dialects.registry import DIALECTS, ENVELOPES, envelope_of_path
from sie.frontend.http.near_routes import hint_for
from sie.frontend.http.response import JSON
from sie.frontend.routes.table import TABLE


def test_every_envelope_has_one_owner() -> None:
    assert len(ENVELOPES) == sum(len(dialect.envelopes) for dialect in DIALECTS)


def test_every_row_and_root_names_an_envelope() -> None:
    named = {row.envelope for row in TABLE} | {name for dialect in DIALECTS for name in dialect.roots.values()}
    assert named == ENVELOPES.keys()


def test_every_row_of_a_dialect_is_in_the_table_and_the_document() -> None:
    for dialect in DIALECTS:
        assert {*dialect.rows} <= {*TABLE}
        assert {row.template for row in dialect.rows} <= {operation.template for operation in dialect.operations}


@pytest.mark.parametrize(
    ("path", "envelope"),
    [
        ("/", "sie"), ("", "sie"), ("/v1", "sie"), ("/v1/", "sie"), ("/v1/encoder", "sie"), ("/v2x", "sie"),
        ("/v2", "kserve"), ("/v2/x/y/z", "kserve"), ("/apis", "sie"),
        ("/api/infer", "trtis"), ("/api/infer/m/x", "trtis"), ("/api/health/x", "trtis"), ("/api", "ollama"), ("/api/x", "ollama"),
        ("/v1/files", "text"), ("/v1/files/a/b", "text"), ("/v1/filesystem", "sie"), ("//v1/files", "sie"),
        ("/v1/messages/batches", "anthropic"), ("/v1/rerank/x", "rerank"),
    ],
)  # fmt: skip
def test_an_unknown_path_belongs_to_the_dialect_of_its_first_folders(path: str, envelope: str) -> None:
    assert envelope_of_path(path) is ENVELOPES[envelope]


def test_every_route_of_trtis_has_its_errors_below_its_first_folders() -> None:
    paths = [row.template for row in TABLE if row.envelope == "trtis"]
    assert len(paths) > 5
    assert all(envelope_of_path(f"{path}/x").answer_unknown_path("", "") == (400, [], b"") for path in paths)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/tags", "/api/version", "/api/embed", "/api"])
def test_clients_of_ollama_are_told_what_to_use_instead(path: str) -> None:
    status, headers, body = envelope_of_path(path).answer_unknown_path(path, hint_for(path, TABLE))
    assert (status, headers) == (404, [JSON])
    assert msgspec.json.decode(body) == {
        "error": f"{path} is not served: use the OpenAI API, /v1/chat/completions, /v1/embeddings and /v1/models"
    }
