"""Addresses of servers, good and bad."""

from __future__ import annotations

import pytest

from sie.loadgen.target import TargetError, parse_target


def test_addresses():
    target = parse_target("http://[::1]:8080/gateway/", key="k")
    assert (target.host, target.port, target.path, target.authority, target.key) == (
        "::1",
        8080,
        "/gateway",
        "[::1]:8080",
        "k",
    )
    assert parse_target("https://host").port == 443
    assert parse_target("https://host").tls is not None
    assert parse_target("unix:/run/x.sock").uds == "/run/x.sock"


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://host:x", "http://host:99999", "http://h/?a=b"]
)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(TargetError):
        parse_target(url)


def test_certificates_that_are_not_there_are_refused():
    with pytest.raises(TargetError, match="TLS"):
        parse_target("https://host", ca_file="/nowhere/ca.pem")


def test_nobody_listening_is_told_with_the_address():
    with pytest.raises(TargetError, match=r"unix:/nowhere\.sock"):
        parse_target("unix:/nowhere.sock").connect()
