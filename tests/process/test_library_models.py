"""GLiNER and GLiClass on a running server, with the unmodified SDK."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sie_sdk import SIEClient
from sie_sdk.client import RequestError
from sie_sdk.client.errors import InputTooLongError

from tests.gli_models import WORDS, save_gliclass, save_gliner
from tests.process.harness import Server, start_server
from tests.process.wire import get, post_json, wait_no_extents

LABELS = ["person", "company", "city"]
TEXT = "😀 Alice met Bob at Acme in Paris"
LONG = " ".join(WORDS * 12)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gliner(tmp_path_factory.mktemp("gliner") / "model", "deberta-v2", "bi-encoder")


@pytest.fixture(scope="module")
def server(spans: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("others")
    with start_server(
        "--model", f"test/spans={spans}",
        "--model", f"test/relations={save_gliner(directory / 'relations', 'modernbert', 'relations')}",
        "--model", f"test/classes={save_gliclass(directory / 'classes')}",
        "--dtype", "float32",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[SIEClient]:
    with SIEClient(server.url) as client:
        yield client


def texts_of(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def test_sdk_gets_the_librarys_entities(client: SIEClient, spans: Path) -> None:
    import gliner

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gliner.GLiNER.from_pretrained(str(spans), local_files_only=True).predict_entities(TEXT, LABELS)
    (found,) = client.extract("test/spans", texts_of(TEXT), labels=LABELS)
    assert expected
    assert [(e["text"], e["label"], e["start"], e["end"]) for e in found["entities"]] == [
        (e["text"], e["label"], e["start"], e["end"]) for e in expected
    ]
    assert [e["score"] for e in found["entities"]] == pytest.approx([e["score"] for e in expected], abs=TOLERANCE)
    assert all(TEXT[e["start"] : e["end"]] == e["text"] for e in found["entities"])


def test_long_text_is_read_to_its_end(client: SIEClient) -> None:
    found = client.extract("test/spans", texts_of(LONG, TEXT), labels=LABELS)
    assert found[0]["entities"][-1]["end"] > len(LONG) - 30
    (alone,) = client.extract("test/spans", texts_of(TEXT), labels=LABELS)
    assert [e["text"] for e in found[1]["entities"]] == [e["text"] for e in alone["entities"]]
    with pytest.raises(InputTooLongError, match=r"items\[0\]"):
        client.extract("test/spans", texts_of(LONG), labels=LABELS, options={"overflow_policy": "error"})


def test_sdk_gets_relations(client: SIEClient) -> None:
    options = {"threshold": 0.3, "relation_labels": ["works", "lives"], "relation_threshold": 0.2}
    (found,) = client.extract("test/relations", texts_of(TEXT), labels=LABELS, options=options)
    names = {entity["text"] for entity in found["entities"]}
    assert found["relations"]
    assert all({r["head"], r["tail"]} <= names and r["relation"] in ("works", "lives") for r in found["relations"])


def test_sdk_gets_classes_and_groups(client: SIEClient) -> None:
    (found,) = client.extract("test/classes", texts_of(TEXT), labels=LABELS)
    assert sorted(one["label"] for one in found["classifications"]) == sorted(LABELS)
    assert sum(one["score"] for one in found["classifications"]) == pytest.approx(1)
    groups = {"topic": ["sport", "news"], "who": ["person", "company"]}
    (found,) = client.extract("test/classes", texts_of(TEXT), options={"label_groups": groups})
    assert found["data"].keys() == groups.keys()
    assert len(found["classifications"]) == 4
    with pytest.raises(InputTooLongError):
        client.extract("test/classes", texts_of(LONG), labels=LABELS, options={"overflow_policy": "error"})
    (cut,) = client.extract("test/classes", texts_of(LONG), labels=LABELS, options={"overflow_policy": "truncate_text"})
    assert len(cut["classifications"]) == 3


@pytest.mark.parametrize(
    ("model", "texts", "params", "part"),
    [
        ("spans", [TEXT], {}, "labels"),
        ("spans", [TEXT, " "], {"labels": LABELS}, "$.items[1].text"),
        ("spans", [TEXT], {"labels": ["a", " "]}, "$.params.labels[1]"),
        ("spans", [TEXT], {"labels": ["x" * 129]}, "128 characters"),
        ("spans", [TEXT], {"labels": [f"{n}" + " a" * 60 for n in range(20)]}, "max_prompt_tokens"),
        ("spans", [TEXT], {"labels": LABELS, "options": {"relation_labels": ["works"]}}, "relation_labels"),
        ("spans", [TEXT], {"labels": LABELS, "options": {"threshold": 2}}, "threshold"),
        ("spans", [TEXT], {"labels": LABELS, "output_schema": {"a": 1}}, "output_schema"),
        ("relations", [TEXT], {"labels": LABELS, "options": {"threshold": 0.05}}, "at least 0.1"),
        ("classes", [TEXT], {"labels": LABELS, "options": {"classification_type": "both"}}, "multi-label"),
        ("classes", [TEXT], {"labels": LABELS, "options": {"label_groups": {"a": ["b", "c"]}}}, "label_groups"),
        ("classes", [TEXT], {"options": {"label_groups": {"a": ["b"]}}}, "two labels"),
        (
            "classes",
            [TEXT],
            {"labels": LABELS, "options": {"examples": [{"text": "a", "labels": ["z"]}]}},
            "examples[0]",
        ),
        ("classes", [TEXT, "<<LABEL>>"], {"labels": LABELS}, "$.items[1].text"),
    ],
)
def test_bad_request_is_told_what_is_wrong(
    server: Server, model: str, texts: list[str], params: dict[str, Any], part: str
) -> None:
    response = post_json(server.port, f"/v1/extract/test/{model}", {"items": texts_of(*texts), "params": params})
    assert (response.status, response.code()) == (400, "INVALID_INPUT"), response.body
    assert part in response.json()["detail"]["message"]


def test_too_long_has_its_own_code(server: Server, client: SIEClient) -> None:
    body = {"items": texts_of(LONG), "params": {"labels": LABELS, "options": {"overflow_policy": "error"}}}
    response = post_json(server.port, "/v1/extract/test/classes", body)
    assert (response.status, response.code()) == (400, "INPUT_TOO_LONG")
    with pytest.raises(RequestError, match="'x'"):
        client.extract("test/classes", texts_of(TEXT), labels=LABELS, options={"overflow_policy": "x"})
    wait_no_extents(server.port)


def test_models_are_listed_as_extractors(server: Server) -> None:
    cards = {card["name"]: card for card in get(server.port, "/v1/models").json()["models"]}
    assert all(cards[name]["outputs"] == ["json"] for name in ("test/spans", "test/relations", "test/classes"))
    assert cards["test/classes"]["max_sequence_length"] == 126
