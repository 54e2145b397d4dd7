"""Every family on a device, in every format, against the same checkpoint in float32 on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sie.values.fallbacks import Fallback
from sie.workers.device import memory
from sie.workers.device.capture import Capturer
from sie.workers.device.fallbacks import collecting
from sie.workers.generation.runner import TextGenerator
from sie.workers.packed import attention
from sie.workers.packed.attention import NotPackableError
from sie.workers.packed.flash import can_attend_flash
from sie.workers.runners.dual import DualRunner
from sie.workers.runners.encode import Backbone
from sie.workers.runners.encoder_graphs import EncoderGraphs
from tests.gpu.device import DEVICE, need
from tests.gpu.families import FAMILIES, Family
from tests.gpu.kinds import KINDS, Answer, Kind, Model
from tests.unit.workers.device.fake_cuda import FakeCuda

HALF = ("bfloat16", "float16")
ON_A_CPU = ("encoder bert", "encoder gemma3_text", "bge-m3", "adapter", "scorer bert", "detector owlvit", "program", "image to text florence2",
            "generator gemma3", "onnx", "gliner2 span bert", "glirel refined")  # fmt: skip
"""Rows that every run of the tests tries on a CPU, so that the comparison itself is known to work."""
RECORDED_HERE = ("encoder bert", "encoder gemma3_text", "encoder nomic-embed-text-v2-moe", "encoder nomic over its training",
                 "encoder jina-embeddings-v2", "bge-m3", "scorer qwen3", "encoder nv-embed", "reranker layerwise", "reranker of lists", "token labels modernbert")  # fmt: skip
"""Rows whose captures are tried on a CPU."""
_CONFIG = SimpleNamespace(get_text_config=lambda: SimpleNamespace(_experts_implementation="eager", model_type="llama"))
PLAIN: Any = SimpleNamespace(
    runner=SimpleNamespace(
        model=SimpleNamespace(config=_CONFIG), cache=SimpleNamespace(device=None, dtype=None, layers=())
    )
)
"""Stands for a model without experts, caps or sinks."""


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
        with collecting(family.kind) as fallbacks:
            model = kind.load(directory, device, dtype)
        faults += [f"{dtype}: {fault}" for fault in (*misplaced(family, model, device, dtype),
                                                     *unexpected(family, model, fallbacks.found, device, dtype),
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
    """Return what does not run as it should: packed, on its device, recorded in 16 bits, and for generators in place."""
    faults: list[str] = []
    runner = model.runner
    is_half = dtype in HALF
    if family.is_packed is not None and runner.execution.packed is not family.is_packed:
        faults.append(f"packed is {runner.execution.packed}")
    if device == "cpu" or not (family.is_packed or family.kind == "generator"):
        return faults
    if family.kind == "generator" and runner.reads_in_place is not is_half:
        faults.append(f"reads in place is {runner.reads_in_place}")
    graphs = graphs_of(runner)
    if (graphs is not None) is not (is_half and is_recorded(family, model, dtype)):
        faults.append(f"CUDA graphs are {'missing' if graphs is None else 'there'}")
    return faults


def is_recorded(family: Family, model: Model, dtype: str) -> bool:
    """Return whether a family's steps in this format can be CUDA graphs on this device."""
    return family.is_recorded and not (family.kind == "generator" and has_slow_experts(model.runner, dtype))


def gathers_prompts(runner: Any) -> bool:
    """Return whether flash attention does not compute a generator's prompts: its scores are capped, it has sinks, or its widths."""
    config, cache = runner.model.config.get_text_config(), runner.cache
    if getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss":
        return True
    return not all(can_attend_flash(cache.device, cache.dtype, layer.widths) for layer in cache.layers)


def has_slow_experts(runner: Any, dtype: str) -> bool:
    """Return whether torch multiplies the rows of experts with the host's help, which no CUDA graph can have."""
    has_experts = runner.model.config.get_text_config()._experts_implementation == "grouped_mm"
    return has_experts and (dtype != "bfloat16" or torch.cuda.get_device_capability()[0] not in (9, 10))


def graphs_of(runner: Any) -> Any:
    """Return the captured steps of a generator, or of a model that runs packed; None without any."""
    if isinstance(runner, TextGenerator):
        return runner._graphs
    return backbone_of(runner).graphs


def backbone_of(runner: Any) -> Backbone:
    """Return the model in a runner of whole sequences: a dual encoder's is that of its texts."""
    own = getattr(runner, "_backbone", None)
    return own or (runner._texts if isinstance(runner, DualRunner) else runner._model).backbone


def unexpected(family: Family, model: Model, found: Sequence[Fallback], device: str, dtype: str) -> list[str]:
    """Return the fallbacks that a load should not have noted, with their reasons, and those that it should have."""
    # In float32 no kernel of this project runs, whatever the family.
    names = {one.name for one in found} - ({"no_kernels"} if dtype == "float32" else set())
    expected = expected_fallbacks(family, model, device, dtype)
    wrong = [f"{one.name}: {one.reason}" for one in found if one.name in names - expected]
    return wrong + [f"{name} was not noted" for name in sorted(expected - names)]


def expected_fallbacks(family: Family, model: Model, device: str, dtype: str) -> set[str]:
    """Return the slower ways in which a family runs, as it is and not by a fault of the device or the host."""
    is_generator, is_half = family.kind == "generator", dtype in HALF
    if device == "cpu" or family.kind == "dual":  # most towers of texts cannot run packed, so nothing is noted
        return set()
    if is_generator and not is_half:
        return {"gathered_blocks"}
    if (
        family.kind == "onnx"
        and "CUDAExecutionProvider" not in importlib.import_module("onnxruntime").get_available_providers()
    ):
        return {"cpu"}  # it says so, and answers
    if family.kind == "encoder-decoder":
        return {"gathered_blocks", "no_graphs"}
    if family.is_packed is False:
        return {"unpacked"}
    may_be_recorded = is_generator or family.is_packed
    expected = {"no_graphs"} if may_be_recorded and not (is_half and is_recorded(family, model, dtype)) else set()
    return expected | ({"gathered_prompts"} if is_generator and gathers_prompts(model.runner) else set())


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


def test_a_load_that_fell_back_is_found(tmp_path: Path) -> None:
    """As on a GPU whose host has no compiler, or where a capture failed."""
    family = FAMILIES["encoder bert"]
    family.write(tmp_path / "model")
    model = KINDS["encoder"].load(tmp_path / "model", "cpu", "bfloat16")
    assert misplaced(family, model, "cuda", "bfloat16") == ["CUDA graphs are missing"]
    assert misplaced(family._replace(is_recorded=False), model, "cuda", "bfloat16") == []
    found = (Fallback("no_kernels", "no C compiler"), Fallback("no_graphs", "it waits"))
    assert unexpected(family, PLAIN, found, "cuda", "bfloat16") == ["no_kernels: no C compiler", "no_graphs: it waits"]
    assert unexpected(family, PLAIN, found, "cuda", "float32") == []
    assert unexpected(FAMILIES["encoder mpnet"], PLAIN, (), "cuda", "bfloat16") == ["unpacked was not noted"]
    assert unexpected(FAMILIES["generator llama"], PLAIN, found[1:], "cuda", "bfloat16") == ["no_graphs: it waits"]
    assert unexpected(FAMILIES["generator llama"], PLAIN, (), "cuda", "float32") == ["gathered_blocks was not noted"]
    assert unexpected(FAMILIES["generator llama-dynamic"], PLAIN, found[1:], "cuda", "float16") == []


@pytest.mark.parametrize("name", RECORDED_HERE)
def test_a_row_says_whether_a_capture_of_its_steps_succeeds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for CUDA, and tensors without values, which no operation can wait for."""
    family = FAMILIES[name]
    family.write(tmp_path / "model")
    backbone = backbone_of(KINDS[family.kind].load(tmp_path / "model", "cpu", "bfloat16").runner)
    backbone.model.to("meta")
    monkeypatch.setattr(backbone, "device", torch.device("meta"))
    monkeypatch.setattr(memory, "_allocator", memory._Allocator())
    monkeypatch.setattr(Capturer, "forbidden", "")
    monkeypatch.setattr(attention, "can_attend_compiled", lambda *_: False)
    monkeypatch.setattr(attention, "_attend_runs", _attend_as_flash)
    monkeypatch.setattr("sie.workers.runners.encoder_graphs.SIZES", (16,))
    FakeCuda(monkeypatch)
    try:
        with torch.inference_mode():
            EncoderGraphs(backbone.run_row, backbone.device, position_offset=0, has_types=backbone.has_types)
    except (NotImplementedError, NotPackableError, RuntimeError):
        assert not family.is_recorded
    else:
        assert family.is_recorded


def _attend_as_flash(query: torch.Tensor, _key: Any, value: torch.Tensor, _boundaries: Any, rule: Any) -> torch.Tensor:
    """Accept what flash attention takes on a GPU."""
    if rule.by_distance or value.shape[2] % 8 or value.shape[2] != query.shape[2]:
        raise NotPackableError("attention runs by length")
    return query.transpose(0, 1)
