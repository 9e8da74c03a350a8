"""URLs with a non-public address are refused in every spelling, before and after name resolution."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from perdure.errors import SettingsError
from perdure.network.egress import EgressRefused, check, resolve
from perdure.network.reply_urls import Reachable
from perdure.settings import Settings

PUBLIC_ONLY = Reachable()

SPELLINGS = [
    "http://127.0.0.1/",
    "http://127.0.0.1:6379/",
    "http://127.1/",
    "http://2130706433/",
    "http://0177.0.0.1/",
    "http://017700000001/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://127.0.0.1./",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://a.localhost/",
    "http://redis.internal/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://printer.local/",
    "http://router.home.arpa/",
    "http://localhost.localdomain/",
    "http://[::1]/",
    "http://[::]/",
    "http://[0:0:0:0:0:0:0:1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[fe80::1%25eth0]/",
    "http://[fd00:ec2::254]/",
    "http://0.0.0.0/",
    "http://0/",
    "http://10.0.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://168.63.129.16/",
    "http://100.100.100.200/",
    "http://255.255.255.255/",
    "http://public.example@127.0.0.1/",
    "http://public.example:80@2130706433/",
    "http://127.0.0.1\\@public.example/",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://127\u30020\u30020\u30021/",
    "http://\u2460\u2461\u2466.0.0.1/",
    "http://\uff4c\uff4f\uff43\uff41\uff4c\uff48\uff4f\uff53\uff54/",
    "http://%31%32%37.0.0.1/",
    "http://exa mple/",
    "http://public.example:0/",
    "http://public.example:65536/",
    "ftp://public.example/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/",
]
PUBLIC = [
    "https://public.example/hook?for=ana",
    "http://public.example:8080/",
    "https://user:password@public.example/",
    "https://93.184.216.34/",
    "https://[2606:2800:220:1::1]/",
    "https://xn--bcher-kva.example/",
    "https://b\xfccher.example/",
    "https://a_b.example./",
    "https://local.example/",
    "https://notlocalhost/",
]


@pytest.mark.parametrize("url", SPELLINGS)
def test_a_special_address_in_the_url_is_refused(url: str) -> None:
    """A URL is refused without a DNS look-up if it is not a valid HTTP URL or names a non-public address or host."""
    with pytest.raises(EgressRefused):
        check(url, PUBLIC_ONLY)


@pytest.mark.parametrize("url", PUBLIC)
def test_a_url_that_may_be_public_is_accepted(url: str) -> None:
    """`check` accepts a public address, and a host name that is not local. It does not resolve the name."""
    check(url, PUBLIC_ONLY)


ALLOWED: list[tuple[str, str]] = [
    ("127.0.0.0/8", "http://127.0.0.1:8000/hook"),
    ("127.0.0.0/8", "http://[::ffff:127.0.0.1]/"),
    ("127.0.0.0/8", "http://localhost/"),
    ("10.1.2.3", "http://10.1.2.3/"),
    ("fd00::/8", "http://[fd00::7]/"),
    ("http://hooks.internal", "http://hooks.internal/any?thing"),
    ("http://hooks.internal", "http://HOOKS.internal./"),
    ("http://Hooks.internal./x", "http://hooks.internal/x"),
    ("http://*.internal/perdure/*", "http://a.b.internal/perdure/x"),
    ("http://hooks.internal:*/", "http://hooks.internal:9999/"),
    ("https://hooks.internal:8443/*", "https://hooks.internal:8443/x"),
    ("http://127.0.0.1:8000/hooks/*", "http://127.0.0.1:8000/hooks/1"),
    ("http://[::1]:8000", "http://[::1]:8000/"),
]
NOT_ALLOWED: list[tuple[str, str]] = [
    ("127.0.0.0/8", "http://10.0.0.1/"),
    ("10.1.2.3", "http://10.1.2.4/"),
    ("http://hooks.internal", "http://hooks.internal:8080/"),
    ("http://hooks.internal", "https://hooks.internal/"),
    ("http://hooks.internal", "http://hooks.internal.localhost/"),
    ("http://hooks.internal*", "http://hooks.internal@127.0.0.1/"),
    ("http://*.internal/*", "http://127.0.0.1/x.internal/"),
    ("http://*.internal/*", "http://127.0.0.1#.internal/"),
    ("http://*.internal/perdure/*", "http://a.internal/perdure/../admin"),
    ("http://*.internal/perdure/*", "http://a.internal/perdure/%2e%2e/admin"),
    ("http://*.internal/perdure/*", "http://a.internal/perdure/%252e%252e/admin"),
    ("http://*.internal/perdure/*", "http://a.internal/perdure/%2525252e./admin"),
    ("http://127.0.0.1:8000/hooks/*", "http://127.0.0.1:8000/other"),
    ("http://127.0.0.1:8000", "http://2130706433:8000/"),
]


@pytest.mark.parametrize(("entry", "url"), ALLOWED)
def test_the_operator_may_allow_a_network_or_a_glob(entry: str, url: str) -> None:
    """A network or a glob in `PERDURE_REPLY_URLS` allows URLs that are not public."""
    check(url, Reachable.parse([entry]))


@pytest.mark.parametrize(("entry", "url"), NOT_ALLOWED)
def test_a_glob_matches_part_by_part(entry: str, url: str) -> None:
    """Each part of a URL must match the same part of a glob. A path or a user name cannot match the host's pattern."""
    with pytest.raises(EgressRefused):
        check(url, Reachable.parse([entry]))


@pytest.mark.parametrize(
    "entry", ["hooks.internal", "10.0.0.1/8", "ftp://a/", "http://", "http://a@b/", "http://a:0/", "http://a:b/", "//a"]
)
def test_a_malformed_entry_stops_the_start(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A malformed entry in `PERDURE_REPLY_URLS` is refused, because it would allow no URL or too many URLs."""
    monkeypatch.setenv("PERDURE_REPLY_URLS", f"10.0.0.0/8,{entry}")
    with pytest.raises(SettingsError, match=r"PERDURE_REPLY_URLS: the entry .* cannot be used: .*accepted: a network"):
        Settings.load(_env_file=None)


def _resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    found = [(socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, 80)) for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["::1"], ["169.254.169.254"], ["::ffff:10.0.0.1"], ["93.184.216.34", "10.0.0.1"], []],
)
def test_a_name_with_a_special_address_is_refused(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """A host name is refused if one of its addresses is not public, or if it has no address."""
    _resolves_to(monkeypatch, *addresses)
    url = check("http://public.example/", PUBLIC_ONLY)
    with pytest.raises(EgressRefused):
        asyncio.run(resolve(url, PUBLIC_ONLY))


@pytest.mark.parametrize("entry", ["10.0.0.0/8", "http://public.example"])
def test_an_allowed_private_address_is_accepted(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """A private address is accepted if an entry allows its network or the URL's host."""
    _resolves_to(monkeypatch, "10.0.0.1", "10.0.0.1", "93.184.216.34")
    reachable = Reachable.parse([entry])
    found: Any = asyncio.run(resolve(check("http://public.example/", reachable), reachable))
    assert [str(each) for each in found] == ["10.0.0.1", "93.184.216.34"]
