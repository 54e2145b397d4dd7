"""Reading blocks in place: the kernel's arguments, on a CPU by a stand-in that does what its documentation says."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sie.workers.generation.graphs import DecodeGraphs, _Recorded
from sie.workers.generation.varlen import StepTables, can_attend
from tests.generation_models import Stream, load, random_prompt, step

PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((5, 29, 18))]


def attend_by_table(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **arguments):
    """Attend as torch.nn.attention.varlen.varlen_attn says that it does with a block table."""
    left, right = arguments["window_size"]
    assert right == 0
    assert arguments["enable_gqa"] == (query.shape[1] != key.shape[2])
    assert int(cu_seq_q.diff().max()) <= max_q
    assert int(arguments["seqused_k"].max()) <= max_k
    assert len(cu_seq_k) == len(cu_seq_q)
    out = torch.empty_like(query)
    bounds = cu_seq_q.tolist()
    for i, (first, last) in enumerate(pairwise(bounds)):
        num_seen = int(arguments["seqused_k"][i])
        table = arguments["block_table"][i].long()
        own_key, own_value = (pages[table].flatten(0, 1)[:num_seen].transpose(0, 1) for pages in (key, value))
        position = torch.arange(num_seen - (last - first), num_seen)[:, None]
        column = torch.arange(num_seen)
        seen = (column <= position) & (column >= position - left if left >= 0 else True)
        out[first:last] = scaled_dot_product_attention(
            query[first:last].transpose(0, 1)[None], own_key[None], own_value[None], attn_mask=seen,
            scale=arguments["scale"], enable_gqa=arguments["enable_gqa"],
        )[0].transpose(0, 1)  # fmt: skip
    return out


@pytest.fixture
def in_place(load_tiny, tmp_path, monkeypatch):
    """Return what loads a tiny model that reads its blocks in place, by the stand-in."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_table)

    def get(name):
        runner = load(load_tiny(name)[1])
        runner.reads_in_place = True
        return runner

    return get


def answers(runner):
    streams = [Stream(prompt, range(8 * i, 8 * i + 8)) for i, prompt in enumerate(PROMPTS)]
    for num_running in (1, 2, 3, 3, 3, 3, 3):
        step(runner, streams[:num_running], most=7)
    for _ in range(6):
        step(runner, streams)
    return [stream.answer for stream in streams]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss"])
def test_blocks_read_in_place_give_the_same_tokens(name, in_place, load_tiny):
    """Gemma 2 caps its scores and gpt-oss has sinks: theirs are gathered."""
    assert answers(in_place(name)) == answers(load_tiny(name)[0])


class EagerGraph:
    """Runs what a recorded graph would."""

    def __init__(self, runner, recorded):
        self.runner, self.recorded = runner, recorded

    def replay(self):
        recorded = self.recorded()
        self.runner._cache.step = recorded.tables
        wanted = torch.arange(recorded.token_ids.shape[1])
        recorded.logits.copy_(self.runner._run_model(recorded.token_ids, recorded.positions, wanted))
        self.runner._cache.step = None


def eager_graphs(runner, sizes, max_blocks):
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs._cache, graphs._max_blocks, graphs._recorded = runner._cache, max_blocks, {}
    for size in sizes:
        tables = StepTables(
            rows=torch.zeros(size, dtype=torch.int64),
            cu_queries=torch.arange(size + 1, dtype=torch.int32), cu_keys=torch.arange(size + 1, dtype=torch.int32),
            seen=torch.ones(size, dtype=torch.int32), blocks=torch.zeros(size, max_blocks, dtype=torch.int32),
            longest_query=1, longest_key=256,
        )  # fmt: skip
        ids = torch.zeros(1, size, dtype=torch.int64)
        graph = EagerGraph(runner, lambda size=size: graphs._recorded[size])
        graphs._recorded[size] = _Recorded(graph, ids, torch.zeros_like(ids), tables, torch.zeros(size, 101))
    return graphs


def test_a_recorded_step_gets_its_values_and_is_filled_up(in_place, load_tiny):
    runner = in_place("gemma3")
    expected = answers(load_tiny("gemma3")[0])
    runner._graphs = eager_graphs(runner, (1, 2, 4), 32)
    assert answers(runner) == expected


def test_steps_with_prompts_or_too_many_sequences_are_not_recorded(in_place):
    runner = in_place("llama")
    runner._graphs = eager_graphs(runner, (1, 2), 32)
    assert answers(runner) == answers(in_place("llama"))  # three decode together: none of the recorded sizes


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_the_kernel_is_for_half_precision_on_a_gpu(device, dtype):
    assert not can_attend(torch.device(device), dtype, {64})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
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
