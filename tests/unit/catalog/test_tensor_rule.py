from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from sie.catalog.spec import ModelSpec, TensorSource
from sie.catalog.tensor_rule import read_tensor_card
from sie.proto.compile import FOLDER, compiled
from sie.values.errors import ModelLoadFailed
from sie.values.tensor import QueuePolicy, TensorRule, TensorSpec
from tests import onnx_models

BOTH = """
    input { name: "x" data_type: TYPE_FP32 dims: 3 }
    input { name: "a" data_type: TYPE_FP32 dims: 2 }
"""


def rule_of(tmp_path: Path, content: bytes, config: str = "", files: dict[str, str] | None = None) -> TensorRule:
    model = onnx_models.write(tmp_path, "m", content, config=config)
    for name, text in (files or {}).items():
        (model / name).write_text(text)
    source = TensorSource(repository=str(tmp_path), name="m", version="1", default_max_batch_size=16)
    rule = read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source)).tensor
    assert rule is not None
    return rule


def test_without_a_configuration_the_file_tells_all(tmp_path: Path):
    rule = rule_of(tmp_path, onnx_models.affine())
    assert (rule.name, rule.version, rule.platform, rule.max_batch_size) == ("m", "1", "onnxruntime_onnx", 16)
    assert rule.inputs == (
        TensorSpec(name="x", datatype="FP32", shape=(-1, 3)), TensorSpec(name="a", datatype="FP32", shape=(-1, 2)),
    )  # fmt: skip
    assert rule.outputs == (TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),)


@pytest.mark.parametrize(
    ("config", "joins"),
    [
        ("", False),
        ("version_policy { all { } }", False),
        ("max_batch_size: 0", False),
        ("max_batch_size: 4", True),
        ("max_batch_size: 4 dynamic_batching { }", True),
        ("dynamic_batching { }", True),
        ("max_batch_size: 0 dynamic_batching { }", False),
    ],
)
def test_requests_are_joined_where_the_configuration_asks_for_it(tmp_path: Path, config: str, joins: bool):
    rule = rule_of(tmp_path, onnx_models.affine(), config)
    assert rule.joins_requests == joins
    if rule.max_batch_size:
        assert ("dynamic_batching" in rule.config) == joins


def test_what_a_configuration_leaves_out_is_completed(tmp_path: Path):
    config = rule_of(tmp_path, onnx_models.affine(), "version_policy { all { } } dynamic_batching { }").config
    assert (config["platform"], config["backend"]) == ("onnxruntime_onnx", "onnxruntime")
    assert config["max_batch_size"] == 16
    assert config["version_policy"] == {"all": {}}
    assert [(tensor["name"], tensor["data_type"], tensor["dims"]) for tensor in config["input"]] == [
        ("x", "TYPE_FP32", [3]), ("a", "TYPE_FP32", [2]),
    ]  # fmt: skip
    assert config["default_model_filename"] == "model.onnx"
    assert config["dynamic_batching"]["preserve_ordering"] is False
    assert config["instance_group"][0]["count"] == 1


def test_a_batch_needs_an_input(tmp_path: Path):
    content = onnx_models.constant()
    assert rule_of(tmp_path, content).inputs == ()
    with pytest.raises(ModelLoadFailed, match="max_batch_size is 4, but the model has no inputs"):
        rule_of(tmp_path, content, "max_batch_size: 4")


def test_a_label_is_a_line_whatever_characters_it_has(tmp_path: Path):
    labelled = 'output { name: "y" data_type: TYPE_FP32 dims: [-1, 2] label_filename: "labels.txt" }'
    text = "a\x0cb\nc\N{LINE SEPARATOR}d\r\n\ne\n"
    (output,) = rule_of(tmp_path, onnx_models.identity(), labelled, {"labels.txt": text}).outputs
    assert output.labels == ("a\x0cb", "c\N{LINE SEPARATOR}d", "", "e")


@pytest.mark.parametrize(
    ("inputs", "outputs", "batch"),
    [
        ([("batch", 2)], [("batch", 2)], 16),
        ([(None, 2)], [(None,)], 16),
        ([("n", 2)], [("m", 2)], 16),
        ([("n", 2), ("m", 2)], [("n", 2)], 0),
        ([("n", 2), (2, "n")], [("n", 2)], 0),
        ([("n", 2), ()], [("n", 2)], 0),
        ([("n", 2)], [(1, 2)], 0),
        ([(1, 2)], [(1, 2)], 0),
        ([("sequence_length", 2)], [("sequence_length", 2)], 0),
        ([("n", 2)], [("num_tokens", 2)], 0),
    ],
)
def test_a_batch_dimension_is_one_that_all_tensors_begin_with(tmp_path: Path, inputs, outputs, batch: int):
    content = onnx_models.model(
        [],
        [onnx_models.value(f"x{i}", "FP32", shape) for i, shape in enumerate(inputs)],
        [onnx_models.value(f"y{i}", "FP32", shape) for i, shape in enumerate(outputs)],
    )
    assert rule_of(tmp_path, content).max_batch_size == batch


@pytest.mark.parametrize("config", ["max_batch_size: 0", 'input { name: "x" data_type: TYPE_FP32 dims: [-1, 2] }'])
def test_a_configuration_may_say_that_there_is_no_batch(tmp_path: Path, config: str):
    rule = rule_of(tmp_path, onnx_models.identity(), config)
    assert rule.max_batch_size == 0
    assert rule.inputs[0].shape == (-1, 2)
    assert rule.config["input"][0]["dims"] == [-1, 2]


def test_a_configuration_may_be_narrower_than_the_model(tmp_path: Path):
    config = """
        max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [3, 8, 9] }
        output { name: "y" data_type: TYPE_FP32 dims: [-1, -1, 9] label_filename: "labels.txt" }
    """
    files = {"labels.txt": "cat\ndog\n"}
    rule = rule_of(tmp_path, onnx_models.identity(shape=("n", 3, "h", "w")), config, files)
    assert rule.max_batch_size == 4
    assert rule.inputs == (TensorSpec(name="x", datatype="FP32", shape=(-1, 3, 8, 9), format="NCHW"),)
    assert rule.outputs == (TensorSpec(name="y", datatype="FP32", shape=(-1, 3, -1, 9), labels=("cat", "dog")),)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BOTH.replace("dims: 3", "dims: 4"), r"input 'x' has the shape \[-1, 4\], but in the model \[-1, 3\]"),
        (BOTH.replace("dims: 3", "dims: [1, 3]"), r"input 'x' has the shape \[-1, 1, 3\], but in the model \[-1, 3\]"),
        (BOTH.replace("FP32 dims: 3", "INT64 dims: 3"), "input 'x' is TYPE_INT64, but in the model TYPE_FP32"),
        (BOTH.replace('"x"', '"z"'), "the model has no input 'z'; it has x, a"),
        (BOTH.replace('"a"', '"x"').replace("dims: 2", "dims: 3"), "input 'x' appears twice"),
        ('input { name: "x" data_type: TYPE_FP32 dims: 3 }', "the model also needs input 'a'"),
        ('output { name: "z" data_type: TYPE_FP32 dims: 2 }', "the model has no output 'z'; it has y"),
        (BOTH.replace("dims: 3", "dims: -2"), "a shape has at most 32 sizes, each -1 or more"),
        ('output { name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "no.txt" }', "no file no.txt of labels"),
    ],
)
def test_a_configuration_that_contradicts_the_model_is_refused(tmp_path: Path, config: str, reason: str):
    with pytest.raises(ModelLoadFailed, match=reason):
        rule_of(tmp_path, onnx_models.affine(), f"max_batch_size: 8 {config}")


def test_a_batch_size_for_a_model_of_one_size_is_refused(tmp_path: Path):
    with pytest.raises(
        ModelLoadFailed, match=r"has the shape \[1, 2\], which does not begin with a variable dimension"
    ):
        rule_of(tmp_path, onnx_models.identity(shape=(1, 2)), "max_batch_size: 8")


QUEUES = """dynamic_batching {
    priority_levels: 3 default_priority_level: 2
    default_queue_policy { default_timeout_microseconds: 50 allow_timeout_override: true }
    priority_queue_policy { key: 3 value { timeout_action: DELAY max_queue_size: 4 } }
}"""


def test_a_configuration_has_priorities_and_queue_policies(tmp_path: Path):
    rule = rule_of(tmp_path, onnx_models.affine(), QUEUES)
    assert (rule.num_priorities, rule.default_priority) == (3, 2)
    assert rule.queue_policies == {
        0: QueuePolicy(timeout_us=50, may_shorten=True), 3: QueuePolicy(delays=True, max_requests=4),
    }  # fmt: skip
    assert rule.config["dynamic_batching"]["priority_levels"] == 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (QUEUES.replace("level: 2", "level: 0"), "default_priority_level is 0, and priority_levels 3"),
        (QUEUES.replace("level: 2", "level: 4"), "default_priority_level is 4, and priority_levels 3"),
        (QUEUES.replace("key: 3", "key: 4"), "priority_queue_policy has level 4 of 3"),
        (QUEUES.replace("key: 3", "key: 0"), "priority_queue_policy has level 0 of 3"),
        (QUEUES.replace("{\n", "{ preserve_ordering: true\n", 1), "preserve_ordering allows one of priority_levels"),
    ],
)
def test_a_queue_that_contradicts_itself_is_refused(tmp_path: Path, config: str, reason: str):
    with pytest.raises(ModelLoadFailed, match=reason):
        rule_of(tmp_path, onnx_models.affine(), config)


def test_a_configuration_may_say_the_order_of_colours(tmp_path: Path):
    assert rule_of(tmp_path, onnx_models.identity()).image_colors == "BGR"
    colors = 'parameters { key: "image_colors" value { string_value: "RGB" } }'
    assert rule_of(tmp_path, onnx_models.identity(), colors).image_colors == "RGB"
    with pytest.raises(ModelLoadFailed, match="'image_colors' is 'HSV', which is neither BGR nor RGB"):
        rule_of(tmp_path, onnx_models.identity(), colors.replace("RGB", "HSV"))


def test_every_datatype_has_its_name(tmp_path: Path):
    for datatype in ("BOOL", "UINT8", "INT64", "FP16", "BF16", "FP64", "BYTES"):
        rule = rule_of(tmp_path, onnx_models.identity(datatype))
        assert rule.inputs[0].datatype == datatype
        assert rule.config["input"][0]["data_type"] == f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}"


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
@pytest.mark.parametrize("name", ["model_config", "kserve", "trtis", "health", "reflection"])
def test_the_compiled_messages_are_those_of_the_proto_files(name: str):
    assert compiled(name) == FOLDER.joinpath(f"{name}.json").read_text()
