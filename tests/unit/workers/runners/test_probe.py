"""What a probe does with an error of the device, and with a model that does not run packed on a GPU."""

from __future__ import annotations

import pytest
import torch
import transformers

from sie.workers.device import faults
from sie.workers.device.fallbacks import collecting
from sie.workers.device.faults import DeviceLostError
from sie.workers.runners import probe
from sie.workers.runners.encode import Backbone
from sie.workers.runners.probe import choose_execution, choose_scoring
from sie.workers.runners.score import ScoreModel

CONFIG = {
    "vocab_size": 120, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 200,
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return Backbone(transformers.BertModel(transformers.BertConfig(**CONFIG)).eval(), CPU)


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that lets the device be lost, or go on computing, after an error."""

    def settle(*, computes):
        monkeypatch.setattr(faults, "_device", "cuda:0")
        monkeypatch.setattr(faults, "_can_compute", lambda _device: computes)

    return settle


def fail(*_arguments):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_a_packed_step_killed_is_not_used_for_another_try(backbone, gpu, monkeypatch):
    gpu(computes=False)
    monkeypatch.setattr(backbone, "run_packed", fail)
    with pytest.raises(DeviceLostError):
        choose_execution("m", backbone)


def test_a_device_that_computes_after_the_error_runs_the_model_unpacked(backbone, gpu, monkeypatch):
    gpu(computes=True)
    monkeypatch.setattr(backbone, "run_packed", fail)
    with collecting("m") as fallbacks:
        assert not choose_execution("m", backbone).packed
    assert fallbacks.found == (), "on a CPU that costs little"


def test_a_device_that_a_head_killed_is_lost(gpu, monkeypatch):
    gpu(computes=False)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**CONFIG, num_labels=1)).eval()
    scorer = ScoreModel(model, CPU, None)
    monkeypatch.setattr(scorer, "run_head", fail)
    with pytest.raises(DeviceLostError):
        choose_scoring("m", scorer)


def test_on_a_gpu_a_model_that_runs_unpacked_has_a_fallback(backbone):
    backbone.device = torch.device("cuda", 0)
    with collecting("m") as fallbacks:
        probe._note_unpacked("m", backbone, "packed results differ")
    assert [(one.name, one.reason) for one in fallbacks.found] == [("unpacked", "packed results differ")]
