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
from tests.process.harness import Server, eventually, free_port, start_server

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def shift(by: float) -> bytes:
    """Return a model y = x + by, so that an answer tells which file gave it."""
    constant = onnx_models.numpy_helper.from_array(np.array([by, by], np.float32), "b")
    return onnx_models.model(
        [onnx_models.helper.make_node("Add", ["x", "b"], ["y"])], [onnx_models.value("x", "FP32", ("batch", 2))],
        [onnx_models.value("y", "FP32", ("batch", 2))], [constant],
    )  # fmt: skip


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
                    self.faults.append(repr(error))
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
        eventually(lambda: self.counts.get(key, 0) >= at_least, f"answers {key}; heard {self.counts}", 20)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(20)
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
                onnx_models.write(repository, "new", shift(by), "1")
                (repository / "new" / "1" / "model.onnx").replace(repository / "m" / "1" / "model.onnx")
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
