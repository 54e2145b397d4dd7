"""Builds the card of one version of a repository's model from its file and its configuration.

When both describe a tensor, they must agree. The configuration may be narrower (a fixed dimension where the model
accepts any), and may leave out outputs. Runs in the prepare helper.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from sie.catalog.exported import ExportedError, read_exported
from sie.catalog.files import Checkpoint, refuse
from sie.catalog.model_config import CONFIG_FILE, read_model_config, to_json
from sie.catalog.onnx_file import OnnxError, OnnxValue, read_onnx
from sie.catalog.queue_rule import read_queue_rule
from sie.catalog.repository_layout import find_file, open_model, reason_without_version
from sie.catalog.spec import ModelSpec, TensorSource
from sie.catalog.warm_up import read_warm_ups
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.tensor import MAX_RANK, TensorRule, TensorSpec

_MAX_LABEL_BYTES = 16 << 20
_NOT_A_BATCH = re.compile(r"seq|len|time|frame|token|sample|height|width", re.IGNORECASE)
"""Names of a leading dimension that is not a batch, so rows of several requests must not be joined in it."""
_FORMATS: dict[str, Literal["", "NHWC", "NCHW"]] = {"FORMAT_NHWC": "NHWC", "FORMAT_NCHW": "NCHW"}
_BACKENDS = {"onnxruntime_onnx": "onnxruntime", "pytorch_exported": "pytorch"}
"""The protocols' backend name of each platform."""
_COLORS = "image_colors"
_CONFIG_NAMES = {"BYTES": "STRING"}
"""Datatypes whose name in a configuration differs from the protocol's."""


class Signature(NamedTuple):
    """The tensors of a model's own file; shapes as in `OnnxValue`."""

    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]
    nbytes: int
    """Size of all its files."""


def read_tensor_card(spec: ModelSpec) -> ModelCard:
    """Return the card of one version of a repository's model. Raises ModelLoadFailed."""
    source = spec.tensor
    assert source is not None
    if not source.version:
        raise ModelLoadFailed(reason_without_version(source), extras={"error_class": "CONFIG"})
    model = open_model(source, spec.id)
    config = read_model_config(model, source.name)
    folder, file, platform = find_file(model, source, config)
    signature = read_signature(folder, file, platform)
    rule = _make_rule(model, source, config, signature, platform)
    complete_config(config, rule, file)
    return ModelCard(
        id=spec.id,
        kind="tensor",
        directory=str(folder.root),
        architecture=platform,
        inputs=("tensor",),
        outputs=(),
        num_weights=-(-signature.nbytes // 4),
        tensor=msgspec.structs.replace(rule, config=to_json(config)),
    )


def read_signature(folder: Checkpoint, file: str, platform: str) -> Signature:
    """Return the signature in a model's file, after checking that all its files are beneath the model's directory."""
    path = folder.root / file
    if platform != "onnxruntime_onnx":
        return _exported_signature(folder, file)
    try:
        found = read_onnx(path)
        nbytes = path.stat().st_size
    except OnnxError as error:
        raise refuse(folder.id, f"{file}: {error}") from None
    except OSError as error:
        raise refuse(folder.id, f"{file}: {error.strerror}", "STORAGE") from error
    for location in found.locations:
        nbytes += _external_bytes(folder, file, location)
    return Signature(found.inputs, found.outputs, nbytes)


def _exported_signature(folder: Checkpoint, file: str) -> Signature:
    try:
        found = read_exported(folder.root / file)
    except ExportedError as error:
        raise refuse(folder.id, f"{file}: {error}") from None
    except OSError as error:
        raise refuse(folder.id, f"{file}: {error.strerror}", "STORAGE") from error
    return Signature(found.inputs, found.outputs, found.nbytes)


def _external_bytes(folder: Checkpoint, file: str, location: str) -> int:
    """Return the size of a weights file; its path is relative to the model's. Source: ONNX, ExternalData.md."""
    if not location or "\0" in location or Path(location).is_absolute():
        raise refuse(folder.id, f"{file}: its weights are in {location!r}, which is not a relative path")
    path = folder.find(location)
    if path is None or not path.is_file():
        raise refuse(folder.id, f"{file}: its weights are in {location}, which is not there", "STORAGE")
    return path.stat().st_size


def _make_rule(model: Checkpoint, source: TensorSource, config: Any, signature: Signature, platform: str) -> TensorRule:
    # A saved program does not keep the names of its dimensions, so only a configuration can tell that one is a batch.
    default = source.default_max_batch_size if platform == "onnxruntime_onnx" else 0
    batch = _batch_size(config, signature, default)
    inputs = _merge(model, "input", config.input, signature.inputs, batch)
    missing = [value.name for value in signature.inputs if value.name not in {spec.name for spec in inputs}]
    if missing:
        raise refuse(model.id, f"{CONFIG_FILE}: the model also needs input {missing[0]!r}")
    if batch and not inputs:
        raise refuse(model.id, f"{CONFIG_FILE}: max_batch_size is {batch}, but the model has no inputs")
    joins = bool(batch) and (config.HasField("max_batch_size") or config.HasField("dynamic_batching"))
    return TensorRule(
        name=source.name,
        version=source.version,
        platform=platform,
        inputs=inputs,
        outputs=_merge(model, "output", config.output, signature.outputs, batch),
        max_batch_size=batch,
        joins_requests=joins,
        probes_batching=bool(batch) and not joins and source.probes_batching,
        image_colors=_image_colors(model, config),
        warm_ups=read_warm_ups(model, config, inputs, batch),
        **read_queue_rule(model.id, config)._asdict(),
    )


def _image_colors(model: Checkpoint, config: Any) -> Literal["BGR", "RGB"]:
    """Return the colour order from a configuration's parameter; default BGR, as in OpenVINO Model Server."""
    if _COLORS not in config.parameters:
        return "BGR"
    colors = config.parameters[_COLORS].string_value
    if colors not in ("BGR", "RGB"):
        raise refuse(model.id, f"{CONFIG_FILE}: parameter {_COLORS!r} is {colors!r}, which is neither BGR nor RGB")
    return colors


def _batch_size(config: Any, signature: Signature, default: int) -> int:
    """Return the configuration's max_batch_size; without it and without tensors there, decide from the model.

    A model has a batch dimension when the first dimension of every input and output may have any size. All inputs must
    use one name for it, and no name may describe another kind of dimension.
    """
    if config.HasField("max_batch_size"):
        return config.max_batch_size
    values = (*signature.inputs, *signature.outputs)
    if config.input or config.output or not signature.inputs or not all(value.shape for value in values):
        return 0
    leading = [value.shape[0] for value in values if value.shape]
    if any(isinstance(size, int) and size >= 0 for size in leading):
        return 0
    names = set(leading[: len(signature.inputs)])
    named = {size for size in leading if isinstance(size, str)}
    if len(names) > 1 or any(_NOT_A_BATCH.search(name) for name in named):
        return 0
    return default


def _merge(
    model: Checkpoint, kind: str, configured: Any, values: tuple[OnnxValue, ...], batch: int
) -> tuple[TensorSpec, ...]:
    """Return the specs of a model's inputs or outputs, in the order of the configuration, or else of the model."""
    own = {value.name: value for value in values}
    if not configured:
        return tuple(_own_spec(model, kind, value, batch) for value in values)
    specs: list[TensorSpec] = []
    for tensor in configured:
        if tensor.name not in own:
            raise refuse(model.id, f"{CONFIG_FILE}: the model has no {kind} {tensor.name!r}; it has {', '.join(own)}")
        if any(spec.name == tensor.name for spec in specs):
            raise refuse(model.id, f"{CONFIG_FILE}: {kind} {tensor.name!r} appears twice")
        specs.append(_merged_spec(model, kind, tensor, own[tensor.name], batch))
    return tuple(specs)


def _own_spec(model: Checkpoint, kind: str, value: OnnxValue, batch: int) -> TensorSpec:
    if value.shape is None:
        raise refuse(model.id, f"the file does not tell the rank of {kind} {value.name!r}; {CONFIG_FILE} has to")
    shape = _numbers(value.shape)
    _check_shape(model, kind, value.name, shape)
    if batch and (not shape or shape[0] != -1):
        raise refuse(
            model.id,
            f"{CONFIG_FILE}: max_batch_size is {batch}, but {kind} {value.name!r} has the shape {list(shape)}, "
            "which does not begin with a variable dimension",
        )
    return TensorSpec(name=value.name, datatype=value.datatype, shape=shape)


def _merged_spec(model: Checkpoint, kind: str, tensor: Any, value: OnnxValue, batch: int) -> TensorSpec:
    where = f"{CONFIG_FILE}: {kind} {tensor.name!r}"
    wanted = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
    actual = f"TYPE_{_CONFIG_NAMES.get(value.datatype, value.datatype)}"
    if wanted != actual:
        raise refuse(model.id, f"{where} is {wanted}, but in the model {actual}")
    shape = (*((-1,) if batch else ()), *tensor.dims)
    _check_shape(model, kind, tensor.name, shape)
    if value.shape is not None:
        own = _numbers(value.shape)
        if len(own) != len(shape) or any(
            -1 not in pair and pair[0] != pair[1] for pair in zip(shape, own, strict=True)
        ):
            raise refuse(model.id, f"{where} has the shape {list(shape)}, but in the model {list(own)}")
        if batch and own[0] != -1:
            raise refuse(
                model.id, f"{where}: max_batch_size is {batch}, but in the model its shape is {list(own)}, of one size"
            )
        shape = tuple(theirs if ours == -1 else ours for ours, theirs in zip(shape, own, strict=True))
    is_input = kind == "input"
    if is_input and tensor.optional:
        raise refuse(model.id, f"{where}: optional is not supported, since the model's file has no default for it")
    if is_input:
        format_name = tensor.DESCRIPTOR.fields_by_name["format"].enum_type.values_by_number[tensor.format].name
        layout = _FORMATS.get(format_name, "")
        return TensorSpec(name=tensor.name, datatype=value.datatype, shape=shape, format=layout)
    labels = _labels(model, tensor.label_filename) if tensor.label_filename else ()
    return TensorSpec(name=tensor.name, datatype=value.datatype, shape=shape, labels=labels)


def _check_shape(model: Checkpoint, kind: str, name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > MAX_RANK or any(size < -1 for size in shape):
        raise refuse(
            model.id,
            f"{kind} {name!r} has the shape {list(shape)}; a shape has at most {MAX_RANK} sizes, each -1 or more",
        )


def _numbers(shape: tuple[int | str, ...]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in shape)


def _labels(model: Checkpoint, name: str) -> tuple[str, ...]:
    """Return the names of an output's classes, one from each line."""
    path = model.find(name)
    if path is None or not path.is_file():
        raise refuse(model.id, f"{CONFIG_FILE}: there is no file {name} of labels", "STORAGE")
    if path.stat().st_size > _MAX_LABEL_BYTES:
        raise refuse(model.id, f"{name} is over {_MAX_LABEL_BYTES} bytes")
    try:
        return tuple(path.read_text("utf-8").removesuffix("\n").split("\n"))  # no other character ends a line
    except UnicodeDecodeError:
        raise refuse(model.id, f"{name} is not UTF-8") from None


def complete_config(config: Any, rule: TensorRule, file: str) -> None:
    """Fill in the missing fields of a configuration, as the protocols show them."""
    config.name = rule.name
    config.max_batch_size = rule.max_batch_size
    config.default_model_filename = file
    if not config.platform and not config.backend:
        config.platform = rule.platform
    if not config.backend:
        config.backend = _BACKENDS[rule.platform]
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    _complete_tensors(config.input, rule.inputs, rule.max_batch_size)
    _complete_tensors(config.output, rule.outputs, rule.max_batch_size)
    if not config.instance_group:
        config.instance_group.add(name=rule.name, count=1)
    if rule.joins_requests and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _complete_tensors(tensors: Any, specs: tuple[TensorSpec, ...], batch: int) -> None:
    if tensors:
        return
    for spec in specs:
        tensor = tensors.add(name=spec.name, dims=spec.shape[1:] if batch else spec.shape)
        types = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name
        tensor.data_type = types[f"TYPE_{_CONFIG_NAMES.get(spec.datatype, spec.datatype)}"].number
