"""Every family on a device, in every format, against the same checkpoint in float32 on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import DEVICE, need
from tests.gpu.families import FAMILIES, Family
from tests.gpu.kinds import KINDS, Answer, Kind, Model

HALF = ("bfloat16", "float16")
ON_A_CPU = ("encoder bert", "encoder gemma3_text", "bge-m3", "adapter", "scorer bert", "detector owlvit", "program", "image to text florence2",
            "generator gemma3")  # fmt: skip
"""Rows that every run of the tests tries on a CPU, so that the comparison itself is known to work."""


def formats(kind: Kind, device: str) -> list[str]:
    """Return the formats in which a kind runs on a device: no float16 on a CPU."""
    return [dtype for dtype in kind.bounds if device != "cpu" or dtype != "float16"]


def compare(family: Family, directory: Path, device: str) -> None:
    """Assert that a family's answers on a device are those on a CPU, alone and together, in each format."""
    family.write(directory)
    kind = KINDS[family.kind]
    reference = kind.load(directory, "cpu", "float32")
    expected = kind.run(reference, kind.inputs(reference))
    faults: list[str] = []
    for dtype in formats(kind, device):
        model = kind.load(directory, device, dtype)
        faults += [f"{dtype}: {fault}" for fault in (*misplaced(family, model, device, dtype),
                                                     *distances(kind, model, expected, dtype))]  # fmt: skip
    assert not faults, "\n".join(faults)


def distances(kind: Kind, model: Model, expected: Answer, dtype: str) -> list[str]:
    """Return how far the answers are off, where that is too far."""
    inputs = kind.inputs(model)
    together = kind.run(model, inputs)
    alone = [kind.run(model, [item])[0] for item in inputs]
    pairs = {"together": (together, expected), "alone": (alone, expected), "alone and together": (alone, together)}
    found = {name: kind.distance(*pair) for name, pair in pairs.items()}
    print(dtype, {name: f"{value:.2g}" for name, value in found.items()})
    return [
        f"{name}: {value:.3g} is over {kind.bounds[dtype]:g}"
        for name, value in found.items()
        if not value <= kind.bounds[dtype]
    ]


def misplaced(family: Family, model: Model, device: str, dtype: str) -> list[str]:
    """Return what does not run as it should: packed, on its device, and for generators in place and recorded."""
    faults: list[str] = []
    runner = model.runner
    if family.is_packed is not None and runner.execution.packed is not family.is_packed:
        faults.append(f"packed is {runner.execution.packed}")
    if family.kind == "generator" and device != "cpu":
        is_half = dtype in HALF
        if runner.reads_in_place is not is_half:
            faults.append(f"reads in place is {runner.reads_in_place}")
        if (runner._graphs is not None) is not (is_half and family.is_recorded):
            faults.append(f"CUDA graphs are {'there' if runner._graphs is not None else 'missing'}")
    return faults


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_on_the_device_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    need(*FAMILIES[name].needs)
    compare(FAMILIES[name], tmp_path / "model", DEVICE)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_family_answers_in_16_bits_as_in_float32(name: str, tmp_path: Path) -> None:
    compare(FAMILIES[name], tmp_path / "model", "cpu")


def test_answers_that_differ_are_found(tmp_path: Path) -> None:
    family = FAMILIES["encoder bert"]
    family.write(tmp_path / "model")
    kind: Any = KINDS[family.kind]
    model = kind.load(tmp_path / "model", "cpu", "float32")
    inputs = kind.inputs(model)
    assert len(distances(kind, model, kind.run(model, inputs[::-1]), "float32")) == 2
    assert misplaced(family._replace(is_packed=False), model, "cpu", "float32") == ["packed is True"]
