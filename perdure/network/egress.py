"""Checks URLs from users or models, and makes requests that connect only to a checked address.

A URL may lead to a service on this host, or to a network behind the firewall. `check` rejects such a URL if it contains
an IP address, in any spelling, or a local host name. `resolve` looks a host name up once, and checks each address of
the host. `pinned` makes a request that connects to a checked address, because a second look-up might return another
address. TLS still checks the certificate against the host name.

The tool `http_get`, the files of messages and the delivery of replies call this module. `get` follows redirects, and
checks the URL of each in the same way.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from perdure.errors import InvalidRequest
from perdure.network.dns import look_up
from perdure.network.reply_urls import PORTS, Reachable
from perdure.network.special_networks import Address
from perdure.network.unlogged import unlogged
from perdure.text.patterns import compiled
from perdure.text.untrusted import first_line

if TYPE_CHECKING:
    import httpx2

MAX_REDIRECTS = 5

_LAST_PORT = 65_535
_NAME = compiled(r"[a-z0-9._-]+")
_NUMERIC = compiled(r"[0-9a-fx.]+")
_LOCAL_NAMES = frozenset(
    {"localhost", "localdomain", "local", "internal", "home.arpa", "ip6-localhost", "ip6-loopback"}
)
"""Names and suffixes that no public name server resolves (RFC 6761, RFC 6762, RFC 8375, ICANN)."""


class EgressRefused(InvalidRequest):
    """The URL's destination is not allowed, or cannot be determined."""


def check(url: str, reachable: Reachable) -> httpx2.URL:
    """Parse `url`, and check it without a DNS look-up.

    Raises:
        EgressRefused: `url` is not an HTTP URL with a valid host, or names a non-public address or host that
            `reachable` does not allow.
    """
    parsed = _parsed(url)
    host, port = _host(parsed), port_of(parsed)
    address = _literal(host)
    if address is None and _NAME.fullmatch(host) is None:
        raise EgressRefused(f"{first_line(host, 100)!r} is refused: it is not a valid host name.")
    if reachable.has_url(parsed.scheme, host, port, _path(parsed)):
        return parsed
    if address is not None:
        _require(host, address, reachable)
    elif not reachable.networks and _is_local(host):
        raise EgressRefused(f"{host} is refused: it is not a public host name.")
    return parsed


async def resolve(url: httpx2.URL, reachable: Reachable) -> list[Address]:
    """Look up the addresses of the URL's host, and check that all of them are allowed.

    Raises:
        EgressRefused: an address is not allowed, or the host has no address.
        OSError, UnicodeError: the name does not resolve.
    """
    host = _host(url)
    found = await asyncio.wrap_future(look_up(host, port_of(url)))
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    if not addresses:
        raise EgressRefused(f"{host} has no address.")
    if not reachable.has_url(url.scheme, host, port_of(url), _path(url)):
        for address in addresses:
            _require(host, address, reachable)
    return list(dict.fromkeys(addresses))


def pinned(
    client: httpx2.AsyncClient, method: str, url: httpx2.URL, address: Address, headers: Mapping[str, str], **more: Any
) -> httpx2.Request:
    """A request to `url` that connects to `address`. TLS checks the certificate against the URL's host."""
    made = client.build_request(
        method,
        url.copy_with(host=str(address)),
        headers={"Host": url.netloc.decode("ascii").rpartition("@")[2], **headers},
        extensions={"sni_hostname": url.raw_host.decode("ascii").rstrip(".")},
        **more,
    )
    return unlogged(made)


@asynccontextmanager
async def get(url: str, reachable: Reachable, accept: str = "*/*") -> AsyncIterator[httpx2.Response]:
    """Send a GET request, and yield the response whose body is not read yet, after at most `MAX_REDIRECTS` redirects.

    The caller limits the time, and the bytes that it reads: a server may compress the body although it is asked not to.

    Raises:
        EgressRefused: the URL or the target of a redirect is not allowed, or there are too many redirects.
        httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError: the server cannot be reached.
    """
    import httpx2  # noqa: PLC0415 (few messages name a URL)

    headers = {"Accept": accept, "Accept-Encoding": "identity"}
    async with httpx2.AsyncClient(timeout=None, follow_redirects=False, trust_env=False) as client:
        for _ in range(MAX_REDIRECTS + 1):
            target = check(url, reachable).copy_with(username=None, password=None)
            address, *_ = await resolve(target, reachable)
            response = await client.send(pinned(client, "GET", target, address, headers), stream=True)
            try:
                location = response.headers.get("Location") if response.is_redirect else None
                if location is None:
                    response.extensions["url"] = target
                    yield response
                    return
                url = str(target.join(location))
            finally:
                await response.aclose()
    raise EgressRefused(f"There were more than {MAX_REDIRECTS} redirects.")


def port_of(url: httpx2.URL) -> int:
    return url.port or PORTS[url.scheme]


def _parsed(url: str) -> httpx2.URL:
    import httpx2  # noqa: PLC0415 (few messages name a URL, and `perdure send` starts without it)

    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, UnicodeError, ValueError) as error:
        raise EgressRefused(f"The URL is refused: {first_line(str(error), 200)}.") from None
    if parsed.scheme not in PORTS or not parsed.host or "\\" in url:  # parsers disagree on backslashes
        raise EgressRefused(
            f"{first_line(url, 100)!r} is refused: expected an address that begins with http:// or https://."
        )
    if parsed.port is not None and not 0 < parsed.port <= _LAST_PORT:
        raise EgressRefused(f"The URL is refused: there is no port {parsed.port}.")
    return parsed


def _host(url: httpx2.URL) -> str:
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _path(url: httpx2.URL) -> str:
    return url.raw_path.decode("ascii")


def _literal(host: str) -> Address | None:
    """The IP address that `host` spells, or `None` if `host` is a name.

    Accepts any spelling of an IPv4 address: octal, hexadecimal, or with fewer than four parts.
    """
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    if _NUMERIC.fullmatch(host) is None:
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def _is_local(host: str) -> bool:
    return any(host == name or host.endswith(f".{name}") for name in _LOCAL_NAMES)


def _require(host: str, address: Address, reachable: Reachable) -> None:
    if not reachable.has_address(address):
        raise EgressRefused(f"{host} is refused: {address} is not a public address.")
