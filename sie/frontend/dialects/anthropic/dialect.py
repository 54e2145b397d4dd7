"""Describes Anthropic's messages API."""

from __future__ import annotations

from typing import Final

from sie.config.limits import Limits
from sie.frontend.dialects.anthropic import openapi, reply
from sie.frontend.dialects.anthropic.request import NAMES, decode_messages
from sie.frontend.dialects.description import Dialect, Envelope, TextCodec, text_row
from sie.frontend.http.response import JSON, Response
from sie.values.generate import GenerateRequest


def _decode(body: bytes, content_type: str | None, limits: Limits) -> tuple[GenerateRequest, tuple[str, str]]:
    request = decode_messages(body, content_type, limits)
    return request, (reply.new_message_id(), request.session_id)


_MESSAGES: Final = TextCodec(
    decode=_decode,
    encode=lambda whole, ids, _prompts: reply.encode_message(whole, *ids),
    make_writer=lambda ids, model, _prompts: reply.MessageWriter(ids[0], model, ids[1]),
    names_of=lambda _ids: NAMES,
)
DIALECT: Final = Dialect(
    rows=(text_row("/v1/messages", _MESSAGES, "anthropic"),),
    operations=openapi.OPERATIONS,
    tags=openapi.TAGS,
    envelopes={
        "anthropic": Envelope(
            failure=lambda error: Response(reply.error_status(error), [JSON], reply.error_body(error)),
            error=openapi.MessageError,
            retries_5xx=True,
        )
    },
    roots={"/v1/messages": "anthropic"},
)
