"""The benchmarks' calculations: ratios, pictures, processor time, and contenders that are left out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from bench import __main__ as command_line
from bench import stages
from bench.catalog import OURS, Peer, Setup
from bench.compare import Comparison, bundled_directory, compare, say
from bench.contenders import Load, Turn
from bench.limits import Ceilings, linear_flop_per_token
from bench.peers import LOADS, print_all
from bench.processes import Program
from bench.report import ROOT
from bench.scaling import Crew, print_scaling, unhindered_rate
from tests.process.harness import eventually

LOAD = LOADS[2]
CEILINGS = Ceilings({"bfloat16": {1: 1e12, 2: 2e12}, "float32": {1: 1e11, 2: 2e11}}, {1: 1e10, 2: 2e10})
MINILM = bundled_directory()


def turn(contender: str, tokens: int, p50_ms: float, load: str = LOAD.name) -> Turn:
    return Turn(
        contender=contender, load=load, seconds=2.0, texts=tokens // 49, tokens=tokens, p50_ms=p50_ms, p99_ms=2 * p50_ms,
        cpu_s={"worker": 1.0, "frontend": 0.5}, generator_cpu_s=0.1,
    )  # fmt: skip


def comparison(*turns: Turn, absent: dict[str, str] | None = None) -> Comparison:
    return Comparison(
        turns=list(turns), cosines={OURS: 0.9998}, absent=absent or {}, ceilings=CEILINGS,
        flop_per_token=linear_flop_per_token(MINILM),
    )  # fmt: skip


def test_every_benchmark_has_help_and_every_one_is_documented():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name in command_line.COMMANDS:
        result = CliRunner().invoke(command_line.main, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert f"| `{name}` |" in page


def test_the_linear_layers_of_minilm_take_21_mflop_a_token():
    assert linear_flop_per_token(MINILM) == 21_233_664


def test_rates_are_compared_with_the_fastest_peer_round_by_round(capsys: pytest.CaptureFixture[str]):
    rounds = [(1000, 500, 900), (2000, 1000, 100), (600, 200, 300)]
    turns = [
        turn(name, tokens, 1000 / tokens)
        for one in rounds
        for name, tokens in zip((OURS, "vllm bf16", "infinity torch bf16"), one, strict=True)
    ]
    print_all(comparison(*turns, absent={"openvino bf16": "not installed"}), LOADS)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {LOAD.name} ")]
    assert [cell.strip() for cell in row.split("|")][2:5] == ["vllm bf16", "2.00x", "0.50x"]


def test_who_took_no_part_is_named_with_the_reason(capsys: pytest.CaptureFixture[str]):
    print_all(comparison(turn(OURS, 1000, 1.0), absent={"openvino bf16": "not installed"}), LOADS)
    assert "- openvino bf16: not installed" in capsys.readouterr().out


def test_a_turn_is_stated_as_a_part_of_the_ceiling():
    one = comparison(turn(OURS, 100_000, 1.0))
    assert one.share_of_ceiling(50_000, 1) == pytest.approx(50_000 * 21_233_664 / 1e12)
    assert one.turns[0].tokens_per_s == 50_000
    assert one.turns[0].tokens_per_cpu_s == pytest.approx(100_000 / 1.5)


class FakeContender:
    """Answers with the vectors and the speed that it is told."""

    def __init__(self, name: str, cosine: float | None) -> None:
        self.name, self._cosine, self.is_stopped = name, cosine, False

    def prepare(self, loads: object, references: object) -> float | None:
        return self._cosine

    def measure(self, load: Load, seconds: float) -> Turn:
        return turn(self.name, 100, 1.0, load.name)

    def stop(self) -> None:
        self.is_stopped = True


def test_turns_go_round_and_wrong_vectors_and_absent_peers_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model.safetensors").symlink_to(Path(MINILM, "model.safetensors"))
    monkeypatch.setattr("bench.compare.measure_ceilings", lambda *_: CEILINGS)
    made: list[FakeContender] = []

    def start(peer: Peer, _setup: Setup) -> FakeContender:
        if peer.name == "broken":
            raise RuntimeError("no port")
        made.append(FakeContender(peer.name, {"right": 0.9999, "wrong": 0.5}.get(peer.name)))
        return made[-1]

    names = {"right": "json", "wrong": "json", "unknown": "json", "broken": "json", "missing": "no_such_package"}
    peers = [Peer(name, "local", package, start) for name, package in names.items()]
    peers.append(Peer("for a GPU", "local", "json", start, devices=("cuda",)))
    setup = Setup(str(tmp_path), "cpu", 1, tmp_path)
    result = compare(peers, LOADS[:2], rounds=2, seconds=1.0, setup=setup)
    assert [(one.contender, one.load) for one in result.turns] == 2 * [
        (name, load.name) for load in LOADS[:2] for name in ("right", "unknown")
    ]
    assert {name: reason.split(":")[0] for name, reason in result.absent.items()} == {
        "wrong": "wrong answers", "broken": "did not start", "missing": "not installed", "for a GPU": "not for cpu",
    }  # fmt: skip
    assert all(contender.is_stopped for contender in made)


def test_figures_come_back_from_their_file_and_make_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from bench.plot import draw

    turns = [turn(OURS, 1000 * load.connections, 5.0, load.name) for load in LOADS if load.connections]
    figures = msgspec.json.decode(msgspec.json.encode(comparison(*turns).figures()))
    page = {"machine": {"cpu": "x", "cores": 2}, "date": "2026-11-21", "commit": "abc"} | figures
    draw(page, msgspec.convert(page["turns"], list[Turn]), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_program_spends_time_until_it_is_paused():
    program = Program(
        [sys.executable, "-c", "import time\nprint('on', flush=True)\nwhile time.process_time() < 20: pass"],
        talks=True,
    )
    try:
        program.read_line(60)
        eventually(lambda: program.cpu_s()["program"] > 0.2, "it spends time")
        program.pause()
        eventually(lambda: psutil.Process(program.process.pid).status() == psutil.STATUS_STOPPED, "it stands still")
        before = program.cpu_s()["program"]
        time_was = time.monotonic()
        eventually(lambda: time.monotonic() - time_was > 0.2, "time passes")
        assert program.cpu_s()["program"] - before <= 0.02
    finally:
        program.stop()
    assert program.process.poll() is not None


def test_the_engine_in_a_process_gives_the_vectors_of_the_library(tmp_path: Path, minilm_directory: Path):
    from sentence_transformers import SentenceTransformer

    texts = ["river stone", "a story of the house " * 20]
    questions = [{"texts": texts, "vectors": str(tmp_path / "rows.npy")}, {"texts": texts, "items": 1, "seconds": 0}]
    done = subprocess.run(
        [sys.executable, "-m", "bench.local", "sie", "--model", str(minilm_directory), "--dtype", "float32"],
        input="\n".join(map(json.dumps, questions)) + "\n", capture_output=True, text=True, timeout=250, check=True,
        cwd=ROOT, env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    _ready, _written, timed = map(json.loads, done.stdout.splitlines())
    assert (timed["texts"], timed["tokens"]) == (2, 4 + 102)
    assert 0 < timed["p50_ms"] <= timed["p99_ms"]
    rows = np.load(tmp_path / "rows.npy")
    expected = SentenceTransformer(str(minilm_directory), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(rows / np.linalg.norm(rows, axis=1, keepdims=True), expected, atol=1e-5)


def test_cores_that_the_generator_took_do_not_count_against_workers(capsys: pytest.CaptureFixture[str]):
    def crew_turn(name: str, tokens: int, worker_s: float) -> Turn:
        return Turn(
            contender=name, load="1 text, 128 connections", seconds=1.0, texts=1, tokens=tokens, generator_cpu_s=0.2,
            cpu_s={"worker": worker_s, "frontend": 0.1},
        )  # fmt: skip

    single, double = crew_turn("1 of 1 thread", 1000, 1.0), crew_turn("2 of 1 thread", 1710, 1.9)
    assert unhindered_rate(single, 1, num_cores=2) == 1000
    assert unhindered_rate(double, 2, num_cores=2) == pytest.approx(1900)
    print_scaling(comparison(single, double), [Crew(1, 1), Crew(2, 1)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "2 of 1 thread" in line]
    assert [cell.strip() for cell in rows[0].split("|")][8:13] == ["1.71x", "1.90x", "1.80x", "2.00x", "95%"]


def test_progress_is_plain_lines_where_nobody_watches(capfd: pytest.CaptureFixture[str]):
    say("starting sie")
    say("starting vllm")
    say("")
    assert capfd.readouterr().err == "starting sie\nstarting vllm\n"


def test_every_stage_of_a_request_is_a_call_that_the_server_makes(
    minilm_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stages, "_BLOCKS", 1)
    monkeypatch.setattr(stages, "_CALLS", 1)
    timed = stages.time_stages("river stone", str(minilm_directory))
    assert {one.stage.side for one in timed} == {"frontend", "tensors", "worker", "model"}
    assert all(one.p50_us > 0 for one in timed)
