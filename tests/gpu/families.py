"""Every family that is served, with what writes a tiny checkpoint of it, and how it has to run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from tests.generation_models import BY_LENGTH
from tests.generation_models import save as save_generator
from tests.gguf_models import write_tiny_llama
from tests.gli_models import GLINER_VARIANTS, save_gliclass, save_gliner, save_gliner2
from tests.gpu.kinds import PROGRAM_WIDTH
from tests.tiny_models import save_adapter
from tests.unit.detection_checkpoints import FAMILIES as DETECTORS
from tests.unit.detection_checkpoints import save_detector
from tests.unit.dual_checkpoints import FAMILIES as DUAL_ENCODERS
from tests.unit.dual_checkpoints import save_dual_encoder
from tests.unit.image_to_text_checkpoints import save_donut, save_florence
from tests.unit.workers.conftest import FAMILIES as ENCODERS
from tests.unit.workers.conftest import save_checkpoint
from tests.unit.workers.generation.test_encoder_decoder import KINDS as T5
from tests.unit.workers.generation.test_encoder_decoder import save_t5
from tests.unit.workers.generation.test_parity import SERVED as GENERATORS
from tests.unit.workers.loading.test_extractors import LABELS, NLI
from tests.unit.workers.loading.test_extractors import save as save_extractor
from tests.unit.workers.loading.test_glirel import VARIANTS as GLIREL
from tests.unit.workers.loading.test_glirel import imported_library, save
from tests.unit.workers.loading.test_list_scorer import save_list_reranker
from tests.unit.workers.loading.test_remote_families import ENCODERS as REMOTE
from tests.unit.workers.loading.test_remote_families import save_remote
from tests.unit.workers.loading.test_scorer import save_layerwise, save_reranker, save_scorer
from tests.unit.workers.loading.test_skipped_prompts import save_nv_embed
from tests.unit.workers.runners.test_tokens import FIXED, WIDTH, write_own

UNPACKED = {"mpnet", "deberta-v2", "bart"}
"""Encoders that transformers runs without its attention interface, or that have a decoder: they are not packed."""
NOT_RECORDED = {
    "llama-dynamic", "nomic over its training",  # their rotary factors are computed for each length
    "jina-embeddings-v2", "jina-embeddings-v2-base-code",  # the penalty for distance needs the lengths
    "nomic-embed-text-v2-moe",  # its experts' shares are counted on the host
}  # fmt: skip
"""Families whose steps cannot be CUDA graphs."""
PACKED_TOWERS = {"clip"}
"""Text towers of dual encoders that run packed. The others read all positions, or pool by themselves."""


class Family(NamedTuple):
    """One row of the comparison."""

    kind: str
    write: Callable[[Path], object]
    is_packed: bool | None = None
    """Whether sequences run back to back; None where a kind has no such choice."""
    is_recorded: bool = True
    """Whether steps in 16 bits are CUDA graphs: decode steps, or the small ones of a model that runs packed."""
    needs: tuple[str, ...] = ()
    """Modules that only some hosts have, without which the row is not run."""


def _colbert(directory: Path) -> None:
    write_own(
        save_checkpoint(directory, "bert"), mask={"skiplist_words": ["."]}, query_expansion=FIXED["query_expansion"]
    )


def _m3(directory: Path) -> None:
    save_checkpoint(directory, "xlm-roberta")
    for name, width in (("sparse", 1), ("colbert", WIDTH)):
        weights = {"weight": torch.randn(width, 32), "bias": torch.randn(width)}
        save_file(weights, directory / f"{name}_linear.safetensors")


def _adapted(directory: Path) -> None:
    save_checkpoint(directory, "bert")
    save_adapter(directory.parent / f"{directory.name}-adapter")


class _Program(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(PROGRAM_WIDTH, 3)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.tanh(self.layer(x)) + self.get_buffer("shift")}


def _program(directory: Path) -> None:
    torch.manual_seed(0)
    folder = directory / "m" / "1"
    folder.mkdir(parents=True)
    rows = {"x": {0: torch.export.Dim("batch")}}
    torch.export.save(
        torch.export.export(_Program(), (torch.ones(2, PROGRAM_WIDTH),), dynamic_shapes=rows), folder / "model.pt2"
    )


def _onnx(directory: Path) -> None:
    from onnx import helper, numpy_helper

    from tests import onnx_models

    weights = np.random.default_rng(0).standard_normal((PROGRAM_WIDTH, 3), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "W"], ["xw"]), helper.make_node("Tanh", ["xw"], ["y"])]
    x, y = (onnx_models.value(name, "FP32", ("batch", width)) for name, width in (("x", PROGRAM_WIDTH), ("y", 3)))
    onnx_models.write(directory, "m", onnx_models.model(nodes, [x], [y], [numpy_helper.from_array(weights, "W")]))


def _glirel(directory: Path, variant: str) -> None:
    with imported_library() as library:
        save(library, directory.parent / f"{directory.name}-source", variant)[0].rename(directory)


def _gguf(directory: Path) -> None:
    directory.mkdir()
    write_tiny_llama(directory / "tiny.gguf")


def _encoder(name: str, **options: Any) -> Family:
    return Family("encoder", partial(save_checkpoint, family=name, **options), is_packed=name not in UNPACKED)


def _remote(name: str) -> Family:
    needs = ("transformers.models.gte",) if name.startswith(("gte", "jina-embeddings-v2")) else ()
    return Family("encoder", partial(save_remote, name=name), True, name not in NOT_RECORDED, needs)


def _gliner(**options: Any) -> Family:
    return Family("gliner", partial(save_gliner, **options), needs=("gliner",))


def _scorer(name: str, **options: Any) -> Family:
    return Family("scorer", partial(save_scorer, family=name, **options), is_packed=name not in UNPACKED)


def _extractor(kind: str, name: str) -> Family:
    auto: Any = transformers.AutoModelForTokenClassification
    labels = LABELS
    if kind == "label pairs":
        auto, labels = transformers.AutoModelForSequenceClassification, list(NLI.values())
    return Family(kind, partial(save_extractor, family=name, auto=auto, labels=labels), is_packed=name not in UNPACKED)


_MASKED = {"auto": transformers.AutoModelForMaskedLM}

FAMILIES: dict[str, Family] = {
    **{f"encoder {name}": _encoder(name) for name in (*ENCODERS, "llama", "eurobert", "nomic_bert")},
    **{f"encoder {name}": _remote(name) for name in REMOTE},
    **{f"splade {name}": _encoder(name, **_MASKED) for name in ("bert", "modernbert", "mpnet")},
    "colbert": Family("encoder", _colbert, is_packed=True),
    "encoder nv-embed": Family("encoder", save_nv_embed, is_packed=True),
    "bge-m3": Family("encoder", _m3, is_packed=True),
    "adapter": Family("adapter", _adapted, is_packed=True),
    **{f"scorer {name}": _scorer(name) for name in ("roberta", "modernbert", "mpnet", "deberta-v2", "qwen3")},
    "scorer bert": _scorer("bert", typed=True),
    "reranker qwen3": Family("reranker", partial(save_reranker, family="qwen3"), is_packed=True),
    "reranker layerwise": Family("layerwise reranker", save_layerwise, is_packed=True),
    "reranker of lists": Family("list reranker", save_list_reranker, is_packed=True),
    **{f"token labels {name}": _extractor("token labels", name) for name in ("bert", "roberta", "modernbert")},
    **{f"label pairs {name}": _extractor("label pairs", name) for name in ("bert", "roberta", "bart")},
    **{
        f"dual {name}": Family("dual", partial(save_dual_encoder, family=name), name in PACKED_TOWERS, is_recorded=False)
        for name in DUAL_ENCODERS
    },
    **{f"detector {name}": Family("detector", partial(save_detector, family=name)) for name in DETECTORS},
    "image to text florence2": Family("image to text", partial(save_florence, by_authors=True)),
    "image to text donut": Family("image to text", save_donut),
    **{f"gliner {name}": _gliner(encoder="bert", variant=name) for name in GLINER_VARIANTS},
    **{f"gliner {name}": _gliner(encoder=name) for name in ("deberta-v2", "modernbert")},
    **{
        f"gliclass {name}": Family("gliclass", partial(save_gliclass, encoder=name), needs=("gliclass",))
        for name in ("bert", "deberta-v2", "modernbert")
    },
    **{
        f"gliner2 {architecture} {encoder}": Family(
            "gliner2", partial(save_gliner2, architecture=architecture, encoder=encoder), needs=("gliner2",)
        )
        for architecture, encoder in (("span", "bert"), ("span", "deberta-v2"), ("boundary", "modernbert"))
    },
    **{f"glirel {name}": Family("glirel", partial(_glirel, variant=name), needs=("glirel",)) for name in GLIREL},
    **{f"encoder-decoder {name}": Family("encoder-decoder", partial(save_t5, kind=name)) for name in T5},
    "generator gguf": Family("generator", _gguf),
    "program": Family("program", _program),
    "onnx": Family("onnx", _onnx, needs=("onnx", "onnxruntime")),
    **{
        f"generator {name}": Family(
            "generator", partial(save_generator, name=name), is_recorded=name not in NOT_RECORDED
        )
        for name in (*GENERATORS, *BY_LENGTH)
    },
}  # fmt: skip
"""Static vectors have no row: they never leave the processor. Unions have none: their members are GLiNER models."""
