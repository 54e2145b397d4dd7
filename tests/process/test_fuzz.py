"""Random bodies on every inference route: each gets a typed answer, and no process dies.

One half is good bodies with some bytes changed, the other well-formed bodies whose fields hold any value at all. Both are
seeded, and a failure shows the body.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import transformers
from PIL import Image

from tests.conftest import MINILM
from tests.process.harness import Server, start_server
from tests.process.mutants import mutate
from tests.process.wire import MSGPACK, Client, dense_rows, encode, stub_rows, wait_no_extents
from tests.tiny_models import save_classifier, save_cross_encoder

SEED = 40_961
NUM_MUTATED = 2000
NUM_MADE_UP = 2000
JSON = {"content-type": "application/json"}
PACKED = {"content-type": MSGPACK}
ALL = "stub/all"
CATALOG = f"""
[models."{ALL}".profiles.default]
[models."{ALL}".profiles.sparse.options]
output_types = ["sparse"]
[models."{ALL}".profiles.toned.options]
lora_id = "tone"
[models."{ALL}".profiles.task.options]
query_template = "{{instruction}} | {{text}}"
default_instruction = "find"
"""


@pytest.fixture(scope="module")
def server(minilm_directory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of a stub that does everything and of real models; afterwards it has the same processes."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(CATALOG)
    ner = save_classifier(folder / "ner", transformers.AutoModelForTokenClassification, ["O", "B-A", "I-A"])
    nli = save_classifier(
        folder / "nli", transformers.AutoModelForSequenceClassification, ["contradiction", "neutral", "entailment"]
    )
    with start_server(
        "--catalog", str(folder / "models.toml"),
        "--model", f"{ALL}=stub:dense=16,sparse=50,multivector=8,score,extract,image",
        "--lora", f"{ALL}=tone=stub:",
        "--model", f"{MINILM}={minilm_directory}",
        "--model", f"tiny/ner={ner}",
        "--model", f"tiny/nli={nli}",
        "--model", f"tiny/ce={save_cross_encoder(folder / 'ce')}",
        "--frontends", "1",
        "--max-items", "64",
        "--max-image-pixels", "65536",
    ) as running:  # fmt: skip
        before = sorted(running.pids())
        yield running
        assert sorted(running.pids()) == before
        assert np.array_equal(dense_rows(encode(running.port, ALL, ["after"])), stub_rows(["after"], 16))
        wait_no_extents(running.port)


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (5, 3), (200, 10, 60)).save(out, "PNG")
    return out.getvalue()


# --- changed bytes ----------------------------------------------------------------------------------------------------


def corpus() -> list[tuple[str, bytes, dict[str, str]]]:
    """Return good requests of every operation in both formats, with every kind of item and option among them."""
    image = picture()
    rich = {"output_dtype": "int8", "instruction": "Find", "output_types": ["dense", "sparse", "multivector"],
            "options": {"is_query": True, "normalize": False, "profile": "task", "max_seq_length": 9}}  # fmt: skip
    text = {"id": "a", "text": "häß w1 w2", "metadata": {"k": [1, None]}}
    encodes = [
        {"items": [text, {"text": ""}], "params": rich},
        {"items": [{"images": [{"data": image, "format": "png"}, {"data": image}]}, {"text": "x"}]},
        {"items": [{"text": "x"}], "params": {"options": {"lora_id": "tone", "output_types": ["sparse"]}}},
    ]
    options = {"threshold": 0.5, "aggregation_strategy": "first", "stride": 2, "overflow_policy": "error"}
    values: list[tuple[str, dict[str, Any]]] = [
        *((f"encode/{ALL}", body) for body in encodes),
        (f"encode/{ALL}:toned", {"items": [text]}),
        (f"encode/{MINILM}", {"items": [text], "params": {"options": {"query_template": "q: {text}", "is_query": True}}}),
        (f"score/{ALL}", {"query": text, "items": [text, {"text": ""}], "instruction": "do", "options": {"profile": "task"}}),
        ("score/tiny/ce", {"query": {"text": "w1"}, "items": [{"text": "w2 w3"}, {"id": "b", "text": "w4"}]}),
        (f"extract/{ALL}", {"items": [text], "params": {"labels": ["a", "b"], "options": {"threshold": 0.5}}}),
        (f"extract/{ALL}", {"items": [{"images": [{"data": image}]}, text], "params": {"labels": ["a"]}}),
        ("extract/tiny/ner", {"items": [text], "params": {"labels": ["A"], "options": options}}),
        ("extract/tiny/nli", {"items": [text], "params": {"labels": ["w4", "w5"], "options": {"multi_label": True}}}),
    ]  # fmt: skip
    packed = [(f"/v1/{path}", msgpack.packb(body), PACKED) for path, body in values]
    written = [(f"/v1/{path}", json.dumps(body, default=_base64).encode(), JSON) for path, body in values]
    embeddings = {"model": MINILM, "input": ["x", "é"], "encoding_format": "base64", "dimensions": 384}
    rerank = {"model": ALL, "query": "q", "documents": ["a", "b"], "top_n": 1, "return_documents": True}
    openai = [
        ("/v1/embeddings", json.dumps(embeddings).encode(), JSON),
        ("/v1/rerank", json.dumps({**rerank, "options": {"profile": "task"}}).encode(), JSON),
    ]
    return [*packed, *written, *openai]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_mutated_bodies_cause_no_server_error(server: Server) -> None:
    print(f"fuzz seed {SEED}")
    rng = np.random.default_rng(SEED)
    requests = corpus()
    answers: dict[str, Counter[int]] = {}
    with Client(server.port) as client:
        for index in range(NUM_MUTATED):
            path, body, headers = requests[index % len(requests)]
            mutated = mutate(body, rng)
            response = client.request("POST", path, mutated, headers)
            check(response.status, response.body, (path, mutated))
            answers.setdefault(path, Counter())[response.status] += 1
    for path, counts in answers.items():
        assert {200, 400} <= counts.keys() or path == "/v1/embeddings", f"the fuzz of {path} was one-sided: {counts}"


def check(status: int, body: bytes, asked: object) -> None:
    """An adapter that loads is told so; that apart, whatever is wrong is the client's fault."""
    assert status < 500 or (status == 503 and b"LORA_LOADING" in body), (status, body, asked)


# --- any value in any field -------------------------------------------------------------------------------------------

OPTIONS = [
    "profile", "is_query", "instruction", "output_types", "output_dtype", "lora_id", "lora", "muvera", "smve",
    "overflow_policy", "query_template", "doc_template", "default_instruction", "normalize", "pooling", "max_seq_length",
    "query_max_length", "score_mode", "score_weights", "threshold", "flat_ner", "multi_label", "merge_adjacent_entities",
    "relation_labels", "relation_threshold", "classification_type", "label_groups", "examples", "hypothesis_template",
    "aggregation_strategy", "stride", "box_threshold", "text_threshold", "score_threshold", "unheard of", "",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63), 0.0, 0.5, 1.0, -0.5, 1e308, "", "x", "{}", "{text}",
    "{text} {instruction}", "{", "{0}", "{text.__class__}", "%s", "default", "task", "sparse", "dense", "tone", "error",
    "truncate_text", "none", "simple", "max", "float16", "int8", "binary", "multi-label", "w1", "\x00", "\U0001f600", [],
    [[]], ["dense"], ["dense", "sparse"], ["dense", "dense"], ["score"], [1], [None], [0.4, 0.2, 0.4], [1, 2, 3], {},
    {"a": {}}, {"a": ["b"]}, {"": []}, [{"text": "x", "labels": ["y"]}], [{"text": None}], "x" * 5000,
]  # fmt: skip
PATHS = [f"encode/{ALL}", f"encode/{ALL}:task", f"encode/{MINILM}", f"score/{ALL}", "score/tiny/ce", f"extract/{ALL}",
         "extract/tiny/ner", "extract/tiny/nli"]  # fmt: skip


def made_up(path: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return a body that is right but for some options, and perhaps one field of its own or of an item."""

    def value() -> Any:
        return VALUES[rng.integers(len(VALUES))]

    options = {OPTIONS[rng.integers(len(OPTIONS))]: value() for _ in range(rng.integers(0, 4))}
    items: list[Any] = [{"text": "w1 w2"}, {"text": ""}][: rng.integers(1, 3)]
    body: dict[str, Any] = {"items": items}
    params: dict[str, Any] = {"options": options}
    if path.startswith("score"):
        body |= {"query": {"text": "w1"}, **params}
    else:
        body["params"] = params
        if path.startswith("extract"):
            params["labels"] = ["w4", "A"] if rng.random() < 0.3 else ["A"]
    if rng.random() < 0.3:
        fields = ["text", "id", "images", "audio", "video", "document", "metadata", "unheard of"]
        items[0] = {**items[0], fields[rng.integers(len(fields))]: value()}
    if rng.random() < 0.3:
        fields = ["output_types", "output_dtype", "instruction", "options", "labels", "output_schema", "query", "items"]
        (body if rng.random() < 0.4 else params)[fields[rng.integers(len(fields))]] = value()
    return body


def test_made_up_values_cause_no_server_error(server: Server) -> None:
    print(f"fuzz seed {SEED}")
    rng = np.random.default_rng(SEED)
    answers: dict[str, Counter[int]] = {}
    with Client(server.port) as client:
        for index in range(NUM_MADE_UP):
            path = PATHS[index % len(PATHS)]
            body = made_up(path, rng)
            is_packed = rng.random() < 0.5
            data = msgpack.packb(body) if is_packed else json.dumps(body).encode()
            response = client.request("POST", f"/v1/{path}", data, PACKED if is_packed else JSON)
            check(response.status, response.body, (path, body))
            answers.setdefault(path, Counter())[response.status] += 1
    for path, counts in answers.items():
        assert {200, 400} <= counts.keys(), f"the fuzz of {path} was one-sided: {counts}"
