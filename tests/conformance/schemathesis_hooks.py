"""What schemathesis is told about this API: msgpack, and the models that a test server has."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import numpy as np
import schemathesis

MODELS = itertools.cycle(("stub/all", "stub/image", "stub/all", None))
"""Every fourth request keeps the model that was made up."""
TENSOR_MODELS = itertools.cycle(("stub/tensor", "stub/all", None))


@schemathesis.serializer("application/msgpack")
def to_msgpack(_context: Any, value: Any) -> bytes:
    try:
        return msgpack.packb(value, unicode_errors="surrogatepass")
    except OverflowError:  # an integer that msgpack has no room for
        return b""


@schemathesis.deserializer("application/msgpack")
def from_msgpack(_context: Any, response: Any) -> Any:
    return _as_json(msgpack.unpackb(response.content, strict_map_key=False))


def _as_json(value: Any) -> Any:
    """Return what the same answer is as JSON. Source: SIE API reference, section 4."""
    if isinstance(value, dict) and b"nd" in value:
        return np.frombuffer(value[b"data"], value[b"type"]).reshape(value[b"shape"]).tolist()
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    return [_as_json(part) for part in value] if isinstance(value, list) else value


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    models = TENSOR_MODELS if case.path.startswith(("/v2", "/api/")) else MODELS
    if (case.path_parameters or {}).get("model") and (model := next(models)):
        case.path_parameters["model"] = model
