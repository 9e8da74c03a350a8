"""TLS to Redis, RabbitMQ and PostgreSQL, as the URLs of the servers request it.

Celery, kombu, py-amqp and redis-py spell the same options differently, and some of them verify no certificate unless an
option requests it. perdure normalises each URL once, when it reads the settings:

- `normalised` spells the options of `rediss://` and `amqps://` in the way that all of these libraries accept. The
  server's certificate and host name are verified, unless the URL requests otherwise.
- `divided` separates the options from the URL, for Celery's settings `broker_use_ssl` and `redis_backend_use_ssl`.
- `remedy` suggests a remedy for an error of TLS.
- `check_postgresql` checks `sslmode`, whose meaning is PostgreSQL's own.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

_ENCRYPTED = {"redis": "rediss", "rediss": "rediss", "amqp": "amqps", "pyamqp": "amqps", "amqps": "amqps"}
"""The schemes of Redis and RabbitMQ, each with the scheme that uses TLS."""

_REQUIREMENTS = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

_OF_BOTH = ("ssl_cert_reqs", "ssl_check_hostname", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_OF_REDIS = ("ssl_ca_path", "ssl_ca_data", "ssl_password", "ssl_min_version", "ssl_ciphers")
_ACCEPTED = "accepted: required, optional or none, or Celery's CERT_REQUIRED, CERT_OPTIONAL or CERT_NONE"

_SSLMODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_UNVERIFIED_SSLMODES = ("allow", "prefer", "require")
"""The modes with which PostgreSQL's client may encrypt a connection, and does not verify the server's certificate."""


def split(url: str) -> list[str]:
    """The URLs of the servers in `url`. kombu separates several by semicolons, which a password may contain, too.

    >>> split("redis://:a;b@one/0")
    ['redis://:a;b@one/0']
    >>> split("redis://one/0;redis://two/0")
    ['redis://one/0', 'redis://two/0']
    """
    parts = url.split(";")
    return parts if all("://" in part for part in parts) else [url]


def normalised(url: str) -> str:
    """`url` with its TLS options in the spelling that all libraries accept. URLs without TLS are returned unchanged.

    >>> normalised("rediss://redis.example/0?ssl_cert_reqs=CERT_OPTIONAL")
    'rediss://redis.example/0?ssl_cert_reqs=optional&ssl_check_hostname=true'

    Raises:
        ValueError: an option is unknown, its value cannot be used, or a server would be verified under another's name.
    """
    servers = [_normalised(each) for each in split(url)]
    _check_names(servers)
    return ";".join(servers)


def divided(url: str) -> tuple[str, dict[str, Any] | None]:
    """A normalised `url` without its TLS options, and the options under the names of its scheme's library.

    The options are `None` if the URL uses no TLS. If the URL names several servers, the options are those of the first.
    """
    found = [_parsed(each) for each in split(url)]
    bare = ";".join(_joined(base, others) for base, others, _ in found)
    options = found[0][2]
    if not options:
        return bare, None
    typed: dict[str, Any] = {
        **options,
        "ssl_cert_reqs": _REQUIREMENTS[options["ssl_cert_reqs"]],
        "ssl_check_hostname": _BOOLEANS[options["ssl_check_hostname"]],
    }
    if (version := options.get("ssl_min_version")) is not None:
        typed["ssl_min_version"] = int(version)
    if url.startswith("amqps"):
        typed = {name.removeprefix("ssl_"): value for name, value in typed.items()}
        if typed.pop("check_hostname"):
            # kombu itself would name the address of localhost
            typed["server_hostname"] = urlsplit(split(bare)[0]).hostname
    return bare, typed


def joined(url: str, options: Mapping[str, Any] | bool | None) -> str:  # noqa: FBT001 (kombu's form)
    """`url` with the TLS options of a kombu connection, normalised; the reverse of `divided`."""
    scheme, _, address = url.partition("://")
    if not options or scheme not in _ENCRYPTED:
        return url
    given = {} if options is True else dict(options)
    named = {name if name.startswith("ssl_") else f"ssl_{name}": value for name, value in given.items()}
    names = {value: name for name, value in _REQUIREMENTS.items()}
    requirement = named.get("ssl_cert_reqs", ssl.CERT_REQUIRED)
    named["ssl_cert_reqs"] = names.get(requirement, str(requirement))
    if _ENCRYPTED[scheme] == "amqps":
        named["ssl_check_hostname"] = str("ssl_server_hostname" in named)
    known = {name: str(value) for name, value in named.items() if name in (*_OF_BOTH, *_OF_REDIS) and value is not None}
    return normalised(f"{_ENCRYPTED[scheme]}://{address}?{urlencode(known, quote_via=quote)}")


def unverified(url: str) -> str | None:
    """The option of a normalised `url` or of a PostgreSQL URL that leaves the server unverified, and its value."""
    options = dict(parse_qsl(url.partition("?")[2]))
    mode = options.get("sslmode", os.environ.get("PGSSLMODE")) if url.startswith("postgresql") else None
    if mode in _UNVERIFIED_SSLMODES:
        return f"sslmode is {mode}"
    if options.get("ssl_cert_reqs") == "none":
        return "ssl_cert_reqs is none"
    return "ssl_check_hostname is false" if options.get("ssl_check_hostname") == "false" else None


def remedy(error: BaseException, variable: str) -> str | None:
    """One sentence that names a remedy for an error of a `rediss://` or `amqps://` connection, whose URL is `variable`.

    `None` if the error is not one of TLS.
    """
    text = str(error)
    if "certificate has expired" in text or "certificate is not yet valid" in text:
        return "Renew the server's certificate, or correct the clock of this machine."
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"ssl_ca_certs in {variable} must name the server's authority, and the URL the server's host."
    if "_ALERT_" in text or "EOF occurred in violation of protocol" in text:
        return (
            f"The server ended the TLS connection: ssl_certfile and ssl_keyfile in {variable} must name a certificate "
            "that it accepts, and its port must be one for TLS."
        )
    return None


def check_postgresql(query: Mapping[str, Any]) -> None:
    """Check `sslmode` in the query of a PostgreSQL URL, or `PGSSLMODE`, and the authorities' file that it needs.

    Raises:
        ValueError: the mode is unknown, or the file does not exist.
    """
    mode = query.get("sslmode", os.environ.get("PGSSLMODE"))
    if mode and mode not in _SSLMODES:
        source = "" if "sslmode" in query else " (from PGSSLMODE)"
        raise ValueError(f"sslmode is {mode!r}{source}; accepted: {', '.join(_SSLMODES)}")
    authorities = query.get("sslrootcert")
    if mode in {"verify-ca", "verify-full"} and isinstance(authorities, str) and authorities != "system":
        _check("sslrootcert", partial(_context().load_verify_locations, authorities))


def _check_names(servers: list[str]) -> None:
    """Check that RabbitMQ's servers can be verified. Kombu keeps its options, with the name, when it fails over.

    Raises:
        ValueError: the servers have several names, of which only one would be verified, or only some use TLS.
    """
    encrypted = [each for each in servers if each.startswith("amqps://")]
    if encrypted and len(encrypted) < len(servers):
        raise ValueError("kombu would use TLS for all servers or for none: begin each URL with amqps://")
    hosts = sorted({urlsplit(each).hostname or "" for each in encrypted})
    checks = any(_parsed(each)[2].get("ssl_check_hostname") == "true" for each in encrypted)
    if len(hosts) > 1 and checks:
        raise ValueError(
            f"kombu would verify all servers ({', '.join(hosts)}) under the name of one. Give one name that leads to "
            "all of them and that their certificates have, or ssl_check_hostname=false for each: their authority is "
            "still verified"
        )


def _normalised(url: str) -> str:
    base, others, options = _parsed(url)
    scheme = base.partition("://")[0]
    if not options and scheme not in {"rediss", "amqps"}:
        return url
    accepted = _OF_BOTH if scheme == "amqps" else (*_OF_BOTH, *_OF_REDIS)
    if scheme not in {"rediss", "amqps"}:
        raise ValueError(f"{', '.join(options)} needs TLS: begin the URL with {_ENCRYPTED.get(scheme, 'rediss')}://")
    if unknown := [name for name in options if name not in accepted]:
        raise ValueError(f"{', '.join(unknown)} is not an option of TLS; accepted: {', '.join(accepted)}")
    requirement = options.pop("ssl_cert_reqs", "required")
    if (required := requirement.lower().removeprefix("cert_")) not in _REQUIREMENTS:
        raise ValueError(f"ssl_cert_reqs is {requirement!r}; {_ACCEPTED}")
    named = options.pop("ssl_check_hostname", "false" if required == "none" else "true")
    if named.lower() not in _BOOLEANS:
        raise ValueError(f"ssl_check_hostname is {named!r}; accepted: true or false")
    checked = _BOOLEANS[named.lower()] and required != "none"
    _check_values(options)
    options = {"ssl_cert_reqs": required, "ssl_check_hostname": str(checked).lower(), **options}
    return _joined(base, [*others, urlencode(options, quote_via=quote)])


def _parsed(url: str) -> tuple[str, list[str], dict[str, str]]:
    """`url` up to its query, the other parameters of the query as they are, and the TLS options."""
    base, _, query = url.partition("?")
    parts = [part for part in query.split("&") if part]
    others = [part for part in parts if not part.startswith("ssl_")]
    options = parse_qsl("&".join(part for part in parts if part.startswith("ssl_")), keep_blank_values=True)
    if len(options) > len(dict(options)):
        raise ValueError("an option of TLS is given twice")  # the libraries disagree on which one applies
    return base, others, dict(options)


def _joined(base: str, parts: list[str]) -> str:
    return f"{base}?{'&'.join(parts)}" if parts else base


def _check_values(options: Mapping[str, str]) -> None:
    version = options.get("ssl_min_version", "")
    if version and (not version.isdecimal() or int(version) not in set(ssl.TLSVersion)):
        raise ValueError(
            f"ssl_min_version is {version!r}; accepted: {ssl.TLSVersion.TLSv1_2:d}, {ssl.TLSVersion.TLSv1_3:d}"
        )
    for name, keyword in (("ssl_ca_certs", "cafile"), ("ssl_ca_path", "capath"), ("ssl_ca_data", "cadata")):
        if (value := options.get(name)) is not None:
            _check(name, partial(_context().load_verify_locations, **{keyword: value}))
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    if certificate is not None:
        password = options.get("ssl_password", "")  # with `None`, OpenSSL would ask for one on the terminal
        _check("ssl_certfile", partial(_context().load_cert_chain, certificate, key, password))
    elif key is not None:
        raise ValueError("ssl_keyfile needs ssl_certfile, the file with the certificate of the key")


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _check(name: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{name} cannot be used ({reason}); accepted: a readable file in PEM form") from None
