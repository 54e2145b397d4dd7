"""Repository models that are loaded anew while requests come: nobody hears of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests import onnx_models
from tests.process.harness import WAIT_S, Server, eventually, free_port, start_server
from tests.process.wire import get, total

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def shift(by: float, width: int = 2) -> bytes:
    """Return a model y = x + by, so that an answer tells which file gave it."""
    constant = onnx_models.numpy_helper.from_array(np.full(width, by, np.float32), "b")
    return onnx_models.model(
        [onnx_models.helper.make_node("Add", ["x", "b"], ["y"])], [onnx_models.value("x", "FP32", ("batch", width))],
        [onnx_models.value("y", "FP32", ("batch", width))], [constant],
    )  # fmt: skip


def unloadable() -> bytes:
    """Return a model that can be read, and that no runtime can load: its only operator does not exist."""
    return onnx_models.model(
        [onnx_models.helper.make_node("NoSuchOperator", ["x"], ["y"])], [onnx_models.value("x", "FP32", ("batch", 2))],
        [onnx_models.value("y", "FP32", ("batch", 2))],
    )  # fmt: skip


def replace(repository: Path, model: bytes) -> None:
    """Put another file in place of version 1, as a whole."""
    onnx_models.write(repository, "new", model, "1")
    (repository / "new" / "1" / "model.onnx").replace(repository / "m" / "1" / "model.onnx")


class Traffic:
    """Clients that ask one model in a loop, and what they heard."""

    def __init__(self, server: Server, modules: tuple[Any, ...]) -> None:
        self.faults: list[str] = []
        self.counts: dict[str, int] = {}
        self._stopping = threading.Event()
        self._server = server
        self._threads = [
            threading.Thread(target=self._ask, args=(module, number)) for number, module in enumerate(modules)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, module: Any, number: int) -> None:
        port = self._server.port if module is triton_http else self._server.grpc_port
        given = module.InferInput("x", [3, 2], "FP32").set_data_from_numpy(ROWS + number)
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            while not self._stopping.is_set():
                try:
                    result = client.infer("m", [given])
                except Exception as error:
                    self.faults.append(f"{type(error).__name__}: {error}")
                    continue
                by = (result.as_numpy("y") - ROWS - number)[0, 0]
                response = result.get_response()
                version = response["model_version"] if isinstance(response, dict) else response.model_version
                if not np.array_equal(result.as_numpy("y"), ROWS + number + by):
                    self.faults.append("a mix")
                key = f"{version}:{by:g}"
                self.counts[key] = self.counts.get(key, 0) + 1

    def wait_for(self, key: str) -> None:
        """Wait until the answer of a version with its shift was heard a few times more."""
        at_least = self.counts.get(key, 0) + 20
        eventually(lambda: self.counts.get(key, 0) >= at_least, f"answers {key}; heard {self.counts}")

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_reload_fails_no_request(tmp_path: Path, protocol: str):
    repository = tmp_path / "repository"
    onnx_models.write(repository, "m", shift(1), "1")
    modules = (triton_http,) * 3 if protocol == "http" else (triton_grpc,) * 3
    with start_server(
        "--model-repository", str(repository), "--repository-control", "explicit", "--grpc-port", str(free_port())
    ) as server:
        admin = triton_http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)
        admin.load_model("m")
        traffic = Traffic(server, modules)
        try:
            traffic.wait_for("1:1")
            for by in (2, 3):  # another file in place of the same version
                replace(repository, shift(by))
                admin.load_model("m")
                traffic.wait_for(f"1:{by}")
            onnx_models.write(repository, "m", shift(4), "2")  # a version that takes its place
            admin.load_model("m")
            traffic.wait_for("2:4")
            eventually(lambda: not admin.is_model_ready("m", "1"), "the old version's end")
            onnx_models.write(repository, "m", b"no model", "3")
            with pytest.raises(Exception, match="version 3 is at UNAVAILABLE"):
                admin.load_model("m")
            traffic.wait_for("2:4")
        finally:
            traffic.stop()
            admin.close()
    assert traffic.faults == []
    assert set(traffic.counts) == {"1:1", "1:2", "1:3", "2:4"}


BAD = {"no model": b"no model", "a model that does not load": unloadable()}


def test_a_bad_file_in_place_of_a_version_leaves_it_as_it_was_loaded(tmp_path: Path):
    repository = tmp_path / "repository"
    onnx_models.write(repository, "m", shift(1), "1")
    with start_server(
        "--model-repository", str(repository), "--repository-control", "explicit", "--devices", "cpu:2"
    ) as server:
        admin = triton_http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)
        admin.load_model("m")
        traffic = Traffic(server, (triton_http,) * 3)
        try:
            traffic.wait_for("1:1")
            for name, model in BAD.items():
                replace(repository, model)
                for _ in range(2):  # and again, with the file unchanged
                    with pytest.raises(triton_http.InferenceServerException, match="version 1 is at UNAVAILABLE"):
                        admin.load_model("m")
                (shown,) = (entry for entry in admin.get_model_repository_index() if entry["name"] == "m")
                assert (shown["state"], bool(shown["reason"])) == ("READY", True), (name, shown)
                card = get(server.port, "/v1/models/m/versions/1").json()
                assert card["state"] == "loaded", name
                assert card["last_error"]["message"], name
                assert admin.is_model_ready("m"), name
                traffic.wait_for("1:1")
            assert server.log_line("goes on as it was loaded before")
            replace(repository, shift(2))
            admin.load_model("m")
            traffic.wait_for("1:2")
            (shown,) = (entry for entry in admin.get_model_repository_index() if entry["name"] == "m")
            assert shown.get("reason", "") == ""
        finally:
            traffic.stop()
            admin.close()
        assert total(server.port, "sie_worker_restarts_total") == 0
    assert traffic.faults == []
    assert set(traffic.counts) == {"1:1", "1:2"}


def test_a_file_that_changes_what_a_model_takes_fails_no_request_of_the_old_kind(tmp_path: Path):
    """Requests that were judged by the old card run on the old model; the others hear what the new one takes."""
    repository = tmp_path / "repository"
    onnx_models.write(repository, "m", shift(1), "1")
    with start_server("--model-repository", str(repository), "--repository-control", "explicit") as server:
        admin = triton_http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)
        admin.load_model("m")
        traffic = Traffic(server, (triton_http,) * 3)
        try:
            traffic.wait_for("1:1")
            replace(repository, shift(2, width=3))
            admin.load_model("m")
            num_faults = len(traffic.faults)
            eventually(lambda: len(traffic.faults) > num_faults, "a refusal by the new model")
        finally:
            traffic.stop()
            admin.close()
    assert set(traffic.counts) == {"1:1"}
    assert [fault for fault in traffic.faults if "unexpected shape" not in fault] == []
