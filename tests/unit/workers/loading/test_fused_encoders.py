"""Encoders whose layers a GPU's kernels compute: with stand-ins on a CPU, and with the kernels in Triton's interpreter."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import transformers

import sie.workers.generation
from sie.workers.generation.fused import fuse_all
from sie.workers.lora.lora_layers import LoraAdapters, LoraPair
from sie.workers.packed import attention
from sie.workers.packed.batch import pack_sequences
from sie.workers.runners.encode import Backbone, Execution
from sie.workers.runners.encoder_formats import join_layers
from sie.workers.runners.probe import MAX_DIFFERENCE, difference
from tests.triton_interpreter import interpreted, needs_triton, run_interpreted
from tests.unit.workers.generation import test_fused

SMALL = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
ENCODERS = {
    "qwen3": (transformers.Qwen3Config, {}, 13),
    "gemma3": (transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 16, "use_bidirectional_attention": True}, 17),
    "mistral": (transformers.MistralConfig, {"sliding_window": 11}, 9),
}
BERT_SHAPED = {
    "bert": (transformers.BertConfig, {}),
    "bert, gelu_new": (transformers.BertConfig, {"hidden_act": "gelu_new"}),
    "bert, no round widths": (transformers.BertConfig, {"hidden_size": 36, "intermediate_size": 50}),
    "xlm-roberta": (transformers.XLMRobertaConfig, {"pad_token_id": 1}),
    "electra": (transformers.ElectraConfig, {"embedding_size": 32}),
}
LENGTHS = (5, 23, 5, 1)


def build(name):
    config, values, _ = ENCODERS[name]
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(config(**{**SMALL, **values})).eval().requires_grad_(False)
    backbone = Backbone(model, torch.device("cpu"))
    return backbone, pack_sequences([np.arange(2, 2 + length, dtype=np.int32) for length in LENGTHS])


def check(name):
    """Compare the library's own layers, one length at a time, with joined ones and the kernels' in one packed step."""
    backbone, batch = build(name)
    with torch.inference_mode():
        expected = backbone.run_rectangles(batch)
    assert join_layers(name, backbone.model) == 2 * 5  # queries, keys, values; gate and the rest
    with torch.inference_mode():
        assert fuse_all(backbone.model) == ENCODERS[name][2]
        attention.register()
        backbone.model.set_attn_implementation(attention.NAME)
        hidden, _ = backbone.run_packed(batch, 0)
    assert difference(hidden, expected) < 1e-4


def build_bert(name, dtype=torch.float32, **changes):
    config, values = BERT_SHAPED[name]
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(config(**{**SMALL, **values, **changes})).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.15)
    return Backbone(model.to(dtype), torch.device("cpu"))


def check_bert(name, dtype):
    """Compare the library's own layers, one length at a time, with joined ones and the kernels' in one packed step."""
    backbone = build_bert(name, dtype)
    batch = pack_sequences([np.arange(2, 2 + length, dtype=np.int32) for length in LENGTHS])
    with torch.inference_mode():
        expected = backbone.run_rectangles(batch)
    join_layers(name, backbone.model)
    assert fuse_all(backbone.model) == 2 * 3  # in each layer two sums with norms, and a GELU
    with torch.inference_mode():
        attention.register()
        backbone.model.set_attn_implementation(attention.NAME)
        hidden, _ = backbone.run_packed(batch, 2 if name == "xlm-roberta" else 0)
    assert difference(hidden, expected) < (1e-4 if dtype == torch.float32 else MAX_DIFFERENCE[dtype])


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setitem(sys.modules, "sie.workers.generation.layer_kernels", test_fused)
    monkeypatch.setattr(sie.workers.generation, "layer_kernels", test_fused, raising=False)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_replaced_layers_of_an_encoder_give_the_library_s_hidden_states(name):
    check(name)


@needs_triton
def test_on_a_cpu_the_kernels_themselves_are_tried():
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_the_kernels_give_the_library_s_hidden_states(name):
    check(name)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(BERT_SHAPED))
def test_replaced_layers_of_a_bert_give_the_library_s_hidden_states(name, dtype):
    check_bert(name, dtype)


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype"), [("bert, no round widths", torch.float16), ("bert, gelu_new", torch.bfloat16)]
)
def test_the_kernels_give_the_hidden_states_of_a_bert(name, dtype):
    check_bert(name, dtype)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("activation", "count"), [("relu", 4), ("quick_gelu", 4), ("gelu_python", 6), ("gelu_fast", 6)]
)
def test_an_activation_is_known_by_its_values(activation, count):
    assert fuse_all(build_bert("bert", hidden_act=activation).model) == count


@pytest.mark.usefixtures("stand_ins")
def test_layers_beside_a_linear_layer_that_are_no_activation_stay():
    strange = torch.nn.ModuleDict({"linear": torch.nn.Linear(8, 8), "other": torch.nn.ModuleList()})
    turned = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Flatten(0))
    for model in (strange, turned, torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())):
        assert fuse_all(model) == 0


@pytest.mark.usefixtures("stand_ins")
def test_a_call_with_keywords_runs_the_layer_s_own_function():
    model = build_bert("bert").model
    layer = model.encoder.layer[0].output
    states, residual = torch.randn(1, 3, 48), torch.randn(1, 3, 32)
    expected = layer(states, residual)
    assert fuse_all(model) == 6
    assert torch.equal(layer(states, input_tensor=residual), expected)
    assert torch.allclose(layer(states, residual), expected, atol=1e-5)


@pytest.mark.usefixtures("stand_ins")
def test_a_sum_that_computes_something_else_stays():
    model = build_bert("bert").model
    own = model.encoder.layer[0].output
    own.forward = lambda states, residual: own.LayerNorm(own.dense(states) + 0.5 * residual)
    assert fuse_all(model) == 5


@pytest.mark.usefixtures("stand_ins")
def test_adapters_of_layers_with_replaced_biases_count():
    def run(fuses):
        backbone = build_bert("bert")
        if fuses:
            assert fuse_all(backbone.model) == 6
        batch = pack_sequences([np.arange(2, 2 + length, dtype=np.int32) for length in LENGTHS])
        rows = backbone.lora_rows
        adapters = LoraAdapters(backbone.model, rows, lambda some: backbone.run(some, Execution(packed=False)))
        random = torch.Generator().manual_seed(2)
        pairs = {
            f"encoder.layer.1.{name}": LoraPair(
                torch.randn(2, inputs, generator=random), torch.randn(outputs, 2, generator=random)
            )
            for name, inputs, outputs in (("intermediate.dense", 32, 48), ("output.dense", 48, 32))
        }
        plain = backbone.run_rectangles(batch)
        adapters.install("a", pairs)
        with torch.inference_mode(), rows.step(["a"] * len(LENGTHS), batch):
            return plain, backbone.run_rectangles(batch)

    (plain, adapted), (fused_plain, fused_adapted) = run(fuses=False), run(fuses=True)
    assert difference(adapted, plain) > 0.1
    assert difference(fused_plain, plain) < 1e-4
    assert difference(fused_adapted, adapted) < 1e-4


def test_a_model_that_does_not_run_on_a_few_tokens_keeps_its_layers():
    model = transformers.T5Model(transformers.T5Config(
        vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )).eval()  # fmt: skip
    assert join_layers("m", model) == 0


@pytest.mark.usefixtures("stand_ins")
def test_an_adapter_of_a_replaced_gate_counts():
    def run(fuses):
        backbone, batch = build("qwen3")
        if fuses:
            join_layers("m", backbone.model)
            fuse_all(backbone.model)
        rows = backbone.lora_rows
        adapters = LoraAdapters(backbone.model, rows, lambda some: backbone.run(some, Execution(packed=False)))
        before = backbone.run_rectangles(batch)
        random = torch.Generator().manual_seed(2)
        pairs = {
            f"layers.1.mlp.{name}": LoraPair(
                torch.randn(2, inputs, generator=random), torch.randn(outputs, 2, generator=random)
            )
            for name, inputs, outputs in (("gate_proj", 32, 48), ("up_proj", 32, 48), ("down_proj", 48, 32))
        }
        adapters.install("a", pairs)
        with torch.inference_mode(), rows.step(["a"] * len(LENGTHS), batch):
            return before, backbone.run_rectangles(batch)

    (plain, adapted), (fused_plain, fused_adapted) = run(fuses=False), run(fuses=True)
    assert difference(adapted, plain) > 0.1
    assert difference(fused_plain, plain) < 1e-4
    assert difference(fused_adapted, adapted) < 1e-4
