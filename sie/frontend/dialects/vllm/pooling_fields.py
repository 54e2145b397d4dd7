"""The fields that vLLM's routes of pooling models share, and the form of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.openai.embeddings import field_of
from sie.frontend.inputs.bounded_json import check_json, decode_typed
from sie.values.errors import BadRequest, InputTooLong, NotFound, SieError
from sie.values.inference import DEFAULT_MODEL

_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    422: "UnprocessableEntityError", 429: "RateLimitError", 503: "ServiceUnavailableError",
}  # fmt: skip
_to_json = msgspec.json.Encoder().encode


class PoolingFields(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["right"] | None = None
    add_special_tokens: Literal[True] = True
    priority: Literal[0] = 0
    request_id: str | None = None
    use_activation: bool | None = None

    @property
    def overflow_policy(self) -> str:
        """The policy for a text over the limit: vLLM refuses it unless the request sets a limit, -1 for the model's."""
        return "error" if self.truncate_prompt_tokens is None else "truncate_text"

    @property
    def max_tokens(self) -> int | None:
        """The request's own limit of tokens."""
        return None if self.truncate_prompt_tokens in (None, -1) else self.truncate_prompt_tokens


_Fields = TypeVar("_Fields", bound=PoolingFields)


def decode_pooling(decoder: msgspec.json.Decoder[_Fields], body: bytes, limits: Limits) -> _Fields:
    """Return a decoded body. Raises BadRequest that names the field."""
    check_json(body, limits.max_depth)
    try:
        call = decode_typed(decoder, body)
        if call.truncate_prompt_tokens == 0:
            raise BadRequest("Expected -1 or an `int` >= 1 - at `$.truncate_prompt_tokens`")
    except BadRequest as error:
        raise BadRequest(error.message, extras={"param": field_of(error.message)}) from None
    return call


def model_of(call: PoolingFields) -> str:
    """Return the id of the requested model."""
    return call.model or DEFAULT_MODEL


def check_texts(field: str, texts: Sequence[str], body_bytes: int, max_bytes: int) -> None:
    """Raise InputTooLong for a text over max_bytes of UTF-8."""
    if body_bytes <= max_bytes:  # decoding JSON escapes only shrinks a text, so none can be longer
        return
    if any(len(text.encode()) > max_bytes for text in texts):
        raise InputTooLong(
            f"Each text in field '{field}' must hold at most {max_bytes} bytes of UTF-8", extras={"param": field}
        )


def usage(num_tokens: int) -> dict[str, Any]:
    """Return vLLM's count of tokens."""
    return {
        "prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0, "prompt_tokens_details": None,
    }  # fmt: skip


def error_body(error: SieError) -> bytes:
    """Return `{"error": {message, type, param, code}}`; code is the status. Source: vLLM, ErrorInfo."""
    param = "model" if error.code == NotFound.code else error.extras.get("param")
    kind = _TYPES.get(error.http_status) or ("BadRequestError" if error.http_status < 500 else "InternalServerError")
    return _to_json({
        "error": {"message": error.message, "type": kind, "param": param, "code": error.http_status}
    })  # fmt: skip
