"""Describes OpenAI's responses API. Its errors are those of OpenAI's other text routes."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.description import Dialect
from sie.frontend.dialects.responses import openapi

DIALECT: Final = Dialect(operations=openapi.OPERATIONS, tags=openapi.TAGS)
