"""A finding of `sie doctor`: what was looked at, whether it is well, and how to mend it."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. fix says how to mend it; it is empty when there is nothing to mend.

    error: the server would not start, or would not serve. warn: it would, but worse than it could.
    """

    area: str
    level: Level
    message: str
    fix: str = ""
