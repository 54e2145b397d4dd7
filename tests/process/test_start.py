"""A start that is refused gives one line with the setting, and exits with 78."""

from __future__ import annotations

import socket

import pytest

from tests.process.harness import EX_CONFIG, run_to_end, start_server

STUB = ("--model", "stub/a=stub:dense=16")


def test_a_second_server_on_the_port_is_refused():
    with start_server(*STUB) as first:
        status, said = run_to_end(*STUB, "--port", str(first.port))
        assert status == EX_CONFIG, said
        assert f"cannot listen on 127.0.0.1:{first.port}" in said


def test_a_port_that_a_stranger_listens_on_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        status, said = run_to_end(*STUB, "--port", str(port))
    assert status == EX_CONFIG, said
    assert f"cannot listen on 127.0.0.1:{port}" in said


def test_a_port_that_a_stranger_shares_is_refused():
    """SO_REUSEPORT would let us in, and half of the traffic would go to the stranger."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        status, said = run_to_end(*STUB, "--port", str(stranger.getsockname()[1]))
    assert status == EX_CONFIG, said
    assert "cannot listen" in said


@pytest.mark.parametrize(
    ("args", "env", "parts"),
    [
        (("--max-body-byte", "9"), {}, ["--max-body-bytes"]),
        (("--port", "70000"), {}, ["port", "70000"]),
        (("--devices", "gpu"), {}, ["devices", "gpu"]),
        (("--devices", "cuda:7"), {}, ["devices", "cuda:7"]),
        (("--watchdog-s", "0"), {}, ["--watchdog-s", "1 to 3600"]),
        ((), {"SIE_PORT": "http"}, ["SIE_PORT", "http"]),
        (("--failpoints", "worker.after_reply=kill"), {}, ["failpoints", "--failpoints", "test"]),
        (("--test", "--failpoints", "worker.afer_reply=kill"), {}, ["failpoints", "did you mean 'worker.after_reply'"]),
        (("--host", "203.0.113.1"), {}, ["host", "203.0.113.1"]),
        (("--request-segment-bytes", str(1 << 36)), {}, ["shared memory", "bytes"]),
    ],
)
def test_a_bad_setting_is_named(args, env, parts):
    status, said = run_to_end(*STUB, *args, env=env)
    assert status == EX_CONFIG, said
    assert all(part in said for part in parts), said
    assert "Traceback" not in said


def test_an_unknown_toml_key_names_file_key_and_nearest(tmp_path):
    file = tmp_path / "sie.toml"
    file.write_text("[limits]\nmax_itemz = 3\n")
    status, said = run_to_end(*STUB, "--config", str(file))
    assert status == EX_CONFIG, said
    assert all(part in said for part in (str(file), "max_itemz", "max_items")), said


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("m=/nowhere/at/all", ["/nowhere/at/all"]),
        ("m={empty}", ["'m'", "config.json"]),
        ("m=stub:dense=x", ["dense"]),
        ("m=stub:dens=16", ["dens"]),
        ("m=stub:dense=0", ["dense"]),
        ("m=stub:fail=oom", ["fail=oom", "refused without `test`"]),
        ("m=stub:kill_on=x", ["kill_on=x", "refused without `test`"]),
        ("=stub:", ["model"]),
    ],
)
@pytest.mark.parametrize("flag", ["--model", "--lazy-model"])
def test_a_bad_model_is_named(flag, spec, parts, tmp_path):
    spec = spec.format(empty=tmp_path)
    status, said = run_to_end(flag, spec)
    assert status == EX_CONFIG, said
    assert all(part in said for part in parts), said
    assert "Traceback" not in said


def test_a_model_named_twice_is_refused():
    status, said = run_to_end(*STUB, *STUB)
    assert status == EX_CONFIG, said
    assert "stub/a" in said
