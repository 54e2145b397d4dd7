from __future__ import annotations

import time

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


@pytest.mark.parametrize(
    ("text", "in_s"),
    [
        ("12h", 12 * 3600),
        ("30d", 30 * 86400),
        ("2w", 14 * 86400),
        ("2100-01-31", None),
        ("2100-01-31T02:00:00+02:00", None),
    ],
)
def test_a_key_can_expire_after_some_time_or_at_one(tmp_path, capsys, text, in_s):
    path = str(tmp_path / "keys.toml")
    earliest_s = int(time.time()) + (in_s or 0)
    assert main(["keys", "new", "a", "--expires", text, "--file", path]) == 0
    (key,) = read_key_file(path).keys
    if in_s is None:
        assert key.shown_expiry == "2100-01-31T00:00:00Z"
    else:
        assert earliest_s <= key.expires_s <= int(time.time()) + in_s
    assert main(["keys", "list", "--file", path]) == 0
    assert key.shown_expiry in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [("30", "is not a time"), ("999999999w", "is not a time"), ("2001-01-01", "is past"), ("0d", "is past")],
)
def test_a_wrong_expiry_is_refused(capsys, text, reason):
    assert main(["keys", "new", "a", "--expires", text]) == 2
    captured = capsys.readouterr()
    assert (captured.out, f"{text!r} {reason}" in captured.err, "--expires" in captured.err) == ("", True, True)


def test_list_shows_names_scopes_limits_and_expiry(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    assert main(["keys", "new", "ops", "--scope", "admin", "--scope", "metrics", "--file", str(path)]) == 0
    assert main(["keys", "new", "guest", "--max-concurrent", "4", "--tokens-per-minute", "9", "--file", str(path)]) == 0
    path.write_text(path.read_text() + "expires = 2001-02-03T04:05:06Z\n")
    capsys.readouterr()
    assert main(["keys", "list", "--file", str(path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", "SCOPES", "LIMITS", "EXPIRES"],
        ["ops", "admin,metrics", "-", "never"],
        ["guest", "infer", "tokens_per_minute=9", "max_concurrent=4", "2001-02-03T04:05:06Z", "(expired)"],
    ]
    assert main(["keys", "list", "--file", str(tmp_path / "none")]) == CONFIG_STATUS
    assert "cannot be read" in capsys.readouterr().err
