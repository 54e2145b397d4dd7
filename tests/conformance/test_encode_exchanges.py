"""Whole bodies of the encode and embeddings routes, byte for byte.

The SIE requests were packed by `sie-sdk` 0.10.1's own packer. The OpenAI request and all replies are written out by hand
from the wire's rules (keys, order, bin and str, the array map), so that no encoder of ours judges itself.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.native import encode, encode_reply
from sie.frontend.dialects.openai import embeddings
from sie.frontend.operations.resolve import resolve_embeddings, resolve_encode
from sie.values.card import ModelCard
from sie.values.inference import EncodeReply, Timing

LIMITS = Limits()
CARD = ModelCard(id="org/m", kind="encoder", dims={"dense": 2}, tokenizer_file="tokenizer.json")

SDK_MINIMAL = bytes.fromhex("81a56974656d739181a474657874a568656c6c6f")
SDK_FULL = bytes.fromhex(
    "82a56974656d739282a26964a161a474657874a568656c6c6f81a474657874a368c3a9a6706172616d7384ac6f75747075745f7479706573"
    "91a564656e7365ac6f75747075745f6474797065a4696e7438ab696e737472756374696f6ea446696e64a76f7074696f6e7381a869735f71"
    "75657279c3"
)
OPENAI_REQUEST = b'{"input":["hello"],"model":"org/m","encoding_format":"base64"}'

REPLY_HEAD = "84 a5 6d6f64656c a5 6f72672f6d a5 6974656d73"  # map of 4, "model": "org/m", "items":
REPLY_TAIL = (
    "a6 74696d696e67 85"  # "timing": map of 5 float64
    "a8 746f74616c5f6d73 cb 3ff8000000000000"
    "a8 71756575655f6d73 cb 3fe0000000000000"
    "af 746f6b656e697a6174696f6e5f6d73 cb 0000000000000000"
    "ac 696e666572656e63655f6d73 cb 3ff0000000000000"
    "b1 706f737470726f63657373696e675f6d73 c0"  # null, since it is zero
    "a5 7573616765 81 ac 696e7075745f746f6b656e73 03"  # "usage": {"input_tokens": 3}
)
ARRAY = "85 c402 6e64 c3 c404 74797065 a3 {dtype} c404 6b696e64 c400 c405 7368617065 91 {width} c404 64617461 c4 {data}"
FLOAT_REPLY = (
    REPLY_HEAD
    + "91 81 a5 64656e7365 83 a4 64696d73 02 a5 6474797065 a7 666c6f61743332 a6 76616c756573"
    + ARRAY.format(dtype="3c6634", width="02", data="08 0000803f 000000c0")
    + REPLY_TAIL
)
BINARY_REPLY = (
    REPLY_HEAD
    + "92"
    + "82 a2 6964 a1 61 a5 64656e7365 83 a4 64696d73 09 a5 6474797065 a6 62696e617279 a6 76616c756573"
    + ARRAY.format(dtype="7c7531", width="02", data="02 ff80")
    + "81 a5 64656e7365 83 a4 64696d73 09 a5 6474797065 a6 62696e617279 a6 76616c756573"
    + ARRAY.format(dtype="7c7531", width="02", data="02 0100")
    + REPLY_TAIL
)


def reply_of(rows, output_dtype, *, dims, ids=()):
    return EncodeReply(
        model="org/m",
        ids=list(ids),
        num_items=len(rows),
        values=memoryview(rows.view(np.uint8)),
        dtype=rows.dtype.str,
        width=rows.shape[1],
        dims=dims,
        output_dtype=output_dtype,
        input_tokens=3,
        timing=Timing(total_ms=1.5, queue_ms=0.5, inference_ms=1.0),
    )


def test_the_sdks_smallest_request():
    request = resolve_encode(encode.decode_encode(SDK_MINIMAL, True, "org/m", LIMITS), CARD)
    assert (request.texts, request.ids, request.output_types) == (["hello"], [], ("dense",))


def test_the_sdks_request_with_everything():
    request = resolve_encode(encode.decode_encode(SDK_FULL, True, "org/m", LIMITS), CARD)
    assert (request.texts, request.ids) == (["hello", "hé"], ["a", None])
    assert (request.output_dtype, request.instruction, request.options) == ("int8", "Find", {"is_query": True})


def test_a_float32_reply():
    rows = np.array([[1.0, -2.0]], "<f4")
    assert encode_reply.encode_reply(reply_of(rows, "float32", dims=2), True) == bytes.fromhex(FLOAT_REPLY)


@pytest.mark.parametrize("output_dtype", ["binary", "ubinary"])
def test_a_binary_reply_with_one_id(output_dtype):
    rows = np.array([[0xFF, 0x80], [0x01, 0x00]], np.uint8)
    encoded = encode_reply.encode_reply(reply_of(rows, output_dtype, dims=9, ids=["a", None]), True)
    assert encoded == bytes.fromhex(BINARY_REPLY)


def test_a_json_reply():
    rows = np.array([[1.0, -2.0]], "<f4")
    assert encode_reply.encode_reply(reply_of(rows, "float32", dims=2), False) == (
        b'{"model":"org/m","items":[{"dense":{"dims":2,"dtype":"float32","values":[1.0,-2.0]}}],'
        b'"timing":{"total_ms":1.5,"queue_ms":0.5,"tokenization_ms":0.0,"inference_ms":1.0,"postprocessing_ms":null},'
        b'"usage":{"input_tokens":3}}'
    )


def test_an_openai_exchange():
    call = embeddings.decode_embeddings(OPENAI_REQUEST, "application/json", LIMITS)
    assert resolve_embeddings(call.request, CARD).texts == ["hello"]
    rows = np.array([[1.0, -2.0]], "<f4")
    assert json.loads(embeddings.encode_embeddings(reply_of(rows, "float32", dims=2), call.base64)) == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": "AACAPwAAAMA="}],
        "model": "org/m",
        "usage": {"prompt_tokens": 3, "total_tokens": 3, "sie_token_source": "worker"},
    }
