"""Weights go from mapped files to their format and device without a second copy in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sie.workers.loading.direct_weights import direct_weights

_SHARD_BYTES = 12 << 20
_EXPERTS = {"moe_intermediate_size": 96, "num_experts_per_tok": 2, "num_experts": 8}


def _save(directory: Path, kind: str, dtype: torch.dtype, **changes: Any) -> int:
    """Write a checkpoint of about 12 million random weights in several files; return the number of weights."""
    values = {
        "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, **changes,
    }  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values)).to(dtype)
    model.save_pretrained(directory, max_shard_size=_SHARD_BYTES)
    assert len(list(directory.glob("*.safetensors"))) > 1
    return sum(weight.numel() for weight in model.parameters())


@contextmanager
def _peak() -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how much the process's anonymous memory has grown at most."""
    stop, peaks = threading.Event(), [_anonymous()]
    before = peaks[0]

    def watch() -> None:
        while not stop.is_set():
            peaks.append(_anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(peaks) - before
    finally:
        stop.set()
        thread.join()


def _anonymous() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def _read(directory: Path, dtype: torch.dtype, kept: frozenset[str] = frozenset()) -> Any:
    with direct_weights(dtype, torch.device("cpu"), kept=kept):
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kind", "changes"), [("LlamaConfig", {}), ("Qwen3MoeConfig", _EXPERTS)])
def test_a_load_holds_little_beside_the_weights(
    stored: torch.dtype, kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    num_weights = _save(tmp_path, kind, stored, **changes)
    _read(tmp_path, torch.bfloat16)  # what the library imports and caches is not the load's
    with _peak() as peak:
        model = _read(tmp_path, torch.bfloat16)
        assert peak() < 2 * num_weights + 1.2 * _SHARD_BYTES
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_values_are_those_of_a_conversion_afterwards(tmp_path: Path) -> None:
    _save(tmp_path, "Qwen3MoeConfig", torch.float32, num_hidden_layers=1, **_EXPERTS)
    found = _read(tmp_path, torch.bfloat16)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.get_default_dtype() == torch.float32
    for (name, weight), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other.to(torch.bfloat16)), name
    for (name, buffer), other in zip(found.named_buffers(), expected.buffers(), strict=True):
        assert buffer.dtype == other.dtype, name
        assert torch.equal(buffer, other), name


def test_weights_that_an_architecture_keeps_in_float32_stay_so(tmp_path: Path) -> None:
    _save(tmp_path, "LlamaConfig", torch.float32, num_hidden_layers=2)
    kept = transformers.LlamaPreTrainedModel
    before = kept._keep_in_fp32_modules_strict
    kept._keep_in_fp32_modules_strict = {"o_proj"}
    try:
        model = _read(tmp_path, torch.float16, frozenset({"k_proj"}))
    finally:
        kept._keep_in_fp32_modules_strict = before
    formats = {name: weight.dtype for name, weight in model.named_parameters()}
    assert formats["model.layers.1.self_attn.o_proj.weight"] == torch.float32
    assert formats["model.layers.1.self_attn.k_proj.weight"] == torch.float32, "the load's own choice"
    assert formats["model.layers.1.self_attn.q_proj.weight"] == torch.float16


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3MoeConfig"])
def test_reading_says_how_far_it_is(tmp_path: Path, kind: str) -> None:
    """Weights that are made of several, such as a layer's experts, count as one."""
    _save(tmp_path, kind, torch.bfloat16, **(_EXPERTS if "Moe" in kind else {}))
    parts: list[float] = []
    with direct_weights(torch.bfloat16, torch.device("cpu"), on_read=parts.append):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(parts) > 20
    assert parts == sorted(set(parts))
    assert parts[-1] == 1.0
