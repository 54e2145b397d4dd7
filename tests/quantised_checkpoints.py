"""Writes quantised checkpoints and computes their plain weights, from the formats' descriptions, without torch.

Sources: DeepSeek-V3's README_WEIGHTS.md (FP8), AutoAWQ's packing_utils.py, AutoGPTQ's qlinear modules, compressed-tensors'
pack_quantized and naive_quantized.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[Any]
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each nibble of a word belongs to."""


class Stored(NamedTuple):
    """A quantised weight (outputs, inputs): its tensors by what follows `weight` or `.`, and what they mean."""

    tensors: dict[str, tuple[str, Array]]
    """Type in safetensors and values; names that begin with a dot replace `.weight`."""
    plain: Array


Quantise = Callable[[Array, np.random.Generator], Stored]


def e4m3_values() -> Array:
    """Return the number of each byte. Source: arXiv 2209.05433: four bits of exponent with bias 7, no infinities."""
    values = []
    for byte in range(256):
        sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(sign * (np.nan if byte & 127 == 127 else size))
    return np.array(values, np.float32)


def to_e4m3(values: Array) -> Array:
    """Return the byte of the nearest number of each value."""
    order = np.argsort(np.where(np.isnan(e4m3_values()), np.inf, e4m3_values()))[:254]
    known = e4m3_values()[order]
    places = np.clip(np.searchsorted(known, values), 1, len(known) - 1)
    places -= np.abs(values - known[places - 1]) < np.abs(values - known[places])
    return order[places].astype(np.uint8)


def pack(values: Array, bits: int) -> Array:
    """Return words (n, m * bits / 32) with the lowest number first, from unsigned numbers (n, m)."""
    each = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % each))).astype(np.uint32)
    words = np.zeros((len(padded), padded.shape[1] // each), np.uint32)
    for place in range(each):
        words |= padded[:, place::each] << np.uint32(bits * place)
    return words.view(np.int32)


def bfloat16(values: Array) -> tuple[Array, Array]:
    """Return values cut to 16 bits, as those bits and as float32."""
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def fp8(block: tuple[int, int] | None, end: str = "_scale_inv", dtype: str = "F32") -> Quantise:
    """A scale for each block; None: one for all, (1, 0): one for each output."""

    def quantise(weight: Array, random: np.random.Generator) -> Stored:
        rows, columns = weight.shape
        high, wide = block or (rows, columns)
        wide = wide or columns
        grid = (-(-rows // high), -(-columns // wide))
        scales = random.uniform(1e-3, 4e-3, grid).astype(np.float32)
        kept = scales
        if dtype == "BF16":
            scales, kept = bfloat16(scales)
        spread = np.repeat(np.repeat(kept, high, 0), wide, 1)[:rows, :columns]
        numbers = to_e4m3(weight / spread)
        shaped = scales.reshape(()) if block is None else scales
        return Stored(
            {"": ("F8_E4M3", numbers), end: (dtype, shaped), "_extra.input_scale": ("F32", np.ones(()))},
            e4m3_values()[numbers] * spread,
        )

    return quantise


def awq(group: int) -> Quantise:
    def quantise(weight: Array, random: np.random.Generator) -> Stored:
        rows, columns = weight.shape
        num_groups = columns // group
        numbers = random.integers(0, 16, (columns, rows))
        zeros = random.integers(0, 16, (num_groups, rows))
        scales = random.uniform(0.01, 0.04, (num_groups, rows)).astype(np.float16)

        def words(values: Array) -> Array:
            return pack(values.reshape(len(values), -1, 8)[:, :, AWQ_PLACES].reshape(values.shape), 4)

        spread = np.repeat(scales.astype(np.float32), group, 0)
        plain = (numbers - np.repeat(zeros, group, 0)).astype(np.float32) * spread
        return Stored(
            {".qweight": ("I32", words(numbers)), ".qzeros": ("I32", words(zeros)), ".scales": ("F16", scales)},
            plain.T,
        )

    return quantise


def gptq(bits: int, group: int, *, is_ordered: bool = False, is_second: bool = False) -> Quantise:
    """is_ordered: the inputs of a group lie apart (desc_act). is_second: zero points are stored as they are."""

    def quantise(weight: Array, random: np.random.Generator) -> Stored:
        rows, columns = weight.shape
        num_groups = columns // group
        groups = np.arange(columns) // group
        if is_ordered:
            groups = random.permutation(groups)
        numbers = random.integers(0, 1 << bits, (columns, rows))
        zeros = random.integers(1, 1 << bits, (num_groups, rows))
        scales = random.uniform(0.01, 0.04, (num_groups, rows)).astype(np.float16)
        if bits == 8:
            scales = (scales / 16).astype(np.float16)
        plain = np.empty((rows, columns), np.float32)
        for column, own in enumerate(groups):
            plain[:, column] = (numbers[column] - zeros[own]) * scales[own].astype(np.float32)
        return Stored(
            {
                ".qweight": ("I32", pack(numbers.T, bits).T),
                ".qzeros": ("I32", pack(zeros - (0 if is_second else 1), bits)),
                ".scales": ("F16", scales), ".g_idx": ("I32", groups.astype(np.int32)),
            },
            plain,
        )  # fmt: skip

    return quantise


def packed(bits: int, group: int, *, zeros: str = "", is_ordered: bool = False) -> Quantise:
    """group 0 is all inputs. zeros: empty, `packed`, or `bytes` as older versions wrote them."""

    def quantise(weight: Array, random: np.random.Generator) -> Stored:
        rows, columns = weight.shape
        size = group or columns
        num_groups, half = -(-columns // size), 1 << bits - 1
        groups = np.arange(columns) // size
        if is_ordered:
            groups = random.permutation(groups)
        numbers = random.integers(-half, half, (rows, columns))
        points = random.integers(-half, half, (rows, num_groups)) if zeros else np.zeros((rows, num_groups), np.int64)
        scales, kept = bfloat16(random.uniform(0.01, 0.04, (rows, num_groups)) * 8 / half)
        tensors: dict[str, tuple[str, Array]] = {
            "_packed": ("I32", pack(numbers + half, bits)), "_scale": ("BF16", scales),
            "_shape": ("I64", np.array([rows, columns])),
        }  # fmt: skip
        if zeros == "packed":
            tensors["_zero_point"] = ("I32", pack((points + half).T, bits).T)
        elif zeros:
            tensors["_zero_point"] = ("I8", points.astype(np.int8))
        if is_ordered:
            tensors["_g_idx"] = ("I32", groups.astype(np.int32))
        return Stored(tensors, (numbers - points[:, groups]).astype(np.float32) * kept[:, groups])

    return quantise


def eight_bits(*, zeros: bool = False) -> Quantise:
    """A byte for each number and a scale for each output (compressed-tensors' int-quantized)."""

    def quantise(weight: Array, random: np.random.Generator) -> Stored:
        numbers = random.integers(-128, 128, weight.shape).astype(np.int8)
        scales = random.uniform(1e-3, 3e-3, (len(weight), 1)).astype(np.float32)
        points = random.integers(-9, 9, scales.shape).astype(np.int8) if zeros else np.zeros(scales.shape, np.int8)
        tensors = {"": ("I8", numbers), "_scale": ("F32", scales)}
        if zeros:
            tensors["_zero_point"] = ("I8", points)
        return Stored(tensors, (numbers.astype(np.int32) - points).astype(np.float32) * scales)

    return quantise


def mxfp4(weight: Array, random: np.random.Generator) -> Stored:
    """Quantise weights (experts, inputs, outputs), as transformers has those of gpt-oss. Source: OCP MX 1.0."""
    experts, inputs, outputs = weight.shape
    known = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = random.integers(0, 16, (experts, outputs, inputs))
    exponents = random.integers(121, 124, (experts, outputs, inputs // 32))
    plain = np.where(numbers < 8, 1, -1) * known[numbers % 8] * np.repeat(2.0 ** (exponents - 127.0), 32, 2)
    halves = numbers.reshape(experts, outputs, -1, 16, 2)
    return Stored(
        {
            "_blocks": ("U8", (halves[..., 0] + 16 * halves[..., 1]).astype(np.uint8)),
            "_scales": ("U8", exponents.astype(np.uint8)),
        },
        plain.transpose(0, 2, 1).astype(np.float32),
    )


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip


FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [32, 24], "activation_scheme": "dynamic"}, fp8((32, 24))),
    "fp8 in blocks, bfloat16 scales": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8((128, 128), dtype="BF16")),
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8(None, "_scale")),
    "fbgemm fp8 by output": ({"quant_method": "fbgemm_fp8"}, fp8((1, 0), "_scale")),
    "compressed fp8 by output": (compressed("float-quantized", type="float", strategy="channel"), fp8((1, 0), "_scale", "BF16")),
    "compressed fp8 by tensor": (compressed("float-quantized", type="float", strategy="tensor"), fp8(None, "_scale")),
    "compressed fp8 in blocks": (compressed("float-quantized", type="float", strategy="block", block_structure=[32, 24]),
                                 fp8((32, 24), "_scale")),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM", "zero_point": True}, awq(16)),
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}, gptq(4, 16)),
    "gptq 4 ordered": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, gptq(4, 16, is_ordered=True)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": 16}, gptq(8, 16)),
    "gptq 4 v2": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}, gptq(4, 16, is_second=True)),
    "packed int4": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=16), packed(4, 16)),
    "packed int4 zeros": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False),
                          packed(4, 16, zeros="packed")),
    "packed int4 old zeros": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False),
                              packed(4, 16, zeros="bytes")),
    "packed int4 ordered": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, actorder="group"),
                            packed(4, 16, is_ordered=True)),
    "packed int8": (compressed("pack-quantized", num_bits=8, strategy="channel"), packed(8, 0)),
    "bytes": (compressed("int-quantized", strategy="channel"), eight_bits()),
    "bytes zeros": (compressed("int-quantized", strategy="channel", symmetric=False), eight_bits(zeros=True)),
}  # fmt: skip
"""The `quantization_config` of each layout, and what writes it."""


def save_quantised(
    source: Path, target: Path, plain: Path, name: str, *, chosen: str | tuple[str, ...] = "_proj.weight"
) -> None:
    """Quantise the weights of a checkpoint whose names end in chosen; write it, and what it means, to two directories."""
    settings, quantise = {**FORMATS, "mxfp4": ({"quant_method": "mxfp4"}, mxfp4)}[name]
    random = np.random.default_rng(7)
    kept: dict[str, tuple[str, Array]] = {}
    meant: dict[str, tuple[str, Array]] = {}
    for weight_name, weight in load_file(source / "model.safetensors").items():
        if not weight_name.endswith(chosen) or "lm_head" in weight_name:
            kept[weight_name] = meant[weight_name] = ("F32", weight)
            continue
        stored = quantise(weight, random)
        base = weight_name.removesuffix(".weight")
        for end, tensor in stored.tensors.items():
            kept[f"{base}{end}" if end.startswith(".") else f"{weight_name}{end}"] = tensor
        meant[weight_name] = ("F32", stored.plain)
    for directory, tensors, extra in ((target, kept, {"quantization_config": settings}), (plain, meant, {})):
        directory.mkdir(exist_ok=True)
        for path in source.glob("*.json"):
            (directory / path.name).write_bytes(path.read_bytes())
        config = json.loads((source / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **extra}))
        write_tensors(directory / "model.safetensors", tensors)


def write_tensors(path: Path, tensors: dict[str, tuple[str, Array]]) -> None:
    """Write a safetensors file. Source: safetensors' format."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, values) in tensors.items():
        data = np.ascontiguousarray(values, np.float32 if dtype == "F32" else values.dtype).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
