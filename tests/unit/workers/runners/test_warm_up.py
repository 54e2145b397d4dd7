"""Warm-up requests of a configuration: read into a card, run at load, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sie.catalog.spec import ModelSpec, TensorSource
from sie.catalog.tensor_rule import read_tensor_card
from sie.values.errors import ModelLoadFailed
from sie.values.tensor import DATATYPES
from sie.workers.runners.onnx import load_onnx
from sie.workers.runners.warm_up import warm_up
from tests import onnx_models


class Watched:
    """A runner that keeps what it is asked."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.seen: list[Any] = []

    def run_tensors(self, requests):
        ((form,), (data,)) = requests[0].task.inputs, requests[0].data
        self.seen.append(
            data.tobytes() if form.datatype == "BYTES" else data.view(DATATYPES[form.datatype]).reshape(form.shape)
        )
        return self.runner.run_tensors(requests)


def card_of(folder: Path, warm_ups: str, model: bytes | None = None):
    onnx_models.write(folder, "m", model or onnx_models.identity(), config=f"max_batch_size: 8\n{warm_ups}")
    source = TensorSource(repository=str(folder), name="m", version="1", default_max_batch_size=16)
    return read_tensor_card(ModelSpec(id=source.hosted_id, directory=source.folder, tensor=source))


def run(card, max_bytes: int = 1 << 20) -> list[Any]:
    watched = Watched(load_onnx(card, "cpu", 1, lambda *_: None))
    warm_up(watched, card, max_bytes, lambda *_: None)
    return watched.seen


def given(source: str, rows: int = 3, count: int = 0, kind: str = "FP32") -> str:
    value = f"data_type: TYPE_{kind} dims: 2 {source}"
    return f'model_warmup {{ name: "w" batch_size: {rows} count: {count} inputs {{ key: "x" value {{ {value} }} }} }}'


def test_zeros_and_random_values_run_as_often_as_they_say(tmp_path: Path):
    seen = run(card_of(tmp_path, given("zero_data: true", count=2) + given("random_data: true", rows=1)))
    assert [one.shape for one in seen] == [(3, 2), (3, 2), (1, 2)]
    assert not seen[0].any()
    assert seen[2].any()


def test_a_file_holds_the_bytes_of_the_tensor(tmp_path: Path):
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "rows").write_bytes(rows.tobytes())
    (seen,) = run(card_of(tmp_path, given('input_data_file: "rows"')))
    assert seen.tolist() == rows.tolist()


def test_strings_are_framed(tmp_path: Path):
    model = onnx_models.identity("BYTES", ("batch", 2))
    (seen,) = run(card_of(tmp_path, given("zero_data: true", rows=1, kind="STRING"), model))
    assert seen == bytes(8)


@pytest.mark.parametrize(
    ("warm_ups", "reason"),
    [
        (given("zero_data: true", rows=9), "'w': batch_size is 9, and max_batch_size 8"),
        (given("zero_data: true", kind="INT8"), "input 'x' is TYPE_INT8, but the model takes FP32"),
        (given("zero_data: true").replace("dims: 2", "dims: 3"), r"input 'x' has the shape \[3, 3\]"),
        (given("zero_data: true").replace('"x"', '"z"'), "the model has no input 'z'"),
        ('model_warmup { name: "w" batch_size: 1 }', "input 'x' is missing"),
        (given(""), "needs one of zero_data, random_data and input_data_file"),
        (given('input_data_file: "none"'), "there is no file warmup/none"),
        (given('input_data_file: "../../../secret"'), "leads out of the model's directory"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_when_the_model_is_read(tmp_path: Path, warm_ups: str, reason: str):
    with pytest.raises(ModelLoadFailed, match=reason):
        card_of(tmp_path / "repository", warm_ups)


def test_a_request_that_fails_fails_the_load(tmp_path: Path):
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "short").write_bytes(b"1234")
    with pytest.raises(ModelLoadFailed, match="'w': input 'x' has 4 bytes in its file, and needs 24"):
        run(card_of(tmp_path, given('input_data_file: "short"')))
    with pytest.raises(ModelLoadFailed, match=r"'w' has 24 bytes, over max_body_bytes \(8\)"):
        run(card_of(tmp_path, given("zero_data: true")), max_bytes=8)
    (tmp_path / "m" / "warmup" / "nine").write_bytes(np.int64(9).tobytes())
    text = 'model_warmup { name: "w" batch_size: 1 inputs { key: "i" value { data_type: TYPE_INT64 input_data_file: "nine" } } }'
    with pytest.raises(ModelLoadFailed, match="'w': Model 'm' rejects these inputs"):
        run(card_of(tmp_path, text, onnx_models.lookup()))
