from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sie.frontend.tensors.checks import check_request
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest
from sie.values.tensor import DATATYPES, Tensor, TensorRequest, TensorRule, TensorSpec

RULE = TensorRule(
    name="m", version="1", platform="onnxruntime_onnx", max_batch_size=8,
    inputs=(TensorSpec(name="X", datatype="FP32", shape=(-1, 4)), TensorSpec(name="S", datatype="BYTES", shape=(-1, 1))),
    outputs=(TensorSpec(name="Y", datatype="FP32", shape=(-1, 4)),),
)  # fmt: skip
PLAIN = TensorRule(
    name="m", version="1", platform="onnxruntime_onnx", inputs=(TensorSpec(name="X", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="Y", datatype="FP32", shape=(-1, 4)),),
)  # fmt: skip
STUB = TensorRule(
    name="s", version="1", platform="stub", inputs=(TensorSpec(name="INPUT0", datatype="FP32", shape=(-1,)),),
    outputs=(TensorSpec(name="OUTPUT0", datatype="FP32", shape=(-1,)),),
)  # fmt: skip


def x(shape=(2, 4), datatype="FP32", nbytes=None, name="X") -> Tensor:
    size = {"FP32": 4, "INT32": 4}.get(datatype, 1)
    total = size
    for dimension in shape:
        total *= dimension
    return Tensor(name, datatype, tuple(shape), memoryview(bytes(total if nbytes is None else nbytes)))


def s(*elements: bytes, shape=(2, 1), data: bytes | None = None) -> Tensor:
    return Tensor("S", "BYTES", shape, memoryview(frame_elements(elements) if data is None else data))


def check(*inputs: Tensor, outputs=(), rule=RULE, max_strings=100) -> None:
    check_request(rule, TensorRequest(model="m/versions/1", inputs=list(inputs), outputs=outputs), max_strings)


def test_what_fits_is_accepted():
    check(x(), s(b"a", b""))
    check(s(b"a", b"\xff" * 300), x(), outputs=("Y", "Y"))
    check(x((8, 4)), s(*[b""] * 8, shape=(8, 1)))
    check(x((0, 4)), rule=PLAIN)
    check(x((30, 4)), rule=PLAIN)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([x(), s(b"", b""), x(name="Z")], "unexpected inference input 'Z' for model 'm'"),
        ([x(), x(), s(b"", b"")], "input 'X' already exists in request"),
        (
            [s(b"", b"")],
            (
                "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['S'], but missing required input(s) ['X']. "
                "Please provide all required input(s)."
            ),
        ),
        ([x(datatype="INT32"), s(b"", b"")], "inference input 'X' data-type is 'INT32', but model 'm' expects 'FP32'"),
        ([x(datatype="FP31"), s(b"", b"")], "invalid datatype for input X: 'FP31'"),
        ([x((2, 5)), s(b"", b"")], "unexpected shape for input 'X' for model 'm'. Expected [-1,4], got [2,5]"),
        ([x((2, 2, 2)), s(b"", b"")], "unexpected shape for input 'X' for model 'm'. Expected [-1,4], got [2,2,2]"),
        ([x(()), s(b"", b"")], "unexpected shape for input 'X' for model 'm'. Expected [-1,4], got []"),
        ([x((1, 4)), s(b"", b"")], "input 'S' batch size does not match other inputs for 'm'"),
        ([x((9, 4)), s(*[b""] * 9, shape=(9, 1))], "inference request batch-size must be <= 8 for 'm'"),
        ([x((0, 4)), s(shape=(0, 1))], "inference request batch-size must be >= 1 for 'm'"),
        ([x(nbytes=33), s(b"", b"")], "input byte size mismatch for input 'X' for model 'm'. Expected 32, got 33"),
        ([x(nbytes=0), s(b"", b"")], "input byte size mismatch for input 'X' for model 'm'. Expected 32, got 0"),
        ([x(), s(b"a")], "expected 2 string elements for inference input 'S' for model 'm', got 1"),
        ([x(), s(b"a", b"b", b"c")], "expected 2 string elements for inference input 'S' for model 'm', got 3"),
        (
            [x(), s(data=struct.pack("<I", 1000) + b"abcd")],
            "incomplete string data for inference input 'S', expecting string of length 1000 but only 4 bytes available",
        ),
        (
            [x(), s(data=b"\0\0\0\0\1\0")],
            "incomplete string length indicator for inference input 'S', expecting 4 bytes but only 2 bytes available",
        ),
    ],
)
def test_what_does_not_fit_is_told(inputs: list[Tensor], message: str):
    with pytest.raises(BadRequest) as error:
        check(*inputs)
    assert error.value.message == message


@pytest.mark.parametrize(
    "shape", [(-1, 4), (2**62, 4), (2**63, 0), (2**40, 16), (0, 2**62, 2**62, 2**62), (1,) * 33, (2**200,)]
)
def test_false_shapes_are_refused_before_any_work(shape: tuple[int, ...]):
    for rule in (PLAIN, STUB):
        tensor = Tensor("X" if rule is PLAIN else "INPUT0", "FP32", shape, memoryview(bytes(64)))
        with pytest.raises(BadRequest):
            check(tensor, rule=rule)


def test_strings_are_counted_no_further_than_they_may_be():
    many = s(data=bytes(4 * 1000), shape=(1000, 1))
    with pytest.raises(BadRequest, match="1000 string elements, over max_tensor_strings"):
        check(Tensor("INPUT0", "BYTES", (1000,), many.data), rule=STUB, max_strings=999)
    two = [Tensor(f"INPUT{i}", "BYTES", (600,), memoryview(bytes(4 * 600))) for i in range(2)]
    with pytest.raises(BadRequest, match="over max_tensor_strings"):
        check(*two, rule=STUB, max_strings=1000)
    check(*two, rule=STUB, max_strings=1200)
    with pytest.raises(BadRequest, match=f"expected {2**40} string elements"):
        check(Tensor("INPUT0", "BYTES", (2**40,), many.data), rule=STUB, max_strings=999)


def test_an_output_is_one_of_the_models():
    with pytest.raises(BadRequest, match="unexpected inference output 'Z' for model 'm'"):
        check(x(), rule=PLAIN, outputs=("Y", "Z"))


def test_a_stub_takes_any_datatype_and_shape_of_its_inputs():
    for datatype in DATATYPES:
        if datatype != "BYTES":
            data = memoryview(bytes(int(DATATYPES[datatype][2:]) * 6))
            check(Tensor("INPUT7", datatype, (1, 2, 3), data), rule=STUB, outputs=("OUTPUT7",))
    for name in ("INPUT", "INPUTx", "X", "INPUT00000"):
        with pytest.raises(BadRequest, match="unexpected inference input"):
            check(x((2, 2), name=name), rule=STUB)
    with pytest.raises(BadRequest, match="unexpected inference output 'OUTPUT1'"):
        check(x((2, 2), name="INPUT0"), rule=STUB, outputs=("OUTPUT1",))
    with pytest.raises(BadRequest, match="expected 1 inputs but got 0"):
        check(rule=STUB)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.builds(
            Tensor,
            st.sampled_from(["X", "S", "Z", ""]),
            st.sampled_from(["FP32", "BYTES", "FP16", "", "fp32"]),
            st.lists(st.integers(-2, 5) | st.integers(-(2**70), 2**70), max_size=4).map(tuple),
            st.binary(max_size=64).map(memoryview),
        ),
        max_size=3,
    ),
    st.lists(st.sampled_from(["Y", "Z"]), max_size=2).map(tuple),
)
def test_whatever_comes_is_accepted_or_a_bad_request(inputs: list[Tensor], outputs: tuple[str, ...]):
    for rule in (RULE, PLAIN):
        try:
            check(*inputs, outputs=outputs, rule=rule)
        except BadRequest:
            continue
        assert all(tensor.datatype == "BYTES" or len(tensor.data) % 16 == 0 for tensor in inputs)
