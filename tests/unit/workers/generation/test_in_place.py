"""Reading blocks in place: the arguments of a GPU's kernels, on a CPU with stand-ins that follow their documentation."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sie.workers.generation
from sie.values.generate import Sampling
from sie.workers.device.fallbacks import collecting
from sie.workers.generation import graphs, paging
from sie.workers.generation.graphs import Answers, DecodeGraphs, StepInputs, _Captured
from sie.workers.generation.runner import TextGenerator
from sie.workers.generation.sampling import likeliest
from sie.workers.generation.varlen import DecodeStep, can_attend
from sie.workers.model_api import Draw, Scored, Slot
from sie.workers.packed import flash
from tests import paged_reference, varlen_stand_ins
from tests.generation_models import Stream, load, random_prompt, step
from tests.gpu.device import DEVICE, is_there
from tests.triton_interpreter import IS_INTERPRETED, interpreted, needs_triton, run_interpreted
from tests.unit.workers.generation_rig import EngineRig

KERNELS = "sie.workers.generation.kernels"
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((5, 29, 18))]


def use_kernels(monkeypatch, kernels):
    monkeypatch.setitem(sys.modules, KERNELS, kernels)
    monkeypatch.setattr(sie.workers.generation, "kernels", kernels, raising=False)


@pytest.fixture
def in_place(load_tiny, monkeypatch):
    """Return what loads a tiny model that reads its blocks in place, by stand-ins for the kernels and torch 2.11's."""
    use_kernels(monkeypatch, paged_reference)
    use_varlen(monkeypatch, varlen_stand_ins.of_2_11)
    monkeypatch.setattr(
        "sie.workers.generation.varlen.can_attend_flash", lambda _device, _dtype, widths: widths[0] == widths[1]
    )

    def get(name):
        runner = load(load_tiny(name)[1])
        runner.reads_in_place = True
        return runner

    yield get
    flash._asks_about_groups.cache_clear()


def use_varlen(monkeypatch, stand_in):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    flash._asks_about_groups.cache_clear()


def answers(runner, num_decoded=6):
    streams = [Stream(prompt, range(8 * i, 8 * i + 8)) for i, prompt in enumerate(PROMPTS)]
    for num_running in (1, 2, 3, 3, 3, 3, 3):
        step(runner, streams[:num_running], most=7)
    for _ in range(num_decoded):
        step(runner, streams)
    return [stream.answer for stream in streams]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_blocks_read_in_place_give_the_same_tokens(name, in_place, load_tiny):
    """The prompts of Gemma 2 (capped scores), gpt-oss (sinks) and DeepSeek (two widths) are gathered."""
    assert answers(in_place(name)) == answers(load_tiny(name)[0])


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("llama", ""), ("gemma3", ""), ("gemma2", "capped"), ("gpt_oss", "sinks"), ("deepseek_v3", "16 and 12 wide")],
)
def test_a_model_whose_prompts_are_gathered_says_so(name, reason, load_tiny, monkeypatch):
    monkeypatch.setattr("sie.workers.generation.runner.can_attend", lambda *_: True)
    monkeypatch.setattr("sie.workers.generation.runner.try_capture", lambda *_: None)
    with collecting("m") as fallbacks:
        load(load_tiny(name)[1])
    assert [fallback.name for fallback in fallbacks.found] == (["gathered_prompts"] if reason else [])
    assert all(reason in fallback.reason for fallback in fallbacks.found)


def test_the_flash_attention_of_torch_2_13_is_told_of_grouped_queries(in_place, load_tiny, monkeypatch):
    use_varlen(monkeypatch, varlen_stand_ins.of_2_13)
    assert answers(in_place("llama")) == answers(load_tiny("llama")[0])


@needs_triton
def test_on_a_cpu_the_kernels_themselves_are_tried():
    run_interpreted(__file__)


@interpreted
def test_the_kernels_themselves_give_the_same_tokens(load_tiny, monkeypatch, in_place):
    monkeypatch.delitem(sys.modules, KERNELS)
    use_kernels(monkeypatch, importlib.import_module(KERNELS))
    assert answers(in_place("mistral"), num_decoded=1) == answers(load_tiny("mistral")[0], num_decoded=1)


def test_rows_that_no_token_has_written_are_never_read(in_place, load_tiny):
    runner = in_place("gemma2")
    expected = answers(load_tiny("gemma2")[0])
    for layer in runner.cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    assert answers(runner) == expected


class EagerGraph:
    """Runs what a recorded graph would, and counts the runs."""

    def __init__(self, runner, recorded):
        self.runner, self.recorded = runner, recorded
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        _, inputs, found = self.recorded()
        token_ids, positions, rows, lengths = inputs.numbers
        self.runner.cache.step = DecodeStep(rows, paged_reference.Tables(positions, inputs.blocks))
        found.logits.copy_(self.runner._run_model(token_ids[None], positions[None], inputs.kept, lengths))
        found.best.copy_(likeliest(found.logits))
        self.runner.cache.step = None


def eager_graphs(runner, sizes, max_blocks, max_kept=4):
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs._cache, graphs._captured = runner.cache, {}
    graphs._copied = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    for size in sizes:
        graph = EagerGraph(runner, lambda size=size: graphs._captured[size])
        num_kept = min(size, max_kept)
        found = Answers(torch.zeros(num_kept, 101), torch.zeros(num_kept, dtype=torch.int64))
        inputs = StepInputs(size, num_kept, max_blocks, torch.device("cpu"))
        graphs._captured[size] = _Captured(graph, inputs, found)
    return graphs


def num_replays(runner):
    return sum(captured.graph.num_replays for captured in runner._graphs._captured.values())


@pytest.mark.parametrize("name", ["gemma3", "phi3-longrope", "llama-longrope"])
def test_a_recorded_step_gets_its_values_and_is_filled_up(name, in_place, load_tiny):
    runner = in_place(name)
    expected = answers(load_tiny(name)[0])
    runner._graphs = eager_graphs(runner, (1, 2, 4), 32)
    assert answers(runner) == expected


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "phi3-longrope"])
def test_a_small_step_with_prompts_beside_sequences_that_decode_is_recorded_whole(
    name, in_place, load_tiny, monkeypatch
):
    runner = in_place(name)
    expected = answers(load_tiny(name)[0])
    runner._graphs = eager_graphs(runner, (1, 2, 4, 8, 16, 32), 32)
    monkeypatch.setattr(runner, "_forward", None)
    assert answers(runner, num_decoded=6) == expected
    assert num_replays(runner) == 7 + 6, "one for each step, of which the first seven have prompts"


def chunks(start, length, scored=None):
    """Return a sequence that decodes beside a chunk of a prompt, whose draw comes after its log probabilities."""
    ids = random_prompt(start + length, 3)
    draws = (Draw(Sampling(temperature=0.0), 0, 0),)
    decoding = Slot(ids[:1], 0, (30,), draws)
    return [decoding, Slot(ids[start:], start, range(2, 30), draws, scored), decoding._replace(blocks=(31,))]


def test_a_recorded_step_scores_the_tokens_of_a_prompt(in_place):
    runner = in_place("llama")
    found = []
    for captured in (None, eager_graphs(runner, (16,), 32, max_kept=8)):
        runner._graphs = captured
        kinds = ((5,), np.float32), ((5, 2), np.int32), ((5, 2), np.float32)
        scored = Scored(3, random_prompt(5, 1), *(np.zeros(*kind) for kind in kinds))
        tokens = runner.run_step(chunks(0, 9, scored))
        found.append((tokens, scored))
    assert num_replays(runner) == 1
    assert found[0][0] == found[1][0]
    eager, recorded = (scored for _, scored in found)
    assert recorded.own == pytest.approx(eager.own, abs=1e-4)
    assert recorded.top_ids.tolist() == eager.top_ids.tolist()


@pytest.mark.parametrize(
    ("slots", "is_recorded"),
    [(chunks(0, 14), True), (chunks(0, 15), False), (chunks(200, 4), True), (chunks(200, 5), False)],
    ids=["as large as the largest", "larger", "few rows read", "many rows read"],
)
def test_a_step_is_recorded_if_its_tokens_and_the_rows_that_they_read_are_few(
    slots, is_recorded, in_place, monkeypatch
):
    monkeypatch.setattr(graphs, "_MOST_SEEN", 201 + 202 + 203 + 204)
    runner = in_place("llama")
    expected = runner.run_logits(slots)
    runner._graphs = eager_graphs(runner, (8, 16), 32)
    assert torch.allclose(runner.run_logits(slots), expected, atol=1e-4)
    assert num_replays(runner) == is_recorded


SAMPLED = Sampling(temperature=1.5, seed=5)
TASKS = [
    {"max_tokens": 9, "ignore_eos": True}, {"max_tokens": 30}, {"num_choices": 2, "max_tokens": 7, "sampling": SAMPLED},
    {"max_tokens": 12, "sampling": Sampling(top_k=8, top_p=0.8), "logprobs": 2}, {"max_tokens": 1},
    {"max_tokens": 14, "ignore_eos": True, "sampling": Sampling(temperature=1.0, min_p=0.05, logit_bias=((9, 3.0),))},
]  # fmt: skip


def engine_answers(runner, monkeypatch, *, generates_ahead):
    """Return what an engine answers to prompts that arrive while it runs, and the numbers of slots of each launch."""
    launched = []

    def launch_step(slots, copies):
        launched.append([slot.drawn for slot in slots])
        return TextGenerator.launch_step(runner, slots, copies)

    with monkeypatch.context() as patch:
        patch.setattr(TextGenerator, "generates_ahead", generates_ahead)
        patch.setattr(runner, "launch_step", launch_step)
        # As a device's: the copy is made when it is begun, and the next step may overwrite its source.
        patch.setattr("sie.workers.generation.sampling.read_later", lambda tensor: tensor.clone().clone)
        rig = EngineRig(runner=runner, max_prefill_tokens=16)
        found = []
        for number, task in enumerate(TASKS):
            found.append(rig.submit(random_prompt(5 + 4 * number, number), **task))
            rig.step(2)
        rig.run()
        rig.assert_all_given_back()
    return found, launched


@pytest.mark.parametrize("sizes", [(1, 2, 4), (1, 2, 4, 8, 16, 32)], ids=["decode steps", "and prompts"])
@pytest.mark.parametrize("name", ["gemma3", "phi3-longrope"])
def test_steps_that_begin_ahead_take_their_tokens_from_the_device(name, sizes, in_place, monkeypatch):
    runner = in_place(name)
    expected, none = engine_answers(runner, monkeypatch, generates_ahead=False)
    assert none == []
    runner._graphs = eager_graphs(runner, sizes, 32)
    found, launched = engine_answers(runner, monkeypatch, generates_ahead=True)
    for answer, own in zip(found, expected, strict=True):
        assert (answer.tokens, answer.finish) == (own.tokens, own.finish)
        logprobs = [[one.logprob for choice in each.logprobs for one in choice] for each in (answer, own)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)
    fed = [[place is not None for place in places] for places in launched]
    assert any(all(places) and len(places) == 3 for places in fed), "a recorded step, padded"
    assert any(any(places) and not all(places) for places in fed), "tokens that are known beside others"


def test_a_token_of_a_recorded_step_has_the_rotary_factors_of_its_own_sequence(in_place):
    """One of a short sequence, one amid a long prompt, and one that decodes behind such a prompt."""
    runner = in_place("phi3-longrope")
    prompts = [Stream(random_prompt(length, length), range(8 * i, 8 * i + 8)) for i, length in enumerate((20, 20, 40))]
    lengths = [runner.least_length(length) for length in (20, 50, 40)]
    assert lengths == [0, 33, 33]

    def slots(most):
        parts = zip(prompts, lengths, strict=True)
        return [stream.next_slot(most)._replace(rotary_length=length) for stream, length in parts]

    runner.run_logits(slots(None))
    for stream in prompts:
        stream.num_read = len(stream.tokens)
        stream.tokens.append(5)
    expected = runner.run_logits(slots(1))
    runner._graphs = eager_graphs(runner, (1, 2, 4), 32)
    assert torch.allclose(runner.run_logits(slots(1)), expected, atol=1e-4)
    lengths[1] = 0
    assert not torch.allclose(runner.run_logits(slots(1))[1], expected[1], atol=1e-2)


def test_steps_of_a_model_whose_every_length_has_its_own_rotary_factors_cannot_be_recorded(in_place):
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="cannot be recorded"):
        in_place("llama-dynamic")._run_model(ids, ids, ids[0], torch.ones(2, dtype=torch.int64))


def test_a_recorded_step_answers_only_the_slots_that_draw(in_place):
    runner = in_place("llama")
    streams = [Stream([*PROMPTS[0], 7], range(4)), Stream(PROMPTS[1], range(8, 12))]
    step(runner, streams[:1], most=5)
    slots = [stream.next_slot(most=1) for stream in streams]
    expected = runner.run_logits(slots)
    runner._graphs = eager_graphs(runner, (1, 2), 32)
    assert len(expected) == 1
    assert torch.allclose(runner.run_logits(slots), expected, atol=1e-4)


def test_steps_of_too_many_tokens_or_answers_are_not_recorded(in_place):
    runner = in_place("llama")
    runner._graphs = eager_graphs(runner, (1, 2, 4), 32, max_kept=2)
    assert answers(runner) == answers(in_place("llama"))  # prompts of up to 7 tokens, and then three draws


class WrongGraphs:
    sizes = ()

    def run(self, slots, _drawn):
        return Answers(torch.zeros(len(slots), 101))


@pytest.mark.usefixtures("in_place")
def test_a_recording_that_gives_other_logits_is_not_used(load_tiny, monkeypatch):
    monkeypatch.setattr("sie.workers.generation.runner.can_attend", lambda *_: True)
    monkeypatch.setattr("sie.workers.generation.runner.try_capture", lambda *_: WrongGraphs())
    runner = load(load_tiny("llama")[1])
    assert runner.reads_in_place
    assert answers(runner) == answers(load_tiny("llama")[0])


@pytest.mark.parametrize("wrong", [None, 1, 4, 8])
def test_captured_steps_of_every_size_are_compared_with_eager_ones(wrong, in_place, load_tiny):
    """Sizes that the comparison with whole sequences never reaches, since that runs two at once."""
    runner = in_place("llama")
    runner._graphs = eager_graphs(runner, (8, 4, 2, 1), 32)
    if wrong is not None:
        captured = runner._graphs._captured[wrong]
        runner._graphs._captured[wrong] = captured._replace(graph=SimpleNamespace(replay=lambda: None))
    whole, sequence = load_tiny("llama")[0], random_prompt(17, 0)
    expected = torch.stack([whole.run_logits([slot_of(sequence[:end])])[0] for end in range(1, 18)])
    with collecting("m") as fallbacks:
        paging._check_graphs(runner, sequence, expected, 4)
    assert [fallback.name for fallback in fallbacks.found] == ([] if wrong is None else ["no_graphs"])
    assert runner.captured_sizes == ([8, 4, 2, 1] if wrong is None else [])
    assert not any(bool(layer.keys[: runner.num_blocks].any()) for layer in runner.cache.layers)


def slot_of(tokens):
    return Slot(tokens, 0, range(8), (Draw(Sampling(temperature=0.0), 0, 0),))


@pytest.mark.usefixtures("in_place")
def test_blocks_are_gathered_where_the_kernels_do_not_run(load_tiny, monkeypatch):
    monkeypatch.setattr("sie.workers.generation.runner.can_attend", lambda *_: True)
    use_kernels(monkeypatch, SimpleNamespace(Tables=paged_reference.Tables))
    runner = load(load_tiny("llama")[1])
    assert not runner.reads_in_place
    assert answers(runner) == answers(load_tiny("llama")[0])


@pytest.mark.parametrize(
    ("device", "dtype", "width"),
    [("cpu", torch.bfloat16, 64), ("cuda", torch.float32, 64), ("cuda", torch.bfloat16, 512)],
)
def test_the_kernels_are_for_half_precision_on_a_gpu(device, dtype, width):
    assert not can_attend(torch.device(device), dtype, {64, width})


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "phi3-longrope"])
def test_on_a_gpu_recorded_steps_and_the_kernel_give_what_gathering_does(name, load_tiny):
    directory = load_tiny(name)[1]
    kernel = load(directory, device="cuda", dtype="bfloat16", max_sequences=4)
    assert kernel.reads_in_place
    assert kernel._graphs is not None
    gathered = load(directory, device="cuda", dtype="bfloat16", max_sequences=4)
    gathered.reads_in_place, gathered._graphs = False, None
    prompts = [Stream(prompt, [i]) for i, prompt in enumerate(PROMPTS)]
    slots = [stream.next_slot() for stream in prompts]
    far = (kernel.run_logits(slots) - gathered.run_logits(slots)).abs().max()
    assert float(far) < 0.1
    for stream in prompts:
        stream.num_read = len(stream.tokens)
        stream.tokens.append(5)
    slots = [stream.next_slot() for stream in prompts]
    far = (kernel.run_logits(slots) - gathered.run_logits(slots)).abs().max()
    assert float(far) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED or not is_there(), reason="needs a device")
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope"])
def test_on_a_device_steps_that_begin_ahead_give_the_same_tokens(name, load_tiny):
    """The same steps, each launched behind one that is not read: padded recorded ones, and one with a prompt amid them."""
    dtype = "float32" if DEVICE == "cpu" else "bfloat16"
    runner = load(load_tiny(name)[1], device=DEVICE, dtype=dtype, max_sequences=4)
    assert runner.generates_ahead == (DEVICE != "cpu")
    runner.decoder = None
    draws = [(Draw(Sampling(**kind), 0, 0),) for kind in ({"temperature": 0.0}, {"seed": 4}, {"top_k": 5, "seed": 8})]

    def decode(is_behind):
        streams = [Stream(prompt, range(8 * i, 8 * i + 8)) for i, prompt in enumerate(PROMPTS)]
        reads, found = [], []
        for number in range(9):
            own = range(2 if number < 4 else 3)
            slots = [streams[i].next_slot()._replace(draws=draws[i]) for i in own]
            if is_behind and number:
                slots = [slot if number == 4 and i == 2 else slot._replace(drawn=i) for i, slot in enumerate(slots)]
            reads.append(runner.launch_step(slots))
            if not is_behind or number:
                found.append(reads[-1 - is_behind]())
            for i, slot in zip(own, slots, strict=True):
                streams[i].num_read += len(slot.token_ids)
                streams[i].tokens.append(0 if is_behind else found[-1][i][0].token_id)
        return found + [reads[-1]()] * is_behind

    assert decode(is_behind=True) == decode(is_behind=False)
