"""Models that cannot be packed, in few padded batches as on a GPU, against a batch for each length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from sie.workers.device.fallbacks import collecting
from sie.workers.lora.lora_layers import LoraAdapters, LoraPair
from sie.workers.packed.batch import pack_sequences
from sie.workers.packed.formulas import UnknownPartsError
from sie.workers.runners import encode, probe
from sie.workers.runners.encode import Backbone, Execution
from sie.workers.runners.probe import MAX_DIFFERENCE, choose_execution, difference
from tests.unit.workers.encoder_models import MODELS, SMALL

_MOST_PASSES = 6


def _disturbed(model):
    """Add noise to all weights: a padding token that is attended to must be seen in the result."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval().requires_grad_(requires_grad=False)


def _deberta():
    torch.manual_seed(3)
    own = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 32, "type_vocab_size": 2}
    return _disturbed(transformers.DebertaV2Model(transformers.DebertaV2Config(**SMALL, **own, conv_kernel_size=3)))


def _t5():
    torch.manual_seed(3)
    own = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 200}
    return _disturbed(transformers.T5EncoderModel(transformers.T5Config(**own)))


FAMILIES = {"mpnet": MODELS["mpnet"], "deberta-v2": _deberta, "t5": _t5}


@pytest.fixture(params=sorted(FAMILIES))
def backbone(request):
    return Backbone(FAMILIES[request.param](), torch.device("cpu"))


@pytest.fixture
def gpu(monkeypatch):
    """Let a backbone take the CPU for a GPU, on which no model has a compiled form."""

    def compile_nothing(_model):
        raise UnknownPartsError("no kernels for its device")

    monkeypatch.setattr(encode, "move", lambda tensor, _device: tensor)
    monkeypatch.setattr(probe, "compile_encoder", compile_nothing)

    def change(backbone):
        backbone.device = torch.device("cuda", 0)
        return backbone

    return change


def _sequences(lengths):
    random = np.random.default_rng(1)
    return [random.integers(5, 200, length).astype(np.int32) for length in lengths]


def _count_passes(backbone):
    shapes = []
    backbone.model.register_forward_pre_hook(
        lambda _model, _args, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sixty_lengths_take_a_handful_of_passes_with_the_same_states(backbone, dtype):
    backbone.model.to(dtype)
    batch = pack_sequences(_sequences(range(4, 4 + 60 * 4, 4)))
    with torch.inference_mode():
        expected = backbone.run_rectangles(batch)
        shapes = _count_passes(backbone)
        found = backbone.run(batch, Execution(packed=False, pads=True))
    assert len(shapes) <= _MOST_PASSES
    assert sum(count * width for count, width in shapes) <= len(batch.input_ids) * 4 / 3
    assert difference(found, expected) < MAX_DIFFERENCE[dtype]
    if dtype == torch.float32:
        assert torch.allclose(found, expected, atol=1e-3)


def test_the_probe_of_a_gpu_proves_padding_and_chooses_it(backbone, gpu):
    with collecting("m") as fallbacks:
        execution = choose_execution("m", gpu(backbone))
    assert (execution.packed, execution.pads) == (False, True)
    assert execution.description == "in padded batches of similar length"
    assert [one.name for one in fallbacks.found] == ["unpacked"]


def test_on_a_cpu_no_step_is_padded(backbone):
    execution = choose_execution("m", backbone)
    assert (execution.packed, execution.pads) == (False, False)


@pytest.mark.parametrize("name", ["a result that differs", "an error"])
def test_a_model_that_reads_its_padding_runs_length_by_length(name, gpu, monkeypatch):
    model = MODELS["mpnet"]()
    forward = model.forward

    def run(input_ids, attention_mask=None, **named):
        if attention_mask is not None and name == "an error":
            raise ValueError("no mask is supported")
        return forward(input_ids=input_ids, **named)

    monkeypatch.setattr(model, "forward", run)
    backbone = gpu(Backbone(model, torch.device("cpu")))
    assert choose_execution("m", backbone) == Execution(packed=False)


def test_types_of_tokens_and_tokens_that_are_not_attended_to_stay_beside_padding():
    backbone = Backbone(_deberta(), torch.device("cpu"))
    sequences = _sequences((5, 9, 7, 9, 30))
    types = [(np.arange(len(ids)) % 2).astype(np.int32) for ids in sequences]
    batch = pack_sequences(sequences, types, attended=np.array([5, 4, 7, 9, 11], np.int32))
    with torch.inference_mode():
        expected = backbone.run_rectangles(batch)
        shapes = _count_passes(backbone)
        found = backbone.run_rectangles(batch, pads=True)
    assert shapes == [(5, 30)]
    seen = np.concatenate([np.arange(end - start) < some for start, end, some in
                           zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.attended, strict=False)])  # fmt: skip
    assert torch.allclose(found[seen], expected[seen], atol=1e-3)


def test_adapters_keep_to_the_rows_of_their_texts():
    backbone = Backbone(MODELS["mpnet"](), torch.device("cpu"))
    rows = backbone.lora_rows
    adapters = LoraAdapters(backbone.model, rows, lambda batch: backbone.run(batch, Execution(packed=False, pads=True)))
    random = torch.Generator().manual_seed(2)
    pair = LoraPair(torch.randn(2, 64, generator=random), torch.randn(64, 2, generator=random))
    adapters.install("a", {"encoder.layer.1.attention.attn.q": pair, "encoder.layer.2.attention.attn.v": pair})
    batch = pack_sequences(_sequences((5, 9, 7, 9, 30)))
    loras = ["a", "", "a", "", ""]
    with torch.inference_mode():
        plain = backbone.run_rectangles(batch, pads=True)
        with rows.step(loras, batch):
            expected = backbone.run_rectangles(batch)
        with rows.step(loras, batch):
            found = backbone.run_rectangles(batch, pads=True)
    assert difference(found, plain) > 0.05
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max"])
def test_pooling_ignores_padding(mode, make_checkpoint, serve):
    runner = serve(make_checkpoint("mpnet")).runner
    runner._backbone.compiled = None
    runner._head._modes = [mode]
    sequences = _sequences((5, 9, 7, 9, 30))
    alone = np.concatenate([runner.run_tokens([ids]) for ids in sequences])
    runner.execution = Execution(packed=False, pads=True)
    shapes = _count_passes(runner._backbone)
    assert np.allclose(runner.run_tokens(sequences), alone, atol=1e-4)
    assert shapes == [(5, 30)]


def test_a_step_whose_masks_wait_for_the_device_does_not_begin_ahead(make_checkpoint, serve):
    runner = serve(make_checkpoint("mpnet")).runner
    runner._backbone.device = torch.device("cuda", 0)
    assert runner.works_ahead
    runner.execution = Execution(packed=False, pads=True)
    assert not runner.works_ahead


def test_texts_of_one_length_need_no_mask(backbone):
    masks = []
    backbone.model.register_forward_pre_hook(
        lambda _model, _args, named: masks.append(named.get("attention_mask")), with_kwargs=True
    )
    with torch.inference_mode():
        backbone.run_rectangles(pack_sequences(_sequences((40, 40, 40))), pads=True)
    assert masks == [None]
