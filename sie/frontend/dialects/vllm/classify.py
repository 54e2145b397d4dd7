"""Decodes and encodes the bodies of `/classify`. Both are JSON.

Source: vLLM, entrypoints/pooling/classify/protocol.py and serving.py. Token ids and chats are refused by name.
"""

from __future__ import annotations

import time
from typing import Annotated, Any
from uuid import uuid4

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.vllm.pooling_fields import PoolingFields, check_texts, decode_pooling, model_of, usage
from sie.values.errors import BadRequest
from sie.values.inference import ExtractReply, ExtractRequest

_MOST_TEXTS = 65_536  # the setting's upper bound; the setting itself is checked after decoding


class TextPair(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    text: str
    text_pair: str | None = None


class ClassifyBody(PoolingFields, gc=False, kw_only=True):
    input: str | TextPair | Annotated[list[str | TextPair], msgspec.Meta(max_length=_MOST_TEXTS)]


_DECODER = msgspec.json.Decoder(ClassifyBody)
_to_json = msgspec.json.Encoder().encode


def decode_classify(body: bytes, limits: Limits) -> ExtractRequest:
    """Return the request in a classify body; pass it to `resolve_extract` next.

    Raises BadRequest (InputTooLong for limits), also for an unknown field.
    """
    call = decode_pooling(_DECODER, body, limits)
    given = call.input if isinstance(call.input, list) else [call.input]
    items = [one if isinstance(one, TextPair) else TextPair(one) for one in given]
    if not items:
        raise BadRequest("Field 'input' must not be empty", extras={"param": "input"})
    if len(items) > limits.max_items:
        raise BadRequest(
            f"Field 'input' must hold at most {limits.max_items} entries, got {len(items)}; split the request",
            extras={"param": "input"},
        )
    pairs = {index: item.text_pair for index, item in enumerate(items) if item.text_pair is not None}
    texts = [item.text for item in items]
    check_texts("input", [*texts, *pairs.values()], len(body), limits.max_item_text_bytes)
    options: dict[str, Any] = {"overflow_policy": call.overflow_policy}
    if call.use_activation is False:
        options["function_to_apply"] = "none"
    return ExtractRequest(
        model=model_of(call), texts=texts, pairs=pairs, options=options, by_class=True, max_tokens=call.max_tokens
    )


def encode_classes(reply: ExtractReply) -> bytes:
    """Return the body of a classify reply: for each text the best class, and the score of each class."""
    data: list[dict[str, Any]] = []
    for index, found in enumerate(reply.extractions):
        best = max(found.classifications, key=lambda one: one.score)  # the first of equal ones, as argmax
        probs = [one.score for one in found.classifications]
        data.append({"index": index, "label": best.label, "probs": probs, "num_classes": len(probs)})
    return _to_json({
        "id": f"classify-{uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": reply.model,
        "data": data,
        "usage": usage(reply.input_tokens),
    })  # fmt: skip
