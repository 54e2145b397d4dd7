"""Reads the warm-up requests (`model_warmup`) of a tensor model's configuration, and checks them against its inputs.

The files that they name lie in the folder `warmup` of the model's directory. Source: Triton, model_config.proto.
"""

from __future__ import annotations

from typing import Any, Final

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.model_config import warm_up_file
from sie.values.tensor import TensorSpec, WarmUp, WarmUpInput

_FIELD: Final = "config.pbtxt: model_warmup"
_TYPE_NAMES: Final = {"TYPE_STRING": "BYTES"}


def read_warm_ups(
    model: Checkpoint, config: Any, inputs: tuple[TensorSpec, ...], max_batch_size: int
) -> tuple[WarmUp, ...]:
    """Return the requests to run when the model is loaded. Raises ModelLoadFailed, naming the request and the input."""
    return tuple(_read(model, request, inputs, max_batch_size) for request in config.model_warmup)


def _read(model: Checkpoint, request: Any, specs: tuple[TensorSpec, ...], max_batch_size: int) -> WarmUp:
    where = f"{_FIELD} {request.name!r}"
    rows = request.batch_size
    if rows > max(1, max_batch_size) or (max_batch_size and not rows):
        raise refuse(model.id, f"{where}: batch_size is {rows}, and max_batch_size {max_batch_size}")
    unknown = request.inputs.keys() - {spec.name for spec in specs}
    if unknown:
        raise refuse(model.id, f"{where}: the model has no input {min(unknown)!r}")
    batch = (rows,) if max_batch_size else ()
    inputs = tuple(_read_input(model, where, request.inputs, spec, batch) for spec in specs)
    return WarmUp(name=request.name, inputs=inputs, count=max(1, request.count))


def _read_input(model: Checkpoint, where: str, given: Any, spec: TensorSpec, batch: tuple[int, ...]) -> WarmUpInput:
    where = f"{where}: input {spec.name!r}"
    if spec.name not in given:
        raise refuse(model.id, f"{where} is missing")
    found = given[spec.name]
    name = found.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[found.data_type].name
    datatype = _TYPE_NAMES.get(name, name.removeprefix("TYPE_"))
    if datatype != spec.datatype:
        raise refuse(model.id, f"{where} is {name}, but the model takes {spec.datatype}")
    shape = (*batch, *found.dims)
    fits = len(shape) == len(spec.shape) and all(
        size >= 0 and own in (-1, size) for size, own in zip(shape, spec.shape, strict=True)
    )
    if not fits:
        raise refuse(model.id, f"{where} has the shape {list(shape)}, but the model takes {list(spec.shape)}")
    source = found.WhichOneof("input_data_type")
    if source == "input_data_file":
        return WarmUpInput(spec.name, spec.datatype, shape, "file", _find(model, where, warm_up_file(found)))
    if source is None or not getattr(found, source):
        raise refuse(model.id, f"{where} needs one of zero_data, random_data and input_data_file")
    return WarmUpInput(spec.name, spec.datatype, shape, "zero" if source == "zero_data" else "random")


def _find(model: Checkpoint, where: str, name: str) -> str:
    path = model.find(name)
    if path is None or not path.is_file():
        raise refuse(model.id, f"{where}: there is no file {name}", "STORAGE")
    return str(path.resolve())
