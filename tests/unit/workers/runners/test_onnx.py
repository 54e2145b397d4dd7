"""How ONNX models of one worker use its memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from sie.catalog.spec import ModelSpec, TensorSource
from sie.catalog.tensor_rule import read_tensor_card
from sie.values.work import TensorForm, TensorTask
from sie.workers.model_api import TensorInputs
from sie.workers.runners.onnx import OnnxRunner, RunLimit, load_onnx
from tests import onnx_models

SHAPE = (4000, 2000)
INPUT_BYTES = 4 * 4000 * 2000
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def no_watching_threads() -> Iterator[None]:
    """Wait until the threads of this file's runners have seen that these are gone: others replace the clock."""
    yield
    for thread in threading.enumerate():
        if thread.name == "onnx-limit":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def load(repository: Path, name: str) -> OnnxRunner:
    """Load a model whose run needs two tensors as large as its input."""
    nodes = [
        helper.make_node("Sin", ["x"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"]),
        helper.make_node("ReduceSum", ["b"], ["y"], keepdims=0),
    ]
    inputs, outputs = [onnx_models.value("x", "FP32", ("n", "m"))], [onnx_models.value("y", "FP32", ())]
    onnx_models.write(repository, name, onnx_models.model(nodes, inputs, outputs))
    source = TensorSource(repository=str(repository), name=name, version="1")
    card = read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source))
    return load_onnx(card, "cpu", 1, lambda *_: None, RunLimit(8.0))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_models_share_the_memory_that_their_largest_runs_need(tmp_path: Path):
    runners = [load(tmp_path, f"m{number}") for number in range(4)]
    data = np.zeros(INPUT_BYTES, np.uint8)
    request = TensorInputs(TensorTask((TensorForm("x", "FP32", SHAPE),), (), 0), (data,))
    held: list[int] = []
    for runner in runners:
        runner.run_tensors([request])
        held.append(resident_bytes())
    assert held[-1] - held[0] < 2 * INPUT_BYTES
