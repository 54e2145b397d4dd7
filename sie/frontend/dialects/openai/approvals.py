"""Decodes a client's decision on a call of a tool, and encodes what became of it.

Source: generation API reference, section 8.4.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from sie.config.limits import Limits
from sie.frontend.dialects.openai.text_fields import decode_body

_MAX_MESSAGE: Final = 10_000


class ApprovalDecision(msgspec.Struct):
    """A client's decision. remember_for_session counts only for an approval."""

    decision: Literal["approve", "deny"]
    remember_for_session: bool = False
    message: Annotated[str, Meta(max_length=_MAX_MESSAGE)] | None = None


_DECODER: Final = msgspec.json.Decoder(ApprovalDecision)


def decode_decision(body: bytes, content_type: str | None, limits: Limits) -> ApprovalDecision:
    """Return the decision in a body. Raises BadRequest naming the field."""
    return decode_body(_DECODER, body, content_type, limits)


def encode_status(status: str) -> bytes:
    """Return the body of an answer."""
    return msgspec.json.encode({"status": status})
