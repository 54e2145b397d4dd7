"""jina-embeddings-v3 in its main repository's layout, with and without its adapters, against formulas in float32.

Source: its modeling_lora.py (LoRAParametrization); vLLM's bert_with_rope.py, jina_merge_lora_weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_encoder
from tests.unit.workers.loading import test_remote_families as flash

TASKS = ["retrieval.query", "retrieval.passage", "text-matching"]
RANK, ALPHA = 2, 3
HUB = "jinaai/xlm-roberta-flash-implementation--"
CONFIG = {
    **flash.FLASH, "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary", "rotary_emb_base": 300.0,
    "lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout_p": 0.0,
    "auto_map": {"AutoConfig": f"{HUB}configuration_xlm_roberta.XLMRobertaFlashConfig",
                 "AutoModel": f"{HUB}modeling_lora.XLMRobertaLoRA",
                 "AutoModelForMaskedLM": f"{HUB}modeling_xlm_roberta.XLMRobertaForMaskedLM"},
}  # fmt: skip
MODULES = [
    {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]},
    {"idx": 1, "name": "pooler", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "normalizer", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
FILES = {
    "modules.json": MODULES, "1_Pooling__config.json": {"pooling_mode_mean_tokens": True},
    "config_sentence_transformers.json": {"prompts": {"retrieval.query": "w1 w2 ", "text-matching": ""}},
}  # fmt: skip


def _plain_weights() -> flash.Weights:
    return flash._random(flash._flash_shapes(learned=False))


def _hub_weights(plain: flash.Weights) -> flash.Weights:
    """Return the weights as torch's parametrizations name them: adapters beside each layer and table."""
    generator = torch.Generator().manual_seed(7)
    weights: flash.Weights = {}
    for name, weight in plain.items():
        if not name.endswith("weight") or "norm" in name or "emb_ln" in name:
            weights[name] = weight
            continue
        base, (rows, columns) = f"{name.removesuffix('weight')}parametrizations.weight", weight.shape
        is_table = "embeddings" in name
        weights[f"{base}.original"] = weight
        shapes = ((rows, RANK), (RANK, columns)) if is_table else ((RANK, columns), (rows, RANK))
        for part, shape in zip("AB", shapes, strict=True):
            weights[f"{base}.0.lora_{part}"] = torch.randn((len(TASKS), *shape), generator=generator) * 0.3
    return weights


def _with_task(plain: flash.Weights, hub: flash.Weights, task: str | None) -> flash.Weights:
    if task is None:
        return plain
    found = dict(plain)
    for name in plain:
        down, up = (hub.get(f"{name.removesuffix('weight')}parametrizations.weight.0.lora_{part}") for part in "AB")
        if down is not None and up is not None:
            a, b = down[TASKS.index(task)], up[TASKS.index(task)]
            found[name] = plain[name] + ALPHA / RANK * (a @ b if "embeddings" in name else b @ a)
    return found


def _prepare(directory: Path, adapter: str | None = None, **changes: Any) -> Any:
    if not directory.exists():
        flash._write(directory, {**CONFIG, **changes}, _hub_weights(_plain_weights()), **FILES)
    spec = ModelSpec(id="org/model", directory=str(directory), adapter=adapter)
    return prepare(Request(spec=spec, cache_dir=str(directory)), print)


@pytest.mark.parametrize("task", [None, *TASKS])
def test_vectors_of_a_task_equal_the_formulas_alone_and_in_every_batch(tmp_path: Path, task: str | None) -> None:
    card = _prepare(tmp_path / "model", task)
    runner: Any = load_encoder(card, "cpu", "float32", lambda *_: None)
    plain = _plain_weights()
    weights = _with_task(plain, _hub_weights(plain), task)
    texts = flash._texts(7, 120, 1, 7, 33)
    with torch.no_grad():
        expected = np.stack([flash._flash(weights, torch.from_numpy(text).long(), CONFIG).mean(0) for text in texts])
    assert runner.execution.packed
    assert card.normalize
    flash._check_rows(runner.run_tokens(texts), expected)
    flash._check_rows(runner.run_tokens(texts[::-1]), expected[::-1].copy())
    for text, row in zip(texts, expected, strict=True):
        flash._check_rows(runner.run_tokens([text]), row[None])


def test_an_adapter_brings_its_prompt(tmp_path: Path) -> None:
    prompts = [_prepare(tmp_path / "model", task).default_prompt for task in (None, *TASKS)]
    assert prompts == [None, "w1 w2 ", None, ""]


@pytest.mark.parametrize(
    ("adapter", "changes", "reason"),
    [
        ("other", {}, "adapter to 'other'; it has .*retrieval.query"),
        ("other", {"lora_adaptations": None}, "it has None"),
        (TASKS[0], {"lora_rank": 0}, "lora_rank 0"),
        (TASKS[0], {"lora_alpha": "1"}, "lora_alpha '1'"),
        (None, {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(
    tmp_path: Path, adapter: str | None, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        _prepare(tmp_path / "model", adapter, **changes)


def test_the_same_module_of_other_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=r"custom_st\.Transformer.*code of its own"):
        _prepare(tmp_path / "model", auto_map={"AutoModel": "modeling_clip.JinaCLIPModel"})


def test_a_model_without_adapters_of_its_own_is_refused_with_one(tmp_path: Path) -> None:
    directory = flash.save_remote(tmp_path / "model", "flash XLM-R, rotary")
    spec = ModelSpec(id="org/model", directory=str(directory), adapter="retrieval.query")
    with pytest.raises(ModelLoadFailed, match="has no adapters of its own"):
        prepare(Request(spec=spec, cache_dir=str(tmp_path)), print)
