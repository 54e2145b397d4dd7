"""Decides which addresses a model may have the server reach: public ones only. Pure."""

from __future__ import annotations

import ipaddress
from typing import Final

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_IPV4_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")


def is_public(text: str) -> bool:
    """Return whether an address belongs to the public internet, also the IPv4 address that an IPv6 one stands for.

    Loopback, private, link-local, shared, reserved and multicast addresses do not. text may have a zone, such as %eth0.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        inner = [address.sixtofour, *(address.teredo or ())]
        if address in _NAT64 or address in _IPV4_COMPATIBLE:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(one is not None and not is_public(str(one)) for one in inner):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
