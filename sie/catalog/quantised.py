"""Refuses checkpoints with quantised weights, by the name of the method, before any weight is read.

transformers needs another package for most methods. For some methods it reads the weights without their scales. The
model then gives wrong numbers without an error. GGUF files are not such checkpoints; `sie.catalog.gguf_file` reads
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

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
_MAX_NAME: Final = 40
_REMEDY: Final = "use its unquantised checkpoint, or, for a model that generates, a GGUF file of it"
_FLOATS: Final = ("BF16", "F16", "F32", "F64")
_SMALL_INTEGERS: Final = ("I8", "U8")


def refuse_quantised(checkpoint: Checkpoint, prefix: str = "") -> None:
    """Raise ModelLoadFailed for a checkpoint whose files say that its weights are quantised.

    prefix is empty, or a folder's name and a slash. An unknown method is refused too.
    """
    name = next(_methods(checkpoint, prefix), None)
    if name is not None:
        raise refuse(checkpoint.id, f"it is quantised with {name}, which this server does not serve; {_REMEDY}")


def find_quantised(dtypes: Mapping[str, str]) -> str | None:
    """Return the name of a tensor whose numbers need a scale, or None.

    dtypes maps each tensor to safetensors' name of its type. Such tensors are floats of 8 bits or fewer, and weights of
    8-bit integers, as bitsandbytes keeps them. Other integers are, for example, positions or masks.
    """
    for name, dtype in dtypes.items():
        is_small_float = dtype.startswith("F") and dtype not in _FLOATS
        if is_small_float or (dtype in _SMALL_INTEGERS and name.endswith("weight")):
            return name
    return None


def quantised_tensor(model_id: str, name: str, dtype: str) -> ModelLoadFailed:
    """Return the error for a tensor that `find_quantised` found."""
    return refuse(model_id, f"its weight {name!r} is quantised ({dtype}), which this server does not serve; {_REMEDY}")


def _methods(checkpoint: Checkpoint, prefix: str) -> Iterator[str]:
    """Yield the method's name from each place where any version has written it."""
    config = checkpoint.read_object(f"{prefix}config.json")
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part.get("quantization_config") is not None:
            yield _method(part["quantization_config"])
        if part.get("compression_config") is not None:  # compressed-tensors, before it had a quant_method
            yield "compressed-tensors"
        if "bits" in _object(part, "quantization"):
            yield "MLX"
    gptq = checkpoint.read_object(f"{prefix}quantize_config.json")  # files about ONNX models have this name too
    if "bits" in gptq:
        yield _method({"quant_method": "gptq", **gptq})
    if "w_bit" in checkpoint.read_object(f"{prefix}quant_config.json"):
        yield "AWQ"
    if _object(checkpoint.read_object(f"{prefix}hf_quant_config.json"), "quantization").get("quant_algo"):
        yield "ModelOpt"


def _method(settings: Any) -> str:
    """Return the name of the method of a `quantization_config`."""
    if not isinstance(settings, dict):
        return _UNNAMED
    if any(settings.get(prefix + key) for prefix in ("", "_") for key in ("load_in_4bit", "load_in_8bit")):
        return "bitsandbytes"
    method = settings.get("quant_method")
    return _NAMES.get(method, method[:_MAX_NAME]) if isinstance(method, str) and method else _UNNAMED


def _object(part: dict[str, Any], key: str) -> dict[str, Any]:
    value = part.get(key)
    return value if isinstance(value, dict) else {}
