"""A server with a model repository: which models load, which do not, and what other routes show of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests import onnx_models
from tests.process.harness import START_TIMEOUT_S, start_server
from tests.process.wire import encode, get, post_json


def test_models_of_a_repository_are_models_of_the_server(tmp_path: Path):
    onnx_models.write(tmp_path, "good", onnx_models.identity(), "3")
    onnx_models.write(tmp_path, "good", onnx_models.affine(), "12")
    onnx_models.write(tmp_path, "broken", b"no model at all")
    onnx_models.write(tmp_path, "contradicted", onnx_models.identity(), config="max_batch_size: 8\nfoo: 1")
    (tmp_path / "empty").mkdir()
    with start_server("--model-repository", str(tmp_path), "--model", "stub/a=stub:dense=16") as server:
        assert get(server.port, "/readyz").status == 200
        infos = {info["id"]: info for info in get(server.port, "/v1/models").json()["models"]}
        assert {name: info["state"] for name, info in infos.items()} == {
            "stub/a": "loaded",
            "good/versions/12": "loaded",
            "broken/versions/1": "failed",
            "contradicted/versions": "failed",
            "empty/versions": "failed",
        }
        assert (infos["good/versions/12"]["inputs"], infos["good/versions/12"]["outputs"]) == (["tensor"], [])
        assert "not an ONNX model" in infos["broken/versions/1"]["last_error"]["message"]
        assert (
            'line 2: Message type "inference.ModelConfig" has no field named "foo"'
            in (infos["contradicted/versions"]["last_error"]["message"])
        )
        assert str(tmp_path) not in get(server.port, "/v1/models").body.decode()

        assert encode(server.port, "stub/a", ["x"]).status == 200
        refused = encode(server.port, "good/versions/12", ["x"])
        assert (refused.status, refused.code()) == (400, "INVALID_INPUT")
        assert post_json(server.port, "/v1/embeddings", {"model": "default", "input": "x"}).status == 200

        os.kill(server.process.pid, signal.SIGHUP)
        server.log_line("settings reloaded", START_TIMEOUT_S)
        assert get(server.port, "/v1/models/good/versions/12").json()["state"] == "loaded"


def test_explicit_control_loads_nothing_by_itself(tmp_path: Path):
    onnx_models.write(tmp_path, "good", onnx_models.identity())
    with start_server("--model-repository", str(tmp_path), "--repository-control", "explicit") as server:
        assert get(server.port, "/v1/models/good/versions/1").json()["state"] == "available"
        refused = encode(server.port, "good/versions/1", ["x"])
        assert (refused.status, refused.code()) == (503, "MODEL_NOT_LOADED")
        assert get(server.port, "/v1/models/good/versions/1").json()["state"] == "available"


def test_models_are_tried_for_batches_when_the_operator_asks_for_it(tmp_path: Path):
    onnx_models.write(tmp_path, "alone", onnx_models.affine())
    onnx_models.write(tmp_path, "mixed", onnx_models.softmax_over_rows("batch"))
    onnx_models.write(tmp_path, "said", onnx_models.softmax_over_rows("batch"), config="dynamic_batching { }")
    with start_server("--model-repository", str(tmp_path), "--probe-batching") as server:
        server.log_line("mixed: requests are not joined: rows give other values beside others", START_TIMEOUT_S)
        log = server.output.text()
    assert "alone: requests are not joined" not in log
    assert "said: requests are not joined" not in log
