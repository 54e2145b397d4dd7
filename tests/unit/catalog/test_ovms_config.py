"""OpenVINO Model Server's config.json as a model repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.repository_layout import find_models
from sie.catalog.spec import repository_specs
from sie.catalog.tensor_rule import read_tensor_card
from sie.values.errors import ModelLoadFailed
from tests import onnx_models


def write(folder: Path, *models: dict[str, Any], **others: Any) -> tuple[str, ...]:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_config_list": [{"config": model} for model in models], **others}))
    return (str(path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for version in ("1", "2", "3"):
        onnx_models.write(tmp_path / "elsewhere", "files", onnx_models.identity(), version)
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        (None, ("3",)), ({"latest": {}}, ("3",)), ({"latest": {"num_versions": 2}}, ("2", "3")), ({"all": {}}, ("1", "2", "3")),
        ({"specific": {"versions": [3, 1]}}, ("1", "3")),
    ],
)  # fmt: skip
def test_a_model_is_served_under_its_name_from_its_directory(folder: Path, policy: Any, served: tuple[str, ...]):
    entry = {"name": "m", "base_path": "elsewhere/files", "target_device": "CPU", "nireq": 2, "batch_size": "auto"}
    (found,) = find_models(write(folder, entry | ({"model_version_policy": policy} if policy else {})))
    assert (found.name, found.versions, found.reason) == ("m", served, "")
    specs = repository_specs(found, 16)
    assert specs[0].id == f"m/versions/{served[0]}"
    card = read_tensor_card(specs[-1])
    assert card.tensor is not None
    assert (card.tensor.name, card.tensor.max_batch_size) == ("m", 16)
    assert Path(card.directory) == folder / "elsewhere" / "files" / served[-1]


@pytest.mark.parametrize(
    "shape", ["auto", {"INPUT0": "auto"}, {"INPUT0": "auto", "INPUT1": "auto"}, {}], ids=["all", "one", "each", "none"]
)
def test_shapes_that_the_models_file_decides_are_taken(folder: Path, shape: Any):
    (found,) = find_models(write(folder, {"name": "m", "base_path": "elsewhere/files", "shape": shape}))
    assert (found.versions, found.reason) == (("3",), "")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"base_path": "elsewhere/files", "shape": {"x": "auto", "y": "(1,2)"}}, "config.json: shape is not supported"),
        ({"base_path": "elsewhere/files", "shape": "(1,2)"}, "config.json: shape is not supported"),
        ({"base_path": "elsewhere/files", "batch_size": 4}, "config.json: batch_size is not supported"),
        ({"base_path": "elsewhere/files", "layout": "NHWC"}, "config.json: layout is not supported"),
        ({"base_path": "elsewhere/files", "stateful": True}, "config.json: stateful is not supported"),
        ({}, "base_path is missing"),
        ({"base_path": "s3://bucket/m"}, "base_path must be a directory of this host"),
        ({"base_path": "nowhere"}, "nowhere is not a directory"),
        ({"base_path": "elsewhere"}, "it has no version to serve"),
        (
            {"base_path": "elsewhere/files", "model_version_policy": {"specific": {"versions": [9]}}},
            "there is no version 9",
        ),
    ],
)
def test_an_entry_that_cannot_be_followed_is_refused_alone(folder: Path, entry: dict[str, Any], reason: str):
    good = {"name": "good", "base_path": str(folder / "elsewhere" / "files")}
    bad, other = find_models(write(folder, {"name": "bad"} | entry, good, mediapipe_config_list=[]))
    assert (bad.name, bad.versions) == ("bad", ())
    assert reason in bad.reason
    assert (other.name, other.versions) == ("good", ("3",))


def test_pipelines_are_refused_by_name_and_the_first_of_a_name_is_served(folder: Path):
    entry = {"name": "m", "base_path": "elsewhere/files"}
    repositories = write(
        folder, entry, {"name": "m", "base_path": "nowhere"}, pipeline_config_list=[{"name": "p", "nodes": []}]
    )
    model, pipeline = find_models((*repositories, str(folder / "elsewhere")))[:2]
    assert (model.versions, pipeline.name) == (("3",), "p")
    assert "pipeline_config_list is not supported" in pipeline.reason
    assert [found.name for found in find_models(repositories, "p")] == ["p"]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_config_list": [{}]}', '{"model_config_list": [{"config": {"name": 3}}]}']
)
def test_a_file_that_cannot_be_read_names_itself(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelLoadFailed, match=r"model_repository .*config\.json: "):
        find_models((str(folder / "config.json"),))


def test_the_file_of_a_version_may_have_any_name(folder: Path):
    version = folder / "elsewhere" / "files" / "3"
    (version / "model.onnx").rename(version / "my resnet.onnx")
    (version / "weights.bin").write_bytes(b"x")
    (found,) = find_models(write(folder, {"name": "m", "base_path": "elsewhere/files"}))
    (spec,) = repository_specs(found, 16)
    card = read_tensor_card(spec)
    assert card.tensor is not None
    assert card.tensor.config["default_model_filename"] == "my resnet.onnx"


@pytest.mark.parametrize(
    ("names", "reason"),
    [(("b.onnx", "a.onnx"), "version 3 has several models: a.onnx, b.onnx"), ((), "version 3 has no model.onnx and no model.pt2")],
)  # fmt: skip
def test_a_version_without_one_model_file_is_refused(folder: Path, names: tuple[str, ...], reason: str):
    version = folder / "elsewhere" / "files" / "3"
    (version / "model.onnx").unlink()
    for name in names:
        (version / name).write_bytes(onnx_models.identity())
    (found,) = find_models(write(folder, {"name": "m", "base_path": "elsewhere/files"}))
    (spec,) = repository_specs(found, 16)
    with pytest.raises(ModelLoadFailed, match=reason):
        read_tensor_card(spec)


def test_in_a_repositorys_own_layout_the_file_keeps_its_fixed_name(folder: Path):
    version = folder / "elsewhere" / "files" / "3"
    (version / "model.onnx").rename(version / "other.onnx")
    (found,) = find_models((str(folder / "elsewhere"),))
    (spec,) = repository_specs(found, 16)
    with pytest.raises(ModelLoadFailed, match=r"version 3 has no model\.onnx and no model\.pt2"):
        read_tensor_card(spec)
