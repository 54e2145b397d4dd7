"""Describes OpenAI's API: embeddings, chat, completions and models."""

from __future__ import annotations

from typing import Final

from sie.config.limits import Limits
from sie.frontend.dialects.description import (
    Codec,
    Dialect,
    Envelope,
    Sent,
    TextCodec,
    json_failure,
    operation_row,
    text_row,
)
from sie.frontend.dialects.openai import chat, completions, embeddings, models, openapi, text_fields
from sie.frontend.http.response import JSON, Response
from sie.values.errors import NotFound, SieError, shorten
from sie.values.inference import EncodeReply, EncodeRequest

_FOLDERS: Final = (
    "assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings", "evals",
    "files", "fine_tuning", "images", "moderations", "organization", "realtime", "responses", "sessions", "skills", "threads",
    "uploads", "vector_stores", "videos",
)  # fmt: skip
"""The folders below `/v1/` in OpenAI's API (source: openai 3.52, `resources`), and those of ours beside them."""


def _decode_embeddings(body: bytes, sent: Sent, limits: Limits) -> tuple[EncodeRequest, bool]:
    call = embeddings.decode_embeddings(body, sent.content_type, limits)
    return call.request, call.base64


def _encode_embeddings(_request: EncodeRequest, base64: bool, reply: EncodeReply, _msgpack: bool) -> bytes:
    return embeddings.encode_embeddings(reply, base64)


def _no_route(path: str, hint: str) -> Response:
    return _TEXT.failure(SieError(f"There is no route {shorten(path)}.{hint}", code="NOT_FOUND", http_status=404))


def _embeddings_failure(error: SieError) -> Response:
    body = models.model_not_found_body(error) if isinstance(error, NotFound) else embeddings.error_body(error)
    return Response(error.http_status, [JSON], body)


def _models_body(error: SieError) -> bytes:
    return models.error_body(error, embeddings.error_object(error))


_EMBEDDINGS: Final = Codec(
    operation="embed", decode=_decode_embeddings, encode=_encode_embeddings, default_output="dense",
    is_quick=lambda base64, _msgpack: base64, has_timing=False, has_ids=True,
)  # fmt: skip
_CHAT: Final = TextCodec(
    decode=chat.decode_chat,
    encode=lambda reply, shown, _prompts: chat.encode_chat(reply, shown),
    make_writer=lambda shown, model, _prompts: chat.ChatWriter(shown, model),
)
_COMPLETIONS: Final = TextCodec(
    decode=completions.decode_completions,
    encode=completions.encode_completions,
    make_writer=completions.CompletionsWriter,
    names_of=lambda shown: shown.names,
    echoes=lambda shown: shown.echo,
)
_TEXT: Final = Envelope(
    failure=json_failure(text_fields.error_body), unknown_path=_no_route, error=openapi.TextError, write_code=text_fields.code_word,
    retries_5xx=True,
)  # fmt: skip

DIALECT: Final = Dialect(
    rows=(
        operation_row("/v1/embeddings", _EMBEDDINGS, "openai", "embeddings"),
        text_row("/v1/chat/completions", _CHAT, "text"),
        text_row("/v1/completions", _COMPLETIONS, "text"),
    ),
    operations=openapi.OPERATIONS,
    tags=openapi.TAGS,
    envelopes={
        "openai": Envelope(
            failure=_embeddings_failure, error=openapi.OpenAIError, write_code=embeddings.wire_code, retries_5xx=True
        ),
        "models": Envelope(
            failure=json_failure(_models_body),
            wrong_method=lambda _template, _methods: Response(405, [JSON], models.METHOD_NOT_ALLOWED),
            error=openapi.ModelMissing,
            retries_5xx=True,
        ),
        "text": _TEXT,
    },
    roots={f"/v1/{folder}": "text" for folder in _FOLDERS},
)
