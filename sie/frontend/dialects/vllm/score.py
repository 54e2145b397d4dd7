"""Decodes and encodes the bodies of vLLM's `/score`. Both are JSON.

Source: vLLM, entrypoints/pooling/scoring/protocol.py, serving.py and utils.py. The two sides have four pairs of
names there.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.vllm.pooling_fields import PoolingFields, check_texts, decode_pooling, model_of, usage
from sie.values.errors import BadRequest
from sie.values.inference import ScoreReply, ScoreRequest

_MOST_TEXTS = 65_536  # the setting's upper bound; the setting itself is checked after decoding
_Texts = str | Annotated[list[str], msgspec.Meta(max_length=_MOST_TEXTS)]
_SIDES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


class PairsBody(PoolingFields, gc=False, kw_only=True):
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    text_1: _Texts | None = None
    text_2: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None
    max_tokens_per_query: Literal[0] = 0
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


_DECODER = msgspec.json.Decoder(PairsBody)
_to_json = msgspec.json.Encoder().encode


def decode_pairs(body: bytes, limits: Limits) -> ScoreRequest:
    """Return the request in a score body; pass it to `resolve_score` next.

    Raises BadRequest (InputTooLong for limits), also for an unknown field.
    """
    call = decode_pooling(_DECODER, body, limits)
    (first, queries), (second, documents) = _read_sides(call)
    for name, texts in ((first, queries), (second, documents)):
        if not texts:
            raise BadRequest(f"Field '{name}' must not be empty", extras={"param": name})
        if len(texts) > limits.max_candidates:
            raise BadRequest(
                f"Field '{name}' must hold at most {limits.max_candidates} entries, got {len(texts)}; split the request",
                extras={"param": name},
            )
        check_texts(name, texts, len(body), limits.max_item_text_bytes)
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"Field '{first}' must hold one text, or as many as '{second}' ({len(documents)}), got {len(queries)}",
            extras={"param": first},
        )
    options: dict[str, Any] = {"overflow_policy": call.overflow_policy}
    if call.max_tokens is not None:
        options["max_seq_length"] = call.max_tokens
    return ScoreRequest(
        model=model_of(call),
        query=queries[0],
        queries=queries if len(queries) > 1 else [],
        documents=documents,
        options=options,
        is_raw=call.use_activation is False,
        max_document_tokens=call.max_tokens_per_doc or None,
    )


def _read_sides(call: PairsBody) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """Return the name and the texts of both sides. Raises BadRequest unless exactly one pair of names is set."""
    given = [
        name for name in dict.fromkeys(name for sides in _SIDES for name in sides) if getattr(call, name) is not None
    ]
    for sides in _SIDES:
        if sorted(given) == sorted(sides):
            first, second = ((name, _as_list(getattr(call, name))) for name in sides)
            return first, second
    named = ", ".join(" and ".join(f"'{name}'" for name in sides) for sides in _SIDES)
    raise BadRequest(f"A body has two sides, named {named}; got {given}", extras={"param": given[0] if given else None})


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def encode_pair_scores(reply: ScoreReply) -> bytes:
    """Return the body of a score reply, in the order of the pairs."""
    return _to_json({
        "id": f"score-{uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": reply.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(reply.scores)],
        "usage": usage(reply.input_tokens),
    })  # fmt: skip
