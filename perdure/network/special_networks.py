"""Decides which addresses are public, according to tables in this module.

`ipaddress.is_global` is not used, because its result differs between Python releases. The tables list every block of
IANA's special-purpose registries (RFC 6890) that is not globally reachable. They also list addresses in public blocks
at which clouds offer metadata and platform services. A test compares the tables with the registries.
"""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_REFUSED_V4 = tuple(
    ipaddress.IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # "this network" (RFC 791)
        "10.0.0.0/8",  # private (RFC 1918)
        "100.64.0.0/10",  # shared by carriers (RFC 6598)
        "127.0.0.0/8",  # loopback (RFC 1122)
        "168.63.129.16/32",  # Azure's platform service, on every virtual machine
        "169.254.0.0/16",  # link-local (RFC 3927), clouds' metadata services included
        "172.16.0.0/12",  # private (RFC 1918)
        "192.0.0.0/24",  # IETF protocol assignments (RFC 6890), Oracle's metadata service included
        "192.0.2.0/24",  # documentation (RFC 5737)
        "192.31.196.0/24",  # AS112 (RFC 7535)
        "192.52.193.0/24",  # automatic multicast tunnels (RFC 7450)
        "192.88.99.0/24",  # relays to IPv6, deprecated (RFC 7526)
        "192.168.0.0/16",  # private (RFC 1918)
        "192.175.48.0/24",  # AS112 (RFC 7534)
        "198.18.0.0/15",  # benchmarks (RFC 2544)
        "198.51.100.0/24",  # documentation (RFC 5737)
        "203.0.113.0/24",  # documentation (RFC 5737)
        "224.0.0.0/4",  # multicast (RFC 5771)
        "240.0.0.0/4",  # reserved (RFC 1112), broadcast included
    )
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
"""Global unicast (RFC 4291). An IPv6 address outside this block is public only if it contains a public IPv4 address."""

_REFUSED_V6 = tuple(
    ipaddress.IPv6Network(block)
    for block in (
        "2001::/23",  # IETF protocol assignments (RFC 2928): benchmarks, ORCHID, Teredo
        "2001:db8::/32",  # documentation (RFC 3849)
        "2620:4f:8000::/48",  # AS112 (RFC 7534)
        "3fff::/20",  # documentation (RFC 9637)
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Whether `address`, or the IPv4 address that it contains, belongs to the public Internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in block for block in _REFUSED_V4)
    inner = _inner(address)
    if inner is not None:
        return is_public(inner)
    return address in _GLOBAL_V6 and not any(address in block for block in _REFUSED_V6)


def reached(address: Address) -> Address:
    """The address that traffic to `address` reaches: the IPv4 address that an IPv6 address contains, else `address`."""
    return (_inner(address) if isinstance(address, ipaddress.IPv6Address) else None) or address


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that traffic to `address` reaches; `None` if `address` contains no IPv4 address.

    An IPv6 address contains an IPv4 address if it is mapped, translated (NAT64) or tunnelled (6to4).
    """
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour
