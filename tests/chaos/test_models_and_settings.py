"""F17, F18, F42, F43: files of a model or the settings file are broken or missing, or models are swapped; the served
models continue.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.cluster import DENSE, MODEL, cluster, logged
from tests.chaos.history import open_loop
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import eventually, start_server
from tests.process.wire import dense_rows, encode, get, post_json


@pytest.fixture
def copied(minilm_directory: Path, tmp_path: Path) -> Path:
    """Return a directory with the small files of a model and a link to its weights."""
    directory = tmp_path / "model"
    shutil.copytree(minilm_directory, directory, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    (directory / "model.safetensors").hardlink_to(minilm_directory / "model.safetensors")
    return directory


@pytest.mark.row("F17", "the directory of a loaded model vanishes")
@pytest.mark.timeout(400)
def test_f17_a_loaded_model_needs_its_files_no_more(row: Row, copied: Path):
    with start_server("--model", f"m={copied}", "--dtype", "float32") as server:
        expected = dense_rows(encode(server.port, "m", ["x"]))
        shutil.rmtree(copied)
        answers = [dense_rows(encode(server.port, "m", ["x"])) for _ in range(pick(20, 500))]
        row.equals("answers that differ", sum(not np.allclose(each, expected, atol=1e-5) for each in answers), 0)
        reloaded = post_json(server.port, "/v1/models/reload", {"model_id": "m"})
        assert reloaded.status >= 400, reloaded
        eventually(lambda: get(server.port, "/v1/models/m").json()["state"] == "failed", "a failed reload")
        card = get(server.port, "/v1/models/m").json()
        assert str(copied) in card["last_error"]["message"] or copied.name in card["last_error"]["message"], card
        assert get(server.port, "/healthz").status == 200


@pytest.mark.row("F18", "weights that are cut short, asked for again and again")
@pytest.mark.timeout(400)
def test_f18_a_broken_model_is_not_tried_again_and_again(row: Row, copied: Path):
    weights = copied / "model.safetensors"
    half = weights.read_bytes()[: weights.stat().st_size // 2]
    weights.unlink()
    weights.write_bytes(half)
    flags = ("--frontends", "1", "--load-retry-s", "1800")  # each hears of the failure in its own time
    with start_server("--lazy-model", f"m={copied}", "--model", f"{MODEL}=stub:dense={DENSE}", *flags) as server:
        with open_loop(server, 50, seed=SEED) as load:
            eventually(lambda: encode(server.port, "m", ["x"]).status not in (200, 503), "a failed load")
            deadline_s = time.monotonic() + pick(2.0, 20.0)
            while time.monotonic() < deadline_s:
                assert encode(server.port, "m", ["x"]).status == 502
        tries = get(server.port, "/v1/models/m").json()["last_error"]["attempts"]
    row.equals("tries within the cool-down", tries, 1)
    row.all_right("failed requests of others", load.history)


@pytest.mark.row("F42", "a reload of settings that are broken")
def test_f42_a_broken_reload_changes_nothing(row: Row, tmp_path: Path):
    file = tmp_path / "sie.toml"
    file.write_text("[limits]\nmax_items = 100\n")
    reloads = pick(5, 50)
    with cluster("--config", str(file)) as server:
        before = sorted(server.pids())
        with open_loop(server, 100, seed=SEED) as load:
            for number in range(reloads):
                file.write_text(("[limits]\nmax_items = \n", "[limits]\nmax_itemz = 3\n")[number % 2])
                num_lines = len(server.output.lines)
                server.process.send_signal(signal.SIGHUP)
                eventually(lambda n=num_lines: logged(server, "the settings in force stay", n), "a refusal in the log")
        assert encode(server.port, MODEL, ["x"] * 101).status == 400
        after = sorted(server.pids())
    row.all_right("failed requests", load.history)
    row.equals("processes replaced", len(set(before) ^ set(after)), 0)


@pytest.mark.row("F43", "a model is reloaded again and again under load")
@pytest.mark.timeout(400)
def test_f43_a_reload_fails_no_request(row: Row):
    swaps = pick(5, 50)
    with cluster() as server, open_loop(server, 100, seed=SEED) as load:
        for _ in range(swaps):
            answer = post_json(server.port, "/v1/models/reload", {"model_id": MODEL})
            assert (answer.status, answer.json()["status"]) == (200, "loaded"), answer
            time.sleep(0.3)
    row.equals("swaps", swaps, swaps)
    row.all_right("failed requests", load.history)
