"""Authentication by a configured key or a user token. A gateway without configured keys requires neither.

`perdure.access.keys` defines the entries of a key list, and `perdure.access.tokens` defines the tokens. A key file is
read again when it changes. The gateway then refuses all keys of a file that it cannot read, and skips invalid lines.

A gateway without keys may listen on loopback only, and every program that can reach its port has access. To exclude
web pages in a browser on this machine, such a gateway makes two checks. It refuses a request whose `Host` does not name
this machine, which stops DNS rebinding, and a request with an `Origin` other than the gateway's own.

An application that mounts the gateway may authenticate the users itself (`authenticated`).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from fastapi import Request
from pydantic import SecretStr

from perdure.access.console_sessions import ConsoleSessions
from perdure.access.keys import ACCEPTED, OF_A_LINE, SHORTEST, Key, parse_entry, parse_key
from perdure.access.tenants import UserKey, tenant_of, user_key
from perdure.access.tokens import ExpiredToken, Tokens, looks_like_token
from perdure.channels.http.limits.throttle import WrongKeys
from perdure.clock import Clock
from perdure.errors import Forbidden, SettingsError, Unauthorized, loggable
from perdure.settings import Settings
from perdure.tools import around

log = logging.getLogger(__name__)


class KeyKind(StrEnum):
    """What a key or token may do.

    A service key acts for any user of its tenant, and so does an admin key with a tenant. An admin key without a tenant
    has access to everything. A token acts for one user.
    """

    SERVICE = "service"
    ADMIN = "admin"
    USER = "user"


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key or a token.

    `tenant` is the tenant whose users the caller has access to; `None` stands for users without a tenant. For a token,
    `user` is the key of the only user that the caller has access to. `digest` is the SHA-256 of the key, and `None` on
    a gateway without keys. `in_console`: the request comes from the console, with a session instead of the key.
    """

    kind: KeyKind
    tenant: str | None = None
    user: UserKey | None = None
    digest: bytes | None = field(default=None, repr=False)
    in_console: bool = False

    @property
    def name(self) -> str:
        """The caller in the record of operators' actions: the begin of the key's SHA-256."""
        return "without a key" if self.digest is None else f"key {self.digest.hex()[:8]}"

    def may_see(self, user: UserKey) -> bool:
        """Whether the caller has access to the user with the key `user`."""
        if self.kind is KeyKind.USER:
            return user == self.user
        return self.is_operator or tenant_of(user) == self.tenant

    @property
    def is_operator(self) -> bool:
        return self.kind is KeyKind.ADMIN and self.tenant is None


Authenticate = Callable[[Request], Awaitable[object] | object]
"""The authentication of an application that mounts the gateway: returns the `user_id` of a request, or `None`.

A FastAPI dependency with the request as its only parameter can be used.
"""


MayApprove = Callable[[str, dict[str, Any]], Awaitable[object] | object]
"""An application's function that returns whether a user may decide about a waiting call.

Its arguments are the `user_id` and the call as `GET /v1/approvals` lists it, with the arguments that it would run with.
"""


async def authenticated(authenticate: Authenticate, request: Request) -> Caller:
    """The caller of `request`, authenticated by the application, with access to one user's data only.

    A request whose `Origin` is not the gateway's own is refused, because the browser of a signed-in user adds the
    application's session cookie to requests of other sites too.

    Raises:
        Unauthorized: `authenticate` returns no user.
        Forbidden: `Origin` is not the gateway's own.
    """
    refuse_other_origins(request)
    user_id = await around.call(authenticate, request)
    if user_id is None or user_id == "":
        raise Unauthorized("Sign in to the application.")
    return Caller(KeyKind.USER, None, user_key(None, str(user_id)))


class _Entry(Protocol):
    def allowed(self) -> Iterable[Key]:
        """The current keys of this entry of a key list."""
        ...


@dataclass(frozen=True, slots=True)
class _Literal:
    key: Key

    def allowed(self) -> Iterable[Key]:
        return (self.key,)


class _KeyFile:
    """Keys in a file, one per line. Empty lines and lines that begin with `#` are ignored."""

    def __init__(self, variable: str, path: Path) -> None:
        self._file = f"{variable} names the file {path}"
        self._path = path
        self._version: tuple[int, int, int] | None = None
        self._keys: tuple[Key, ...] = ()
        try:
            invalid = self._read()
        except OSError as error:
            raise SettingsError(f"{self._file}, which cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{self._file}, which is not UTF-8 text") from error
        if invalid:
            raise SettingsError(f"{self._file}, whose {invalid[0]}; accepted: {OF_A_LINE}")

    def allowed(self) -> Iterable[Key]:
        try:
            invalid = self._read()
        except (OSError, UnicodeDecodeError) as error:
            if self._keys:
                log.error("%s, which cannot be used (%s): its keys are refused", self._file, loggable(error))  # noqa: TRY400 (the message has all facts)
            self._version, self._keys = None, ()
        else:
            for each in invalid:
                log.error("%s, whose %s: the line is skipped", self._file, each)
        return self._keys

    def _read(self) -> Sequence[str]:
        """Read the file if it has changed; returns an error message for each invalid line."""
        status = self._path.stat()
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if version == self._version:
            return ()
        keys: list[Key] = []
        invalid: list[str] = []
        for number, line in enumerate(self._path.read_text(encoding="utf-8").splitlines(), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            try:
                keys.append(parse_key(text))
            except ValueError as error:
                invalid.append(f"line {number} {error}")
        self._keys, self._version = tuple(keys), version
        return invalid


class Keys:
    """The service and admin keys of one installation, and its user tokens.

    Raises:
        SettingsError: a file is invalid, a key is listed for two tenants, or `PERDURE_SECRET_KEY` is too short.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        admin = _entries("PERDURE_ADMIN_KEYS", settings.admin_keys)
        service = _entries("PERDURE_API_KEYS", settings.api_keys)
        self._entries = [(KeyKind.ADMIN, entry) for entry in admin] + [(KeyKind.SERVICE, entry) for entry in service]
        self._wrong_keys = WrongKeys(clock)
        self._settings, self._clock = settings, clock
        if settings.secret_key is not None and len(settings.secret_key.get_secret_value()) < SHORTEST:
            raise SettingsError(
                f"PERDURE_SECRET_KEY is too short to sign user tokens; accepted: {SHORTEST} characters or more"
            )
        tenants: dict[bytes, str | None] = {}
        for _, entry in self._entries:
            for key in entry.allowed():
                if tenants.setdefault(key.digest, key.tenant) != key.tenant:
                    raise SettingsError("PERDURE_API_KEYS and PERDURE_ADMIN_KEYS list one key for two tenants")

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self._settings.signing_keys(), self._clock)

    @cached_property
    def console(self) -> ConsoleSessions:
        return ConsoleSessions(self._settings.signing_key(), self._clock)

    def operator(self, cookie: str) -> Caller | None:
        """The operator whose session of the console `cookie` is; `None` if the session's key is no longer configured.

        Raises:
            Unauthorized: the cookie is of no session, or the session has expired.
        """
        if not self._entries:
            return Caller(KeyKind.ADMIN) if self.console.is_of(cookie, None) else None
        keys = [key for kind, entry in self._entries if kind is KeyKind.ADMIN for key in entry.allowed()]
        found = [key for key in keys if key.tenant is None and self.console.is_of(cookie, key.digest)]
        return Caller(KeyKind.ADMIN, digest=found[0].digest) if found else None

    @property
    def are_none(self) -> bool:
        """Whether no key is configured, so that every program of this machine has access."""
        return not self._entries

    def caller(self, request: Request) -> Caller:
        """The caller that sent `request`.

        Raises:
            Unauthorized: the key or token is invalid, or it is missing although keys are configured.
            RateLimited: the key or token is invalid, and the client's address has sent too many invalid ones.
            Forbidden: no keys are configured, and `Host` is not this machine or `Origin` is not the gateway's own.
        """
        given = _bearer(request)
        if not self._entries:
            refuse_other_sites(request)
        elif given is None:
            raise Unauthorized("A key is needed: send it as `Authorization: Bearer KEY`.")
        elif (caller := self._holder(hashlib.sha256(given).digest())) is not None:
            return caller
        token = (given or b"").decode("ascii", "replace")
        if not looks_like_token(token) and not self._entries:
            return Caller(KeyKind.ADMIN)
        try:
            user = self.tokens.user(token)
        except ExpiredToken:
            raise
        except Unauthorized:
            self._wrong_keys.count(request.client.host if request.client else "")
            raise
        return Caller(KeyKind.USER, tenant_of(user), user)

    def _holder(self, digest: bytes) -> Caller | None:
        holder: Caller | None = None
        for kind, entry in self._entries:
            for known in entry.allowed():
                # Compare every key, so that the response time does not depend on which key matches.
                if hmac.compare_digest(known.digest, digest) and holder is None:
                    holder = Caller(kind, known.tenant, digest=known.digest)
        return holder


def _entries(variable: str, listed: tuple[SecretStr, ...]) -> Iterator[_Entry]:
    for number, item in enumerate(listed, start=1):
        try:
            entry = parse_entry(item.get_secret_value())
        except ValueError as error:
            raise SettingsError(f"{variable}: entry {number} {error}; accepted: {ACCEPTED}") from None
        yield _KeyFile(variable, entry) if isinstance(entry, Path) else _Literal(entry)


def _bearer(request: Request) -> bytes | None:
    for name, value in request.scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" and key.strip() else None
    return None


def refuse_other_sites(request: Request) -> None:
    """Refuse a request to a gateway without keys, unless a program or a page of this machine has sent it.

    Raises:
        Forbidden: `Host` is not this machine, or `Origin` is not the gateway's own.
    """
    host = request.headers.get("host", "")
    if not _is_loopback(_hostname(f"//{host}")):
        raise Forbidden("This gateway has no keys, so it answers only requests for localhost. Set PERDURE_API_KEYS.")
    origin = request.headers.get("origin")
    foreign = origin is not None and origin.lower() != f"{request.url.scheme}://{host}".lower()
    if foreign or _is_from_another_site(request):
        raise Forbidden("This gateway has no keys, so it answers no request from another origin. Set PERDURE_API_KEYS.")


def refuse_other_origins(request: Request) -> None:
    """Refuse a request that a page of another origin has sent.

    Raises:
        Forbidden: `Origin` is not the gateway's own.
    """
    origin = request.headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2].lower() != request.headers.get("host", "").lower()
    if foreign or _is_from_another_site(request):
        raise Forbidden("This gateway answers no request from another origin.")


def _is_from_another_site(request: Request) -> bool:
    """Whether a page of another origin sent the request, as its browser reports. Not all of them send an `Origin`.

    Another port of this machine is another origin of the same site.
    """
    return request.headers.get("sec-fetch-site", "none").lower() in {"cross-site", "same-site"}


def _hostname(url: str) -> str:
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
