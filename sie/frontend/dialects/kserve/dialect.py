"""Describes KServe v2 over HTTP."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.description import Dialect, Envelope, not_found_text
from sie.frontend.dialects.kserve import openapi
from sie.frontend.dialects.kserve.infer import error_body
from sie.frontend.http.response import JSON, Response
from sie.values.errors import SieError

_CODINGS: Final = ("accept-encoding", "gzip, deflate")
"""The header that answers an unsupported Content-Encoding, as in Triton. Source: RFC 9110, section 15.5.16."""


def _failure(error: SieError) -> Response:
    of_coding = [_CODINGS] if error.http_status == 415 else []
    return Response(error.http_status, [JSON, *of_coding], error_body(error.message))


DIALECT: Final = Dialect(
    operations=openapi.OPERATIONS,
    tags=openapi.TAGS,
    envelopes={
        "kserve": Envelope(
            failure=_failure,
            unknown_path=lambda _path, hint: Response(404, [JSON], error_body(not_found_text(hint))),
            wrong_method=lambda _template, _methods: Response(405, [JSON], error_body("Method Not Allowed")),
            error=openapi.TensorError,
            has_ids=False,
        )
    },
    roots={"/v2": "kserve"},
)
