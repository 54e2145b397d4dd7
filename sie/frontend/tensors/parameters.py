"""Checks the parameters of KServe v2 requests, over HTTP and gRPC. Pure.

Source: Open Inference Protocol v2 and Triton's parameters, sequence and schedule policy extensions.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

import msgspec

from sie.frontend.inputs.bounded_json import decode_free_form
from sie.values.errors import BadRequest
from sie.values.tensor import RegionPart, TensorRule

EMPTY_FINAL_RESPONSE: Final = "triton_enable_empty_final_response"
"""The gRPC parameter that asks for a mark on the last reply to a request on a stream."""
_RESERVED: Final = "triton_"
_UNSIGNED_LIMIT: Final = 1 << 64
_FEW_BYTES: Final = 1024
_decode: Final = msgspec.json.Decoder(dict[str, Any] | None).decode


def decode_parameters(raw: msgspec.Raw, path: str, max_depth: int) -> dict[str, Any]:
    """Return the parameters of a JSON body, none for an absent member. path names them in errors.

    Raises the errors of `decode_free_form` and `checked_parameters`.
    """
    nbytes = memoryview(raw).nbytes
    if not nbytes:
        return {}
    if nbytes <= _FEW_BYTES:  # nearly all; this takes a third of the time
        try:
            return checked_parameters(_decode(raw) or {})
        except msgspec.DecodeError:
            pass  # the other decoder names the path
    return checked_parameters(decode_free_form(raw, msgpack=False, path=path, max_depth=max_depth))


def checked_parameters(parameters: dict[str, Any], own: Container[str] = ()) -> dict[str, Any]:
    """Return parameters after checking their types and names; own lists the reserved names that are allowed.

    Raises BadRequest.
    """
    for name, value in parameters.items():
        if not isinstance(value, bool | int | float | str):
            raise BadRequest(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")
        if name.startswith(_RESERVED) and name not in own:
            raise BadRequest(f"parameter '{name}' starts with '{_RESERVED}', which is reserved")
    return parameters


def check_sequence(parameters: dict[str, Any], *, least_id: int = 0) -> None:
    """Raise BadRequest if parameters of a sequence have wrong types. The server has no sequence models."""
    sequence = parameters.get("sequence_id", "")
    if not isinstance(sequence, str) and not (type(sequence) is int and least_id <= sequence < _UNSIGNED_LIMIT):
        raise BadRequest(f"parameter 'sequence_id' must be an integer from {least_id}, or a string")
    flag(parameters, "sequence_start")
    flag(parameters, "sequence_end")


def flag(parameters: dict[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean parameter. Raises BadRequest."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"parameter '{name}' must be a bool")
    return value


def unsigned(parameters: dict[str, Any], name: str) -> int:
    """Return an unsigned 64-bit parameter, or 0 if it is absent. Raises BadRequest."""
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < _UNSIGNED_LIMIT:
        raise BadRequest(f"parameter '{name}' must be an integer that is not negative")
    return value


def region_part(parameters: dict[str, Any], name: str) -> RegionPart | None:
    """Return the place of a tensor in a client's shared memory, or None. name is the tensor's. Raises BadRequest."""
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str) or not region:
        raise BadRequest(f"'{name}': parameter 'shared_memory_region' must be the name of a region")
    if "shared_memory_byte_size" not in parameters:
        raise BadRequest(f"'{name}': parameter 'shared_memory_byte_size' is missing")
    if parameters.get("binary_data") is True or "binary_data_size" in parameters or parameters.get("classification"):
        raise BadRequest(f"'{name}': shared memory excludes 'binary_data', 'binary_data_size' and 'classification'")
    return RegionPart(
        region, unsigned(parameters, "shared_memory_offset"), unsigned(parameters, "shared_memory_byte_size")
    )


def checked_priority(priority: int, rule: TensorRule) -> int:
    """Return a request's priority, 0 for the model's own. Raises BadRequest for one that the model does not have.

    A model without priorities accepts any, and treats all alike.
    """
    if 0 < rule.num_priorities < priority:
        raise BadRequest(
            f"parameter 'priority' is {priority}, and model '{rule.name}' has {rule.num_priorities} levels"
        )
    return priority
