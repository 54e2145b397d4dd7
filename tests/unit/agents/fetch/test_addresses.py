"""Which addresses a model may have the server reach."""

from __future__ import annotations

import pytest

from sie.agents.fetch.addresses import is_public


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "2002:101:101::1"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::127.0.0.1",
        "2001:0:7f00:1::",
    ],
)  # fmt: skip
def test_addresses_of_this_host_and_its_networks_are_not_public(address: str) -> None:
    assert not is_public(address)
