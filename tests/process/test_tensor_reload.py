"""Repository models that are reloaded under traffic: no request fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf import text_format
from tritonclient.utils import InferenceServerException

from sie.proto import message_class
from tests import onnx_models
from tests.process.harness import WAIT_S, Server, eventually, free_port, start_server
from tests.process.wire import get, post_json, raw_request, send_raw, total

_PAUSE_S = 0.02
"""A client's pause between requests: a load takes many times as long, and without it they slow the load."""
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
            while not self._stopping.wait(_PAUSE_S):
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
            assert server.log_line("keeps serving as it was loaded before")
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


# --- management calls -------------------------------------------------------------------------------------------------

BROKEN = {
    "unsupported scheduling": ("sequence_batching { }", "config.pbtxt: sequence_batching is not supported"),
    "unparsable": ("max_batch_size: 8\nfoo: 1", 'has no field named "foo"'),
    "no version": ("", "it has no version to serve"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def managed(home: Path) -> Iterator[Server]:
    onnx_models.write(home, "steady", shift(1))
    with start_server(
        "--model-repository", str(home), "--repository-control", "explicit", "--grpc-port", str(free_port())
    ) as running:
        yield running


class Callers:
    """Every way to load or unload a model. Each answers an empty text, or the reason of its failure."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.http = triton_http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60)
        self.grpc = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.grpc.close()
        self.channel.close()

    def ask(self, action: str, name: str) -> dict[str, str]:
        """Ask over each API in turn."""
        return {api: getattr(self, api)(action, name) for api in ("over_http", "over_grpc", "over_v1", "over_v1_grpc")}

    def over_http(self, action: str, name: str) -> str:
        return self._reason(getattr(self.http, f"{action}_model"), name, "400")

    def over_grpc(self, action: str, name: str) -> str:
        return self._reason(getattr(self.grpc, f"{action}_model"), name, "StatusCode.INTERNAL")

    def _reason(self, call: Callable[[str], Any], name: str, status: str) -> str:
        try:
            call(name)
        except InferenceServerException as error:
            return error.message() if error.status() == status else f"status {error.status()}"
        return ""

    def over_v1(self, action: str, name: str) -> str:
        path = f"/api/modelcontrol/{action}/{name}"
        response = send_raw(self.server.port, raw_request(path, b"", {"host": "127.0.0.1"}))
        message = message_class("trtis", "nvidia.inferenceserver.RequestStatus")()
        status = text_format.Parse(response.headers["nv-status"], message)
        assert (response.status, status.code) in ((200, 1), (400, 6))
        return status.msg

    def over_v1_grpc(self, action: str, name: str) -> str:
        asked = message_class("trtis", "nvidia.inferenceserver.ModelControlRequest")(
            model_name=name, type=int(action == "load")
        )
        call = self.channel.unary_unary("/nvidia.inferenceserver.GRPCService/ModelControl")
        reply = message_class("trtis", "nvidia.inferenceserver.ModelControlResponse")
        status = reply.FromString(call(asked.SerializeToString(), timeout=WAIT_S)).request_status
        assert status.code in (1, 6)
        return status.msg

    def reload(self) -> tuple[int, dict[str, Any]]:
        response = send_raw(self.server.port, raw_request("/v1/config/reload", b"", {"host": "127.0.0.1"}))
        return response.status, response.json()

    def shown(self, name: str) -> list[tuple[str, str, str]]:
        """Return version, state and reason of each version in the index, which is the same over both protocols."""

        def same() -> tuple[list[tuple[str, str, str]]] | None:  # each process hears of a change for itself
            found = [one for one in self.http.get_model_repository_index() if one["name"] == name]
            typed = [one for one in self.grpc.get_model_repository_index().models if one.name == name]
            rows = [(one.get("version", ""), one.get("state", ""), one.get("reason", "")) for one in found]
            return (rows,) if rows == [(one.version, one.state, one.reason) for one in typed] else None

        return eventually(same, "both protocols list the same")[0]

    def answer(self, name: str) -> float:
        """Return by how much the model that serves shifts its input."""
        given = triton_http.InferInput("x", [3, 2], "FP32").set_data_from_numpy(ROWS)
        return float((self.http.infer(name, [given]).as_numpy("y") - ROWS)[0, 0])


def unbreak(folder: Path) -> None:
    (folder / "config.pbtxt").unlink(missing_ok=True)
    onnx_models.write(folder.parent, folder.name, shift(1))


@pytest.mark.parametrize("fault", BROKEN)
def test_a_load_of_what_cannot_be_loaded_says_why_each_time_over_every_api(managed: Server, home: Path, fault: str):
    name, (config, reason) = fault.replace(" ", "-"), BROKEN[fault]
    (home / name).mkdir()
    if config:
        onnx_models.write(home, name, shift(1), config=config)
    with Callers(managed) as callers:
        for api, said in callers.ask("load", name).items():
            assert reason in said, api
        ((version, state, shown),) = callers.shown(name)
        assert (version, state) == ("", "UNAVAILABLE")
        assert reason in shown
        assert callers.reload()[0] == 200  # it was never loaded, and so it is not for a reload to load
        assert reason in callers.shown(name)[0][2]
        model_id = {"model_id": f"{name}/versions"}
        for verb in ("load", "reload"):
            answer = post_json(managed.port, f"/v1/models/{verb}", model_id)
            assert (answer.status, reason in answer.json()["error"]) == (502, True), verb
        assert set(callers.ask("unload", name).values()) == {""}
        assert [found[1:] for found in callers.shown(name)] == [("UNAVAILABLE", "unloaded")]
        unbreak(home / name)
        assert set(callers.ask("load", name).values()) == {""}
        assert callers.shown(name) == [("1", "READY", "")]


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_in_the_repository_leaves_a_model_that_serves(managed: Server, home: Path, fault: str):
    name, (config, reason) = f"serving-{fault.replace(' ', '-')}", BROKEN[fault]
    onnx_models.write(home, name, shift(1))
    with Callers(managed) as callers:
        assert callers.over_http("load", name) == ""
        if config:
            (home / name / "config.pbtxt").write_text(config)
        else:
            (home / name / "1").rename(home / name / "one")
        for asked in (callers.ask("load", name), {"again": callers.over_http("load", name)}):
            for api, said in asked.items():
                assert reason in said, api
            status, answer = callers.reload()
            assert (status, reason in answer["error"]) == (400, True)
            assert callers.answer(name) == 1
            ((version, state, shown),) = callers.shown(name)
            assert (version, state, reason in shown) == ("1", "READY", True)
            assert reason in get(managed.port, f"/v1/models/{name}/versions/1").json()["last_error"]["message"]
            assert callers.http.get_model_metadata(name)["versions"] == ["1"]
        unbreak(home / name)
        assert callers.reload()[0] == 201
        assert callers.shown(name) == [("1", "READY", "")]
        assert f"{name}/versions" not in [card["id"] for card in get(managed.port, "/v1/models").json()["models"]]


def test_a_reload_says_why_a_version_did_not_load(managed: Server, home: Path):
    onnx_models.write(home, "halting", shift(1))
    with Callers(managed) as callers:
        assert callers.over_http("load", "halting") == ""
        onnx_models.write(home, "halting", b"no model", "2")
        for _ in range(2):
            status, answer = callers.reload()
            assert status == 400
            assert "load failed for model 'halting': version 2 is at UNAVAILABLE state" in answer["error"]
            assert "not an ONNX model" in answer["error"]
            assert [row[:2] for row in callers.shown("halting")] == [("1", "READY"), ("2", "UNAVAILABLE")]
            assert "not an ONNX model" in callers.shown("halting")[1][2]
        assert callers.answer("halting") == 1
        onnx_models.write(home, "halting", shift(2), "2")
        assert callers.reload()[0] == 201
        assert callers.answer("halting") == 2


def test_metadata_and_status_are_of_what_serves_and_not_of_retired_versions(managed: Server, home: Path):
    onnx_models.write(home, "aging", shift(1, width=3))
    with Callers(managed) as callers:
        assert callers.over_http("load", "aging") == ""
        onnx_models.write(home, "aging", shift(2), "2")
        assert callers.over_http("load", "aging") == ""
        eventually(lambda: ("1", "UNAVAILABLE", "unloaded") in callers.shown("aging"), "the old version's end")
        assert callers.http.get_model_metadata("aging")["versions"] == ["2"]
        assert list(callers.grpc.get_model_metadata("aging").versions) == ["2"]
        status = message_class("trtis", "nvidia.inferenceserver.ServerStatus").FromString(
            get(managed.port, "/api/status/aging?format=binary").body
        )
        assert list(status.model_status["aging"].config.output[0].dims) == [2]
