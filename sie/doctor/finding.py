"""Defines a finding of `sie doctor`: its area, its level, its message and its fix."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. fix says how to correct a fault; it is empty without a fault.

    error: the server would not start, or would not serve. warn: it would serve, but worse than it could.
    """

    area: str
    level: Level
    message: str
    fix: str = ""
