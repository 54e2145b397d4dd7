"""The rerank route of Text Embeddings Inference: the part of a ranking that an answer has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sie.config.limits import Limits
from sie.frontend.dialects.tei.rerank import decode_either, encode_either
from sie.values.inference import ScoreReply, Timing


@pytest.mark.parametrize(("fields", "places"), [({}, [1, 2, 0]), ({"top_n": 2}, [1, 2]), ({"top_n": 9}, [1, 2, 0])])
def test_answer_has_as_many_of_the_best_as_are_asked_for(fields: dict[str, Any], places: list[int]) -> None:
    body = {"query": "q", "texts": ["a", "b", "c"], **fields}
    request, call = decode_either(json.dumps(body).encode(), Limits())
    reply = ScoreReply(model="m", scores=[-1.0, 2.0, 1.0], input_tokens=4, timing=Timing())
    assert [rank["index"] for rank in json.loads(encode_either(request, call, reply))] == places
