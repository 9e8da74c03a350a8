"""The receivers that `PERDURE_REPLY_URLS` allows in addition to public addresses: networks and globs of URLs.

The parts of a glob are matched separately, so a pattern for the host never matches the path: `http://*.corp/*` does not
match `http://10.0.0.1/x.corp/`. `perdure.network.egress` checks each URL. If no glob allows the URL, it also checks
each address of the URL's host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import unquote

from perdure.network.special_networks import Address, Network, is_public, reached

PORTS = {"http": 80, "https": 443}
"""The accepted schemes of URLs, with their default ports."""

_ACCEPTED = "accepted: a network such as 10.1.0.0/16, or a glob of URLs such as https://hooks.corp.example/perdure/*"


@dataclass(frozen=True, slots=True)
class UrlGlob:
    """A glob `SCHEME://HOST[:PORT][/PATH]`.

    If `port` is `None`, any port matches. If `path` is `None`, any path matches.
    """

    scheme: str
    host: str
    port: int | None
    path: str | None

    @classmethod
    def parse(cls, entry: str) -> UrlGlob:
        """Parse an entry of `PERDURE_REPLY_URLS`.

        The port `*` matches any port. Without a port, only the scheme's default port matches. Without a path, any path
        matches.

        Raises:
            ValueError: the entry is malformed.
        """
        scheme, _, rest = entry.partition("://")
        authority, slash, path = rest.partition("/")
        host, port = _split(authority)
        usable = scheme in PORTS and host.rstrip(".") and authority.isascii() and "@" not in authority
        if not usable or not (port in {"", "*"} or (port.isdecimal() and 0 < int(port) < 2**16)):
            raise ValueError(_ACCEPTED)
        number = None if port == "*" else int(port or PORTS[scheme])
        return cls(scheme, host.lower().rstrip("."), number, f"/{path}" if slash else None)

    def matches(self, scheme: str, host: str, port: int, path: str) -> bool:
        """Whether a URL with these parts matches. `host` is in lower case; `path` includes the query."""
        if scheme != self.scheme or self.port not in {None, port}:
            return False
        if not (host == self.host if ":" in self.host else fnmatchcase(host, self.host)):
            return False
        return self.path is None or (".." not in _unquoted(path) and fnmatchcase(path, self.path))


@dataclass(frozen=True, slots=True)
class Reachable:
    """The non-public networks and URLs that are allowed. By default, none are allowed."""

    networks: tuple[Network, ...] = ()
    urls: tuple[UrlGlob, ...] = ()

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Reachable:
        """Parse the entries of `PERDURE_REPLY_URLS`.

        Raises:
            ValueError: an entry is neither a network nor a glob of URLs. The message contains the entry.
        """
        networks: list[Network] = []
        urls: list[UrlGlob] = []
        for entry in entries:
            try:
                if "://" in entry:
                    urls.append(UrlGlob.parse(entry))
                else:
                    networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                explanation = _ACCEPTED if _ACCEPTED in str(error) else f"{error}; {_ACCEPTED}"
                raise ValueError(f"the entry {entry!r} cannot be used: {explanation}") from None
        return cls(tuple(networks), tuple(urls))

    def has_address(self, address: Address) -> bool:
        """Whether `address`, or the IPv4 address that it contains, is public or in one of the networks."""
        inner = reached(address)
        return is_public(address) or any(inner in network or address in network for network in self.networks)

    def has_url(self, scheme: str, host: str, port: int, path: str) -> bool:
        """Whether a glob allows a URL with these parts.

        If a glob allows a URL, `perdure.network.egress` does not check the addresses of the URL's host.
        """
        return any(glob.matches(scheme, host, port, path) for glob in self.urls)


ANYWHERE = Reachable((ipaddress.IPv4Network("0.0.0.0/0"), ipaddress.IPv6Network("::/0")))
"""Allows all addresses, for URLs from the operator's settings."""


def _unquoted(path: str) -> str:
    """Unquote `path` until it no longer changes, because each server in a chain of proxies may unquote it once."""
    while (decoded := unquote(path)) != path:
        path = decoded
    return path


def _split(authority: str) -> tuple[str, str]:
    """Split `HOST:PORT` or `[IPv6]:PORT`."""
    if authority.startswith("["):
        host, _, port = authority[1:].partition("]")
        return host, port.removeprefix(":")
    host, _, port = authority.partition(":")
    return host, port
