"""Cohere's second rerank route: which documents an answer has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.cohere.rerank_v2 import decode_rerank_v2, encode_ranking_v2
from sie.values.inference import ScoreReply, Timing


@pytest.mark.parametrize(
    ("fields", "best"),
    [({}, {"index": 1}), ({"return_documents": None, "priority": None}, {"index": 1}), ({"return_documents": False}, {"index": 1}),
     ({"return_documents": True}, {"index": 1, "document": {"text": "b"}})],
)  # fmt: skip
def test_results_repeat_their_documents_on_request(fields: dict[str, Any], best: dict[str, Any]) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, **fields}
    call = decode_rerank_v2(json.dumps(body).encode(), Limits())
    reply = ScoreReply(model="m", scores=[0.25, 0.5], input_tokens=4, timing=Timing())
    assert json.loads(encode_ranking_v2(call, reply))["results"] == [{**best, "relevance_score": 0.5}]
