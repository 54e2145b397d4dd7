"""Estimates the size of an encoded answer, to decide whether a thread must encode it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sie.values.generate import GenerateReply, LogprobText, TextDelta

_LOGPROB_BYTES: Final = 64
"""A token's text, bytes and log probability in JSON."""


def reply_bytes(reply: GenerateReply, prompts: Sequence[str]) -> int:
    """Estimate the bytes of a whole answer. prompts are those that it repeats before each of their choices."""
    texts = sum(
        len(choice.text) + len(choice.reasoning) + sum(len(call.arguments) for call in choice.calls)
        for choice in reply.choices
    )
    num_prompts = max(1, len(prompts), len(reply.scored))
    echoed = sum(map(len, prompts)) + sum(map(_logprob_bytes, reply.scored))
    own = sum(_logprob_bytes(choice.logprobs) for choice in reply.choices)
    return texts + own + echoed * len(reply.choices) // num_prompts


def events_bytes(events: Iterable[object]) -> int:
    """Estimate the bytes of the texts and log probabilities in events."""
    return sum(len(event.text) + _logprob_bytes(event.logprobs) for event in events if isinstance(event, TextDelta))


def _logprob_bytes(tokens: Sequence[LogprobText]) -> int:
    """Estimate the bytes of tokens by the alternatives of the last one: a prompt's first token has none, all others equally many."""
    return len(tokens) * (1 + len(tokens[-1].top)) * _LOGPROB_BYTES if tokens else 0
