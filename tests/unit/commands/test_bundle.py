"""What `sie doctor --bundle` writes, and what it must not."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path

import pytest

from sie.commands import bundle, cli
from sie.commands.bundle import mask, write_bundle
from sie.config.settings import Loaded, load_settings
from sie.config.sources import SettingsError
from sie.doctor.finding import Finding
from sie.values.api_key import make_key

FOUND = [Finding(area="disk", level="ok", message="room")]


def nobody_listens() -> Loaded:
    return load_settings(None, {}, {"port": "1", "nats": "nats://me:hush@queue:4222"})


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        return {name.removeprefix("sie-bundle/"): file.read().decode() for name, file in files.items() if file}


@pytest.fixture(autouse=True)
def _no_server_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIE_URL", raising=False)


def test_bundle_has_every_part_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key()
    monkeypatch.setenv("SIE_API_KEY", key)
    log = tmp_path / "log"
    log.write_text(f"old line\nrefused key {key} of Bearer abcdef-1\n")
    path = tmp_path / "bundle.tar.gz"
    names = write_bundle(str(path), nobody_listens, FOUND, log_file=str(log), status_s=0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    parts = read(path)
    assert list(parts) == names
    settings = json.loads(parts["settings.json"])
    assert "hush" not in parts["settings.json"]
    assert any(values.get("port", {}).get("value") == 1 for values in settings.values())
    assert "ringserve" in parts["versions.txt"]
    assert "room" in parts["findings.txt"]
    assert parts["log.txt"] == "old line\nrefused key sie_*** of Bearer ***\n"
    assert "127.0.0.1:1" in parts["status.jsonl"], "says why there is no status"
    assert key not in "".join(parts.values())


def test_bundle_says_why_a_server_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"/readyz": (503, b"not ready: not loaded: m (failed: https://me:hush@hub/m)"), "/metrics": (403, b"")}
    monkeypatch.setattr(bundle, "call", lambda _target, _method, path: answers.get(path, (200, b"{}")))
    path = tmp_path / "bundle.tar.gz"
    write_bundle(str(path), nobody_listens, FOUND, log_file="/dev/null", status_s=0)
    parts = read(path)
    assert parts["ready.txt"] == "status 503\nnot ready: not loaded: m (failed: https://***@hub/m)\n"
    assert parts["metrics.txt"] == "status 403\n"


def test_doctor_writes_it_beside_its_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bundle.tar.gz"
    cli.main(["doctor", "--only", "disk", "--port", "1", "--model", "a=stub:dense=8", "--bundle", str(path)])
    printed = capsys.readouterr()
    assert "read it before you send it" in printed.err
    assert {line.split()[1] for line in printed.out.splitlines() if line.startswith(("ok", "warn"))} == {"disk"}
    assert "disk" in read(path)["findings.txt"]


def test_settings_that_cannot_be_read_are_said_in_their_place(tmp_path: Path) -> None:
    def load() -> Loaded:
        raise SettingsError("sie.toml: no_such_key is unknown")

    path = tmp_path / "bundle.tar.gz"
    write_bundle(str(path), load, FOUND, log_file=str(tmp_path / "absent"), status_s=0)
    parts = read(path)
    assert "no_such_key" in parts["settings.json"]
    assert "cannot be read" in parts["log.txt"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="bundle: /"):
        write_bundle(str(tmp_path / "no" / "folder"), nobody_listens, FOUND, log_file="/dev/null", status_s=0)


def test_a_file_that_is_there_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "there").touch(mode=0o644)
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("there", "link"):
        with pytest.raises(SettingsError, match="File exists"):
            write_bundle(str(tmp_path / name), nobody_listens, FOUND, log_file="/dev/null", status_s=0)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("nats://user:word@host:4222 x", "nats://***@host:4222 x"),
        ("https://search/?q=1&key=abc", "https://search/?***"),
        ("authorization: Bearer abc.def", "authorization: Bearer ***"),
        ("x-api-key: abc", "x-api-key: ***"),
        ("nats://user:p@ss@host:4222/a@b x@y", "nats://***@b x@y"),
        ("nats://user:pa/ss?x#y@host", "nats://***@host"),
        ('{"authorization": "Basic dXNlcjpw", "b": 1}', '{"authorization": "***", "b": 1}'),
        ("authorization: Basic dXNlcjpw\nnext", "authorization: ***\nnext"),
        ('{"bearer_token":"abc","b":1}', '{"bearer_token":"***","b":1}'),
        ("api_key=abc secret_key=def other=1", "api_key=*** secret_key=*** other=1"),
        ("token: abc", "token: ***"),
        ("passwd=abc", "passwd=***"),
        ("HF_TOKEN=hf_abc", "HF_TOKEN=***"),
        ("password: 'a b, c; d' x", "password: '***' x"),
        (r'{"password": "a\"b c", "n": 2}', '{"password": "***", "n": 2}'),
        (r'{"message": "{\"password\": \"a b\", \"n\": 1}"}', r'{"message": "{\"password\": \"***\", \"n\": 1}"}'),
        ('password = "never closed, a b\nnext', 'password = "***\nnext'),
        ("[('authorization', 'Basic a b'), ('x', 'y')]", "[('authorization', '***'), ('x', 'y')]"),
        ("sie serve --api-key abc --port 1", "sie serve --api-key *** --port 1"),
        ('"tls_key": {"value": "x"}', '"tls_key": {"value": "x"}'),
        ("max_tokens=5 tokens_per_minute: 30 num_tokens=7", "max_tokens=5 tokens_per_minute: 30 num_tokens=7"),
        ("api_keys: /etc/sie/keys.toml", "api_keys: /etc/sie/keys.toml"),
        ("tokenizer=fast keyboard: us", "tokenizer=fast keyboard: us"),
        ("sie_oom_recoveries_attempted_total 3", "sie_oom_recoveries_attempted_total 3"),
        ("http://127.0.0.1:8080/v1/models", "http://127.0.0.1:8080/v1/models"),
    ],
)
def test_only_secrets_are_masked(text: str, masked: str) -> None:
    assert mask(text) == masked
