"""Reads how a checkpoint's weights are quantised, from its configuration. Refuses other methods by name.

The supported layouts are dequantised while they are read (`sie.workers.loading.dequantised`). For the others,
transformers needs another package, or reads the weights without their scales. The model then gives wrong numbers
without an error. GGUF files are not such checkpoints; `sie.catalog.gguf_file` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.values.errors import ModelLoadFailed

_NAMES: Final = {
    "aqlm": "AQLM", "auto-round": "AutoRound", "awq": "AWQ", "bitnet": "BitNet", "eetq": "EETQ", "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8", "fp_quant": "FP-Quant", "gptq": "GPTQ", "higgs": "HIGGS", "hqq": "HQQ", "modelopt": "ModelOpt",
    "mxfp4": "MXFP4", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "quanto": "Quanto", "quark": "Quark", "sinq": "SINQ",
    "spqr": "SpQR", "vptq": "VPTQ",
}  # fmt: skip
"""Names in prose of the methods of transformers 5.23, where they differ from `quant_method`."""
_UNNAMED: Final = "a method that it does not name"
_MAX_TEXT: Final = 40
_MOST_INPUTS: Final = 1 << 20
_REMEDY: Final = "use its unquantised checkpoint, or, for a model that generates, a GGUF file of it"
_FLOATS: Final = ("BF16", "F16", "F32", "F64")
_SMALL_FLOATS: Final = ("F8_E4M3", "F8_E5M2")
_SMALL_INTEGERS: Final = ("I8", "U8")


class Quantisation(msgspec.Struct, frozen=True, kw_only=True):
    """How the quantised weights of a checkpoint are stored.

    scaled: NAME in a small type, and NAME_scale_inv or NAME_scale. packed: NAME_packed, as compressed-tensors packs
    integers. awq and gptq: the `qweight`, `qzeros` and `scales` of a layer. mxfp4: NAME_blocks and NAME_scales of experts.
    """

    name: str
    """The method, in prose."""
    layout: Literal["scaled", "packed", "awq", "gptq", "mxfp4"]
    dtypes: tuple[str, ...] = ("I32",)
    """Types of the stored numbers, or of the words that they are packed in, by safetensors' names."""
    bits: int = 8
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; 0 means all of them. None: all together, or each output for itself."""
    zero_shift: int = 0
    """The number that is added to a stored zero point."""


class _Place(NamedTuple):
    """The settings of a method, and where they stand."""

    model_id: str
    field: str
    """Their name for errors, such as `quantization_config`."""
    name: str
    settings: dict[str, Any]

    def value(self, keys: str, default: Any = None) -> tuple[str, Any]:
        """Return the first of these keys (separated by blanks) that is set, and its value."""
        key = next((key for key in keys.split() if self.settings.get(key) is not None), keys.split(maxsplit=1)[0])
        value = self.settings.get(key)
        return f"{self.field}.{key}", default if value is None else value

    def one_of(self, keys: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Return the value of a key. Raises ModelLoadFailed, which names the key, for one that is not allowed."""
        field, value = self.value(keys, default)
        if isinstance(value, str):
            value = value.lower()
        if not isinstance(value, str | int) or isinstance(value, bool) or value not in allowed:
            raise self.unserved(field, value, f"only {' or '.join(map(str, allowed))}")
        return value

    def group(self, keys: str, default: Any = None) -> tuple[int, int]:
        """Return the block of a group of inputs. -1 is all inputs."""
        field, value = self.value(keys, default)
        if type(value) is not int or (value != -1 and not 0 < value <= _MOST_INPUTS):
            raise self.unserved(field, value, "only a number of inputs, or -1")
        return 1, max(value, 0)

    def rectangle(self, key: str) -> tuple[int, int]:
        """Return the block of outputs and inputs that is the value of a key."""
        field, value = self.value(key)
        is_list = isinstance(value, list) and len(value) == 2
        if not is_list or any(type(size) is not int or not 0 < size <= _MOST_INPUTS for size in value):
            raise self.unserved(field, value, "only two numbers, of outputs and of inputs")
        return value[0], value[1]

    def unserved(self, field: str, value: Any, served: str) -> ModelLoadFailed:
        text = str(value)[:_MAX_TEXT]
        reason = f"it is quantised with {self.name}, and {field} is {text!r}; {served} is served"
        return refuse(self.model_id, f"{reason}. Otherwise {_REMEDY}")

    def part(self, key: str, settings: dict[str, Any]) -> _Place:
        return self._replace(field=f"{self.field}.{key}", settings=settings)


def read_quantisation(checkpoint: Checkpoint, prefix: str = "") -> Quantisation | None:
    """Return how the weights are quantised, or None where no file says so.

    prefix is empty, or a folder's name and a slash. Raises ModelLoadFailed for another method, and for settings of a
    known one that are not supported; the message has the method's or the setting's name.
    """
    place = next(_places(checkpoint, prefix), None)
    if place is None:
        return None
    read = _READERS.get(place.name)
    if read is None:
        raise refuse(checkpoint.id, f"it is quantised with {place.name}, which this server does not serve; {_REMEDY}")
    return read(place)


def refuse_quantised(checkpoint: Checkpoint, prefix: str = "") -> None:
    """Raise ModelLoadFailed for quantised weights of any method. For models that other libraries read."""
    found = read_quantisation(checkpoint, prefix)
    if found is not None:
        reason = f"it is quantised with {found.name}, which this server does not serve for models of this kind"
        raise refuse(checkpoint.id, f"{reason}; use its unquantised checkpoint")


def find_quantised(dtypes: Mapping[str, str]) -> str | None:
    """Return the name of a tensor whose numbers need a scale, or None.

    dtypes maps each tensor to safetensors' name of its type. Such tensors are floats of 8 bits or fewer, weights of
    8-bit integers, as bitsandbytes keeps them, and packed ones. Other integers are, for example, positions or masks.
    """
    for name, dtype in dtypes.items():
        is_small_float = dtype.startswith("F") and dtype not in _FLOATS
        is_packed = dtype in (*_SMALL_INTEGERS, "I32") and name.endswith(("qweight", "weight_packed"))
        if is_small_float or is_packed or (dtype in _SMALL_INTEGERS and name.endswith("weight")):
            return name
    return None


def quantised_tensor(model_id: str, name: str, dtype: str) -> ModelLoadFailed:
    """Return the error for a tensor that `find_quantised` found."""
    return refuse(model_id, f"its weight {name!r} is quantised ({dtype}), which this server does not serve; {_REMEDY}")


def _places(checkpoint: Checkpoint, prefix: str) -> Iterator[_Place]:
    """Yield the settings from each place where any version of a method has written them."""

    def place(field: str, settings: Any) -> _Place:
        return _Place(checkpoint.id, field, _method(settings), settings if isinstance(settings, dict) else {})

    config = checkpoint.read_object(f"{prefix}config.json")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part.get("quantization_config") is not None:
            yield place("quantization_config", part["quantization_config"])
        if part.get("compression_config") is not None:  # compressed-tensors, before it had a quant_method
            old = _object(part, "compression_config")
            yield place("compression_config", {**old, "quant_method": "compressed-tensors"})
        if "bits" in _object(part, "quantization"):
            yield _Place(checkpoint.id, "quantization", "MLX", {})
    gptq = checkpoint.read_object(f"{prefix}quantize_config.json")  # files about ONNX models have this name too
    if "bits" in gptq:
        yield place("quantize_config.json", {"quant_method": "gptq", **gptq})
    awq = checkpoint.read_object(f"{prefix}quant_config.json")
    if "w_bit" in awq:
        yield place("quant_config.json", {"quant_method": "awq", **awq})
    if _object(checkpoint.read_object(f"{prefix}hf_quant_config.json"), "quantization").get("quant_algo"):
        yield _Place(checkpoint.id, "hf_quant_config.json", "ModelOpt", {})


def _method(settings: Any) -> str:
    """Return the name of the method of a `quantization_config`."""
    if not isinstance(settings, dict):
        return _UNNAMED
    if any(settings.get(prefix + key) for prefix in ("", "_") for key in ("load_in_4bit", "load_in_8bit")):
        return "bitsandbytes"
    method = settings.get("quant_method")
    return _NAMES.get(method, method[:_MAX_TEXT]) if isinstance(method, str) and method else _UNNAMED


def _object(part: dict[str, Any], key: str) -> dict[str, Any]:
    value = part.get(key)
    return value if isinstance(value, dict) else {}


def _read_fp8(place: _Place) -> Quantisation:
    """Source: transformers 5.23 FineGrainedFP8Config; DeepSeek-V3's inference/kernel.py, `weight_dequant`."""
    _, given = place.value("weight_block_size")
    block = None if given is None else place.rectangle("weight_block_size")
    return Quantisation(name=place.name, layout="scaled", dtypes=_SMALL_FLOATS, block=block)


def _read_awq(place: _Place) -> Quantisation:
    """Source: AutoAWQ's awq/utils/packing_utils.py; older files have other names for two settings."""
    place.one_of("backend", ("autoawq", "auto"), "autoawq")
    place.one_of("version format checkpoint_format", ("gemm",), "gemm")
    bits = place.one_of("bits w_bit", (4,), 4)
    return Quantisation(name=place.name, layout="awq", bits=bits, block=place.group("group_size q_group_size", 128))


def _read_gptq(place: _Place) -> Quantisation:
    """Source: AutoGPTQ's qlinear modules. Its format stores zero points less one; GPTQModel's second one as they are."""
    form = place.one_of("checkpoint_format format", ("gptq", "gptq_v2"), "gptq")
    bits = place.one_of("bits", (4, 8))
    place.one_of("pack_dtype", ("int32",), "int32")
    if place.settings.get("is_marlin_format"):
        raise place.unserved(f"{place.field}.is_marlin_format", True, "only false")
    changed = next((rule for rule in _object(place.settings, "dynamic") if not rule.startswith("-")), None)
    if changed is not None:
        raise place.unserved(f"{place.field}.dynamic", changed, "only the same settings for all layers, or none (-:)")
    zero_shift = 1 if form == "gptq" else 0
    return Quantisation(
        name=place.name, layout="gptq", bits=bits, block=place.group("group_size", -1), zero_shift=zero_shift
    )


_FORMATS: Final = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


def _read_compressed(place: _Place) -> Quantisation:
    """Return the quantisation of a checkpoint of compressed-tensors.

    Source: compressed-tensors 0.20, its compressors and `quantization/quant_args.py`.
    """
    form = place.one_of("format", _FORMATS)
    for key in ("sparsity_config", "transform_config"):
        value = _object(place.settings, key)
        if value.get("format", "dense") != "dense" or value.get("config_groups"):
            raise place.unserved(f"{place.field}.{key}", value.get("format", "set"), "only weights without it")
    groups = _object(place.settings, "config_groups")
    found = [
        _read_group(place.part(f"config_groups.{name}", group), form)
        for name, group in groups.items()
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    if not found or any(group != found[0] for group in found):
        given = f"{len(found)} groups with weights"
        raise place.unserved(f"{place.field}.config_groups", given, "only one group, or several with the same settings")
    return found[0]


def _read_group(place: _Place, form: str) -> Quantisation:
    place.one_of("format", (form,), form)
    weights = place.part("weights", _object(place.settings, "weights"))
    is_packed = form == "pack-quantized"
    kinds = {"pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",)}
    kind = weights.one_of("type", kinds.get(form, ("int", "float")), "int")
    bits = weights.one_of("num_bits", (4, 8) if is_packed else (8,), 8)
    has_groups = weights.settings.get("group_size") is not None
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), "group" if has_groups else "tensor")
    block = None
    if strategy == "group":
        block = weights.group("group_size")
    elif strategy == "block":
        block = weights.rectangle("block_structure")
    small = _SMALL_FLOATS if kind == "float" else ("I8",)
    return Quantisation(
        name=place.name, layout="packed" if is_packed else "scaled", dtypes=("I32",) if is_packed else small,
        bits=bits, block=block,
    )  # fmt: skip


def _read_mxfp4(place: _Place) -> Quantisation:
    """Source: transformers 5.23 integrations/mxfp4.py, the layout of gpt-oss."""
    return Quantisation(name=place.name, layout="mxfp4", dtypes=("U8",), bits=4)


_READERS: Final = {
    "FP8": _read_fp8,
    "FBGEMM FP8": _read_fp8,  # which has no blocks
    "AWQ": _read_awq,
    "GPTQ": _read_gptq,
    "MXFP4": _read_mxfp4,
    "compressed-tensors": _read_compressed,
}
