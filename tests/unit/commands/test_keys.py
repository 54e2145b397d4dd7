from __future__ import annotations

import pytest
from click.testing import CliRunner

from sie.commands.cli import main
from sie.commands.keys import keys
from sie.ipc.exit_statuses import CONFIG_STATUS
from sie.values.api_key import SCOPES, digest_of, read_key_file


def test_key_is_printed_once_and_its_hash_is_kept(tmp_path):
    path = tmp_path / "keys.toml"
    done = CliRunner().invoke(
        keys,
        [
            "new",
            "ops",
            "--scope",
            "admin",
            "--scope",
            "metrics",
            "--file",
            str(path),
            "--max-concurrent",
            "3",
            "--tokens-per-minute",
            "5000",
        ],
    )
    assert done.exit_code == 0, done.output
    text = done.stdout.strip()
    (key,) = read_key_file(str(path)).keys
    assert (key.name, key.digest, key.scopes) == ("ops", digest_of(text), ("admin", "metrics"))
    assert (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent) == (None, 5000, 3)
    assert text not in path.read_text()
    assert text not in done.stderr


def test_key_can_have_every_scope_there_is():
    (scope,) = (param for param in keys.commands["new"].params if param.name == "scopes")
    assert tuple(scope.type.choices) == SCOPES


def test_without_a_file_the_entry_is_printed_beside_the_key():
    done = CliRunner().invoke(keys, ["new", "app"])
    assert f'hash = "sha256:{digest_of(done.stdout.strip()).hex()}"' in done.stderr
    assert 'scopes = ["infer"]' in done.stderr


@pytest.mark.parametrize("name", ["a b", "", "ä", "x" * 65, ".a", "a\n"])
def test_bad_name_is_refused(name, capsys):
    assert main(["keys", "new", name]) == CONFIG_STATUS
    assert "NAME" in capsys.readouterr().err


def test_second_key_of_a_name_is_refused(tmp_path, capsys):
    path = str(tmp_path / "keys.toml")
    assert main(["keys", "new", "a", "--file", path]) == 0
    before = capsys.readouterr().out.strip()
    assert main(["keys", "new", "a", "--file", path]) == CONFIG_STATUS
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"sie: {path}: has a key called 'a' already; choose another name\n"
    (key,) = read_key_file(path).keys
    assert key.digest == digest_of(before)
