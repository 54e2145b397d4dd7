"""`sie bench` as a user calls it, against a running server: every dialect, both loops, and what it says of trouble."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sie.loadgen import DIALECTS
from tests.process.harness import Server, free_port, start_server

SHORT = ("--seconds", "0.3", "--warmup", "0.1", "--distinct", "8", "--connections", "4")
NO_JSON_FORM = {"trtis", "kserve-grpc"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(
        "--model", "stub/a=stub:dense=16,score,extract", "--model", "stub/slow=stub:dense=16,latency_ms=50",
        "--grpc-port", str(free_port()),
    ) as running:  # fmt: skip
        yield running


def bench(*args: str, key: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sie", "bench", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "BENCH_API_KEY": key}
    )


def loads_of(*args: str) -> list[dict[str, Any]]:
    done = bench(*SHORT, "--json", *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["loads"]


@pytest.mark.parametrize("encoding", ["binary", "json"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_answered_and_checked(server: Server, dialect: str, encoding: str):
    url = f"grpc://127.0.0.1:{server.grpc_port}" if dialect == "kserve-grpc" else server.url
    args = ("--url", url, "--model", "stub/a", "--dialect", dialect, "--encoding", encoding, "--items", "3")
    if encoding == "json" and dialect in NO_JSON_FORM:
        assert "JSON" in bench(*args).stderr
        return
    (load,) = loads_of(*args)
    assert load["errors"] == {}
    assert load["requests"] > 20
    assert load["checked"] >= 16
    assert load["min_cosine"] > 0.999
    assert load["tokens_per_s"] > load["texts_per_s"] > load["requests_per_s"]


def test_a_closed_loop_for_each_number_of_connections(server: Server):
    loads = loads_of("--url", server.url, "--model", "stub/slow", "--connections", "1", "--within-ms", "20")
    assert [load["load"] for load in loads] == ["4 connections", "1 connection"]
    assert all(load["latency_ms"]["50"] >= 50 and load["good_per_s"] == 0 for load in loads)


def test_an_open_loop_has_the_rate_that_it_was_told(server: Server):
    loads = loads_of(
        "--url", server.url, "--model", "stub/a", "--rate", "100", "--rate", "200", "--arrivals", "constant"
    )
    assert [load["requests"] for load in loads] == [30, 60]


def test_the_table_is_one_line_a_load_and_tells_what_it_means(server: Server):
    done = bench("--url", server.url, "--model", "stub/a", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "p99.9 ms" in done.stdout
    assert "\n4 connections " in done.stdout
    assert "answers compared" in done.stdout
    assert "the generator used" in done.stdout


def test_a_key_and_a_unix_socket(tmp_path: Path):
    key = subprocess.run(
        [sys.executable, "-m", "sie", "keys", "new", "bench", "--file", str(tmp_path / "keys.toml")],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout.strip()  # fmt: skip
    uds = tmp_path / "s"
    serve = ("--model", "stub/a=stub:dense=8", "--uds", str(uds), "--api-keys", str(tmp_path / "keys.toml"))
    with start_server(*serve):
        args = ("--url", f"unix:{uds}", "--model", "stub/a", *SHORT)
        assert "status 401" in bench(*args, key="wrong").stderr
        done = bench(*args, key=key)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "none"), "MODEL_NOT_FOUND"),
        (("--model", "stub/a", "--texts", "12:x"), "'12:x'"),
        (("--model", "stub/a", "--url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1"),
        (("--model", "stub/a", "--url", "nowhere"), "'nowhere' is not"),
        (("--model", "stub/a", "--label", "x"), "takes no labels"),
    ],
)
def test_trouble_is_one_line_and_status_1(server: Server, args: tuple[str, ...], said: str):
    done = bench("--url", server.url, *args)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
