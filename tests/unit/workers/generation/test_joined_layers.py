"""Replacements of a model's own layers compute the same: joined linear layers, compiled norms."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from sie.workers.generation.norms import CompiledNorm, compile_norms
from sie.workers.packed.sharing import Share, share_inputs
from tests.generation_models import FAMILIES
from tests.kernels import in_every_format

SAMPLE = torch.arange(3, 9)[None]


def build(name):
    config_class, values = FAMILIES[name]
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**values)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "joined"), [("llama", 15), ("qwen2", 15), ("gemma3", 35), ("phi", 9), ("phi3", 0), ("gpt_neox", 0)]
)
def test_layers_that_read_one_tensor_are_joined(name, joined):
    """Three layers of queries, keys and values in one, and two of a gate; where they are one already nothing changes."""
    model = build(name)
    num_weights = sum(weight.numel() for weight in model.parameters())
    expected = model(input_ids=SAMPLE).logits
    assert share_inputs(model, SAMPLE[:, :4]) == joined
    assert torch.allclose(model(input_ids=SAMPLE).logits, expected, atol=1e-4)
    assert torch.allclose(model(input_ids=SAMPLE[:, 1:]).logits, build(name)(input_ids=SAMPLE[:, 1:]).logits, atol=1e-4)
    assert sum(weight.numel() for weight in model.parameters()) == num_weights


def test_a_model_that_reads_its_layers_weights_is_put_back():
    class Nosy(nn.Module):
        """Looks at the weight of a layer that shares its input."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 6)
            self.embed = nn.Embedding(20, 8)

        def forward(self, input_ids, use_cache=False):
            states = self.embed(input_ids)
            scale = self.a.weight.sum()
            return transformers.modeling_outputs.CausalLMOutput(
                logits=torch.cat([self.a(states), self.b(states)], -1) * scale
            )

    model = Nosy().requires_grad_(False)
    expected = model(SAMPLE).logits
    assert share_inputs(model, SAMPLE) == 0
    assert not any(isinstance(module, Share) for module in model.modules())
    assert torch.equal(model(SAMPLE).logits, expected)


@in_every_format
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_norms_of_both_formulas_are_compiled(name, dtype):
    model, plain = build(name).to(dtype), build(name).to(dtype)
    count = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    assert compile_norms(model, dtype) == count
    norms = [(own, other) for own, other in zip(model.modules(), plain.modules(), strict=True)
             if isinstance(own, CompiledNorm)]  # fmt: skip
    for own, other in norms:
        width = other.weight.shape[0]
        rows = torch.randn(1, 5, 3 * width).to(dtype)
        for states in (
            rows[..., :width],
            rows.view(1, 5, 3, width).transpose(1, 2),
            rows[0, 0, :width],
            rows[:, :0, :width],
        ):
            assert torch.allclose(
                own(states).float(), other(states).float(), rtol=2e-2 if dtype.itemsize == 2 else 1e-5
            )


def test_what_is_only_called_a_norm_stays():
    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, states):
            return states.sigmoid() * self.weight

    model = nn.Sequential(OddRMSNorm(), nn.LayerNorm(8)).requires_grad_(False)
    assert compile_norms(model, torch.float32) == 0


def test_without_kernels_norms_stay(monkeypatch):
    monkeypatch.setattr("sie.workers.generation.norms.can_normalise", lambda **_: False)
    assert compile_norms(build("llama"), torch.float32) == 0
