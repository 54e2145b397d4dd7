"""Checks the sampling fields that all routes have under the same names, and the bounds of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from sie.values.errors import BadRequest
from sie.values.generate import GenerateRequest

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=1e6)]
TopK = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Share = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""A value outside 0 to 1 turns the filter off."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=1e6)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopText = Annotated[str, Meta(min_length=1)]
StopTexts = Annotated[list[StopText], Meta(max_length=65_536)]


class SamplingNumbers(msgspec.Struct, kw_only=True):
    """The sampling fields of a request. None: not given."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    min_tokens: Number | None = None


def write_sampling(fields: SamplingNumbers, request: GenerateRequest) -> None:
    """Copy the sampling fields into a request."""
    request.temperature = fields.temperature
    request.top_p = fields.top_p
    request.top_k = fields.top_k
    request.min_p = fields.min_p
    request.presence_penalty = fields.presence_penalty
    request.frequency_penalty = fields.frequency_penalty
    request.repetition_penalty = fields.repetition_penalty
    request.seed = fields.seed
    request.ignore_eos = bool(fields.ignore_eos)
    request.min_tokens = fields.min_tokens or 0


def wrong(field: str, reason: str) -> BadRequest:
    """Return the error for a field with a wrong value; reason follows the field's name."""
    return BadRequest(f"Field '{field}' {reason}", extras={"param": field})


def refuse_set(body: msgspec.Struct, reasons: Mapping[str, str]) -> None:
    """Raise BadRequest for the first of these fields that is neither null nor false nor empty."""
    for field, reason in reasons.items():
        if getattr(body, field):
            raise wrong(field, reason)


def read_stop(stop: str | list[str] | None, field: str = "stop") -> tuple[str, ...]:
    """Return the stop strings. Raises BadRequest for an empty one."""
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise wrong(field, "must not hold an empty text")
    return tuple(dict.fromkeys(stops))
