"""Requests with more log probabilities than an answer may have are refused, or end earlier."""

from __future__ import annotations

from typing import Any

import pytest

from sie.frontend.generation.logprob_limit import limit_logprobs
from sie.values.errors import BadRequest
from sie.values.generate import GenerateRequest

PROMPTS = [([1, 2, 3], 10), ([1, 2], 10)]
ECHO = {"prompt_logprobs": 4}


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"logprobs": 0}, 20),
        ({"logprobs": 4}, 100),
        ({"logprobs": 4, "num_choices": 3}, 300),
        ({"logprobs": 1, **ECHO}, 65),
        ({"logprobs": 1, **ECHO, "num_choices": 2}, 130),
    ],
)
def test_tokens_alternatives_choices_and_prompts_count(fields: dict[str, Any], count: int) -> None:
    request = GenerateRequest(model="m", max_tokens=10, **fields)
    assert limit_logprobs(PROMPTS, request, count) == PROMPTS
    with pytest.raises(BadRequest, match=rf"'top_logprobs' is over max_answer_logprobs \({count - 1}\).*{count} log"):
        limit_logprobs(PROMPTS, request, count - 1)


def test_an_answer_without_max_tokens_ends_at_the_limit() -> None:
    request = GenerateRequest(model="m", logprobs=1, **ECHO)
    assert limit_logprobs(PROMPTS, request, 64) == [([1, 2, 3], 9), ([1, 2], 9)]
    with pytest.raises(BadRequest, match="max_answer_logprobs"):
        limit_logprobs(PROMPTS, request, 28)


def test_a_request_without_logprobs_has_no_limit() -> None:
    assert limit_logprobs(PROMPTS, GenerateRequest(model="m"), 1) == PROMPTS
