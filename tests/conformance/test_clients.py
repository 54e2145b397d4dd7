"""Unmodified clients against a running server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import subprocess
from collections.abc import Iterator

import msgpack
import numpy as np
import openai
import pytest
from sie_sdk import SIEAsyncClient, SIEClient
from sie_sdk.client import RequestError

from tests.conftest import MINILM
from tests.process.harness import WAIT_S, Server

TEXTS = ["alpha", "β", "", "the fourth text is a little longer than the others"]


def stub_rows(texts, dense=16):
    rows = [np.frombuffer(hashlib.shake_256(text.encode()).digest(dense), np.int8) for text in texts]
    return np.stack(rows).astype(np.float32) / np.float32(127)


def quantised(row, output_dtype):
    """Return a float32 row in another dtype. Source: SIE API reference, section 5."""
    match output_dtype:
        case "float32" | "float16":
            return row.astype(output_dtype)
        case "int8":
            return np.round(row / np.abs(row).max() * 127).astype(np.int8)
        case "uint8":
            return np.round((row - row.min()) / (row.max() - row.min()) * 255).astype(np.uint8)
        case _:
            return np.packbits(row > 0)


@pytest.fixture
def sdk(stub_server: Server) -> Iterator[SIEClient]:
    with SIEClient(stub_server.url) as client:
        yield client


@pytest.fixture
def sdk_minilm(minilm_server: Server) -> Iterator[SIEClient]:
    with SIEClient(minilm_server.url) as client:
        yield client


@pytest.fixture
def oai(stub_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stub_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def oai_minilm(minilm_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{minilm_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


# --- sie-sdk ----------------------------------------------------------------------------------------------------------


def test_sdk_encodes_one_item(sdk):
    result = sdk.encode("stub/a", {"text": "alpha"})
    assert np.array_equal(result["dense"], stub_rows(["alpha"])[0])
    assert result["dense"].dtype == np.float32
    assert result["timing"]["total_ms"] > 0


def test_sdk_encodes_a_list_in_order_and_echoes_ids(sdk):
    items = [{"text": text, "id": f"id-{index}"} for index, text in enumerate(TEXTS)]
    results = sdk.encode("stub/a", items)
    assert [result["id"] for result in results] == ["id-0", "id-1", "id-2", "id-3"]
    assert np.array_equal(np.stack([result["dense"] for result in results]), stub_rows(TEXTS))


def test_sdk_reply_has_no_id_that_the_request_had_not(sdk):
    first, second = sdk.encode("stub/a", [{"text": "x"}, {"text": "y", "id": "own"}])
    assert first.get("id") is None
    assert second["id"] == "own"


@pytest.mark.parametrize("is_query", [True, False])
def test_sdk_instruction_is_put_before_the_text(sdk, is_query):
    result = sdk.encode("stub/a", {"text": "alpha"}, instruction="Find", is_query=is_query)
    assert np.array_equal(result["dense"], stub_rows(["Find alpha"])[0])


def test_sdk_templates_are_for_queries_and_documents_apart(sdk):
    options = {"query_template": "query: {text}", "doc_template": "passage: {text}"}
    query = sdk.encode("stub/a", {"text": "x"}, is_query=True, options=options)
    document = sdk.encode("stub/a", {"text": "x"}, options=options)
    rows = np.stack([query["dense"], document["dense"]])
    assert np.array_equal(rows, stub_rows(["query: x", "passage: x"]))


def test_sdk_normalize_gives_unit_length(sdk):
    result = sdk.encode("stub/a", {"text": "alpha"}, options={"normalize": True})
    row = stub_rows(["alpha"])[0]
    np.testing.assert_allclose(result["dense"], row / np.linalg.norm(row), rtol=1e-6)


@pytest.mark.parametrize("output_dtype", ["float32", "float16", "int8", "uint8", "binary", "ubinary"])
def test_sdk_output_dtypes_follow_their_formulas(sdk, output_dtype):
    results = sdk.encode("stub/a", [{"text": text} for text in TEXTS], output_dtype=output_dtype)
    for result, row in zip(results, stub_rows(TEXTS), strict=True):
        expected = quantised(row, output_dtype)
        assert result["dense"].dtype == expected.dtype
        assert np.array_equal(result["dense"], expected)


@pytest.mark.parametrize("output_dtype", ["float16", "int8", "uint8", "binary"])
def test_sdk_output_dtypes_of_a_real_model(sdk_minilm, output_dtype):
    plain = sdk_minilm.encode(MINILM, {"text": "alpha"})["dense"]
    found = sdk_minilm.encode(MINILM, {"text": "alpha"}, output_dtype=output_dtype)["dense"]
    expected = quantised(plain, output_dtype)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    # A second forward pass may round a value that lies between two steps the other way.
    step = 2**-10 if output_dtype == "float16" else 1
    if output_dtype == "binary":
        assert np.unpackbits(found ^ expected).sum() <= 1
    else:
        assert np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() <= step


def test_sdk_lists_models(sdk):
    models = {model["name"]: model for model in sdk.list_models()}
    assert set(models) == {"stub/a", "stub/slow", "stub/lazy"}
    assert models["stub/a"]["loaded"] is True
    assert models["stub/a"]["inputs"] == ["text"]
    assert models["stub/a"]["outputs"] == ["dense"]
    assert models["stub/a"]["dims"] == {"dense": 16}


def test_sdk_gets_one_model(sdk_minilm):
    model = sdk_minilm.get_model(MINILM)
    assert (model["name"], model["dims"], model["max_sequence_length"]) == (MINILM, {"dense": 384}, 256)


def test_sdk_hears_model_not_found_with_near_ids(sdk):
    with pytest.raises(RequestError, match=r"Model 'stub/b' not found Did you mean 'stub/a'") as caught:
        sdk.encode("stub/b", {"text": "x"})
    assert (caught.value.code, caught.value.status_code) == ("MODEL_NOT_FOUND", 404)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"output_types": ["sparse"]}, "sparse"),
        ({"output_types": ["nonsense"]}, "nonsense"),
        ({"output_dtype": "float8"}, "float8"),
        ({"options": {"profile": "fast"}}, "fast"),
        ({"options": {"lora_id": "l"}}, "lora_id"),
        ({"options": {"is_query": "yes"}}, "is_query"),
        ({"options": {"query_template": "{other}"}, "is_query": True}, "other"),
    ],
)
def test_sdk_hears_invalid_input_with_the_reason(sdk, kwargs, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        sdk.encode("stub/a", {"text": "x"}, **kwargs)
    assert (caught.value.code, caught.value.status_code) == ("INVALID_INPUT", 400)


def test_sdk_hears_that_an_image_is_not_text(sdk):
    png = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    )
    with pytest.raises(RequestError, match="requires text input") as caught:
        sdk.encode("stub/a", {"images": [png]})
    assert caught.value.code == "INVALID_INPUT"


def test_sdk_hears_that_there_are_too_many_items(sdk):
    with pytest.raises(RequestError, match="at most 64 items") as caught:
        sdk.encode("stub/a", [{"text": "x"}] * 65)
    assert caught.value.status_code == 400


def test_sdk_polls_until_a_lazy_model_is_loaded(sdk):
    """The first answer is MODEL_LOADING with Retry-After 5; the SDK waits that long."""
    result = sdk.encode("stub/lazy", {"text": "alpha"}, provision_timeout_s=30)
    assert np.array_equal(result["dense"], stub_rows(["alpha"])[0])
    assert sdk.get_model("stub/lazy")["state"] == "loaded"


def test_sdk_watches_the_status(sdk):
    frames = sdk.watch()
    try:
        first, second = next(frames), next(frames)
    finally:
        frames.close()
    assert first["ready"] is True
    assert second["timestamp"] > first["timestamp"]


def test_sdk_does_not_warn_of_another_version(stub_server, monkeypatch, caplog):
    """It says so once a process, so it has to forget that it did."""
    monkeypatch.setattr(SIEClient, "_version_warning_logged", False)
    with SIEClient(stub_server.url) as client:
        client.encode("stub/a", {"text": "x"})
    assert not [record for record in caplog.records if record.name.startswith("sie_sdk")]


def test_sdk_is_told_that_this_is_no_gateway(sdk):
    with pytest.raises(RequestError) as caught:
        sdk.get_capacity()
    assert caught.value.code == "not_gateway"


def test_async_sdk_encodes_many_at_once(stub_server):
    async def encode_all():
        async with SIEAsyncClient(stub_server.url) as client:
            return await asyncio.gather(*(client.encode("stub/a", {"text": f"text {n}"}) for n in range(50)))

    results = asyncio.run(encode_all())
    rows = np.stack([result["dense"] for result in results])
    assert np.array_equal(rows, stub_rows([f"text {n}" for n in range(50)]))


def test_async_sdk_maps_errors_and_lists_models(stub_server):
    async def ask():
        async with SIEAsyncClient(stub_server.url) as client:
            with pytest.raises(RequestError) as caught:
                await client.encode("nobody/knows", [{"text": "x"}])
            return caught.value.code, await client.list_models()

    code, models = asyncio.run(ask())
    assert code == "MODEL_NOT_FOUND"
    assert "stub/a" in {model["name"] for model in models}


# --- openai -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.NOT_GIVEN])
def test_openai_embeds_texts(oai, encoding_format):
    reply = oai.embeddings.create(model="stub/a", input=TEXTS, encoding_format=encoding_format)
    assert [row.index for row in reply.data] == [0, 1, 2, 3]
    vectors = [row.embedding for row in reply.data]
    if encoding_format == "base64":
        rows = np.stack([np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors])
    else:
        rows = np.array(vectors, np.float32)
    assert np.array_equal(rows, stub_rows(TEXTS))
    assert reply.model == "stub/a"
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == 2 + 1 + 1 + 13


def test_openai_embeds_one_text(oai):
    reply = oai.embeddings.create(model="stub/a", input="alpha")
    assert np.array_equal(np.float32(reply.data[0].embedding), stub_rows(["alpha"])[0])


def test_openai_token_ids_of_another_tokenizer_are_refused(bfloat16_server):
    """What LangChain's OpenAIEmbeddings sends by default: ids of tiktoken's cl100k_base, which 30522 tokens may hold."""
    with (
        openai.OpenAI(base_url=f"{bfloat16_server.url}/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as caught,
    ):
        client.embeddings.create(model=MINILM, input=[[9906, 1917]], encoding_format="base64")
    assert (caught.value.param, caught.value.code) == ("input", "invalid_request")


def test_openai_token_arrays_equal_their_text(oai_minilm, minilm_directory):
    from tokenizers import Tokenizer

    texts = ["a first text", "and a second, longer one"]
    tokenizer = Tokenizer.from_file(str(minilm_directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokens = [tokenizer.encode(text).ids for text in texts]
    by_text = oai_minilm.embeddings.create(model=MINILM, input=texts)
    by_tokens = oai_minilm.embeddings.create(model=MINILM, input=tokens)
    one = oai_minilm.embeddings.create(model=MINILM, input=tokens[0])
    rows = np.array([row.embedding for row in by_text.data])
    np.testing.assert_allclose(np.array([row.embedding for row in by_tokens.data]), rows, atol=1e-5)
    np.testing.assert_allclose(one.data[0].embedding, rows[0], atol=1e-5)
    assert by_text.usage.prompt_tokens == by_tokens.usage.prompt_tokens == sum(map(len, tokens))


def test_openai_dimensions_cut_and_renormalise(oai):
    reply = oai.embeddings.create(model="stub/a", input="alpha", dimensions=5)
    cut = stub_rows(["alpha"])[0][:5]
    np.testing.assert_allclose(reply.data[0].embedding, cut / np.linalg.norm(cut), rtol=1e-6)


def test_openai_dimensions_are_refused_by_a_model_that_was_not_trained_for_them(oai_minilm):
    with pytest.raises(openai.BadRequestError, match="cannot give 100 dimensions") as caught:
        oai_minilm.embeddings.create(model=MINILM, input="x", dimensions=100)
    assert (caught.value.param, caught.value.code) == ("dimensions", "unsupported_field")
    assert len(oai_minilm.embeddings.create(model=MINILM, input="x", dimensions=384).data[0].embedding) == 384


def test_openai_token_ids_outside_the_vocabulary_are_refused_by_field(oai_minilm):
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary") as caught:
        oai_minilm.embeddings.create(model=MINILM, input=[[30522]])
    assert (caught.value.param, caught.value.code) == ("input", "invalid_request")


def test_openai_default_is_the_only_model(oai_minilm):
    assert oai_minilm.embeddings.create(model="default", input="x").model == MINILM


def test_openai_lists_and_retrieves_models(oai):
    listed = {model.id: model for model in oai.models.list()}
    assert {"stub/a", "stub/slow"} <= set(listed)
    model = oai.models.retrieve("stub/a")
    assert (model.id, model.object) == ("stub/a", "model")
    assert isinstance(model.created, int)


def test_openai_hears_typed_errors(oai):
    with pytest.raises(openai.NotFoundError) as missing:
        oai.embeddings.create(model="nobody/knows", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        oai.models.retrieve("nobody/knows")
    with pytest.raises(openai.BadRequestError, match="cannot be empty") as empty:
        oai.embeddings.create(model="stub/a", input=[])
    assert empty.value.param == "input"
    with pytest.raises(openai.UnprocessableEntityError):
        oai.embeddings.create(model="stub/a", input={"a": 1})  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="token arrays"):
        oai.embeddings.create(model="stub/a", input=[1, 2, 3])


# --- curl -------------------------------------------------------------------------------------------------------------


def curl(*args: str) -> tuple[int, str, bytes]:
    """Return status, content type and body."""
    done = subprocess.run(
        ["curl", "-sS", "--max-time", f"{WAIT_S:g}", "-w", "\n%{http_code} %{content_type}", *args],
        capture_output=True,
        check=True,
        timeout=WAIT_S,
    )
    body, _, trailer = done.stdout.rpartition(b"\n")
    status, _, content_type = trailer.decode().partition(" ")
    return int(status), content_type, body


def test_bare_curl_gets_msgpack(stub_server):
    data = '{"items":[{"text":"alpha"}]}'
    status, content_type, body = curl("-d", data, f"{stub_server.url}/v1/encode/stub/a")
    assert (status, content_type) == (200, "application/msgpack")
    packed = msgpack.unpackb(body, strict_map_key=False)["items"][0]["dense"]["values"]
    assert np.array_equal(np.frombuffer(packed[b"data"], packed[b"type"]), stub_rows(["alpha"])[0])


@pytest.mark.parametrize("path", ["stub/a", "stub%2Fa", "stub%2fa"])
def test_curl_asks_for_json_by_any_spelling_of_the_path(stub_server, path):
    status, content_type, body = curl(
        "-H", "Accept: application/json", "-d", '{"items":[{"text":"alpha"}]}', f"{stub_server.url}/v1/encode/{path}"
    )
    assert (status, content_type) == (200, "application/json")
    assert b'"model":"stub/a"' in body


def test_curl_gets_errors_as_json_whatever_it_accepts(stub_server):
    status, content_type, body = curl(
        "-H", "Accept: application/msgpack", "-d", "{", f"{stub_server.url}/v1/encode/stub/a"
    )
    assert (status, content_type) == (400, "application/json")
    assert b'"code":"INVALID_INPUT"' in body


@pytest.mark.parametrize(("path", "text"), [("/healthz", b"ok"), ("/readyz", b"ok"), ("/", b"OK"), ("/health", b"OK")])
def test_curl_asks_for_health(stub_server, path, text):
    status, content_type, body = curl(f"{stub_server.url}{path}")
    assert (status, body) == (200, text)
    assert content_type.startswith("text/plain")


def test_curl_asks_for_the_dashboard(stub_server):
    status, content_type, body = curl("-H", "Accept: text/html", f"{stub_server.url}/")
    assert status == 200
    assert content_type.startswith("text/html")
    assert b"<html" in body.lower()
