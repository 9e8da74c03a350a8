"""Who calls: keys from the settings, compared in constant time; on loopback without keys, nobody asks.

A key list's entries are `KEY`, `sha256:HEX` or `file:PATH`, whose lines are entries of the
first two forms and are read again when the file changes. A file that cannot be read lets
nobody in.

Without keys, whoever reaches the port is let in, and a browser on this machine reaches it
on behalf of any page that it shows. So then only requests are answered that name this
machine as their host (a page cannot make its own name resolve here and call) and that no
page of another origin sends.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from fastapi import Request
from pydantic import SecretStr

from perdure.errors import Forbidden, SettingsError, Unauthorized
from perdure.settings import SHA256, Settings

log = logging.getLogger(__name__)


class Caller(StrEnum):
    """What a caller may reach: a service acts for any user that it names, an admin reaches everything."""

    SERVICE = "service"
    ADMIN = "admin"


class _Entry(Protocol):
    def digests(self) -> Iterable[bytes]:
        """The SHA-256 of each key that this entry of a list allows now."""
        ...


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes

    def digests(self) -> Iterable[bytes]:
        return (self.digest,)


class _KeyFile:
    """Keys in a file, one a line; empty lines and those that begin with `#` say nothing."""

    def __init__(self, variable: str, path: Path) -> None:
        self._variable = variable
        self._path = path
        self._version: tuple[int, int, int] | None = None
        self._digests: tuple[bytes, ...] = ()
        try:
            self._read()
        except OSError as error:
            raise SettingsError(f"{variable} names the file {path}, which cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{variable} names the file {path}, which is not UTF-8 text") from error

    def digests(self) -> Iterable[bytes]:
        try:
            self._read()
        except (OSError, SettingsError, UnicodeDecodeError) as error:
            if self._digests:
                log.error("%s: %s cannot be used (%s); its keys let nobody in", self._variable, self._path, error)  # noqa: TRY400 (the sentence is all there is to say)
            self._version, self._digests = None, ()
        return self._digests

    def _read(self) -> None:
        status = self._path.stat()
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if version == self._version:
            return
        lines = enumerate(self._path.read_text(encoding="utf-8").splitlines(), start=1)
        place = f"{self._variable} names the file {self._path}, whose line"
        self._digests = tuple(
            _digest(f"{place} {number}", line.strip())
            for number, line in lines
            if line.strip() and not line.strip().startswith("#")
        )
        self._version = version


class Keys:
    """The keys of one installation."""

    def __init__(self, settings: Settings) -> None:
        admin = _entries("PERDURE_ADMIN_KEYS", settings.admin_keys)
        service = _entries("PERDURE_API_KEYS", settings.api_keys)
        self._entries = [(Caller.ADMIN, entry) for entry in admin] + [(Caller.SERVICE, entry) for entry in service]

    def caller(self, request: Request) -> Caller:
        """Who sent `request`.

        Raises:
            Unauthorized: keys are configured, and it carries none of them.
            Forbidden: none are configured, and it was not meant for this machine or comes from another origin.
        """
        if not self._entries:
            _refuse_other_sites(request)
            return Caller.ADMIN
        given = _bearer(request)
        if given is None:
            raise Unauthorized("A key is needed: send it as `Authorization: Bearer KEY`.")
        found = self._holder(hashlib.sha256(given).digest())
        if found is None:
            raise Unauthorized("That key is not known.")
        return found

    def _holder(self, digest: bytes) -> Caller | None:
        found: Caller | None = None
        for caller, entry in self._entries:
            for known in entry.digests():
                # Every key is compared, so that the time taken tells nothing.
                if hmac.compare_digest(known, digest) and found is None:
                    found = caller
        return found


def _entries(variable: str, listed: tuple[SecretStr, ...]) -> Iterator[_Entry]:
    for item in listed:
        text = item.get_secret_value()
        if text.startswith("file:"):
            yield _KeyFile(variable, Path(text.removeprefix("file:")))
        else:
            yield _Key(_digest(variable, text))


def _digest(place: str, text: str) -> bytes:
    """The digest that the key `text` is or has; `place` says where it is written, for the error message."""
    if not text.startswith("sha256:"):
        return hashlib.sha256(text.encode()).digest()
    found = SHA256.fullmatch(text)
    if found is None:
        raise SettingsError(f"{place} is sha256:… without 64 hexadecimal digits")
    return bytes.fromhex(found[1])


def _bearer(request: Request) -> bytes | None:
    for name, value in request.scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" and key.strip() else None
    return None


def _refuse_other_sites(request: Request) -> None:
    host = request.headers.get("host", "")
    if not _is_loopback(_name(f"//{host}")):
        raise Forbidden("This gateway has no keys, so it answers only requests for localhost. Set PERDURE_API_KEYS.")
    origin = request.headers.get("origin")
    if origin is not None and origin.lower() != f"{request.url.scheme}://{host}".lower():
        raise Forbidden("This gateway has no keys, so it answers no page of another origin. Set PERDURE_API_KEYS.")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
