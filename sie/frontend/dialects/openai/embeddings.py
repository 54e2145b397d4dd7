"""Decodes the bodies of `/v1/embeddings` to a typed request, and encodes replies and errors.

Requests are read in two steps, as in the native dialect. `decode_embeddings` needs no model. `resolve_embeddings`
checks the request against the model's card. Replies are always JSON, whatever `Accept` says. An error body has
`message` beside `error`, because some clients read the one and some the other. Source: SIE API reference, section 9.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pybase64

from sie.config.limits import Limits
from sie.frontend.inputs.bounded_json import check_json, decode_typed
from sie.values.errors import BadRequest, InputTooLong, SieError
from sie.values.inference import DEFAULT_MODEL, EncodeReply, EncodeRequest

_MOST_TOKENS = 1 << 20
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_TokenIds = Annotated[list[_TokenId], msgspec.Meta(max_length=_MOST_TOKENS)]
# One list type for the three kinds of list, because a union may hold only one. `_read_input` tells them apart.
_Inputs = Annotated[list[str | _TokenId | _TokenIds], msgspec.Meta(max_length=_MOST_TOKENS)]

_CODES = {
    "INVALID_INPUT": "invalid_request",
    "INPUT_TOO_LONG": "invalid_request",
    "MODEL_NOT_FOUND": "model_not_found",
    "UNAUTHORIZED": "invalid_api_key",
    "FORBIDDEN": "insufficient_permissions",
    "RATE_LIMIT": "rate_limit_exceeded",
    "QUEUE_FULL": "server_overloaded",
    "INFERENCE_ERROR": "inference_error",
    "INTERNAL_ERROR": "inference_error",
}
_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_PATH = re.compile(r" - at `(?:key` in `)?\$([^`]*)`$")
_PATH_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_NAMED = re.compile(r"Object (?:missing required|contains unknown) field `([^`]+)`")
_EXPECTED = re.compile(r"Expected `([a-z]+)")
_SCHEMA_TYPES = {"str": "string_type", "int": "int_type", "array": "list_type", "object": "model_attributes_type"}


class EmbeddingsBody(msgspec.Struct, gc=False, kw_only=True):
    input: str | _Inputs
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """The model refuses impossible numbers, also 0, so that they are a 400 and not a 422."""
    user: str | None = None
    overflow_policy: Literal["default", "error", "truncate_text"] | None = None


class EmbeddingsCall(msgspec.Struct, frozen=True):
    """A decoded request, and how to write its vectors."""

    request: EncodeRequest
    base64: bool


_DECODER = msgspec.json.Decoder(EmbeddingsBody)
_to_json = msgspec.json.Encoder().encode


def decode_embeddings(body: bytes, content_type: str | None, limits: Limits) -> EmbeddingsCall:
    """Return the request in an embeddings body; pass its `request` to `resolve_embeddings` next.

    `input` is a text, a list of texts, a token array or a list of token arrays. Unknown fields are ignored.
    Raises BadRequest. Its status is 422, with the faults in its extras, for a body that breaks the schema, is not JSON or
    is not declared as JSON. It is 400 for an empty or too long input.
    """
    if not _is_json(content_type):
        is_json = body[:64].lstrip().startswith(b"{")
        hint = ". It looks like JSON: send it with Content-Type: application/json" if is_json else ""
        raise _schema_error("model_attributes_type", ["body"], f"Input should be a valid JSON object{hint}")
    check_json(body, limits.max_depth)
    try:
        call = decode_typed(_DECODER, body)
    except BadRequest as exc:
        raise _from_decoder(exc.message) from None
    request = EncodeRequest(model=call.model or DEFAULT_MODEL, dimensions=call.dimensions)
    if call.overflow_policy is not None:
        request.options = {"overflow_policy": call.overflow_policy}
    _read_input(call.input, request)
    _check_sizes(request, limits, len(body))
    return EmbeddingsCall(request, call.encoding_format == "base64")


def _is_json(content_type: str | None) -> bool:
    """Tell whether a JSON route accepts a content type: none, `application/json` or `application/*+json`, any parameters."""
    if not content_type:
        return True
    main, _, sub = content_type.partition(";")[0].strip().lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _read_input(value: str | list[Any], request: EncodeRequest) -> None:
    if isinstance(value, str):
        request.texts = [value]
        return
    kinds = set(map(type, value))
    if not kinds:
        raise BadRequest("Input cannot be empty", extras={"param": "input"})
    if kinds == {str}:
        request.texts = value
    elif kinds == {int}:
        request.token_lists = [value]
    elif kinds == {list}:
        request.token_lists = value
    else:
        raise _schema_error(
            "union_type", ["body", "input"], "Input should be all strings, all integers or all arrays of integers"
        )
    if request.token_lists is not None and not all(request.token_lists):
        raise BadRequest("Input cannot be empty", extras={"param": "input"})


def _check_sizes(request: EncodeRequest, limits: Limits, body_bytes: int) -> None:
    count = len(request.texts if request.texts is not None else request.token_lists or ())
    if count > limits.max_items:
        raise BadRequest(
            f"Field 'input' must hold at most {limits.max_items} entries, got {count}; split the request",
            extras={"param": "input"},
        )
    if body_bytes <= limits.max_item_text_bytes:  # decoding JSON escapes only shrinks a text, so none can be longer
        return
    for index, text in enumerate(request.texts or ()):
        if len(text.encode()) > limits.max_item_text_bytes:
            raise InputTooLong(
                f"Field 'input[{index}]' must hold at most {limits.max_item_text_bytes} bytes of UTF-8 text",
                extras={"param": "input"},
            )


def encode_embeddings(reply: EncodeReply, base64: bool) -> bytes:
    """Return the body of an embeddings reply.

    Reads reply.values once and keeps no view of it. base64 encodes the row's little-endian float32 bytes.
    """
    rows = _rows_base64(reply) if base64 else _rows_float(reply)
    parts = [b'{"object":"list","data":[']
    for index, row in enumerate(rows):
        comma = b"," if index else b""
        parts += (comma, b'{"object":"embedding","index":%d,"embedding":' % index, row, b"}")
    usage: dict[str, Any] = {
        "prompt_tokens": reply.input_tokens,
        "total_tokens": reply.input_tokens,
        "sie_token_source": "worker",
    }
    if reply.cuts:
        usage["sie_truncated"] = sorted(reply.cuts)
    parts += (b'],"model":', _to_json(reply.model), b',"usage":', _to_json(usage), b"}")
    return b"".join(parts)


def _rows_base64(reply: EncodeReply) -> list[bytes]:
    rows = reply.values.cast("B")
    row_bytes = rows.nbytes // reply.num_items
    starts = range(0, rows.nbytes, row_bytes)
    return [b'"' + pybase64.b64encode(rows[start : start + row_bytes]) + b'"' for start in starts]


def _rows_float(reply: EncodeReply) -> list[bytes]:
    rows = np.frombuffer(reply.values.cast("B"), reply.dtype).reshape(reply.num_items, reply.width)
    return [_to_json(row.tolist()) for row in rows]  # one row at a time: numbers as objects take more than their text


def error_body(error: SieError) -> bytes:
    """Return `{"error": {message, type, param, code, ...}, "message"}`; `detail` also holds schema faults."""
    body: dict[str, Any] = {"error": error_object(error), "message": error.message}
    if "schema_faults" in error.extras:
        body["detail"] = error.extras["schema_faults"]
    return _to_json(body)


def error_object(error: SieError) -> dict[str, Any]:
    """Return OpenAI's error object for one of our errors; other extras (`attempts`, ...) follow the four fields."""
    extras = {key: value for key, value in error.extras.items() if key != "schema_faults"}
    return {
        "message": error.message,
        "type": _TYPES.get(error.http_status)
        or ("invalid_request_error" if error.http_status < 500 else "server_error"),
        "param": extras.pop("param", None),
        "code": wire_code(error.code),
        **extras,
    }


def wire_code(code: str) -> str:
    """Return this dialect's name for one of our codes."""
    return _CODES.get(code, code)


def _from_decoder(message: str) -> BadRequest:
    """Turn msgspec's text into the list of faults that clients of this route expect."""
    at = _PATH.search(message)
    loc: list[str | int] = ["body"]
    if at:
        loc += [name or int(number) for name, number in _PATH_STEP.findall(at[1])]
    text = message[: at.start()] if at else message
    if missing := _MISSING.search(text):
        return _schema_error("missing", [*loc, missing[1]], "Field required")
    expected = _EXPECTED.match(text)
    if expected:
        return _schema_error(_SCHEMA_TYPES.get(expected[1], "value_error"), loc, text)
    return _schema_error("value_error" if at else "json_invalid", loc, text)


def field_of(message: str) -> str | None:
    """Return the top-level field in a decoder's error text, for `param`; None if the error is about the whole body."""
    at = _PATH.search(message)
    found = (_PATH_STEP.match(at[1]) if at else None) or _NAMED.search(message)
    return found[1] if found else None


def _schema_error(kind: str, loc: list[str | int], msg: str) -> BadRequest:
    """Return the 422. `input` is null, because a client's own bytes are not sent back."""
    faults = [{"type": kind, "loc": loc, "msg": msg, "input": None}]
    param = str(loc[1]) if len(loc) > 1 else None
    return BadRequest(msg, http_status=422, extras={"param": param, "schema_faults": faults})
