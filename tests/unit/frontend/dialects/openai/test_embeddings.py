from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.config.limits import Limits
from sie.frontend.dialects.openai.embeddings import decode_embeddings, encode_embeddings, error_body
from sie.frontend.operations.resolve import resolve_embeddings
from sie.values.card import ModelCard
from sie.values.errors import (
    BadRequest,
    InputTooLong,
    Internal,
    ModelLoadFailed,
    NotFound,
    Overloaded,
    PoisonInput,
    Unavailable,
)
from sie.values.inference import EncodeReply, Timing

LIMITS = Limits()
CARD = ModelCard(id="m", kind="encoder", dims={"dense": 384}, tokenizer_file="tokenizer.json")


def decode(value, content_type="application/json", limits=LIMITS):
    return decode_embeddings(json.dumps(value).encode(), content_type, limits)


def refusal(call, *args):
    with pytest.raises(BadRequest) as caught:
        call(*args)
    return caught.value


@pytest.mark.parametrize(
    ("value", "texts", "token_lists"),
    [
        ("a", ["a"], None),
        ("", [""], None),
        (["a", ""], ["a", ""], None),
        ([1, 2], None, [[1, 2]]),
        ([[1], [2, 3]], None, [[1], [2, 3]]),
    ],
)
def test_every_form_of_input(value, texts, token_lists):
    request = decode({"model": "m", "input": value}).request
    assert (request.model, request.texts, request.token_lists) == ("m", texts, token_lists)


@pytest.mark.parametrize(("encoding", "expected"), [(None, False), ("float", False), ("base64", True)])
def test_encoding_format(encoding, expected):
    assert decode({"model": "m", "input": "a", "encoding_format": encoding}).base64 is expected
    assert decode({"model": "m", "input": "a"}).base64 is False


@pytest.mark.parametrize("body", [{"input": "a"}, {"input": "a", "model": None}, {"input": "a", "model": "default"}])
def test_no_model_means_the_default_one(body):
    assert decode(body).request.model == "default"


def test_unknown_fields_are_ignored():
    assert decode({"model": "m", "input": "a", "user": "u", "x": {"y": [1]}}).request.texts == ["a"]


@pytest.mark.parametrize(
    "content_type", [None, "", "application/json", "Application/JSON; charset=utf-8", "application/x+json"]
)
def test_json_content_types(content_type):
    assert decode({"model": "m", "input": "a"}, content_type).request.texts == ["a"]


@pytest.mark.parametrize(
    ("body", "content_type", "kind", "loc"),
    [
        (b'{"model":"m","input":"a"}', "text/plain", "model_attributes_type", ["body"]),
        (b'{"model":"m","input":"a"}', "application/x-www-form-urlencoded", "model_attributes_type", ["body"]),
        (b"\x81\xa5input\xa1a", "application/msgpack", "model_attributes_type", ["body"]),
        (b"{", None, "json_invalid", ["body"]),
        (b"", None, "json_invalid", ["body"]),
        (b'{"input":"\xff"}', None, "json_invalid", ["body"]),
        (b"[]", None, "model_attributes_type", ["body"]),
        (b'{"model":"m"}', None, "missing", ["body", "input"]),
        (b'{"model":5,"input":"a"}', None, "string_type", ["body", "model"]),
        (b'{"input":["a",{}]}', None, None, ["body", "input", 1]),
        (b'{"input":5}', None, None, ["body", "input"]),
        (b'{"input":["a",1]}', None, "union_type", ["body", "input"]),
        (b'{"input":[[1],2]}', None, "union_type", ["body", "input"]),
        (b'{"input":[true]}', None, None, ["body", "input", 0]),
        (b'{"input":[-1]}', None, None, ["body", "input", 0]),
        (b'{"input":[[1,4294967296]]}', None, None, ["body", "input", 0, 1]),
        (b'{"input":[1.5]}', None, None, ["body", "input", 0]),
        (b'{"input":"a","encoding_format":"hex"}', None, "value_error", ["body", "encoding_format"]),
        (b'{"input":"a","dimensions":"8"}', None, "int_type", ["body", "dimensions"]),
    ],
)
def test_schema_faults_are_422_with_both_keys(body, content_type, kind, loc):
    error = refusal(decode_embeddings, body, content_type, LIMITS)
    assert error.http_status == 422
    answer = json.loads(error_body(error))
    (fault,) = answer["detail"]
    assert set(fault) == {"type", "loc", "msg", "input"}
    assert fault["loc"] == loc
    assert kind is None or fault["type"] == kind
    assert answer["error"]["message"] == answer["message"] == fault["msg"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == (loc[1] if len(loc) > 1 else None)
    assert "schema_faults" not in answer["error"]


@pytest.mark.parametrize("value", [[], [[]], [[1], []]])
def test_empty_input_is_400_in_the_openai_envelope(value):
    error = refusal(decode, {"model": "m", "input": value})
    assert error.http_status == 400
    assert json.loads(error_body(error)) == {
        "error": {"message": "Input cannot be empty", "type": "invalid_request_error", "param": "input", "code": "invalid_request"},
        "message": "Input cannot be empty",
    }  # fmt: skip


def test_limits_on_entries_and_texts_are_400():
    limits = Limits(max_items=2, max_item_text_bytes=100)
    assert refusal(decode, {"input": ["a"] * 3}, None, limits).http_status == 400
    error = refusal(decode, {"input": ["a", "é" * 51]}, None, limits)
    assert (error.http_status, "input[1]" in error.message) == (400, True)
    assert decode({"input": list(range(50))}, None, limits).request.token_lists == [list(range(50))]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 70))
def test_a_mutated_body_is_read_or_refused_and_never_crashes(edits, length):
    body = bytearray(b'{"model":"m","input":["a","b\\n"],"encoding_format":"base64"}')
    for position, value in edits:
        body[position % len(body)] = value
    assert outcome(bytes(body[:length])) in (200, 400, 422)


def outcome(body):
    try:
        decode_embeddings(body, None, LIMITS)
    except BadRequest as error:
        error_body(error)
        return error.http_status
    return 200


@pytest.mark.parametrize(
    ("matryoshka", "dimensions", "allowed"),
    [
        (False, 384, True),
        (False, 383, False),
        (False, 385, False),
        (True, 1, True),
        (True, 385, False),
        (True, 0, False),
        (True, -1, False),
        (False, 2**31 - 1, False),
        ((64, 128), 64, True),
        ((64, 128), 384, True),
        ((64, 128), 65, False),
        ((64, 512), 512, False),
    ],
)
def test_dimensions_follow_the_card(matryoshka, dimensions, allowed):
    card = ModelCard(id="m", kind="encoder", dims={"dense": 384}, matryoshka=matryoshka)
    request = decode({"input": "a", "dimensions": dimensions}).request
    if allowed:
        assert resolve_embeddings(request, card).dimensions == dimensions
        return
    error = refusal(resolve_embeddings, request, card)
    body = json.loads(error_body(error))["error"]
    assert (error.http_status, body["code"], body["param"]) == (400, "unsupported_field", "dimensions")


def test_resolved_requests_are_dense_float32():
    card = msgspec.structs.replace(CARD, accept_token_ids=True)
    for value in ("a", [1, 2]):
        request = resolve_embeddings(decode({"input": value}).request, card)
        assert (request.output_types, request.output_dtype) == (("dense",), "float32")


@pytest.mark.parametrize("value", [[9906, 1917], [[9906], [1917]]])
def test_token_ids_are_refused_unless_the_operator_says_that_they_are_the_models(value):
    error = refusal(resolve_embeddings, decode({"input": value}).request, CARD)
    body = json.loads(error_body(error))["error"]
    assert (error.http_status, body["code"], body["param"]) == (400, "invalid_request", "input")
    assert "check_embedding_ctx_length=False" in error.message
    assert "accept_token_ids = true" in error.message


def test_models_that_cannot_serve_the_input_are_named():
    sparse = ModelCard(id="sparse", kind="encoder", outputs=("sparse",))
    assert "sparse" in refusal(resolve_embeddings, decode({"input": "a"}).request, sparse).message
    stub = ModelCard(id="stub", kind="stub", dims={"dense": 4})
    message = refusal(resolve_embeddings, decode({"input": [1]}).request, stub).message
    assert "requires text" in message
    assert "check_embedding_ctx_length=False" in message
    assert "accept_token_ids" not in message, "it would stop the start"


def test_a_profile_decides_what_happens_to_long_texts_unless_the_request_does():
    card = ModelCard(id="m", kind="encoder", profiles={"default": {"overflow_policy": "error"}})
    assert resolve_embeddings(decode({"input": "a"}).request, card).options["overflow_policy"] == "error"
    request = decode({"input": "a", "overflow_policy": "default"}).request
    assert resolve_embeddings(request, card).options["overflow_policy"] == "default"


def reply_of(rows):
    view = memoryview(rows.view(np.uint8).reshape(len(rows), -1)).toreadonly()
    return EncodeReply(
        model='or"g/m', ids=[], num_items=len(rows), values=view, dtype="<f4", width=rows.shape[1], dims=rows.shape[1],
        output_dtype="float32", input_tokens=9, timing=Timing(),
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("base64_rows", [True, False])
def test_reply_holds_every_row_and_real_usage(count, base64_rows):
    rows = np.random.default_rng(count).standard_normal((count, 384)).astype(np.float32)
    body = json.loads(encode_embeddings(reply_of(rows), base64_rows))
    vectors = [entry.pop("embedding") for entry in body["data"]]
    if base64_rows:
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    np.testing.assert_array_equal(np.array(vectors, np.float32), rows)
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": index} for index in range(count)],
        "model": 'or"g/m',
        "usage": {"prompt_tokens": 9, "total_tokens": 9, "sie_token_source": "worker"},
    }


def test_the_openai_librarys_types_accept_the_reply():
    types = pytest.importorskip("openai.types")
    rows = np.ones((2, 4), np.float32)
    parsed = types.CreateEmbeddingResponse.model_validate_json(encode_embeddings(reply_of(rows), base64=False))
    assert [entry.index for entry in parsed.data] == [0, 1]
    assert parsed.data[1].embedding == [1.0] * 4
    assert parsed.usage.total_tokens == 9


@pytest.mark.parametrize(
    ("error", "kind", "code", "extras"),
    [
        (BadRequest("x"), "invalid_request_error", "invalid_request", {}),
        (InputTooLong("x"), "invalid_request_error", "invalid_request", {}),
        (NotFound("x"), "invalid_request_error", "model_not_found", {}),
        (PoisonInput("x"), "invalid_request_error", "POISON_INPUT", {}),
        (Overloaded("x", retry_after_s=1), "server_error", "server_overloaded", {}),
        (Unavailable("x"), "server_error", "MODEL_LOADING", {}),
        (ModelLoadFailed("x", extras={"attempts": 2}), "server_error", "MODEL_LOAD_FAILED", {"attempts": 2}),
        (Internal("x"), "server_error", "inference_error", {}),
    ],
)
def test_error_envelope(error, kind, code, extras):
    expected = {"message": "x", "type": kind, "param": None, "code": code, **extras}
    assert json.loads(error_body(error)) == {"error": expected, "message": "x"}
