"""The checks before a start: files of MCP servers, connections to NATS and collectors of traces that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie.commands import cli
from sie.config.settings import load_settings
from sie.ipc.exit_statuses import CONFIG_STATUS
from sie.supervisor.host_resources import StartError
from sie.supervisor.start_checks import check_agents, check_start


def check(**given: str) -> None:
    check_agents(load_settings(None, {}, given).settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "mcp_config"),
        ('{"servers": [{"name": "a b", "source": {"type": "Http", "url": "http://a/"}}]}', "name"),
        ('{"servers": [{"name": "a", "source": {"type": "Other"}}]}', "Other"),
        ('{"servers": [{"name": "a", "url": "x", "source": {"type": "Http", "url": "http://a/"}}]}', "url"),
        ('{"servers": [{"name": "a", "source": {"type": "Http", "url": "ftp://a/"}}]}', "url"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(StartError, match=words) as caught:
        check(mcp_config=str(path))
    assert str(path) in str(caught.value)
    with pytest.raises(StartError, match="No such file"):
        check(mcp_config=str(tmp_path / "none"))


def check_nats(nats: str, **files: str) -> None:
    check_start(load_settings(None, {}, {"nats": nats, **files}), is_gateway=True)


@pytest.mark.parametrize(
    "nats",
    ["nats://h:4222", "h", "h:4222", "tls://h", "nats://u:p@h:4222, nats://[::1]:4222", "ws://h:80", "wss://h/nats"],
)
def test_addresses_of_nats_are_taken(nats: str) -> None:
    check_nats(nats)


@pytest.mark.parametrize(
    "nats",
    [
        "nats://a:b", "nats://h:99999", "nats://", ",", "nats://h,", "nats://[::1", "http://h", "nats://u:secret@h:x",
        "nats://h,ws://h", "nats://u:secret@",
    ],
)  # fmt: skip
def test_what_is_no_address_of_nats_is_refused_without_its_password(nats: str) -> None:
    with pytest.raises(StartError, match=r"^nats: .*nats://HOST:PORT") as refused:
        check_nats(nats)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("setting", ["nats_tls_ca", "nats_credentials"])
def test_files_for_nats_that_cannot_be_used_are_named(tmp_path: Path, setting: str) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes(b"SUA\xff")
    for path, reason in (
        (tmp_path / "none", "cannot be read: No such file"), (tmp_path, "cannot be read: Is a dir"), (odd, "holds no"),
    ):  # fmt: skip
        with pytest.raises(StartError, match=f"^{setting}: {path}: {reason}"):
            check_nats("nats://h", **{setting: str(path)})


def test_a_seed_and_credentials_for_nats_are_taken(tmp_path: Path) -> None:
    seed = tmp_path / "a.nk"
    seed.write_text("SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y\n")
    check_nats("nats://h", nats_credentials=str(seed))
    creds = tmp_path / "a.creds"
    creds.write_text(
        "-----BEGIN NATS USER JWT-----\ney\n------END NATS USER JWT------\n-----BEGIN USER NKEY SEED-----\nSU\n"
    )
    check_nats("nats://h", nats_credentials=str(creds))


def test_search_without_an_address_or_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^search_url: .*--search-url"):
        check(enable_search="true")
    odd = tmp_path / "odd"
    odd.write_bytes(b"\xff")
    for path, reason in ((tmp_path / "none", "cannot be read: No such file"), (odd, "is not UTF-8 text")):
        given = {"agent": "true", "agent_dir": str(tmp_path), "search_url": "http://h/", "search_key_file": str(path)}
        with pytest.raises(StartError, match=f"^search_key_file: {path}: {reason}"):
            check(**given)
        check(**{**given, "agent": "false"})
    odd.write_text("key\n")
    check(**given)
    check(agent="true", agent_dir=str(tmp_path))


def test_a_chat_template_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(StartError, match=f"^chat_template: {path}: cannot be read: {reason}"):
            check_start(load_settings(None, {}, {"chat_template": str(path)}), is_gateway=False)


def test_a_service_of_agents_names_a_key_of_search_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--agent-socket", str(tmp_path / "s"), "--agent", "--search-url", "http://h/")
    assert cli.main(["agents", *flags, "--search-key-file", str(tmp_path / "none")]) == CONFIG_STATUS
    assert capsys.readouterr().err.startswith(f"sie: search_key_file: {tmp_path}/none: cannot be read")


def check_tracing(**given: str) -> None:
    check_start(load_settings(None, {}, {"tracing": True, **given}), is_gateway=False)


def test_a_collector_that_the_protocol_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(StartError, match="'http/json'"):
        check_tracing()
    check_tracing(otlp_protocol="http", otlp_endpoint="https://c/otlp")
    with pytest.raises(StartError, match="--otlp-protocol http"):
        check_tracing(otlp_protocol="grpc", otlp_endpoint="https://c/otlp")
    check_tracing(otlp_protocol="grpc", otlp_endpoint="https://c/")


@pytest.mark.parametrize(("place", "reason"), [("file", "File exists"), ("file/agents", "Not a directory")])
def test_a_directory_of_sessions_that_cannot_be_made_is_named(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / place)
    with pytest.raises(StartError, match=f"^agent_dir: {path}: .*{reason}"):
        check_start(load_settings(None, {}, {"agent": True, "agent_dir": path}), is_gateway=False)
    check_start(load_settings(None, {}, {"agent_dir": path}), is_gateway=False)
