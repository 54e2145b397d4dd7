"""Finds the tensors of each quantised weight in a checkpoint's headers. Must check every shape before a value is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Final

import msgspec

from sie.catalog.files import refuse
from sie.catalog.quantised import Quantisation
from sie.values.errors import ModelLoadFailed

_SCALES: Final = ("F16", "BF16", "F32", "F8_E8M0")
_SCALE_ENDS: Final = ("_scale_inv", "_scale")
_WORD_BITS: Final = 32
_MX_BYTES: Final = 16
"""Bytes of 32 numbers of four bits, which share a scale."""


class Tensor(msgspec.Struct, frozen=True):
    """The fields of a tensor in a safetensors header that are read here; `__metadata__` has neither."""

    dtype: str = ""
    shape: list[Annotated[int, msgspec.Meta(ge=0)]] = []


class QuantisedWeight(msgspec.Struct, frozen=True, kw_only=True):
    """A weight whose numbers, scales and perhaps zero points are tensors of their own."""

    name: str
    shape: tuple[int, ...]
    """(outputs, inputs), or of MXFP4 (experts, inputs, outputs). With `shape` among its parts, the second number is the
    most that it can be."""
    block: tuple[int, int]
    """Outputs and inputs that share a scale."""
    num_groups: int
    """Number of scales of an output."""
    parts: dict[str, str]
    """The names of its tensors by their role: `numbers`, `scales`, `zeros`, `groups`, `shape`."""


def plan_weights(model_id: str, found: Quantisation, tensors: Mapping[str, Tensor]) -> list[QuantisedWeight]:
    """Return the quantised weights among tensors.

    Raises ModelLoadFailed, with the name of the tensor, for one that is missing or has another shape or type than the
    layout has, and if there are no quantised weights.
    """
    plan = _Plan(model_id, found, tensors)
    read = {"scaled": plan.scaled, "packed": plan.packed, "awq": plan.awq, "gptq": plan.gptq, "mxfp4": plan.mxfp4}[
        found.layout
    ]
    weights = [read(name) for name in tensors if plan.is_weight(name)]
    if not weights:
        raise refuse(model_id, f"its configuration says that it is quantised with {found.name}, and no weight is")
    for weight in weights:
        if weight.name in tensors and weight.parts["numbers"] != weight.name:
            raise refuse(model_id, f"it has {weight.name!r} twice, quantised with {found.name} and plain")
    return weights


class _Plan:
    """The tensors of one checkpoint. Each layout's method takes the name of the tensor with a weight's numbers."""

    def __init__(self, model_id: str, found: Quantisation, tensors: Mapping[str, Tensor]) -> None:
        self._model_id = model_id
        self._found = found
        self._tensors = tensors
        self._per_word = _WORD_BITS // found.bits

    def is_weight(self, name: str) -> bool:
        if self._tensors[name].dtype not in self._found.dtypes:
            return False
        if self._found.layout == "scaled":
            return not name.endswith(("_zero_point", *_SCALE_ENDS))
        return name.endswith({"packed": ".weight_packed", "mxfp4": "_blocks"}.get(self._found.layout, ".qweight"))

    def scaled(self, name: str) -> QuantisedWeight:
        shape = self._shape(name)
        scales = next((name + end for end in _SCALE_ENDS if name + end in self._tensors), name + _SCALE_ENDS[-1])
        block = self._block(shape, scales)
        grid = (_ceil(shape[0], block[0]), _ceil(shape[1], block[1]))
        self._check(scales, _SCALES, _forms(grid))
        parts = {"numbers": name, "scales": scales}
        zeros = f"{name}_zero_point"
        if zeros in self._tensors:
            self._check(zeros, (*_SCALES, *self._found.dtypes), _forms(grid))
            parts["zeros"] = zeros
        return QuantisedWeight(name=name, shape=shape, block=block, num_groups=grid[1], parts=parts)

    def packed(self, name: str) -> QuantisedWeight:
        base = name.removesuffix("_packed")
        rows, words = self._shape(name)
        names = {"scales": f"{base}_scale", "shape": f"{base}_shape"}
        self._check(names["shape"], ("I64", "I32"), [(2,)])
        most, least = words * self._per_word, (words - 1) * self._per_word + 1
        block = self._block((rows, most), names["scales"])
        counts = range(_ceil(least, block[1]), _ceil(most, block[1]) + 1)
        num_rows = _ceil(rows, block[0])
        self._check(names["scales"], _SCALES, [form for count in counts for form in _forms((num_rows, count))])
        given = self._tensors[names["scales"]].shape
        count = given[1] if len(given) == 2 else 1
        zeros, groups = f"{base}_zero_point", f"{base}_g_idx"
        if zeros in self._tensors:
            if self._tensors[zeros].dtype == "I8":  # before compressed-tensors packed them
                self._check(zeros, ("I8",), _forms((num_rows, count)))
            else:
                self._check(zeros, ("I32",), [(_ceil(num_rows, self._per_word), count)])
            names["zeros"] = zeros
        if groups in self._tensors:
            self._check(groups, ("I32", "I64"), [(inputs,) for inputs in range(least, most + 1)])
            names["groups"] = groups
        parts = {"numbers": name, **names}
        return QuantisedWeight(name=base, shape=(rows, most), block=block, num_groups=count, parts=parts)

    def awq(self, name: str) -> QuantisedWeight:
        inputs, words = self._shape(name)
        return self._grouped(name, (words * self._per_word, inputs), {})

    def gptq(self, name: str) -> QuantisedWeight:
        words, outputs = self._shape(name)
        if outputs % self._per_word:
            raise self._wrong(name, [f"a multiple of {self._per_word} as its second number"])
        inputs = words * self._per_word
        groups = f"{name.removesuffix('qweight')}g_idx"
        if groups not in self._tensors:
            return self._grouped(name, (outputs, inputs), {})
        self._check(groups, ("I32", "I64"), [(inputs,)])
        return self._grouped(name, (outputs, inputs), {"groups": groups})

    def mxfp4(self, name: str) -> QuantisedWeight:
        """The weights of all experts of a layer, 32 inputs in 16 bytes."""
        base = name.removesuffix("_blocks")
        shape = self._tensors[name].shape
        if len(shape) != 4 or 0 in shape or shape[3] != _MX_BYTES:
            raise self._wrong(name, [f"four dimensions, the last one {_MX_BYTES}"])
        experts, outputs, count, _ = shape
        parts = {"numbers": name, "scales": f"{base}_scales"}
        self._check(parts["scales"], ("U8", "F8_E8M0"), [(experts, outputs, count)])
        inputs = 2 * _MX_BYTES
        return QuantisedWeight(
            name=base, shape=(experts, count * inputs, outputs), block=(1, inputs), num_groups=count, parts=parts
        )

    def _grouped(self, name: str, shape: tuple[int, int], parts: dict[str, str]) -> QuantisedWeight:
        """Return a weight of AWQ or GPTQ, which have the scales and zero points of an output in a column."""
        base = name.removesuffix("qweight")
        block = self._block(shape)
        count = _ceil(shape[1], block[1])
        parts = {"numbers": name, "scales": f"{base}scales", "zeros": f"{base}qzeros", **parts}
        self._check(parts["scales"], _SCALES, [(count, shape[0])])
        self._check(parts["zeros"], ("I32",), [(count, shape[0] // self._per_word)])
        return QuantisedWeight(name=f"{base}weight", shape=shape, block=block, num_groups=count, parts=parts)

    def _block(self, shape: tuple[int, int], scales: str = "") -> tuple[int, int]:
        """Return the numbers of outputs and inputs that share a scale; without a block, by the number of scales."""
        block = self._found.block
        if block is None:
            given = self._tensors.get(scales, Tensor())
            is_one = all(size == 1 for size in given.shape) and bool(given.dtype)
            block = (shape[0] if is_one else 1, 0)
        return block[0], block[1] or shape[1]

    def _shape(self, name: str) -> tuple[int, int]:
        shape = self._tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise self._wrong(name, ["two dimensions"])
        return shape[0], shape[1]

    def _check(self, name: str, dtypes: Collection[str], shapes: Collection[tuple[int, ...]]) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise refuse(self._model_id, f"it is quantised with {self._found.name}, and has no tensor {name!r}")
        if tensor.dtype not in dtypes or tuple(tensor.shape) not in shapes:
            raise self._wrong(name, [str(list(shape)) for shape in list(shapes)[:3]], dtypes)

    def _wrong(self, name: str, shapes: list[str], dtypes: Collection[str] = ()) -> ModelLoadFailed:
        tensor = self._tensors[name]
        expected = " or ".join(shapes) + (f", as {', '.join(dtypes)}" if dtypes else "")
        reason = f"its tensor {name!r} has the shape {tensor.shape}, as {tensor.dtype}"
        return refuse(self._model_id, f"{reason}; {self._found.name} with its settings needs {expected}")


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def _forms(grid: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the shapes in which a grid of scales is written: one scale may be a scalar, one for each output a row."""
    forms: list[tuple[int, ...]] = [grid]
    if grid[1] == 1:
        forms.append((grid[0],))
    return [*forms, ()] if grid == (1, 1) else forms
