from __future__ import annotations

import pytest

from sie.config.sections import Access
from sie.supervisor.host_resources import StartError
from sie.supervisor.listen import exposure_warnings, resolve_host

OPEN, IN_CLEAR = "no api_keys", "no tls_cert"


@pytest.mark.parametrize(
    ("access", "parts"),
    [
        (Access(), [OPEN, IN_CLEAR]),
        (Access(api_keys="k"), [IN_CLEAR]),
        (Access(tls_cert="c", tls_key="k"), [OPEN]),
        (Access(tls_cert="c", tls_key="k", tls_client_ca="a"), []),
        (Access(tls_cert="c", tls_key="k", api_keys="k"), []),
        (Access(uds="/run/s"), []),
    ],
)
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.4", "2001:db8::1", "fe80::1%eth0"])
def test_exposed_addresses_are_named(address, access, parts):
    warnings = exposure_warnings(address, access)
    assert len(warnings) == len(parts)
    for warning, part in zip(warnings, parts, strict=True):
        assert part in warning
        assert address in warning


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_gives_no_exposure_warning(address):
    assert exposure_warnings(address, Access()) == []


def test_host_may_be_a_name():
    assert resolve_host("localhost") in ("127.0.0.1", "::1")
    assert resolve_host("127.0.0.1") == "127.0.0.1"
    assert resolve_host("::1") == "::1"


@pytest.mark.parametrize("host", ["no.such.host.invalid", "1.2.3.4:80", "a b", "x" * 300, "\u2024"])
def test_what_names_no_host_is_refused(host):
    with pytest.raises(StartError, match="host: "):
        resolve_host(host)
