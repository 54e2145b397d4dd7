"""What a host takes of the configuration that its cluster shares."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sie.catalog.spec import ModelSpec, parse_model_spec
from sie.config.cluster_settings import Cluster
from sie.config.settings import Settings
from sie.supervisor.configured_models import Models
from sie.supervisor.shared_configs import add_configs
from sie.values.shared_config import AdapterSettings, ModelConfig, ProfileConfig

OWN: Models = [(parse_model_spec("m=stub:dense=8"), True, None)]
SHORT = {"short": ProfileConfig(None, AdapterSettings({"max_seq_length": 8}))}


def take(*configs: ModelConfig, own: Models = OWN, root: str = "") -> tuple[dict[str, ModelSpec], dict[str, str]]:
    models, refused = add_configs(own, configs, Settings(cluster=Cluster(weights_root=root)))
    return {spec.id: spec for spec, _, _ in models}, refused


def test_profiles_are_added_to_a_model_that_the_host_has_and_its_own_id_stays():
    specs, refused = take(ModelConfig("m", profiles=SHORT))
    assert (specs["m"].profiles, refused) == ({"default": {}, "short": {"max_seq_length": 8}}, {})
    assert specs["m"].stub is not None


def test_a_configuration_without_weights_adds_no_model():
    assert take(ModelConfig("other", profiles=SHORT)) == ({"m": OWN[0][0]}, {})


def test_a_model_of_the_hub_is_added():
    specs, refused = take(ModelConfig("org/new", hf_id="org/new", hf_revision="main", max_sequence_length=64))
    new = specs["org/new"]
    assert (new.directory, new.revision, new.max_sequence_length, refused) == (None, "main", 64, {})


def test_what_the_operator_wrote_is_not_changed():
    own = [(msgspec.structs.replace(OWN[0][0], profiles={"short": {"max_seq_length": 4}}), True, None)]
    specs, refused = take(ModelConfig("m", profiles=SHORT), own=own)
    assert specs["m"].profiles == {"short": {"max_seq_length": 4}}
    assert "another profile 'short'" in refused["m"]
    assert "another max_sequence_length" in take(ModelConfig("m", max_sequence_length=4))[1]["m"]


@pytest.mark.parametrize("path", ["../secret", "/etc", "missing"])
def test_weights_outside_of_the_root_are_refused(tmp_path: Path, path: str):
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").mkdir()
    specs, refused = take(ModelConfig("x", weights_path=path), root=str(tmp_path / "root"))
    assert "x" not in specs
    assert "weights_root" in refused["x"]


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "loop/x"])
def test_a_path_that_the_system_does_not_take_is_refused_and_others_are_taken(tmp_path: Path, path: str):
    (tmp_path / "loop").symlink_to("loop")
    specs, refused = take(ModelConfig("x", weights_path=path), ModelConfig("n", hf_id="n"), root=str(tmp_path))
    assert "n" in specs
    assert refused.keys() == {"x"}
    assert "weights_root" in refused["x"]


def test_files_that_fail_in_an_unknown_way_cost_only_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise MemoryError("too many tensors")

    (tmp_path / "x").mkdir()
    monkeypatch.setattr("sie.supervisor.shared_configs.read_local_card", fail)
    specs, refused = take(ModelConfig("x", weights_path="x"), root=str(tmp_path))
    assert (list(specs), list(refused)) == (["m"], ["x"])


def test_without_a_root_no_path_is_taken():
    assert "no weights_root" in take(ModelConfig("x", weights_path="x"))[1]["x"]
