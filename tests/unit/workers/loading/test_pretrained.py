"""Which checkpoints become a model of transformers, and how those fail that do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_encoder
from sie.workers.runners.encode import EncodeRunner


def _load(directory: Path) -> EncodeRunner:
    runner = load_encoder(read_card(ModelSpec(id="test/model"), str(directory)), "cpu", "float32", lambda *_: None)
    assert isinstance(runner, EncodeRunner)
    return runner


def _error_class(caught: pytest.ExceptionInfo[ModelLoadFailed]) -> str:
    return caught.value.extras["error_class"]


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1000], lambda raw: raw[:4], lambda raw: b"\xff" * 8 + raw[8:]])
def test_damaged_weights_fail_the_load_until_they_change(
    damage: Callable[[bytes], bytes], make_checkpoint: Any
) -> None:
    directory = make_checkpoint("bert")
    weights = directory / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelLoadFailed) as caught:
        _load(directory)
    assert _error_class(caught) == "CONFIG"


def test_weights_that_vanished_since_the_card_was_read_fail_the_load(make_checkpoint: Any) -> None:
    directory = make_checkpoint("bert")
    card = read_card(ModelSpec(id="a"), str(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadFailed) as caught:
        load_encoder(card, "cpu", "float32", lambda *_: None)
    assert _error_class(caught) == "STORAGE"


def test_weights_that_are_not_in_the_file_are_not_made_up(make_checkpoint: Any) -> None:
    directory = make_checkpoint("bert")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelLoadFailed, match="missing") as caught:
        _load(directory)
    assert _error_class(caught) == "CONFIG"


@pytest.mark.parametrize("model_type", ["bert", "bert-of-mine"])
def test_remote_code_is_never_run(model_type: str, make_checkpoint: Any, tmp_path: Path) -> None:
    directory, canary = make_checkpoint("bert"), tmp_path / "canary"
    config = json.loads((directory / "config.json").read_text())
    remote = {name: f"evil.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForTextEncoding", "AutoTokenizer")}
    config.update(auto_map=remote, model_type=model_type)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(f"open({str(canary)!r}, 'w').write('ran')\n")
    with pytest.raises(ModelLoadFailed, match="auto_map"):
        _load(directory)
    card = read_card(ModelSpec(id="m", ignore_remote_code=True), str(directory))
    if model_type == "bert":
        assert load_encoder(card, "cpu", "float32", lambda *_: None).execution.packed
    else:
        with pytest.raises(ModelLoadFailed, match="auto_map"):
            load_encoder(card, "cpu", "float32", lambda *_: None)
    assert not canary.exists()


@pytest.mark.parametrize("is_encoder_decoder", [True, False])
def test_encoder_of_t5_loads_whatever_its_config_calls_it(
    is_encoder_decoder: bool, make_checkpoint: Any, tokenize: Any
) -> None:
    """transformers 5 saves a T5EncoderModel with `is_encoder_decoder` false."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    directory = make_checkpoint("t5", auto=transformers.AutoModelForTextEncoding, **sizes)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["T5EncoderModel"]
    (directory / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": is_encoder_decoder}))
    runner, texts = _load(directory), ["w1 w2 w3", "w4"]
    rows = runner.run_tokens(tokenize(runner.card, texts))
    model = transformers.T5EncoderModel.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = [
            model(torch.tensor(row[None], dtype=torch.long)).last_hidden_state[0].mean(0).numpy()
            for row in tokenize(runner.card, texts)
        ]
    np.testing.assert_allclose(rows, np.stack(expected), rtol=2e-3, atol=2e-4)


def test_architecture_without_a_text_encoder_is_refused(make_checkpoint: Any) -> None:
    directory = make_checkpoint("bert")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "marian", "is_encoder_decoder": True}))
    with pytest.raises(ModelLoadFailed, match="no text encoder"):
        _load(directory)
