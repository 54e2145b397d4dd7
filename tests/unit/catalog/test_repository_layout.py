from __future__ import annotations

import os
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format

from sie.catalog.repository_layout import find_models
from sie.catalog.spec import ModelSpec, TensorSource
from sie.catalog.tensor_rule import read_tensor_card
from sie.proto import message_class
from sie.values.errors import ModelLoadFailed
from tests import onnx_models


def versions(repository: Path) -> dict[str, tuple[str, ...]]:
    return {model.name: model.versions for model in find_models((str(repository),))}


def read(repository: Path, name: str = "m", version: str = "1"):
    source = TensorSource(repository=str(repository), name=name, version=version, default_max_batch_size=16)
    return read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source))


def with_versions(repository: Path, config: str) -> None:
    for version in ("1", "2", "10"):
        onnx_models.write(repository, "m", onnx_models.identity(), version, config)


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ("10",)),
        ("version_policy { latest { num_versions: 2 } }", ("2", "10")),
        ("version_policy { latest { } }", ("10",)),
        ("version_policy { all { } }", ("1", "2", "10")),
        ("version_policy { specific { versions: [2, 1] } }", ("1", "2")),
    ],
)
def test_the_policy_chooses_versions_by_number(tmp_path: Path, policy: str, served: tuple[str, ...]):
    with_versions(tmp_path, policy)
    assert versions(tmp_path) == {"m": served}


def test_a_version_that_the_policy_names_must_be_there(tmp_path: Path):
    with_versions(tmp_path, "version_policy { specific { versions: 3 } }")
    (found,) = find_models((str(tmp_path),))
    assert found.versions == ()
    assert "there is no version 3" in found.reason


def test_only_plain_names_and_decimal_versions_are_served(tmp_path: Path):
    for name in ("good-1.x_y", "with space", ".hidden", "é"):
        onnx_models.write(tmp_path, name, onnx_models.identity())
    for version in ("0", "01", "-1", "latest", "9223372036854775808"):
        onnx_models.write(tmp_path, "good-1.x_y", onnx_models.identity(), version)
    (tmp_path / "a file").write_text("")
    assert versions(tmp_path) == {"good-1.x_y": ("1",)}


def test_a_name_of_two_repositories_is_the_first_ones(tmp_path: Path):
    for folder, version in (("a", "1"), ("b", "2")):
        onnx_models.write(tmp_path / folder, "m", onnx_models.identity(), version)
    found = find_models((str(tmp_path / "a"), str(tmp_path / "b")))
    assert [(model.name, model.versions) for model in found] == [("m", ("1",))]


def test_one_model_is_found_without_the_others(tmp_path: Path):
    for name in ("m", "n"):
        onnx_models.write(tmp_path, name, onnx_models.identity())
    assert [model.name for model in find_models((str(tmp_path),), "n")] == ["n"]
    assert find_models((str(tmp_path),), "..") == []
    assert find_models((str(tmp_path),), "nope") == []


def test_the_stamp_changes_with_the_files(tmp_path: Path):
    model = onnx_models.write(tmp_path, "m", onnx_models.identity())
    (before,) = find_models((str(tmp_path),))
    assert find_models((str(tmp_path),)) == [before]
    (model / "config.pbtxt").write_text("max_batch_size: 4")
    assert find_models((str(tmp_path),))[0].stamps != before.stamps


@pytest.mark.parametrize("file", ["labels.txt", "warmup/x.bin", "1/weights/w.bin"])
def test_the_stamp_changes_with_every_file_that_a_version_uses(tmp_path: Path, file: str):
    config = """
        output { name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }
        model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 input_data_file: "x.bin" } } }
    """
    path = onnx_models.write(tmp_path, "m", onnx_models.identity(), config=config) / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"cold")
    (before,) = find_models((str(tmp_path),))
    path.write_bytes(b"cooler")
    assert find_models((str(tmp_path),))[0].stamps != before.stamps


@pytest.mark.parametrize("name", [r"a\000b", "../labels.txt", "a" * 300])
def test_a_file_that_cannot_be_named_so_is_the_fault_of_its_model_alone(tmp_path: Path, name: str):
    output = f'output {{ name: "y" data_type: TYPE_FP32 dims: 2 label_filename: "{name}" }}'
    onnx_models.write(tmp_path, "bad", onnx_models.identity(), config=output)
    onnx_models.write(tmp_path, "good", onnx_models.identity())
    bad, good = find_models((str(tmp_path),))
    assert bad.reason.startswith("Model 'bad' cannot be loaded: ")
    assert (good.reason, good.versions) == ("", ("1",))


def outside(tmp_path: Path) -> Path:
    """Return a directory beside the repository, with a whole model in it."""
    return onnx_models.write(tmp_path / "outside", "m", onnx_models.identity())


def test_a_model_may_not_be_a_link_out_of_the_repository(tmp_path: Path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "m").symlink_to(outside(tmp_path))
    (found,) = find_models((str(repository),))
    assert found.versions == ()
    assert "leads out of the model's directory" in found.reason


@pytest.mark.parametrize("part", ["1", "1/model.onnx", "config.pbtxt"])
def test_nothing_of_a_model_may_be_a_link_out_of_it(tmp_path: Path, part: str):
    target = outside(tmp_path)
    (target / "config.pbtxt").write_text("")
    model = onnx_models.write(tmp_path / "repository", "m", onnx_models.identity())
    path = model / part
    if path.is_dir():
        (path / "model.onnx").unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target / part)
    with pytest.raises(ModelLoadFailed, match="leads out of the model's directory"):
        read(tmp_path / "repository")


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("../../outside/secret.bin", "leads out"),
        ("/etc/hostname", "not a relative path"),
        ("link.bin", "leads out"),
        ("missing.bin", "not there"),
        ("", "not a relative path"),
    ],
)
def test_external_data_stays_beneath_the_model(tmp_path: Path, location: str, reason: str):
    model = onnx_models.write(tmp_path / "repository", "m", onnx_models.external(location))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.bin").write_bytes(bytes(8))
    (model / "1" / "link.bin").symlink_to(tmp_path / "outside" / "secret.bin")
    with pytest.raises(ModelLoadFailed, match=reason):
        read(tmp_path / "repository")


def test_external_data_of_the_model_counts_as_its_own(tmp_path: Path):
    model = onnx_models.write(tmp_path, "m", onnx_models.external("weights.bin"))
    (model / "1" / "weights.bin").write_bytes(bytes(4096))
    assert read(tmp_path).num_weights > 1024


def test_a_fifo_in_place_of_a_file_is_refused_at_once(tmp_path: Path):
    model = onnx_models.write(tmp_path, "m", onnx_models.identity())
    os.mkfifo(model / "config.pbtxt")
    (found,) = find_models((str(tmp_path),))
    assert "config.pbtxt is not a file" in found.reason


def test_the_file_that_the_configuration_names_is_read(tmp_path: Path):
    model = onnx_models.write(tmp_path, "m", onnx_models.identity(), config='default_model_filename: "other.onnx"')
    with pytest.raises(ModelLoadFailed, match=r"version 1 has no other\.onnx"):
        read(tmp_path)
    (model / "1" / "model.onnx").rename(model / "1" / "other.onnx")
    card = read(tmp_path)
    assert card.tensor is not None
    assert card.tensor.config["default_model_filename"] == "other.onnx"


@pytest.mark.parametrize("name", ["../1/model.onnx", "/etc/passwd", ".hidden"])
def test_the_file_is_one_of_the_version(tmp_path: Path, name: str):
    onnx_models.write(tmp_path, "m", onnx_models.identity(), config=f'default_model_filename: "{name}"')
    with pytest.raises(ModelLoadFailed, match="is not the name of a file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('name: "m"\n\nfoo: 1', r'config\.pbtxt, line 3: .*no field named "foo"'),
        ("max_batch_size: 4\ninput {", r"config\.pbtxt, line 2"),
        ("max_batch_size: x", r"config\.pbtxt, line 1"),
        ("max_batch_size: -1", "max_batch_size is -1"),
        ('name: "other"', "name is 'other', but its directory is 'm'"),
        ('platform: "tensorrt_plan"', "platform 'tensorrt_plan' is not one of"),
        ('backend: "python"', "backend 'python' is not one of"),
        ("sequence_batching { }", "sequence_batching is not supported"),
        ("ensemble_scheduling { }", "ensemble_scheduling is not supported"),
        ("model_transaction_policy { decoupled: true }", "decoupled is not supported"),
        ('model_operations { op_library_filename: "evil.so" }', "model_operations is not supported"),
        ('input { name: "x" reshape { shape: 1 } }', r"input\.reshape is not supported"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(tmp_path: Path, config: str, reason: str):
    onnx_models.write(tmp_path, "m", onnx_models.identity(), config=config)
    with pytest.raises(ModelLoadFailed, match=reason):
        read(tmp_path)


def test_hints_about_speed_are_read_and_not_followed(tmp_path: Path):
    config = """
        instance_group [ { count: 2 kind: KIND_CPU } ]
        optimization { graph { level: 1 } execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }
        dynamic_batching { preferred_batch_size: [4, 8] max_queue_delay_microseconds: 100 }
        parameters { key: "intra_op_thread_count" value { string_value: "1" } }
        model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } } }
        metric_tags { key: "team" value: "vision" }
    """
    onnx_models.write(tmp_path, "m", onnx_models.identity(), config=config)
    rule = read(tmp_path).tensor
    assert rule is not None
    assert rule.config["instance_group"][0]["kind"] == "KIND_CPU"
    assert rule.config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert rule.config["parameters"] == {"intra_op_thread_count": {"string_value": "1"}}


@pytest.mark.parametrize("source", ["zero_data: true", "random_data: true", 'input_data_file: "x.bin"'])
def test_a_configuration_shows_its_warm_ups_as_they_are_written(tmp_path: Path, source: str):
    """gRPC and the v1 status turn the JSON form into messages again, which no message with two of three sources can be."""
    written = f'model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: 2 {source} }} }} }}'
    model = onnx_models.write(tmp_path, "m", onnx_models.identity(), config=written)
    (model / "warmup").mkdir()
    (model / "warmup" / "x.bin").write_bytes(bytes(8))
    rule = read(tmp_path).tensor
    assert rule is not None
    config = message_class("model_config", "inference.ModelConfig")
    shown = json_format.ParseDict(rule.config, config())
    assert shown.model_warmup == text_format.Parse(written, config()).model_warmup
