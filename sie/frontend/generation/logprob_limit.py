"""Limits the log probabilities of an answer, which cost far more memory and time than its text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from sie.values.errors import BadRequest
from sie.values.generate import GenerateRequest


def limit_logprobs(
    fitted: Sequence[tuple[list[int], int]], request: GenerateRequest, limit: int
) -> Sequence[tuple[list[int], int]]:
    """Return each prompt with the most tokens of its choices, so that the answer has at most limit log probabilities.

    fitted: the same by the model's context alone. Every choice repeats its prompt, if that is scored. Raises BadRequest
    if a request without max_tokens has no room for a token, and for a request with max_tokens that is over the limit.
    """
    per_prompt_token, per_token = (
        0 if top is None else request.num_choices * (1 + top) for top in (request.prompt_logprobs, request.logprobs)
    )
    of_prompts = per_prompt_token * sum(len(ids) for ids, _ in fitted)
    count = of_prompts + per_token * sum(max_tokens for _, max_tokens in fitted)
    if count <= limit:
        return fitted
    room = (limit - of_prompts) // (per_token * len(fitted)) if per_token else 0
    if request.max_tokens is None and room > 0:
        return [(ids, min(max_tokens, room)) for ids, max_tokens in fitted]
    raise BadRequest(
        f"Field 'top_logprobs' is over max_answer_logprobs ({limit}): the answer could have {count} log probabilities, "
        "which are its tokens times 1 + the alternatives; ask for fewer tokens, alternatives, choices or prompts",
        extras={"param": "top_logprobs"},
    )
