"""Profiles: as entries of their own, in a request's options, and with unmodified clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from sie_sdk import SIEClient
from sie_sdk.client import RequestError

from tests.process.harness import EX_CONFIG, WAIT_S, Server, eventually, run_to_end, start_server
from tests.process.watchers import first_frame
from tests.process.wire import dense_rows, encode, get, post_json, stub_rows, total

CATALOG = """
[models."stub/a".profiles.default]
options = { query_template = "q: {text}", doc_template = "d: {text}" }
[models."stub/a".profiles.task]
options = { query_template = "{instruction} | {text}", default_instruction = "find" }
[models."stub/a".profiles.same]
extends = "task"
[models."stub/a".profiles.sparse]
options = { output_types = ["sparse"], output_dtype = "float16" }
[models."stub/a".profiles.short]
options = { max_seq_length = 2, query_max_length = 1 }
[models."stub/a".profiles.sure]
options = { threshold = 1.0 }

[models."stub/only".profiles.lazy]
options = { instruction = "read" }

[models."hub/none"]
revision = "main"
"""
ENTRIES = [
    "stub/a",
    "stub/a:task",
    "stub/a:same",
    "stub/a:sparse",
    "stub/a:short",
    "stub/a:sure",
    "stub/only:lazy",
    "hub/none",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    catalog = tmp_path_factory.mktemp("catalog") / "models.toml"
    catalog.write_text(CATALOG)
    with start_server(
        "--catalog", str(catalog),
        "--model", "stub/a=stub:dense=16,sparse=50,score,extract",
        "--lazy-model", "stub/only=stub:dense=16",
        "--default-model", "stub/a:short",
        env={"HF_HUB_OFFLINE": "1"},
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def sdk(server: Server) -> Iterator[SIEClient]:
    with SIEClient(server.url, timeout_s=WAIT_S) as client:
        yield client


def test_every_profile_is_listed_as_an_entry(server):
    models = get(server.port, "/v1/models").json()["models"]
    assert [model["name"] for model in models] == ENTRIES
    assert list(models[0]["profiles"]) == ["default", "task", "same", "sparse", "short", "sure"]
    assert [model["state"] for model in models[:6]] == ["loaded"] * 6
    assert models[3]["profiles"].keys() == {"default"}
    assert models[3]["profiles"]["default"]["output_types"] == ["sparse"]
    assert get(server.port, "/v1/models/stub/a:task").json()["name"] == "stub/a:task"
    assert get(server.port, "/v1/models/stub%2Fa%3Atask").json()["name"] == "stub/a:task"


@pytest.mark.parametrize(
    ("model", "params", "read"),
    [
        ("stub/a", {}, "d: x"),
        ("stub/a:default", {}, "d: x"),
        ("stub/a", {"options": {"is_query": True}}, "q: x"),
        ("stub/a", {"options": {"doc_template": None}}, "x"),
        ("stub/a", {"options": {"doc_template": "{text}!"}}, "x!"),
        ("stub/a", {"options": {"profile": "task"}}, "x"),
        ("stub/a", {"options": {"profile": "task", "is_query": True}}, "find | x"),
        ("stub/a", {"options": {"profile": "task", "is_query": True}, "instruction": "do"}, "do | x"),
        ("stub/a", {"options": {"profile": "task", "is_query": True}, "instruction": ""}, " | x"),
        ("stub/a:task", {"options": {"is_query": True}}, "find | x"),
        ("stub/a:same", {"options": {"is_query": True}}, "find | x"),
        ("stub/a:task", {"instruction": "do"}, "do x"),
    ],
)
def test_a_text_is_read_as_its_profile_says(server, model, params, read):
    response = encode(server.port, model, ["x"], **params)
    assert np.array_equal(dense_rows(response), stub_rows([read], 16))
    assert response.unpack()["model"] == model


def test_the_sdk_reaches_a_profile_by_name_and_as_an_entry(sdk):
    entry = sdk.encode("stub/a:sparse", {"text": "alpha"})
    option = sdk.encode("stub/a", {"text": "alpha"}, options={"profile": "sparse"})
    for result in (entry, option):
        assert result.get("dense") is None
        assert result["sparse"]["values"].dtype == np.float16
    assert np.array_equal(entry["sparse"]["indices"], option["sparse"]["indices"])
    query = sdk.encode("stub/a:task", {"text": "x"}, is_query=True)
    assert np.array_equal(query["dense"], stub_rows(["find | x"], 16)[0])


def test_lengths_only_lower_the_limit(sdk):
    long = "0123456789"
    for model, options in (("stub/a:short", {}), ("stub/a", {"profile": "short"})):
        document = sdk.encode(model, {"text": long}, options=options)
        query = sdk.encode(model, {"text": long}, is_query=True, options=options)
        found = np.stack([document["dense"], query["dense"]])
        assert np.array_equal(found, stub_rows(["01234567", "0123"], 16))
    higher = sdk.encode("stub/a", {"text": long}, options={"max_seq_length": 1 << 30, "doc_template": "{text}"})
    assert np.array_equal(higher["dense"], stub_rows([long], 16)[0])


@pytest.mark.parametrize(
    ("model", "params", "message"),
    [
        (
            "stub/a",
            {"options": {"profile": "fast"}},
            "Profile 'fast' not found. Available: ['default', 'task', 'same', 'sparse', 'short', 'sure']",
        ),
        ("stub/a:task", {"options": {"profile": "sparse"}}, "Profile 'sparse' not found. Available: ['default']"),
        ("stub/a", {"options": {"profile": 1}}, "Option 'profile' must be a non-empty string or null"),
        (
            "stub/a:sparse",
            {"options": {"output_types": ["dense"]}},
            "Profile 'default' does not give output type 'dense'. Available: ['sparse']",
        ),
        ("stub/a", {"options": {"max_seq_length": 1.5}}, "Expected `int | null`, got `float`"),
        ("stub/a", {"options": {"smve": {}}}, "does not support option 'smve'"),
    ],
)
def test_what_a_profile_cannot_do_is_400(server, model, params, message):
    response = encode(server.port, model, ["x"], **params)
    assert (response.status, response.code()) == (400, "INVALID_INPUT")
    assert message in response.json()["detail"]["message"]


def test_an_unknown_profile_is_an_unknown_model_and_near_entries_are_named(sdk):
    with pytest.raises(RequestError, match=r"Model 'stub/a:spars' not found Did you mean 'stub/a:sparse'"):
        sdk.encode("stub/a:spars", {"text": "x"})
    with pytest.raises(RequestError, match=r"Model 'stub/only' not found Did you mean 'stub/only:lazy'"):
        sdk.encode("stub/only", {"text": "x"})


def test_scores_follow_the_profile(server):
    def score(model, query, document, **fields):
        body = {"query": {"text": query}, "items": [{"text": document}], **fields}
        response = post_json(server.port, f"/v1/score/{model}", body, {"accept": "application/json"})
        assert response.status == 200, response.body
        return response.json()["scores"][0]["score"]

    plain = {"options": {"query_template": None, "doc_template": None}}
    expected = score("stub/a", "find | a", "b", **plain)
    assert score("stub/a:task", "a", "b") == expected
    assert score("stub/a", "a", "b", options={"profile": "task"}) == expected
    assert score("stub/a", "a", "b", options={"profile": "task"}, instruction="do") != expected
    assert score("stub/a", "a", "b") == score("stub/a", "q: a", "d: b", **plain)
    reply = post_json(server.port, "/v1/rerank", {"model": "stub/a:task", "query": "a", "documents": ["b"]}).json()
    assert reply["results"][0]["relevance_score"] == expected


def test_extraction_follows_the_profile(sdk):
    item, labels = {"text": "a text with many words to find"}, ["one", "two"]
    assert sdk.extract("stub/a", item, labels=labels)["entities"]
    assert sdk.extract("stub/a:sure", item, labels=labels)["entities"] == []
    assert sdk.extract("stub/a", item, labels=labels, options={"profile": "sure"})["entities"] == []
    assert sdk.extract("stub/a:sure", item, labels=labels, options={"threshold": 0.0})["entities"]
    with pytest.raises(RequestError, match="does not support 'max_seq_length'"):
        sdk.extract("stub/a:short", item, labels=labels)


def test_openai_s_embeddings_take_the_default_profile(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        for model, read in (("stub/a", "d: 0123456789"), ("stub/a:short", "01234567"), ("default", "01234567")):
            reply = client.embeddings.create(model=model, input="0123456789")
            assert np.allclose(reply.data[0].embedding, stub_rows([read], 16)[0])
        with pytest.raises(openai.BadRequestError, match="does not support embeddings"):
            client.embeddings.create(model="stub/a:sparse", input="x")


def test_an_entry_loads_its_model_and_is_counted_under_its_own_name(server):
    def state() -> str:
        return get(server.port, "/v1/models/stub/only:lazy").json()["state"]

    assert state() == "available"
    assert encode(server.port, "stub/only:lazy", ["x"]).code() == "MODEL_LOADING"
    eventually(lambda: state() == "loaded", "the model loaded")
    assert np.array_equal(dense_rows(encode(server.port, "stub/only:lazy", ["x"])), stub_rows(["read x"], 16))
    labels = {"model": "stub/only:lazy", "status": "success"}
    eventually(lambda: total(server.port, "sie_requests_total", **labels) == 1, "it is counted")


def test_the_status_feed_shows_entries(server):
    frame = first_frame(server)
    assert {"stub/a", "stub/a:sparse"} <= set(frame["loaded_models"])
    assert {model["name"] for model in frame["models"]} == set(ENTRIES)


def test_a_model_that_is_still_on_the_hub_is_not_judged_before_it_is_known(server):
    response = encode(server.port, "hub/none", ["x"], output_types=["sparse"])
    assert (response.status, response.code()) == (503, "MODEL_LOADING")
    eventually(lambda: encode(server.port, "hub/none", ["x"], output_types=["sparse"]).status == 502, "it failed")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[models."stub/a".profiles.p]\noptions = { outputs = [] }', "unknown option 'outputs'"),
        ('[models."stub/a".profiles.p]\noptions = { output_types = ["sparse"] }', "profile 'p' is for output 'sparse'"),
        ('[models."stub/a"]\nmax_sequence_length = 9000', "max_sequence_length is 9000, but its own is 8192"),
    ],
)
def test_a_file_that_cannot_be_served_stops_the_start(tmp_path: Path, text, reason):
    catalog = tmp_path / "models.toml"
    catalog.write_text(text)
    status, log = run_to_end("--catalog", str(catalog), "--model", "stub/a=stub:")
    assert status == EX_CONFIG
    assert reason in log


def test_a_dead_worker_costs_an_entry_s_requests_nothing(server):
    with contextlib.ExitStack() as ends:
        client = ends.enter_context(SIEClient(server.url, timeout_s=WAIT_S))
        server.kill_worker()
        result = client.encode("stub/a:task", {"text": "x"}, is_query=True)
    assert np.array_equal(result["dense"], stub_rows(["find | x"], 16)[0])
