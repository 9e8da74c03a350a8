"""`is_public` agrees with IANA's registries, and checks the IPv4 address that an IPv6 address contains."""

from __future__ import annotations

import ipaddress

import pytest

from perdure.network.special_networks import is_public

NOT_GLOBALLY_REACHABLE = [
    # IANA IPv4 Special-Purpose Address Registry: "Globally Reachable" is False, or N/A because the block is deprecated.
    "0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24",
    "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
    "255.255.255.255/32",
    # IANA IPv6 Special-Purpose Address Registry, selected by the same rule.
    "::1/128", "::/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:2::/48",
    "2001:10::/28", "2001:db8::/32", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10",
    # Not in those registries: multicast, and the deprecated site-local addresses (RFC 3879).
    "224.0.0.0/4", "ff00::/8", "fec0::/10",
]  # fmt: skip
PUBLIC_NEIGHBOURS = [
    "1.0.0.0", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0",
    "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0",
    "191.255.255.255", "192.0.1.0", "192.0.3.0", "192.88.98.255", "192.88.100.0", "192.167.255.255", "192.169.0.0",
    "198.17.255.255", "198.20.0.0", "198.51.99.255", "198.51.101.0", "203.0.112.255", "203.0.114.0", "223.255.255.255",
    "2000::", "2001:200::", "2001:db7:ffff::", "2001:db9::", "2003::", "3ffe:ffff::", "3fff:1000::",
    "2606:2800:220:1::1",
]  # fmt: skip


@pytest.mark.parametrize("block", NOT_GLOBALLY_REACHABLE)
def test_no_address_of_a_special_block_is_public(block: str) -> None:
    """Addresses of special blocks are not public. perdure has its own table: Python's differs between releases."""
    network = ipaddress.ip_network(block)
    middle = network[network.num_addresses // 2]
    assert not any(is_public(address) for address in (network[0], middle, network[-1]))


@pytest.mark.parametrize("address", PUBLIC_NEIGHBOURS)
def test_the_addresses_next_to_a_special_block_are_public(address: str) -> None:
    """Addresses next to a special block are public, because a block that is too large would exclude public sites."""
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "service",
    [
        "169.254.169.254",  # Amazon, Google, Azure, DigitalOcean and others: instance metadata
        "169.254.170.2",  # Amazon: credentials of containers
        "fd00:ec2::254",  # Amazon: instance metadata over IPv6
        "168.63.129.16",  # Azure: the platform's own service
        "100.100.100.200",  # Alibaba: instance metadata
        "192.0.0.192",  # Oracle: instance metadata
    ],
)
def test_no_service_of_a_cloud_platform_is_public(service: str) -> None:
    """Metadata services are not public, because they give credentials to any process on the machine."""
    assert not is_public(ipaddress.ip_address(service))


@pytest.mark.parametrize(
    ("outer", "public"),
    [
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        ("2002:808:808::", True),
        ("::ffff:10.0.0.1", False),
        ("::ffff:168.63.129.16", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
        ("::10.0.0.1", False),
        ("2001:0:808:808::", False),
    ],
)
def test_an_address_within_an_address_is_checked(outer: str, public: bool) -> None:
    """If an IPv6 address contains an IPv4 address, the IPv4 address is checked. Deprecated formats are never public."""
    assert is_public(ipaddress.ip_address(outer)) is public
