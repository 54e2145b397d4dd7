"""Reads a tensor model's `config.pbtxt`, refuses the parts that are not supported, and writes its JSON form.

The file is a ModelConfig in protobuf's text format. Unsupported fields that would change a model's answers are refused
by name. Hints about speed (instance_group, optimization, queue delays, metric tags) are read and ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from sie.catalog.files import Checkpoint, refuse
from sie.proto import message_class

CONFIG_FILE = "config.pbtxt"
_WARM_UPS = "warmup"
_MAX_BYTES = 4 << 20
_BACKENDS = {
    "onnxruntime_onnx": "onnxruntime_onnx",
    "onnxruntime": "onnxruntime_onnx",
    "pytorch_exported": "pytorch_exported",
    "pytorch": "pytorch_exported",
}
"""Allowed values of `platform` and `backend`, and our name of that platform."""
_FORBIDDEN: dict[str, Callable[[Any], bool]] = {
    "sequence_batching": lambda config: config.HasField("sequence_batching"),
    "ensemble_scheduling": lambda config: config.HasField("ensemble_scheduling"),
    "cc_model_filenames": lambda config: bool(config.cc_model_filenames),
    "model_operations": lambda config: bool(config.model_operations.op_library_filename),
    "model_transaction_policy.decoupled": lambda config: config.model_transaction_policy.decoupled,
    "batch_input": lambda config: bool(config.batch_input),
    "batch_output": lambda config: bool(config.batch_output),
    "model_repository_agents": lambda config: bool(config.model_repository_agents.agents),
    "input.reshape": lambda config: any(tensor.HasField("reshape") for tensor in config.input),
    "output.reshape": lambda config: any(tensor.HasField("reshape") for tensor in config.output),
    "input.allow_ragged_batch": lambda config: any(tensor.allow_ragged_batch for tensor in config.input),
    "is_shape_tensor": lambda config: any(tensor.is_shape_tensor for tensor in (*config.input, *config.output)),
    "is_non_linear_format_io": lambda config: any(
        tensor.is_non_linear_format_io for tensor in (*config.input, *config.output)
    ),
}


class ModelPolicy(msgspec.Struct, frozen=True):
    """Which versions of a model are served: all, the newest num_versions, or those in versions."""

    choice: Literal["latest", "all", "specific"] = "latest"
    num_versions: int = 1
    versions: tuple[int, ...] = ()


def policy_of(config: Any) -> ModelPolicy:
    """Return the version policy of a ModelConfig; by default the latest version."""
    policy = config.version_policy
    if policy.WhichOneof("policy_choice") == "specific":
        return ModelPolicy("specific", versions=tuple(policy.specific.versions))
    if policy.WhichOneof("policy_choice") == "all":
        return ModelPolicy("all")
    return ModelPolicy("latest", policy.latest.num_versions or 1)


def read_model_config(model: Checkpoint, name: str) -> Any:
    """Return the ModelConfig in a model's directory, or an empty one without the file.

    Raises ModelLoadFailed, with file and line for unreadable text, and with the name of an unsupported field.
    """
    config = message_class("model_config", "inference.ModelConfig")()
    path = model.find(CONFIG_FILE)
    if path is None:
        return config
    if not path.is_file():
        raise refuse(model.id, f"{CONFIG_FILE} is not a file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise refuse(model.id, f"{CONFIG_FILE}: {error.strerror}", "STORAGE") from error
    if len(raw) > _MAX_BYTES:
        raise refuse(model.id, f"{CONFIG_FILE} is over {_MAX_BYTES} bytes")
    try:
        text_format.Parse(raw.decode(), config)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise refuse(model.id, f"{CONFIG_FILE}, line {line}: not UTF-8") from None
    except text_format.ParseError as error:
        line = error.GetLine()
        where = f"{CONFIG_FILE}, line {line}" if line else CONFIG_FILE
        raise refuse(model.id, f"{where}: {_reason(error)}") from None
    except RecursionError:
        raise refuse(model.id, f"{CONFIG_FILE}: nested too deep") from None
    _check(model, name, config)
    return config


def platform_of(model: Checkpoint, config: Any) -> str:
    """Return the platform that a configuration names; empty when the model's file decides."""
    for field in ("platform", "backend"):
        value = getattr(config, field)
        if value and value not in _BACKENDS:
            raise refuse(model.id, f"{CONFIG_FILE}: {field} {value!r} is not one of {', '.join(_BACKENDS)}")
    return _BACKENDS.get(config.platform or config.backend, "")


def named_files(config: Any) -> list[str]:
    """Return the files of labels and of warm-up requests that a ModelConfig names, relative to the model's directory."""
    given = [one for request in config.model_warmup for one in request.inputs.values() if one.input_data_file]
    labels = [output.label_filename for output in config.output if output.label_filename]
    return [*labels, *map(warm_up_file, given)]


def warm_up_file(given: Any) -> str:
    """Return the file of an input of a warm-up request, relative to the model's directory."""
    return f"{_WARM_UPS}/{given.input_data_file}"


def to_json(message: Any) -> dict[str, Any]:
    """Return a message as JSON values with the proto's own names: enums by name, 64-bit integers as numbers.

    Missing fields appear with their defaults, except for messages and members of a oneof that are not set.
    """
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_value = field.message_type.fields_by_name["value"]
            values[field.name] = {str(key): _value(of_value, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            values[field.name] = [_value(field, item) for item in value]
        elif (field.message_type is None and field.containing_oneof is None) or message.HasField(field.name):
            values[field.name] = _value(field, value)
    return values


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value


def _check(model: Checkpoint, name: str, config: Any) -> None:
    if config.name and config.name != name:
        raise refuse(model.id, f"{CONFIG_FILE}: name is {config.name!r}, but its directory is {name!r}")
    if config.max_batch_size < 0:
        raise refuse(model.id, f"{CONFIG_FILE}: max_batch_size is {config.max_batch_size}")
    for field, is_set in _FORBIDDEN.items():
        if is_set(config):
            raise refuse(model.id, f"{CONFIG_FILE}: {field} is not supported")


def _reason(error: text_format.ParseError) -> str:
    """Return the parser's message without the leading position."""
    text = str(error)
    position = f"{error.GetLine()}:{error.GetColumn()} : "
    return text.removeprefix(position)
