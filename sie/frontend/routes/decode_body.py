"""Decodes request bodies. For a refused body, adds a hint to the error and finds the model that the body names.

An accepted request does not pay for that. Must not refuse a body that its dialect accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from sie.frontend.dialects.description import Codec
from sie.frontend.dialects.native.negotiate import is_msgpack
from sie.frontend.http.compression import CODING_NOT_SERVED, has_coding
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.routing import Row
from sie.frontend.http.threads import offload
from sie.frontend.models.model_table import ModelTable
from sie.values.errors import BadRequest
from sie.values.inference import DEFAULT_MODEL

_T = TypeVar("_T")

_GZIP: Final = b"\x1f\x8b"
_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
"""The first bytes of a map in msgpack; no JSON begins with one of them."""


class _Named(msgspec.Struct):
    model: Any = None


_decode_named = msgspec.json.Decoder(_Named).decode


async def decode_body(
    exchange: Exchange, pool: ThreadPoolExecutor, models: ModelTable, decode: Callable[..., _T], body: bytes, *args: Any
) -> _T:
    """Return decode(body, *args), in a thread of the pool for a large body. Raises the errors of decode, with a hint.

    A refusal is counted for the model that the body names.
    """
    try:
        return await offload(pool, len(body), decode, body, *args)
    except BadRequest as error:
        add_hint(error, exchange, body)
        if not exchange.model and exchange.route is not None:
            codec = _codec_of(exchange)
            output = codec.default_output if codec is not None else "generate"
            exchange.model = await offload(pool, len(body), _named_model, body, output, models)
        raise


def add_hint(error: BadRequest, exchange: Exchange, body: bytes) -> None:
    """Add to an error why the body was misread, if its headers or its first bytes tell."""
    if error.http_status != 415 and (hint := _hint(exchange, body)):
        error.message = f"{error.message}. {hint}"


def _hint(exchange: Exchange, body: bytes) -> str:
    headers, codec = exchange.headers, _codec_of(exchange)
    kind = headers.get("content-type")
    takes_msgpack = codec is not None and codec.has_msgpack
    start = body[:64].lstrip()[:1]
    if start == b"{":
        return (
            "It looks like JSON: send it with Content-Type: application/json"
            if takes_msgpack and is_msgpack(kind)
            else ""
        )
    if has_coding(headers) or body.startswith(_GZIP):
        return CODING_NOT_SERVED
    if not start or start[0] not in _MAPS or (takes_msgpack and is_msgpack(kind)):
        return ""
    way = "send it with Content-Type: application/msgpack" if takes_msgpack else "this route takes JSON"
    return f"It looks like msgpack: {way}"


def _codec_of(exchange: Exchange) -> Codec | None:
    """Return the codec of the route, or None if it generates text or has a handler of its own."""
    route = exchange.route
    return route.codec if isinstance(route, Row) and isinstance(route.codec, Codec) else None


def _named_model(body: bytes, output: str, models: ModelTable) -> str:
    """Return the id of the served model that a refused JSON body names, or an empty text if it names none.

    output is the one that the default model must have.
    """
    try:
        model = _decode_named(body).model or DEFAULT_MODEL
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(model, str):
        return ""
    if model == DEFAULT_MODEL and model not in models:
        model = models.default_of(output) or ""
    entry = models.find(model)
    return entry.card.id if entry is not None else ""
