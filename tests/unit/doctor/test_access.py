"""The findings about access to a server."""

from __future__ import annotations

import time

import pytest

from sie.doctor.access import check_access
from sie.values.api_key import ApiKey, add_entry, render_entry
from tests.unit.doctor.test_host import bad, settings

KEY = render_entry(ApiKey(name="a", digest=bytes(32), scopes=("infer",)))


def test_loopback_needs_nothing():
    assert bad(check_access(settings())) == []


def test_exposed_address_is_a_warning_for_each_missing_protection():
    found = bad(check_access(settings(server={"host": "0.0.0.0"})))
    assert [level for level, _ in found] == ["warn", "warn"]
    assert bad(check_access(settings(server={"host": "0.0.0.0"}, access={"uds": "/run/sie/s"}))) == []


@pytest.mark.parametrize(("mode", "levels"), [(0o600, []), (0o644, ["warn"]), (0o666, ["error"])])
def test_file_of_keys_is_read(tmp_path, mode, levels):
    path = tmp_path / "keys.toml"
    path.write_text(KEY)
    path.chmod(mode)
    assert [level for level, _ in bad(check_access(settings(access={"api_keys": str(path)})))] == levels


def test_keys_that_expire_soon_or_have_are_named(tmp_path):
    path = tmp_path / "keys.toml"
    for number, (name, in_days) in enumerate({"old": -1, "soon": 6, "late": 8}.items()):
        expires_s = int(time.time()) + in_days * 86400
        add_entry(str(path), ApiKey(name=name, digest=bytes([number]) * 32, scopes=("infer",), expires_s=expires_s))
    ((level, message),) = bad(check_access(settings(access={"api_keys": str(path)})))
    assert level == "warn"
    assert [name in message for name in ("old (", "soon (", "late (")] == [True, True, False]


@pytest.mark.parametrize(
    "access", [{"api_keys": "/nowhere/keys.toml"}, {"tls_cert": "/nowhere/c.pem", "tls_key": "/nowhere/k.pem"}]
)
def test_what_would_stop_the_start_is_an_error(access):
    found = bad(check_access(settings(access=access)))
    assert [level for level, _ in found] == ["error"]
    assert "/nowhere/" in found[0][1]


def test_malformed_host_is_an_error():
    assert [level for level, _ in bad(check_access(settings(server={"host": "no.such.host.invalid"})))] == ["error"]
