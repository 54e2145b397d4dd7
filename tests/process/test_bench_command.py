"""`sie bench` against a running server: every dialect, both loops, and its error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sie.commands import cli
from sie.loadgen import DIALECTS
from tests.process.harness import WAIT_S, Server, free_port, start_server

SHORT = ("--seconds", "0.3", "--warmup", "0.1", "--distinct", "8", "--connections", "4")
NO_JSON_FORM = {"trtis", "kserve-grpc", "trtis-grpc"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "stub/a=stub:dense=16,score,extract", "--model", "stub/slow=stub:dense=16,latency_ms=50",
        "--grpc-port", str(free_port()),
    ) as running:  # fmt: skip
        yield running


class Done(NamedTuple):
    """What a command line came to."""

    status: int
    stdout: str
    stderr: str


Bench = Callable[..., Done]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return what runs `sie bench` in this process; an interpreter of its own for each call would take most of the time."""

    def run(*args: str, key: str = "") -> Done:
        monkeypatch.setenv("BENCH_API_KEY", key)
        return Done(cli.main(["bench", *args]), *capsys.readouterr())

    return run


def loads_of(bench: Bench, *args: str) -> list[dict[str, Any]]:
    done = bench(*SHORT, "--json", *args)
    assert done.status == 0, done.stderr
    return json.loads(done.stdout)["loads"]


@pytest.mark.parametrize("encoding", ["binary", "json"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_answered_and_checked(bench: Bench, server: Server, dialect: str, encoding: str):
    url = f"grpc://127.0.0.1:{server.grpc_port}" if dialect.endswith("grpc") else server.url
    args = ("--url", url, "--model", "stub/a", "--dialect", dialect, "--encoding", encoding, "--items", "3")
    if encoding == "json" and dialect in NO_JSON_FORM:
        assert "JSON" in bench(*args).stderr
        return
    (load,) = loads_of(bench, *args)
    assert load["errors"] == {}
    assert load["requests"] >= 4
    assert load["checked"] >= 4
    assert load["min_cosine"] > 0.999
    assert load["tokens_per_s"] > load["texts_per_s"] > load["requests_per_s"]


@pytest.mark.parametrize("dialect", ["kserve-grpc", "trtis-grpc"])
def test_a_refusal_over_grpc_is_told(bench: Bench, server: Server, dialect: str):
    done = bench("--url", f"grpc://127.0.0.1:{server.grpc_port}", "--model", "none", "--dialect", dialect)
    assert done.status == 1
    assert done.stderr.endswith(": Request for unknown model: 'none' is not found\n")
    assert "\N{REPLACEMENT CHARACTER}" not in done.stderr


def test_a_closed_loop_for_each_number_of_connections(bench: Bench, server: Server):
    loads = loads_of(bench, "--url", server.url, "--model", "stub/slow", "--connections", "1", "--within-ms", "20")
    assert [load["load"] for load in loads] == ["4 connections", "1 connection"]
    assert all(load["latency_ms"]["50"] >= 50 and load["good_per_s"] == 0 for load in loads)


def test_an_open_loop_has_the_rate_that_it_was_told(bench: Bench, server: Server):
    loads = loads_of(
        bench, "--url", server.url, "--model", "stub/a", "--rate", "100", "--rate", "200", "--arrivals", "constant"
    )
    assert [load["requests"] for load in loads] == [30, 60]


def test_the_table_is_one_line_a_load_and_tells_what_it_means(server: Server):
    command = [sys.executable, "-m", "sie", "bench", "--url", server.url, "--model", "stub/a", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert "p99.9 ms" in done.stdout
    assert "\n4 connections " in done.stdout
    assert "answers compared" in done.stdout
    assert "the generator used" in done.stdout


def test_a_key_and_a_unix_socket(bench: Bench, tmp_path: Path):
    key = subprocess.run(
        [sys.executable, "-m", "sie", "keys", "new", "bench", "--file", str(tmp_path / "keys.toml")],
        capture_output=True, text=True, timeout=WAIT_S, check=True,
    ).stdout.strip()  # fmt: skip
    uds = tmp_path / "s"
    serve = ("--model", "stub/a=stub:dense=8", "--uds", str(uds), "--api-keys", str(tmp_path / "keys.toml"))
    with start_server(*serve):
        args = ("--url", f"unix:{uds}", "--model", "stub/a", *SHORT)
        assert "status 401" in bench(*args, key="wrong").stderr
        done = bench(*args, key=key)
        assert done.status == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "none"), "MODEL_NOT_FOUND"),
        (("--model", "none", "--dialect", "trtis"), "none"),
        (("--model", "stub/a", "--texts", "12:x"), "--texts: '12:x'"),
        (("--model", "stub/a", "--dialect", "kserve-grpc"), "--dialect kserve-grpc needs --url grpc"),
        (("--model", "stub/a", "--url", "grpc://127.0.0.1:1"), "--dialect sie-encode needs --url http"),
        (("--model", "stub/a", "--url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1"),
        (("--model", "stub/a", "--url", "nowhere"), "'nowhere' is not"),
        (("--model", "stub/a", "--label", "x"), "takes no labels"),
    ],
)
def test_trouble_is_one_line_and_status_1(bench: Bench, server: Server, args: tuple[str, ...], said: str):
    done = bench("--url", server.url, *args)
    assert done.status == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
