"""SIGHUP: settings that can change in a running server change; a broken file changes nothing and is reported
everywhere.
"""

from __future__ import annotations

import json
import signal

from tests.process.harness import Server, eventually, start_server
from tests.process.notify_socket import ServiceManager
from tests.process.watchers import first_frame
from tests.process.wire import Client, encode, get, total, under_load

MODEL_A = "stub/a=stub:dense=16"


def write(path, limits: str = "", server: str = "", models: tuple[str, ...] = (MODEL_A,)) -> None:
    path.write_text(f"[server]\n{server}\n[models]\nmodel = {json.dumps(models)}\n[limits]\n{limits}\n")


def reload(server: Server, expected: str) -> None:
    """Ask for a reload and wait for one more log line that holds `expected`."""
    seen = server.output.text().count(expected)
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.output.text().count(expected) > seen, f"{expected!r} in the log")


def config_error(server: Server) -> str | None:
    return first_frame(server)["config_error"]


def status_of(server: Server, num_items: int) -> int:
    return encode(server.port, "stub/a", ["x"] * num_items).status


def test_limits_and_levels_change_without_a_restart_and_the_rest_is_named(tmp_path):
    file = tmp_path / "sie.toml"
    write(file)
    with start_server("--config", str(file), "--frontends", "2") as server:
        pids = server.pids()
        assert status_of(server, 101) == 200
        write(file, limits="max_items = 100\nmax_reply_bytes = 8192", server='log_level = "debug"\naccess_log = 1.0')
        reload(server, "settings reloaded: log_level, access_log, max_items")
        server.log_line("a restart is needed for: max_reply_bytes")  # the line after that one
        for _ in range(24):  # whichever frontend it is
            eventually(lambda: status_of(server, 101) == 400, "the new limit")
        with Client(server.port) as client:
            answer = client.encode("stub/a", ["a secret"], {"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        line = json.loads(server.log_line("mine-1"))
        assert (line["logger"], line["route"], line["status"]) == ("sie.access", "/v1/encode/{model}", 200)
        assert (line["model"], line["items"], line["inference_ms"] > 0) == ("stub/a", 1, True)
        assert "a secret" not in server.output.text()
        assert server.pids() == pids
        write(file)
        reload(server, "settings reloaded: log_level, access_log, max_items")
        eventually(lambda: status_of(server, 101) == 200, "the old limit")


def test_a_broken_file_keeps_the_old_settings_and_is_reported(tmp_path):
    file = tmp_path / "sie.toml"
    write(file, limits="max_items = 100")
    with ServiceManager() as manager, start_server("--config", str(file), env=manager.env) as server:
        manager.wait_for("READY")
        with under_load(server, "stub/a", 16, seed=1) as load:
            load.wait_answers(20)
            for broken, reason in (("max_itemz = 3", "max_itemz"), ("max_items = ", "is not TOML")):
                file.write_text(f"[models]\nmodel = ['{MODEL_A}']\n[limits]\n{broken}\n")
                reload(server, "the settings in force stay")
                begun = manager.wait_for("RELOADING")
                assert manager.wait_for("READY", after_s=begun.at_s)
                assert int(manager.named("MONOTONIC_USEC")[-1].value) > 0
                assert f"settings not reloaded: {file}" in manager.wait_for("STATUS", reason).value
                manager.notes.clear()
                eventually(lambda part=reason: part in (config_error(server) or ""), "the error in the status")
                eventually(lambda: total(server.port, "sie_config_refused") == 1, "the refusal shown")
                assert status_of(server, 101) == 400
            load.wait_answers(20)
        eventually(lambda: total(server.port, "sie_config_reloads_total", result="refused") == 2, "two refusals")
        write(file, limits="max_items = 101")
        reload(server, "settings reloaded: max_items")
        eventually(lambda: status_of(server, 101) == 200, "the new limit")
        eventually(lambda: config_error(server) is None, "no error in the status")
        eventually(lambda: total(server.port, "sie_config_refused") == 0, "no refusal")
        eventually(
            lambda: any("not reloaded" not in note.value for note in manager.named("STATUS")[-1:]), "a calm status"
        )


def test_models_come_and_go_and_no_answer_of_the_others_is_lost(tmp_path):
    file = tmp_path / "sie.toml"
    write(file)
    with start_server("--config", str(file)) as server:
        with under_load(server, "stub/a", 16, seed=2) as load:
            load.wait_answers(20)
            write(file, models=(MODEL_A, "stub/b=stub:dense=8"))
            reload(server, "settings reloaded: model")
            eventually(lambda: encode(server.port, "stub/b", ["x"]).status == 200, "the new model")
            assert get(server.port, "/readyz").status == 200
            write(file, models=(MODEL_A,))
            reload(server, "settings reloaded: model")
            eventually(lambda: encode(server.port, "stub/b", ["x"]).status == 404, "the end of the model")
            load.wait_answers(20)
        write(file, models=("stub/a=stub:dense=32",))
        reload(server, "a restart is needed for: the definition of model stub/a")
        write(file, models=("c=/nowhere/at/all",))
        reload(server, "the settings in force stay: model: ")
        assert encode(server.port, "stub/a", ["x"]).status == 200


def test_a_shorter_load_timeout_counts_for_an_adapter_that_loads(tmp_path):
    file = tmp_path / "sie.toml"
    models = f"[models]\nmodel = ['{MODEL_A}']\nlora = ['stub/a=slow=stub:load_ms=30000']\n"
    file.write_text(models)
    with start_server("--config", str(file)) as server:

        def message() -> str:
            return encode(server.port, "stub/a", ["x"], options={"lora_id": "slow"}).body.decode(errors="replace")

        assert "is loading" in message()
        file.write_text(f"{models}load_timeout_s = 1\n")
        reload(server, "settings reloaded: load_timeout_s")
        eventually(lambda: "not loaded within load_timeout_s (1 s)" in message(), "the end of the load")
