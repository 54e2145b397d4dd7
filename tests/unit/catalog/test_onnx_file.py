from __future__ import annotations

import random
from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import helper

from sie.catalog import onnx_file
from sie.catalog.onnx_file import OnnxError, OnnxValue, read_onnx
from tests import onnx_models


def read(tmp_path: Path, content: bytes):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    return read_onnx(path)


@pytest.mark.parametrize("name", onnx_models.REAL)
def test_real_models_are_read_as_onnxruntime_reads_them(name: str):
    path = onnx_models.real_model(name)
    found, session = read_onnx(path), onnxruntime.InferenceSession(str(path))
    for ours, theirs in ((found.inputs, session.get_inputs()), (found.outputs, session.get_outputs())):
        # Without a name onnxruntime has None; its own shape inference may know a size that the file does not tell.
        named = [(one.name, [None if size == -1 else size for size in one.shape or ()]) for one in ours]
        assert named == [(one.name, one.shape) for one in theirs]


def test_initializers_among_the_inputs_are_not_inputs(tmp_path: Path):
    found = read(tmp_path, onnx_models.affine())
    assert found.inputs == (OnnxValue("x", "FP32", ("batch", 3)), OnnxValue("a", "FP32", ("batch", 2)))
    assert found.outputs == (OnnxValue("y", "FP32", ("batch", 2)),)
    assert found.locations == ()


@pytest.mark.parametrize("content", [onnx_models.external, onnx_models.hidden_external])
def test_external_files_are_found_wherever_a_tensor_may_be(tmp_path: Path, content):
    assert read(tmp_path, content("../up/weights.bin")).locations == ("../up/weights.bin",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (onnx_models.nested_functions(40), "over 100000 nodes"),
        (onnx_models.nested_functions(3, is_cycle=True), "nested over 100 deep"),
    ],
)
def test_functions_that_stand_for_nodes_without_end_are_refused(tmp_path: Path, content: bytes, reason: str):
    with pytest.raises(OnnxError, match=reason):
        read(tmp_path, content)


def test_own_nodes_beside_functions_are_not_the_functions_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onnx_file, "_MAX_FUNCTION_NODES", 20)
    content = onnx.ModelProto.FromString(onnx_models.nested_functions(3))
    content.graph.node.extend(helper.make_node("Identity", ["x"], [f"z{number}"]) for number in range(50))
    assert read(tmp_path, content.SerializeToString()).outputs == (OnnxValue("y", "FP32", ("n",)),)
    content.graph.node.add().CopyFrom(content.graph.node[0])
    with pytest.raises(OnnxError, match="over 20 nodes"):
        read(tmp_path, content.SerializeToString())


def test_functions_of_few_nodes_are_read(tmp_path: Path):
    assert read(tmp_path, onnx_models.nested_functions(3)).outputs == (OnnxValue("y", "FP32", ("n",)),)


def test_elements_that_no_protocol_has_are_refused(tmp_path: Path):
    complex64 = helper.make_tensor_value_info("x", 14, (1,))
    content = onnx_models.model([], [complex64], [complex64])
    with pytest.raises(OnnxError, match="'x' has elements of ONNX type 14"):
        read(tmp_path, content)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 64, b"\xff" * 64, b"PK\x03\x04" + b"\x00" * 60])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes):
    with pytest.raises(OnnxError):
        read(tmp_path, content)


def test_broken_files_are_read_or_refused_and_nothing_else(tmp_path: Path):
    whole = bytearray(onnx_models.hidden_external("w"))
    rng = random.Random(7)
    num_refused = 0
    for _ in range(400):
        content = bytearray(whole[: rng.randrange(1, len(whole) + 1)])
        for _ in range(rng.randrange(3)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        try:
            read(tmp_path, bytes(content))
        except OnnxError:
            num_refused += 1
    assert num_refused > 100
