"""Owns the bounds of the sampling fields on every route that generates text."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=1e6)]
TopK = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Share = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""Outside 0 to 1 it is off."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=1e6)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
StopText = Annotated[str, Meta(min_length=1)]
StopTexts = Annotated[list[StopText], Meta(max_length=65_536)]
