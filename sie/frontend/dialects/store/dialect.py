"""Describes the API of files, containers, skills and sessions. Errors are those of OpenAI's text routes, or Anthropic's."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.description import Dialect
from sie.frontend.dialects.store import openapi

DIALECT: Final = Dialect(operations=openapi.OPERATIONS, tags=openapi.TAGS)
