"""How much memory keys and values get, with stand-ins for a GPU's memory."""

from __future__ import annotations

import pytest
import torch

from sie.config.generation_settings import Generation
from sie.ipc.messages import CacheRoom, MemoryReport
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.generate import GenerateRule
from sie.workers.generation.cache_size import count_blocks, largest_step, plan_cache_bytes
from tests.unit.workers.device.fake_cuda import FakeCuda

GIB = 1 << 30
MIB = 1 << 20
GPU = torch.device("cuda", 0)
CARD = ModelCard(id="m", kind="generator", generate=GenerateRule(context_length=1 << 17))


@pytest.mark.parametrize("total_gib", [8, 24, 80])
@pytest.mark.parametrize("used_gib", [0, 2, 5, 7])
@pytest.mark.parametrize("step_gib", [0, 0.25, 2])
@pytest.mark.parametrize("pct", [50.0, 80.0, 95.0, 100.0])
def test_no_cache_lets_a_step_bring_the_device_over_its_limit(total_gib, used_gib, step_gib, pct):
    total, step = total_gib * GIB, int(step_gib * GIB)
    available = total - used_gib * GIB
    own = plan_cache_bytes(MemoryReport(total, available), step, 0.85, CacheRoom(pct))
    assert 0 <= own <= 0.85 * max(0, available - step)
    assert own == 0 or available - own - step >= total * (1 - pct / 100)


class Memory:
    """The memory of a GPU of 24 GiB, in which a step's tensors come and go."""

    def __init__(self, monkeypatch, used=0, cached=0):
        self.cuda = FakeCuda(monkeypatch)
        self.allocated, self.cached, self.peak = used, cached, used
        total = 24 * GIB
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset_peak)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: self.allocated + self.cached)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: self.peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (total - self.allocated - self.cached, total))

    def reset_peak(self, _device):
        self.peak = self.allocated

    def run(self, nbytes):
        self.peak = max(self.peak, self.allocated + nbytes)


def test_blocks_leave_room_for_the_largest_step_and_count_cached_memory_as_free(monkeypatch):
    memory = Memory(monkeypatch, used=8 * GIB, cached=4 * GIB)
    asked = []

    def run_step(num_blocks, slots):
        asked.append((num_blocks, len(slots), sum(len(slot.token_ids) for slot in slots)))
        memory.run((num_blocks + 1) * 4 * MIB + 2 * GIB)  # its own blocks, and 2 GiB besides

    found = count_blocks(CARD, MIB // 8, GPU, Generation(), room=CacheRoom(95.0), run_step=run_step)
    assert asked == [(129, 64, 4096 + 63)]
    assert found * 4 * MIB == pytest.approx(0.85 * (16 - 2) * GIB, abs=4 * MIB)


def test_a_cache_leaves_models_that_load_later_their_part_and_has_room_for_a_sequence_before(monkeypatch):
    def blocks(room):
        memory = Memory(monkeypatch, used=8 * GIB)
        return count_blocks(
            CARD, MIB // 8, GPU, Generation(), room=room, run_step=lambda *_: memory.run(130 * 4 * MIB + 2 * GIB)
        )

    assert blocks(CacheRoom(95.0, 4 * GIB, 0.5)) * 4 * MIB == pytest.approx(
        (10 - 0.05 * 24 - 24 / 64) / 2 * GIB, abs=4 * MIB
    )
    assert blocks(CacheRoom(95.0, 14 * GIB, 0.5)) * 4 * MIB == 8192 * MIB // 8


def test_a_cache_of_a_given_size_needs_no_trial(monkeypatch):
    Memory(monkeypatch)
    settings = Generation(kv_cache_bytes=GIB)
    found = count_blocks(CARD, MIB // 8, GPU, settings, room=CacheRoom(95.0), run_step=lambda *_: pytest.fail("run"))
    assert found == 256


def test_a_step_without_memory_refuses_the_model_and_names_what_to_lower(monkeypatch):
    Memory(monkeypatch, used=20 * GIB)

    def run_step(_num_blocks, _slots):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(ModelLoadFailed, match=r"step of 4159 tokens .* lower max_prefill_tokens") as caught:
        count_blocks(CARD, MIB // 8, GPU, Generation(), room=CacheRoom(95.0), run_step=run_step)
    assert caught.value.extras == {"error_class": "OOM"}


def test_a_device_without_room_for_blocks_is_named(monkeypatch):
    memory = Memory(monkeypatch, used=22 * GIB)
    with pytest.raises(ModelLoadFailed, match="beside its weights and a step, cuda:0 has room for 0 blocks"):
        count_blocks(CARD, MIB // 8, GPU, Generation(), room=CacheRoom(95.0), run_step=lambda *_: memory.run(GIB))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_the_largest_step_runs(name, load_tiny):
    runner, _ = load_tiny(name)
    settings = Generation(kv_block_tokens=8, max_sequences=5)
    num_blocks, slots = largest_step(runner.card, settings)
    assert num_blocks == 256 // 8 + 1 <= runner.num_blocks
    answers = runner.run_step(slots)
    assert [len(chosen) for chosen in answers] == [1] * 5
    runner.cache.clear(range(num_blocks))
