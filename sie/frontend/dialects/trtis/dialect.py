"""Describes the TensorRT Inference Server v1 API over HTTP."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.description import Dialect, Envelope
from sie.frontend.dialects.trtis import openapi
from sie.frontend.http.response import Response
from sie.values.errors import SieError

_FIRST: Final = ("health", "status", "infer", "modelcontrol", "repository", "sharedmemorycontrol", "profile")
"""The first folders below `/api`. All other paths there are those of Ollama's clients."""


def _failure(error: SieError) -> Response:
    from sie.frontend.dialects.trtis.status import failure  # imports protobuf, which few servers need

    return Response(*failure(error))


DIALECT: Final = Dialect(
    operations=openapi.OPERATIONS,
    tags=openapi.TAGS,
    envelopes={
        "trtis": Envelope(
            failure=_failure,
            unknown_path=lambda _path, _hint: Response(400, [], b""),  # the API has no 404
            wrong_method=lambda _template, _methods: Response(405, [], b""),
            has_ids=False,
        )
    },
    roots={f"/api/{first}": "trtis" for first in _FIRST},
)
