from __future__ import annotations

import base64
import contextlib
import json
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.config.limits import Limits
from sie.frontend.dialects.native.encode import decode_encode, error_body, method_not_allowed_body, not_found_body
from sie.frontend.dialects.native.encode_reply import encode_reply
from sie.frontend.models.not_found import model_not_found
from sie.frontend.operations.resolve import resolve_encode
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal, ModelLoadFailed, SieError
from sie.values.inference import EncodeReply, EncodeRequest, Timing

LIMITS = Limits()
CARD = ModelCard(id="org/m", kind="encoder", dims={"dense": 4})
BOTH = pytest.mark.parametrize("msgpack", [True, False], ids=["msgpack", "json"])


def decode(value, msgpack=True, limits=LIMITS):
    body = msgspec.msgpack.encode(value) if msgpack else msgspec.json.encode(value)
    return decode_encode(body, msgpack, "org/m", limits)


def resolve(value, msgpack=True, card=CARD):
    return resolve_encode(decode(value, msgpack), card)


def with_params(msgpack=True, **params):
    return resolve({"items": [{"text": "x"}], "params": params}, msgpack)


def refusal(call, *args, **kwargs):
    with pytest.raises(BadRequest) as caught:
        call(*args, **kwargs)
    assert caught.value.http_status == 400
    return caught.value


@BOTH
class TestDecode:
    def test_the_smallest_request(self, msgpack):
        request = resolve({"items": [{"text": "x"}]}, msgpack)
        assert (request.model, request.texts, request.ids) == ("org/m", ["x"], [])
        assert (request.output_types, request.output_dtype) == (("dense",), "float32")
        assert (request.instruction, request.options) == (None, {})

    def test_ids_are_kept_per_item_only_when_given(self, msgpack):
        request = decode({"items": [{"text": "a"}, {"id": "7", "text": ""}, {"id": "", "text": "c"}]}, msgpack)
        assert request.texts == ["a", "", "c"]
        assert request.ids == [None, "7", ""]

    def test_null_is_accepted_for_every_optional_field(self, msgpack):
        item = {"id": None, "text": "x", "images": None, "audio": None, "video": None, "document": None}
        nothing = {"output_types": None, "output_dtype": None, "instruction": None, "options": None}
        assert resolve({"items": [{**item, "metadata": None}], "params": nothing}, msgpack).texts == ["x"]
        assert resolve({"items": [item], "params": None}, msgpack).texts == ["x"]

    def test_unknown_fields_are_ignored_at_every_level(self, msgpack):
        value = {"x": [1], "items": [{"text": "a", "y": {"z": 1}}], "params": {"w": 1, "options": {"custom": [1]}}}
        request = resolve(value, msgpack)
        assert request.texts == ["a"]
        assert request.options == {"custom": [1]}

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({}, "Object missing required field `items`"),
            ({"items": []}, "Field 'items' must not be empty"),
            ({"items": None}, "Expected `array`, got `null` - at `$.items`"),
            ({"items": [{"text": 5}]}, "Expected `str | null`, got `int` - at `$.items[0].text`"),
            ({"items": [{"text": "a"}, {"id": 5}]}, "Expected `str | null`, got `int` - at `$.items[1].id`"),
            ({"items": [5]}, "Expected `object`, got `int` - at `$.items[0]`"),
            ({"items": [{"metadata": 5}]}, "Expected `object | null` - at `$.items[0].metadata`"),
            ({"items": [{"metadata": []}]}, "Expected `object | null` - at `$.items[0].metadata`"),
            ([], "Expected `object`, got `array`"),
            ({"items": [{"text": "x"}], "params": {"options": 5}}, "Expected `object | null`, got `int` - at `$.params.options`"),
            ({"items": [{"text": "x"}], "params": {"output_types": [1]}}, "Expected `str`, got `int` - at `$.params.output_types[0]`"),
            ({"items": [{"images": [{}]}]}, "Object missing required field `data` - at `$.items[0].images[0]`"),
        ],
    )  # fmt: skip
    def test_faults_name_their_path(self, msgpack, value, message):
        got = refusal(decode, value, msgpack).message
        assert got.replace("`None`", "`null`") == message  # msgspec names a msgpack null after Python's

    def test_audio_alone_is_strict(self, msgpack):
        data = b"abc" if msgpack else base64.b64encode(b"abc").decode()
        error = refusal(decode, {"items": [{"audio": {"data": data, "bogus": 1}}]}, msgpack)
        assert error.message == "Object contains unknown field `bogus` - at `$.items[0].audio`"
        decode({"items": [{"video": {"data": data, "bogus": 1}}]}, msgpack)

    def test_items_over_the_limit_are_a_permanent_refusal(self, msgpack):
        limits = Limits(max_items=2)
        assert decode({"items": [{"text": "x"}] * 2}, msgpack, limits).texts == ["x", "x"]
        error = refusal(decode, {"items": [{"text": "x"}] * 3}, msgpack, limits)
        assert (error.code, error.retryable) == ("INVALID_INPUT", False)
        assert "at most 2 items, got 3" in error.message

    def test_text_and_metadata_of_an_item_share_one_limit(self, msgpack):
        limits = Limits(max_item_text_bytes=100)
        decode({"items": [{"text": "é" * 50}, {"text": "x" * 100}]}, msgpack, limits)
        error = refusal(decode, {"items": [{"text": "x"}, {"text": "é" * 51}]}, msgpack, limits)
        assert error.message == "Field 'items[1]' must hold at most 100 bytes of UTF-8 text"
        assert error.code == "INVALID_INPUT"
        refusal(decode, {"items": [{"text": "x" * 60, "metadata": {"a": "y" * 60}}]}, msgpack, limits)

    def test_options_are_held_to_64_kib(self, msgpack):
        value = {"items": [{"text": "x"}], "params": {"options": {"a": "y" * 70_000}}}
        assert "$.params.options" in refusal(decode, value, msgpack).message


def test_bad_base64_names_the_json_path():
    error = refusal(decode, {"items": [{"images": [{"data": "!!"}]}]}, msgpack=False)
    assert "$.items[0].images[0].data" in error.message


@pytest.mark.parametrize(
    ("body", "msgpack"),
    [
        (b"", True),
        (b"", False),
        (b"\xc0", True),
        (b"null", False),
        (b'{"items":[{"text":"a"}]}x', False),
        (b"\x81\xa5items\x91\x81\xa4text\xa1x\x00", True),
        (b"\x81\xa5items\x91\x81\xa4text\xa1\xff", True),
        (b'{"items":[{"text":"\\ud800"}]}', False),
        (b'{"items":[{"text":"\xed\xa0\x80"}]}', False),
        (b'{"items":[{"text":"x","metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5001 + b"]}", False),
        (b"\x81\xa5items\x91\x82\xa4text\xa1x\xa8metadata" + b"\x81\xa1a" * 5000 + b"\xc0", True),
        (b"\x81\xa5items\xdd\xff\xff\xff\xff", True),
        (b"\x91" * 1_000_000, True),
        (b'{"x":' + b"[" * 1_000_000, False),
    ],
)
def test_malformed_bodies_are_400(body, msgpack):
    assert refusal(decode_encode, body, msgpack, "m", LIMITS).code == "INVALID_INPUT"


def test_a_duplicate_key_counts_last():
    assert decode_encode(b'{"items":[],"items":[{"text":"a","text":"b"}]}', False, "m", LIMITS).texts == ["b"]


_VALID = {True: msgspec.msgpack.encode({"items": [{"id": "a", "text": "x", "metadata": {"k": 1}}], "params": {"options": {"is_query": True}}})}  # fmt: skip
_VALID[False] = msgspec.json.encode(msgspec.msgpack.decode(_VALID[True]))


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(1, 90),
)
def test_a_mutated_body_is_read_or_refused_and_never_crashes(msgpack, edits, length):
    body = bytearray(_VALID[msgpack])
    for position, value in edits:
        body[position % len(body)] = value
    with contextlib.suppress(BadRequest):  # any other exception fails the test
        resolve_encode(decode_encode(bytes(body[:length]), msgpack, "m", LIMITS), CARD)


class TestResolve:
    @pytest.mark.parametrize(
        "item",
        [{}, {"images": [{"data": b""}]}, {"text": "x", "audio": {"data": b"a"}},
         {"video": {"data": b"a"}}, {"document": {"data": b"a", "format": "pdf"}}],
    )  # fmt: skip
    def test_an_item_that_is_not_text_is_refused_after_the_model_is_known(self, item):
        request = decode({"items": [{"text": "x"}, item]})
        assert request.texts is None
        assert "requires text input - at `$.items[1]`" in refusal(resolve_encode, request, CARD).message

    def test_a_text_beside_images_is_read_by_a_model_of_texts(self):
        request = decode({"items": [{"text": "x", "images": [{"data": b"a"}]}, {"text": "y"}]})
        resolved = resolve_encode(request, CARD)
        assert (resolved.texts, resolved.images) == (["x", "y"], None)

    def test_output_types_options_beat_params(self):
        card = ModelCard(id="m", kind="encoder", outputs=("dense", "sparse"))
        params = {"output_types": ["sparse"], "options": {"output_types": ["dense"]}}
        assert resolve({"items": [{"text": "x"}], "params": params}, card=card).output_types == ("dense",)
        params = {"output_types": ["sparse", "dense", "sparse"]}
        assert resolve({"items": [{"text": "x"}], "params": params}, card=card).output_types == ("sparse", "dense")

    @pytest.mark.parametrize("where", ["params", "options"])
    @pytest.mark.parametrize("value", [[], ["bogus"], ["sparse"], ["dense", "multivector"]])
    def test_output_types_that_cannot_be_served_are_400(self, where, value):
        params = {"output_types": value} if where == "params" else {"options": {"output_types": value}}
        assert refusal(with_params, **params).code == "INVALID_INPUT"

    def test_output_types_in_options_may_hold_anything_and_are_still_400(self):
        refusal(with_params, options={"output_types": [[1], {"a": 1}]})
        refusal(with_params, options={"output_types": "dense"})

    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            ({}, "float32"),
            ({"output_dtype": "int8"}, "int8"),
            ({"options": {"output_dtype": "binary"}}, "binary"),
            ({"output_dtype": "float16", "options": {"output_dtype": "binary"}}, "float16"),
            ({"output_dtype": "ubinary"}, "ubinary"),
        ],
    )
    def test_output_dtype_the_request_beats_options(self, params, expected):
        assert with_params(**params).output_dtype == expected

    def test_an_unknown_output_dtype_is_named(self):
        assert refusal(with_params, output_dtype="float64").message == "Unsupported output_dtype: float64"

    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            ({"instruction": "a", "options": {"instruction": "b"}}, "a"),
            ({"instruction": "", "options": {"instruction": "b"}}, ""),
            ({"options": {"instruction": "b"}}, "b"),
            ({}, None),
        ],
    )
    def test_instruction_the_request_beats_options(self, params, expected):
        assert with_params(**params).instruction == expected

    @pytest.mark.parametrize("profile", [None, "default"])
    def test_the_default_profile_is_taken_and_leaves_no_trace(self, profile):
        assert with_params(options={"profile": profile}).options == {}

    @pytest.mark.parametrize(
        ("profile", "message"),
        [
            ("x", "Profile 'x' not found. Available: ['default']"),
            ("", "Option 'profile' must be a non-empty string or null"),
            (5, "Option 'profile' must be a non-empty string or null"),
        ],
    )
    def test_other_profiles_are_refused(self, profile, message):
        assert refusal(with_params, options={"profile": profile}).message == message

    @pytest.mark.parametrize("policy", ["default", "error", "truncate_text", None])
    def test_overflow_policies(self, policy):
        with_params(options={"overflow_policy": policy})

    @pytest.mark.parametrize("policy", ["truncate", 5, ["error"], {}])
    def test_another_overflow_policy_lists_the_valid_ones(self, policy):
        message = refusal(with_params, options={"overflow_policy": policy}).message
        assert "['default', 'error', 'truncate_text']" in message

    @pytest.mark.parametrize(
        "options",
        [{"is_query": 1}, {"normalize": "yes"}, {"instruction": 5}, {"query_template": []}, {"output_dtype": 5}],
    )
    def test_options_are_typed_strictly(self, options):
        (name,) = options
        assert f"$.params.options.{name}" in refusal(with_params, options=options).message

    @pytest.mark.parametrize("name", ["smve", "pooling", "lora"])
    def test_options_that_cannot_be_served_are_refused_by_name(self, name):
        assert f"'{name}'" in refusal(with_params, options={name: 1}).message
        with_params(options={name: None})


def reply_of(array, **fields):
    rows = np.ascontiguousarray(array)
    view = memoryview(rows.view(np.uint8).reshape(len(rows), -1)).toreadonly()
    defaults = {
        "model": "org/m",
        "ids": [],
        "num_items": len(rows),
        "values": view,
        "dtype": rows.dtype.str,
        "width": rows.shape[1],
        "dims": rows.shape[1],
        "output_dtype": rows.dtype.name,
        "input_tokens": 7,
        "timing": Timing(total_ms=3.5, queue_ms=1.0, tokenization_ms=0.5, inference_ms=2.0),
    }
    return EncodeReply(**{**defaults, **fields})


TIMING = {"total_ms": 3.5, "queue_ms": 1.0, "tokenization_ms": 0.5, "inference_ms": 2.0, "postprocessing_ms": None}


def read_msgpack(body):
    def to_text(value):
        if isinstance(value, dict) and b"nd" in value:
            return np.frombuffer(value[b"data"], value[b"type"]).reshape(value[b"shape"])
        if isinstance(value, dict):
            return {key: to_text(child) for key, child in value.items()}
        return [to_text(child) for child in value] if isinstance(value, list) else value

    return to_text(msgspec.msgpack.decode(body))


class TestReply:
    @pytest.mark.parametrize("count", [1, 3, 16, 70])
    @pytest.mark.parametrize("dtype", ["<f4", "<f2", "|i1", "|u1"])
    def test_msgpack_holds_every_row_in_order(self, count, dtype):
        rows = np.random.default_rng(count).integers(0, 100, (count, 384)).astype(dtype)
        body = read_msgpack(encode_reply(reply_of(rows), True))
        assert list(body) == ["model", "items", "timing", "usage"]
        assert (body["timing"], body["usage"]) == (TIMING, {"input_tokens": 7})
        assert [list(item) for item in body["items"]] == [["dense"]] * count
        assert all(item["dense"]["dims"] == 384 and item["dense"]["dtype"] == rows.dtype.name for item in body["items"])
        np.testing.assert_array_equal([item["dense"]["values"] for item in body["items"]], rows)

    @BOTH
    @pytest.mark.parametrize("postprocessing_ms", [0.0, 0.25])
    @pytest.mark.parametrize("usage", [(0, 0), (7, 0), (70_000, 0), (7, 2)])
    def test_times_and_usage_are_the_same_keys_in_both_formats(self, msgpack, postprocessing_ms, usage):
        times = {"total_ms": 3.5, "queue_ms": 0.0, "tokenization_ms": 1e-3, "inference_ms": 1 / 3}
        timing = Timing(**times, postprocessing_ms=postprocessing_ms)
        reply = reply_of(np.ones((1, 2), np.float32), timing=timing, input_tokens=usage[0], num_images=usage[1])
        encoded = encode_reply(reply, msgpack)
        body = read_msgpack(encoded) if msgpack else json.loads(encoded)
        assert body["timing"] == {**times, "postprocessing_ms": postprocessing_ms or None}
        assert list(body["timing"]) == [*times, "postprocessing_ms"]
        assert body["usage"] == {"input_tokens": usage[0], **({"images": usage[1]} if usage[1] else {})}

    @BOTH
    def test_ids_are_present_only_where_given(self, msgpack):
        encoded = encode_reply(reply_of(np.ones((3, 2), np.float32), ids=["a", None, ""]), msgpack)
        body = read_msgpack(encoded) if msgpack else json.loads(encoded)
        assert [item.get("id", "absent") for item in body["items"]] == ["a", "absent", ""]

    def test_json_has_plain_lists_and_the_same_keys(self):
        body = json.loads(encode_reply(reply_of(np.array([[0.1, 2.0]], np.float16)), False))
        values = [float(np.float16(0.1)), 2.0]
        assert body == {
            "model": "org/m",
            "items": [{"dense": {"dims": 2, "dtype": "float16", "values": values}}],
            "timing": TIMING,
            "usage": {"input_tokens": 7},
        }

    @BOTH
    @pytest.mark.parametrize("output_dtype", ["binary", "ubinary"])
    def test_binary_keeps_the_models_width_and_one_name(self, msgpack, output_dtype):
        reply = reply_of(np.array([[255, 1]], np.uint8), dims=16, output_dtype=output_dtype)
        encoded = encode_reply(reply, msgpack)
        dense = (read_msgpack(encoded) if msgpack else json.loads(encoded))["items"][0]["dense"]
        assert (dense["dims"], dense["dtype"], list(dense["values"])) == (16, "binary", [255, 1])

    @BOTH
    def test_postprocessing_time_is_shown_when_there_is_one(self, msgpack):
        encoded = encode_reply(reply_of(np.ones((1, 1), np.float32), timing=Timing(postprocessing_ms=0.25)), msgpack)
        body = read_msgpack(encoded) if msgpack else json.loads(encoded)
        assert body["timing"]["postprocessing_ms"] == 0.25

    def test_no_view_of_the_extent_is_kept(self):
        rows = bytearray(16)
        view = memoryview(rows).cast("B", shape=(2, 8))
        reply = reply_of(np.zeros((2, 2), np.float32), values=view)
        encode_reply(reply, True)
        encode_reply(reply, False)
        del reply
        view.release()
        rows.append(0)  # raises BufferError while anything still looks at the bytes

    def test_the_sdks_decoder_reads_the_reply(self):
        sdk = pytest.importorskip("sie_sdk._msgpack")
        rows = np.random.default_rng(3).random((3, 384), np.float32)
        body = sdk.unpackb(encode_reply(reply_of(rows, ids=["a", None, "c"]), True), numeric_arrays=True)
        assert body["items"][2]["id"] == "c"
        np.testing.assert_array_equal([item["dense"]["values"] for item in body["items"]], rows)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BadRequest("no"), {"code": "INVALID_INPUT", "message": "no"}),
        (SieError("gone"), {"code": "INTERNAL_ERROR", "message": "gone"}),
        (Internal("oops"), {"code": "INFERENCE_ERROR", "message": "oops"}),
        (
            ModelLoadFailed("failed", extras={"error_class": "GATED", "attempts": 1, "permanent": True}),
            {
                "code": "MODEL_LOAD_FAILED",
                "message": "failed",
                "error_class": "GATED",
                "attempts": 1,
                "permanent": True,
            },
        ),
    ],
)
def test_native_error_envelope(error, expected):
    assert json.loads(error_body(error)) == {"detail": expected}


def test_framework_bodies():
    assert json.loads(not_found_body()) == {"detail": "Not Found"}
    assert json.loads(method_not_allowed_body()) == {"detail": "Method Not Allowed"}


@pytest.mark.parametrize(
    ("model", "known", "message"),
    [
        ("zzz", ["BAAI/bge-m3"], "Model 'zzz' not found"),
        ("", ["BAAI/bge-m3"], "Model '' not found"),
        ("BAAI/bge-m4", ["BAAI/bge-m3"], "Model 'BAAI/bge-m4' not found Did you mean 'BAAI/bge-m3'?"),
        ("bge-m3", ["some-organisation/bge-m3"], "Model 'bge-m3' not found Did you mean 'some-organisation/bge-m3'?"),
        (
            "a/mod",
            ["a/mod1", "a/mod2", "a/mod3", "a/mod4"],
            r"Model 'a/mod' not found Did you mean ('a/mod\d'(, )?){3}\?",
        ),
        ("x" * 10_000, ["x" * 10_001], r"Model 'x{200}\.\.\.' not found"),
    ],
)
def test_unknown_models_get_up_to_three_suggestions(model, known, message):
    error = model_not_found(model, known)
    assert (error.http_status, error.code) == (404, "MODEL_NOT_FOUND")
    assert error.message == message or re.fullmatch(message, error.message)


def test_decode_returns_the_shared_request_type():
    assert isinstance(decode({"items": [{"text": "x"}]}), EncodeRequest)
