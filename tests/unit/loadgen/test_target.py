"""Addresses of servers, good and bad."""

from __future__ import annotations

import re
import ssl

import pytest

from sie.loadgen.target import TargetError, parse_target, reason_of


@pytest.mark.parametrize("key", ["a\nb", "a b", "k\r", "\u20ac", "\udcff", "a\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str):
    with pytest.raises(TargetError, match="the API key has a character that no header can carry") as refused:
        parse_target("http://h:1", key=key)
    assert key not in str(refused.value)


@pytest.mark.parametrize("url", ["http://h:1/a b", "http://h:1/\u00e4", "http://h:1/\udcff"])
def test_a_path_that_no_request_can_carry_is_refused(url: str):
    with pytest.raises(TargetError, match="percent"):
        parse_target(url)


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
    "url",
    [
        "",
        "host:80",
        "ftp://host",
        "http://",
        "http://host:x",
        "http://host:99999",
        "http://h/?a=b",
        "http://[::1",
        "http://[x]",
    ],
)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(TargetError, match=re.escape(repr(url))):
        parse_target(url)


def test_unreadable_tls_files_are_refused_with_their_flag(tmp_path):
    other = tmp_path / "other.pem"
    other.write_text("not a certificate")
    with pytest.raises(TargetError, match=r"^--ca /nowhere/ca\.pem: No such file"):
        parse_target("https://host", ca_file="/nowhere/ca.pem")
    with pytest.raises(TargetError, match=r"^--ca .*other\.pem: the file holds no certificate"):
        parse_target("https://host", ca_file=str(other))
    with pytest.raises(TargetError, match=r"^--cert .*other\.pem: .*--cert-key names the file of the key"):
        parse_target("https://host", cert_file=str(other))


@pytest.mark.parametrize("url", ["http://host", "grpc://host:1", "unix:/run/sie.sock"])
def test_tls_files_are_refused_beside_an_address_without_tls(url: str):
    for field, flag in (("ca_file", "--ca"), ("cert_file", "--cert"), ("key_file", "--cert-key")):
        with pytest.raises(TargetError, match=rf"^{flag} .*https://.*{url.partition(':')[0]}:"):
            parse_target(url, **{field: "/nowhere/file.pem"})


def test_a_private_key_without_a_certificate_is_refused(tmp_path):
    (tmp_path / "key.pem").write_text("no PEM")
    with pytest.raises(TargetError, match=r"^--cert-key .*--cert"):
        parse_target("https://host", key_file=str(tmp_path / "key.pem"))


def test_nobody_listening_is_told_with_the_address():
    with pytest.raises(TargetError, match=r"unix:/nowhere\.sock"):
        parse_target("unix:/nowhere.sock").connect()


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".b", "\u00e4..b"])
def test_what_is_no_host_name_is_told(host: str):
    with pytest.raises(TargetError, match=r": not a host name$"):
        parse_target(f"http://{host}").connect()


def test_a_failed_handshake_says_what_may_be_wrong():
    wrong_version = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    assert reason_of(wrong_version).startswith("it answers without TLS")
    alert = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required (_ssl.c:2580)")
    assert reason_of(alert).endswith("give it with --cert and --cert-key")
    unknown = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate (_ssl.c:1006)")
    assert reason_of(unknown).startswith("self-signed certificate; --ca names")
    unknown.verify_code = 62
    assert reason_of(unknown) == "self-signed certificate; use one of the names in the server's certificate"
    assert reason_of(ssl.SSLError(1, "[SSL: OTHER] other (_ssl.c:1)")) == "other"
