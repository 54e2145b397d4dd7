from __future__ import annotations

import logging

import pytest

from sie.supervisor.key_file import KeyFileWatch
from sie.values.api_key import ApiKey, KeyFileError, render_entry

A = render_entry(ApiKey(name="a", digest=bytes(32), scopes=("infer",)))
B = render_entry(ApiKey(name="b", digest=bytes([1]) * 32, scopes=("infer",)))


def names(watch):
    return [key.name for key in watch.message.keys]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(A)
    path.chmod(0o600)
    return path


def test_change_is_taken_over_when_it_has_stood_for_a_turn(path):
    watch = KeyFileWatch(str(path))
    assert not watch.poll()
    path.write_text(A + B)
    assert not watch.poll(), "it may still be written"
    assert watch.poll()
    assert names(watch) == ["a", "b"]
    assert not watch.poll()


@pytest.mark.parametrize("break_it", ["unlink", "garbage", "empty", "no keys", "mode"])
def test_whatever_is_wrong_keeps_the_old_keys_and_is_said_once(path, break_it, caplog):
    watch = KeyFileWatch(str(path))
    secret = watch.message.secret
    if break_it == "unlink":
        path.unlink()
    elif break_it == "mode":
        path.chmod(0o666)
    else:
        path.write_text({"garbage": "[[key", "empty": "", "no keys": "key = []"}[break_it])
    with caplog.at_level(logging.ERROR):
        changes = [watch.poll() for _ in range(6)]
    assert changes == [False, True, False, False, False, False]
    assert names(watch) == ["a"]
    assert str(path) in watch.message.problem
    assert len(caplog.records) == 1
    path.write_text(B)
    path.chmod(0o600)
    assert [watch.poll() for _ in range(3)] == [False, True, False]
    assert (names(watch), watch.message.problem, watch.message.secret) == (["b"], "", secret)


def test_file_that_goes_and_comes_back_ends_the_alarm(path):
    watch = KeyFileWatch(str(path))
    path.rename(path.with_suffix(".away"))
    assert [watch.poll() for _ in range(2)] == [False, True]
    path.with_suffix(".away").rename(path)
    assert [watch.poll() for _ in range(2)] == [False, True]
    assert watch.message.problem == ""


def test_first_reading_must_succeed(tmp_path, path, caplog):
    with pytest.raises(KeyFileError):
        KeyFileWatch(str(tmp_path / "none"))
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert names(KeyFileWatch(str(path))) == ["a"]
    assert "chmod o-r" in caplog.text
