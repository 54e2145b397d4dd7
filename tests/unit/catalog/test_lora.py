from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.lora import find_lora_weights, read_lora_config
from sie.catalog.spec import parse_adapter_spec
from sie.values.card import AdapterSpec, StubOptions
from sie.values.errors import BadRequest, Internal

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["query", "value"]}
SAVED_BY_PEFT: dict[str, Any] = {
    **CONFIG, "alpha_pattern": {}, "auto_mapping": {"base_model_class": "BertModel"}, "base_model_name_or_path": "x/y",
    "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "lora_dropout": 0.1,
    "megatron_core": "megatron.core", "modules_to_save": None, "qalora_group_size": 16, "use_dora": False,
    "layer_replication": None, "trainable_token_indices": None, "task_type": "FEATURE_EXTRACTION", "lora_bias": False,
}  # fmt: skip

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes an adapter's directory: peft's config with changes, and files."""

    def make(files: tuple[str, ...] = ("adapter_model.safetensors",), **changes: Any) -> str:
        (tmp_path / "adapter_config.json").write_text(json.dumps({**SAVED_BY_PEFT, **changes}))
        for name in files:
            (tmp_path / name).write_bytes(b"weights")
        return str(tmp_path)

    return make


def test_config_as_peft_saves_it_is_read(write: Write) -> None:
    config = read_lora_config("a", write())
    assert (config.rank("x.query"), config.scale("x.query")) == (8, 2.0)
    assert [config.targets(name) for name in ("x.query", "query", "x.key", "xquery")] == [True, True, False, False]


def test_scale_is_by_the_root_of_the_rank_where_the_config_says_so(write: Write) -> None:
    config = read_lora_config("a", write(use_rslora=True, r=16, rank_pattern={"value": 4}, alpha_pattern={"key": 2}))
    assert config.scale("layer.0.query") == 16 / 4
    assert config.scale("layer.0.value") == 16 / 2
    assert config.scale("layer.0.key") == 2 / 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "its peft_type is 'IA3', not 'LORA'"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"modules_to_save": ["classifier"]}, r"modules_to_save \['classifier'\] is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.w"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"a_field_of_tomorrow": 3}, "a_field_of_tomorrow 3 is not supported"),
        ({"r": 0}, r"Expected `int` >= 1 - at `\$.r`"),
        ({"r": "8"}, "Expected `int`, got `str`"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "layer.(query"}, "missing \\)"),
        ({"rank_pattern": {"(": 3}}, "missing \\)"),
    ],
)
def test_config_that_would_change_the_vectors_is_refused_by_name(
    changes: dict[str, Any], reason: str, write: Write
) -> None:
    with pytest.raises(Internal, match=f"Adapter 'a' cannot be loaded: .*{reason}"):
        read_lora_config("a", write(**changes))


def test_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Internal, match=r"there is no adapter_config.json in"):
        read_lora_config("a", str(tmp_path))
    with pytest.raises(Internal, match=r"Adapter 'a' cannot be loaded: there is no directory"):
        read_lora_config("a", str(tmp_path / "nowhere"))


def test_pickled_weights_are_not_read(write: Write) -> None:
    with pytest.raises(Internal, match=r"only pickled weights \(adapter_model.bin\); convert them"):
        find_lora_weights("a", write(("adapter_model.bin",)))


def test_weights_are_not_read_from_outside_the_directory(write: Write, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_bytes(b"secret")
    directory = write(())
    (Path(directory) / "adapter_model.safetensors").symlink_to(outside)
    with pytest.raises(Internal, match=r"adapter_model\.safetensors leads out of the model's directory"):
        find_lora_weights("a", directory)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("org/m=org/a", AdapterSpec(model="org/m", id="org/a")),
        ("org/m=org/a@v1", AdapterSpec(model="org/m", id="org/a", revision="v1")),
        ("m=a=/srv/a", AdapterSpec(model="m", id="a", directory="/srv/a")),
        ("m=a=/srv/x=y", AdapterSpec(model="m", id="a", directory="/srv/x=y")),
        ("m=a=stub:load_ms=5", AdapterSpec(model="m", id="a", stub=StubOptions(load_ms=5.0))),
    ],
)
def test_adapter_spec_is_read(text: str, spec: AdapterSpec) -> None:
    assert parse_adapter_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m", "names no adapter; the form is MODEL=ID"),
        ("m=", "1 to 256"),
        ("m=/srv/a", "is a path without an id"),
        ("../m=a", "is a path without an id"),
        ("m=a/../b", "'..' part"),
        ("m=a=", "no directory after '='"),
        ("m=a=stub:dense=3", "the only option of a stub.s adapter is load_ms"),
    ],
)
def test_adapter_spec_that_cannot_be_read_says_why(text: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse_adapter_spec(text)
