"""The checks before a start: a file of MCP servers that cannot be used, and a connection to NATS that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie.config.settings import load_settings
from sie.supervisor.host_resources import StartError
from sie.supervisor.start_checks import check_mcp, check_start


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
        check_mcp(str(path))
    assert str(path) in str(caught.value)
    with pytest.raises(StartError, match="No such file"):
        check_mcp(str(tmp_path / "none"))


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
