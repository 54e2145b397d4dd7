"""Small steps of encoders as CUDA graphs: with stand-ins that run a graph's work when it is replayed."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from sie.workers.device import memory
from sie.workers.device.capture import Capturer, CaptureRefusedError
from sie.workers.device.fallbacks import collecting
from sie.workers.packed import attention
from sie.workers.packed.attention import Boundaries
from sie.workers.packed.batch import Run, pack_sequences
from sie.workers.runners import graph_probe
from sie.workers.runners.encode import Backbone, Execution
from sie.workers.runners.encoder_graphs import SIZES, EncoderGraphs, StepInputs
from sie.workers.runners.graph_probe import capture, capture_small_steps
from sie.workers.runners.probe import MAX_DIFFERENCE, difference
from tests.gpu.device import DEVICE, is_there
from tests.unit.workers.device.fake_cuda import FakeCuda

CPU, META = torch.device("cpu"), torch.device("meta")
SMALL = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 1040, "pad_token_id": 0,
}  # fmt: skip
DECODER = {"num_key_value_heads": 2, "head_dim": 16}
FAMILIES = {
    "bert": (transformers.BertConfig, {}, 0),
    "xlm-roberta": (transformers.XLMRobertaConfig, {"type_vocab_size": 1, "pad_token_id": 1}, 2),
    "modernbert": (
        transformers.ModernBertConfig,
        {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 16},
        0,
    ),
    "qwen3": (transformers.Qwen3Config, DECODER, 0),
    "mistral": (transformers.MistralConfig, {**DECODER, "sliding_window": 11}, 0),
}
LENGTHS = (5, 23, 5, 1)


def build(name, device=CPU, **changes):
    """Return a tiny model that runs packed, and how it does."""
    config, values, offset = FAMILIES[name]
    torch.manual_seed(1)
    own = config(**{**SMALL, **values, **changes})
    own.use_cache = False  # as the loader does
    with device:
        model = transformers.AutoModel.from_config(own).eval().requires_grad_(False)
    attention.register()
    model.set_attn_implementation(attention.NAME)
    return Backbone(model, device), Execution(packed=True, position_offset=offset)


def batch_of(lengths=LENGTHS, token_types=None):
    return pack_sequences([np.arange(3, 3 + length, dtype=np.int32) % 100 + 3 for length in lengths], token_types)


class Replays:
    """In place of a capturer: a graph runs its work anew."""

    num_replays = 0

    def __init__(self, _device):
        pass

    def capture(self, run):
        hidden = run().clone()

        def replay():
            Replays.num_replays += 1
            hidden.copy_(run())

        return SimpleNamespace(replay=replay), hidden


@pytest.fixture
def replays(monkeypatch):
    """Let graphs run on a CPU, whose attention finds the lengths in what a GPU's would read."""
    attend_runs = attention._attend_runs

    def attend_by_bounds(query, key, value, boundaries, rule):
        runs, start = [], 0
        for length, same in groupby(length for length in boundaries.cu_seqlens.diff().tolist() if length):
            count = len(list(same))
            runs.append(Run(start, count, length))
            start += count * length
        return attend_runs(query, key, value, Boundaries(boundaries.cu_seqlens, runs, boundaries.max_length), rule)

    monkeypatch.setattr(attention, "_attend_runs", attend_by_bounds)
    monkeypatch.setattr(attention, "can_attend_compiled", lambda *_: False)
    monkeypatch.setattr("sie.workers.runners.encoder_graphs.Capturer", Replays)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))
    monkeypatch.setattr(Replays, "num_replays", 0)


def first_is_faster():
    """Return a measure by which every captured step is faster than the library's, which is measured behind it."""
    seconds = iter(range(1 << 20))
    return lambda _run: next(seconds)


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_captured_step_gives_the_same_hidden_states(name):
    backbone, execution = build(name)
    with torch.inference_mode():
        backbone.graphs = capture(backbone, execution, first_is_faster())
        assert backbone.graphs is not None
        assert backbone.graphs.sizes == [*reversed(SIZES)]
        num_before = Replays.num_replays
        batches = [batch_of(), batch_of((16,)), batch_of((1,) * 32), batch_of((300, 40, 1)), batch_of()]
        if name == "bert":
            batches.append(batch_of((5, 7), [np.array([0, 0, 1, 1, 1]), np.ones(7, int)]))
        answers = [(backbone.run(batch, execution), batch) for batch in batches]
        for hidden, batch in answers:  # none was overwritten by a later step
            assert difference(hidden, backbone.run_packed(batch, execution.position_offset)[0]) < 1e-4
    assert Replays.num_replays - num_before == len(batches)


@pytest.mark.usefixtures("replays")
def test_steps_that_fit_no_graph_run_without():
    backbone, execution = build("xlm-roberta")
    with torch.inference_mode():
        graphs = capture(backbone, execution, first_is_faster())
        assert graphs is not None
        assert graphs.run(batch_of((1025,))) is None
        assert graphs.run(batch_of((2,) * 33)) is None
        assert graphs.run(batch_of()._replace(attended=np.array([1, 2, 3, 4], np.int32))) is None
        assert graphs.run(batch_of((2, 3), [np.zeros(2, int), np.zeros(3, int)])) is None, "this family has no types"
        graphs.keep({16, 64})
        assert graphs.run(batch_of((20,))) is None, "only the next larger graph was compared with the library"
        assert graphs.run(batch_of((33,))) is not None


@pytest.mark.usefixtures("replays")
def test_graphs_that_make_nothing_faster_are_dropped():
    backbone, execution = build("bert", max_position_embeddings=30)
    with torch.inference_mode():
        assert capture(backbone, execution, lambda _run: 1.0) is None
        graphs = capture(backbone, execution, first_is_faster())
    assert graphs is not None
    assert graphs.sizes[0] == 1024, "769 tokens are 28 sequences of at most 30 tokens"
    with torch.inference_mode():
        backbone, execution = build("bert", max_position_embeddings=20)
        graphs = capture(backbone, execution, first_is_faster())
    assert graphs is not None
    assert graphs.sizes[0] == 768, "and 39 of at most 20"


def test_a_step_of_each_family_waits_for_nothing_and_is_captured(monkeypatch):
    monkeypatch.setattr(memory, "_allocator", memory._Allocator())
    monkeypatch.setattr(Capturer, "forbidden", "")
    monkeypatch.setattr(attention, "_attend_runs", lambda query, *_: query.transpose(0, 1))
    monkeypatch.setattr("sie.workers.runners.encoder_graphs.SIZES", (16,))
    cuda = FakeCuda(monkeypatch)
    for name in FAMILIES:
        backbone, _ = build(name, META)
        with torch.inference_mode():
            EncoderGraphs(backbone.run_row, META, position_offset=0, has_types=backbone.has_types)
    assert cuda.num_captured == len(FAMILIES)


def on_gpu(backbone, execution, monkeypatch):
    """Return the fallbacks of a model that is said to be on a GPU."""
    monkeypatch.setattr(backbone, "device", SimpleNamespace(type="cuda"))
    with collecting("m") as fallbacks:
        capture_small_steps(backbone, execution)
    return [(fallback.name, fallback.reason) for fallback in fallbacks.found]


def test_a_model_whose_attention_needs_the_lengths_says_so(monkeypatch):
    """Such as any in float32, which no kernel of the device attends to."""
    monkeypatch.setattr("sie.workers.runners.encoder_graphs.Capturer", Replays)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(attention, "can_attend_compiled", lambda *_: False)
    backbone, execution = build("bert")
    monkeypatch.setattr(graph_probe, "EncoderGraphs", lambda run, _device, **kinds: EncoderGraphs(run, CPU, **kinds))
    ((name, reason),) = on_gpu(backbone, execution, monkeypatch)
    assert name == "no_graphs"
    assert "the device alone knows the lengths" in reason
    assert backbone.graphs is None


def test_a_model_whose_rotary_factors_depend_on_lengths_says_so(monkeypatch):
    backbone, execution = build("qwen3", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert [name for name, _ in on_gpu(backbone, execution, monkeypatch)] == ["no_graphs"]


@pytest.mark.usefixtures("replays")
def test_a_captured_step_that_gives_other_values_is_refused(monkeypatch):
    backbone, execution = build("bert")
    fill = StepInputs.fill
    monkeypatch.setattr(StepInputs, "fill", lambda inputs, batch, _offset: fill(inputs, batch, 9))
    with torch.inference_mode(), pytest.raises(CaptureRefusedError, match="differ by"):
        capture(backbone, execution, lambda _run: 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not is_there(), reason="needs a device")
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_on_a_device_small_steps_are_captured_and_give_the_same(name):
    backbone, execution = build(name, torch.device(DEVICE))
    backbone.model.to(torch.bfloat16)
    with collecting("m") as fallbacks:
        capture_small_steps(backbone, execution)
    assert fallbacks.found == ()
    graphs = backbone.graphs
    assert (graphs is None) is (DEVICE == "cpu")
    with torch.inference_mode():
        for lengths in () if graphs is None else ((1,), LENGTHS, (16,), (1,) * 32, (100, 3), (500, 12)):
            batch = batch_of(lengths)
            found, expected = graphs.run(batch), backbone.run_packed(batch, 0)[0]
            assert found is None or difference(found, expected) < MAX_DIFFERENCE[torch.bfloat16]
    assert graphs is None or 16 in graphs.sizes
