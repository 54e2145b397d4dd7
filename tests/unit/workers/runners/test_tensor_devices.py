"""Where models of tensors run in a worker with a GPU; a load that ends on the CPU says so."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

from sie.catalog.spec import ModelSpec, TensorSource
from sie.catalog.tensor_rule import read_tensor_card
from sie.values.errors import BadRequest, ModelLoadFailed
from sie.values.work import TensorForm, TensorTask
from sie.workers.device.fallbacks import collecting
from sie.workers.model_api import TensorInputs
from sie.workers.runners import exported
from sie.workers.runners.exported import load_exported
from sie.workers.runners.onnx import load_onnx
from tests import onnx_models

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def read_card(repository):
    source = TensorSource(repository=str(repository), name="m", version="1", default_max_batch_size=16)
    return read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source))


def run(runner, values):
    data = np.array(values, np.float32)
    (output,) = runner.run_tensors(
        [TensorInputs(TensorTask((TensorForm("x", "FP32", data.shape),), (), 0), (data.reshape(-1).view(np.uint8),))]
    ).outputs[0]
    return output.data.view(np.float32).reshape(output.form.shape).tolist()


@pytest.fixture
def onnx_card(tmp_path):
    onnx_models.write(tmp_path, "m", onnx_models.identity())
    return read_card(tmp_path)


@pytest.fixture
def gpu_build(monkeypatch):
    """Return what makes onnxruntime a build for GPUs whose sessions have these providers; it returns what was asked."""
    asked = []
    session_class = onnxruntime.InferenceSession

    def make(providers):
        class Session(session_class):
            def __init__(self, path, options, providers):
                asked.append(providers)
                super().__init__(path, options, providers=[CPU])

            def get_providers(self):
                return providers

        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: asked.append("preloaded"))
        monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
        return asked

    return make


def test_on_a_cpu_worker_there_is_no_gpu_to_miss(onnx_card):
    with collecting("m") as fallbacks:
        assert run(load_onnx(onnx_card, "cpu", 1, lambda *_: None), [[1.0, 2.0]]) == [[1.0, 2.0]]
    assert fallbacks.found == ()


def test_a_build_of_onnxruntime_for_cpus_is_named_and_serves(onnx_card, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with collecting("m") as fallbacks:
        assert run(load_onnx(onnx_card, "cuda:1", 1, lambda *_: None), [[1.0, 2.0]]) == [[1.0, 2.0]]
    (fallback,) = fallbacks.found
    assert fallback.name == "cpu"
    assert fallback.reason.endswith("is a build for CPUs: replace it by onnxruntime-gpu")


def test_a_gpu_build_gets_its_libraries_and_the_worker_s_device(onnx_card, gpu_build):
    asked = gpu_build([CUDA, CPU])
    with collecting("m") as fallbacks:
        load_onnx(onnx_card, "cuda:1", 1, lambda *_: None)
    assert asked == ["preloaded", [(CUDA, {"device_id": 1}), CPU]]
    assert fallbacks.found == ()


def test_a_provider_that_does_not_start_is_named_with_the_library_that_is_missing(onnx_card, gpu_build):
    gpu_build([CPU])
    with collecting("m") as fallbacks:
        assert run(load_onnx(onnx_card, "cuda", 1, lambda *_: None), [[1.0, 2.0]]) == [[1.0, 2.0]]
    (fallback,) = fallbacks.found
    assert fallback.name == "cpu"
    assert "does not start its CUDA provider" in fallback.reason
    assert "libonnxruntime_providers_cuda.so: cannot open shared object file" in fallback.reason


class Shifted(torch.nn.Module):
    """Has a weight, a constant, and a tensor that the program creates on a device."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(2))
            self.layer.bias.fill_(1.0)
        self.constant = torch.tensor([1.0, 2.0])

    def forward(self, x):
        return {"y": self.layer(x) + self.constant + torch.zeros(2, device=x.device)}


@pytest.fixture
def program_card(tmp_path):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(Shifted(), (torch.ones(1, 2),)), folder / "model.pt2")
    return read_card(tmp_path)


def test_a_program_moves_to_the_device_with_all_that_it_holds_and_creates(program_card, monkeypatch):
    monkeypatch.setattr(exported, "resolve_device", lambda _name: torch.device("meta"))
    with collecting("m") as fallbacks:
        runner = load_exported(program_card, "cuda:0", lambda *_: None)
    assert fallbacks.found == ()
    outputs = runner._run([torch.ones(1, 2, device="meta")])
    assert [output.device.type for output in outputs] == ["meta"]


def test_a_program_that_cannot_be_moved_runs_on_the_cpu_and_says_why(program_card, monkeypatch):
    def refuse(_program, _device):
        raise KeyError("device")

    monkeypatch.setattr(exported, "resolve_device", lambda _name: torch.device("meta"))
    monkeypatch.setattr(exported, "move_to_device_pass", refuse)
    with collecting("m") as fallbacks:
        runner = load_exported(program_card, "cuda:0", lambda *_: None)
    assert run(runner, [[3.0, 4.0]]) == [[5.0, 7.0]]
    (fallback,) = fallbacks.found
    assert (fallback.name, fallback.reason) == ("cpu", "torch cannot move the program to the GPU: KeyError: 'device'")


def test_a_program_that_stays_behind_in_part_runs_on_the_cpu(program_card, monkeypatch):
    monkeypatch.setattr(exported, "resolve_device", lambda _name: torch.device("meta"))
    monkeypatch.setattr(exported, "move_to_device_pass", lambda program, _device: program)
    with collecting("m") as fallbacks:
        runner = load_exported(program_card, "cuda:0", lambda *_: None)
    assert run(runner, [[3.0, 4.0]]) == [[5.0, 7.0]]
    assert [fallback.reason for fallback in fallbacks.found] == ["tensors of the program stay on cpu"]


class Repeated(torch.nn.Module):
    def forward(self, times, x, mask=None):
        return {"y": x * times if mask is None else x * mask}


def test_a_program_runs_with_the_arguments_that_it_was_saved_with(tmp_path):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(Repeated(), (3, torch.ones(1, 2), None)), folder / "model.pt2")
    runner = load_exported(read_card(tmp_path), "cpu", lambda *_: None)
    assert run(runner, [[3.0, 4.0]]) == [[9.0, 12.0]]


class Counting(torch.nn.Module):
    """Adds to a buffer in place, perhaps through a view, or only to copies of it."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.register_buffer("sums", torch.zeros(2, 2))

    def forward(self, x):
        if self.way == "copy":
            return {"y": x + self.sums.double().add_(1)[0].float().add_(1)}
        part = {"whole": self.sums, "view": self.sums[0].view(-1), "split": self.sums.chunk(2)[1]}[self.way]
        part.add_(1)
        return {"y": x + self.sums[-1]}


@pytest.mark.parametrize("way", ["whole", "view", "split"])
def test_a_program_that_keeps_state_between_requests_is_refused(tmp_path, way):
    card = counting(tmp_path, way)
    with pytest.raises(ModelLoadFailed, match=r"it changes its own state \(sums\)"):
        load_exported(card, "cpu", lambda *_: None)


def test_a_program_may_write_to_what_it_made_of_its_weights(tmp_path):
    runner = load_exported(counting(tmp_path, "copy"), "cpu", lambda *_: None)
    assert [run(runner, [[3.0, 4.0]]) for _ in range(2)] == [[[5.0, 6.0]]] * 2


def counting(tmp_path, way):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(Counting(way), (torch.ones(1, 2),)), folder / "model.pt2")
    return read_card(tmp_path)


class Enlarged(torch.nn.Module):
    def forward(self, x):
        return {"y": torch.nn.functional.interpolate(x[None], scale_factor=2.0)[0]}


def test_a_size_that_the_program_cannot_compute_with_is_the_clients_fault(tmp_path):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    sizes = {"x": {1: torch.export.Dim("n")}}
    program = torch.export.export(Enlarged(), (torch.ones(1, 2),), dynamic_shapes=sizes)
    torch.export.save(program, folder / "model.pt2")
    runner = load_exported(read_card(tmp_path), "cpu", lambda *_: None)
    with pytest.raises(BadRequest, match="sizes should be greater than 0"):
        run(runner, np.zeros((1, 0)))
