"""Describes Ollama's own API, of which no route is served: its clients are told which routes to use instead."""

from __future__ import annotations

from typing import Final

import msgspec

from sie.frontend.dialects.description import Dialect, Envelope, json_failure
from sie.frontend.http.response import JSON, Response


def _unknown_path(path: str, _hint: str) -> Response:
    """Return a 404. It leaves out the hint, because the nearest path of another API would lead astray."""
    text = f"{path} is not served: use the OpenAI API, /v1/chat/completions, /v1/embeddings and /v1/models"
    return Response(404, [JSON], msgspec.json.encode({"error": text}))


DIALECT: Final = Dialect(
    operations=(),
    envelopes={
        "ollama": Envelope(
            failure=json_failure(lambda error: msgspec.json.encode({"error": error.message})),
            unknown_path=_unknown_path,
        )
    },
    roots={"/api": "ollama"},
)
