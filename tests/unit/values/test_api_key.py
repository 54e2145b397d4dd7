from __future__ import annotations

import os
import re

import pytest

from sie.values.api_key import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    ApiKey,
    KeyFileError,
    add_entry,
    digest_of,
    make_key,
    parse_keys,
    read_key_file,
    render_entry,
)

HASH = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32


def entry(name="a", hash_=HASH, scopes='["infer"]', more=""):
    return f'[[key]]\nname = "{name}"\nhash = "{hash_}"\nscopes = {scopes}\n{more}\n'


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_made_keys_are_long_and_never_the_same():
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"sie_[A-Za-z0-9_-]{43}", key) for key in keys)


def test_entry_is_read_as_it_was_written():
    text = make_key()
    key = ApiKey(
        name="ingest", digest=digest_of(text), scopes=("infer", "admin"), requests_per_minute=60,
        tokens_per_minute=5000, max_concurrent=2, expires_s=1_800_000_000, weight=3,
    )  # fmt: skip
    assert parse_keys(render_entry(key), "f") == (key,)
    assert text not in render_entry(key)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no key"),
        ("key = []", "has no key"),
        ("nope", "TOML"),
        ("keys = 1\n" + entry(), "keys"),
        (entry(more="expires = 3"), "$.key[0].expires"),
        (entry(more="expires = 2027-01-31"), "$.key[0].expires"),
        (entry(more="expires = 2027-01-31T12:00:00"), "$.key[0].expires"),
        (entry(more="expire = 2027-01-31T12:00:00Z"), "expire"),
        (entry(name="a b"), "$.key[0].name"),
        (entry(name=""), "$.key[0].name"),
        (entry(hash_="sie_plain-text-key"), "$.key[0].hash"),
        (entry(hash_="sha256:AB"), "$.key[0].hash"),
        (entry(scopes="[]"), "$.key[0].scopes"),
        (entry(scopes='["root"]'), "$.key[0].scopes"),
        (entry(more="requests_per_minute = 0"), "$.key[0].requests_per_minute"),
        (entry(more="requests_per_minute = 9223372036854775808"), "$.key[0].requests_per_minute"),
        (entry(more="max_concurrent = -1"), "$.key[0].max_concurrent"),
        (entry(more="max_concurrent = 1.5"), "$.key[0].max_concurrent"),
        (entry() + entry(hash_=OTHER), "name 'a' appears twice"),
        (entry() + entry(name="b"), "$.key[1].hash"),
    ],
)
def test_wrong_file_is_refused_by_field_and_shows_no_secret(text, fault):
    with pytest.raises(KeyFileError) as caught:
        parse_keys(text, "keys.toml")
    message = str(caught.value)
    assert message.startswith("keys.toml: ")
    assert fault in message
    assert "plain-text" not in message


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_may_write_is_refused(tmp_path, mode):
    with pytest.raises(KeyFileError, match="write"):
        read_key_file(write(tmp_path / "keys.toml", entry(), mode))


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o640, False), (0o400, False), (0o644, True)])
def test_file_that_everybody_may_read_is_said_to_be(tmp_path, mode, is_open):
    found = read_key_file(write(tmp_path / "keys.toml", entry(), mode))
    assert (len(found.keys), found.is_world_readable) == (1, is_open)


def test_what_is_no_small_text_file_is_refused(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    large = tmp_path / "large"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, fault in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "directory"),
        (pipe, "regular"),
        (binary, "UTF-8"),
        (large, "MiB"),
    ):
        with pytest.raises(KeyFileError, match=fault):
            read_key_file(str(path))


def test_entries_are_added_to_a_file_that_stays_whole(tmp_path):
    path = tmp_path / "keys.toml"
    add_entry(str(path), ApiKey(name="a", digest=bytes(32), scopes=("infer",)))
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # an editor that writes no last line end
    add_entry(str(path), ApiKey(name="b", digest=bytes([1]) * 32, scopes=("admin",)))
    assert [key.name for key in read_key_file(str(path)).keys] == ["a", "b"]
    before = path.read_text()
    with pytest.raises(KeyFileError, match="has a key called 'b' already"):
        add_entry(str(path), ApiKey(name="b", digest=bytes([2]) * 32, scopes=("admin",)))
    assert path.read_text() == before


def test_an_entry_is_added_to_a_file_of_comments(tmp_path):
    path = write(tmp_path / "keys.toml", "# keys of this host\n", 0o600)
    with pytest.raises(KeyFileError, match="has no key; `sie keys new` makes one"):
        read_key_file(path)
    add_entry(path, ApiKey(name="a", digest=bytes(32), scopes=("infer",)))
    assert [key.name for key in read_key_file(path).keys] == ["a"]


def test_a_file_with_the_most_keys_takes_no_more(tmp_path):
    text = "".join(entry(f"k{n}", f"sha256:{n:064x}") for n in range(MAX_KEYS))
    path = write(tmp_path / "keys.toml", text, 0o600)
    with pytest.raises(KeyFileError, match=str(MAX_KEYS)):
        add_entry(path, ApiKey(name="more", digest=b"m" * 32, scopes=("infer",)))
    assert len(read_key_file(path).keys) == MAX_KEYS


def test_a_full_disk_leaves_the_keys_that_were_there(tmp_path, monkeypatch):
    path = str(tmp_path / "keys.toml")
    add_entry(path, ApiKey(name="a", digest=bytes(32), scopes=("infer",)))
    write_all = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, data: write_all(fd, data[:20])
    )  # as write(2) does on the last free bytes
    with pytest.raises(KeyFileError, match="cannot be written: No space left on device"):
        add_entry(path, ApiKey(name="b", digest=bytes([1]) * 32, scopes=("infer",)))
    assert [key.name for key in read_key_file(path).keys] == ["a"]


def test_nothing_is_added_to_a_file_of_something_else(tmp_path):
    path = tmp_path / "sie.toml"
    path.write_text("[server]\nport = 1\n")
    with pytest.raises(KeyFileError):
        add_entry(str(path), ApiKey(name="a", digest=bytes(32), scopes=("infer",)))
    assert path.read_text() == "[server]\nport = 1\n"
