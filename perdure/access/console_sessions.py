"""Sessions of the operator's console: a signed cookie that names an admin key by a keyed digest, and expires.

No session is stored. A session ends when it expires, when its key is no longer configured, or when
`PERDURE_SECRET_KEY` changes. A request that changes something also needs the session's CSRF token, which a page of
another origin can neither read nor guess.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt

from perdure.clock import Clock
from perdure.errors import Unauthorized

VALID = timedelta(hours=12)

_ALGORITHM = "HS256"
_AUDIENCE = "perdure:console"
_PURPOSE = b"perdure: sessions of the console"
_SIGN_IN = "Sign in to the console."


class ConsoleSessions:
    """Begins and verifies sessions. All gateways of an installation share `secret` (`PERDURE_SECRET_KEY`)."""

    def __init__(self, secret: bytes, clock: Clock) -> None:
        self._key = hmac.digest(secret, _PURPOSE, hashlib.sha256)
        self._clock = clock

    def begin(self, digest: bytes | None) -> tuple[str, datetime]:
        """The cookie of a new session, and its expiry time.

        `digest` is the SHA-256 of the admin key; `None`: the gateway has no keys.
        """
        now = self._clock.now().replace(microsecond=0)
        expires_at = now + VALID
        claims = {"key": self._mark(digest), "aud": _AUDIENCE, "iat": now, "exp": expires_at}
        return jwt.encode(claims, self._key, _ALGORITHM), expires_at

    def is_of(self, cookie: str, digest: bytes | None) -> bool:
        """Whether the session of `cookie` was begun with the key of this digest.

        Raises:
            Unauthorized: the cookie is of no session of this installation, or the session has expired.
        """
        return hmac.compare_digest(self._claims(cookie)["key"], self._mark(digest))

    def expires_at(self, cookie: str) -> datetime:
        """When the session ends.

        Raises:
            Unauthorized: as `is_of`.
        """
        return datetime.fromtimestamp(self._claims(cookie)["exp"], UTC)

    def csrf(self, cookie: str) -> str:
        """The CSRF token of the session of `cookie`."""
        return hmac.new(self._key, b"csrf " + cookie.encode(), hashlib.sha256).hexdigest()

    def _claims(self, cookie: str) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                cookie,
                self._key,
                [_ALGORITHM],
                audience=_AUDIENCE,
                options={"require": ["key", "exp", "iat"], "verify_exp": False, "verify_iat": False},
            )
            expires_s = float(claims["exp"])
        except (jwt.InvalidTokenError, TypeError, ValueError) as error:
            raise Unauthorized(_SIGN_IN) from error
        if expires_s <= self._clock.now().timestamp():
            raise Unauthorized("The console's session has expired. Sign in again.")
        return claims

    def _mark(self, digest: bytes | None) -> str:
        return "" if digest is None else hmac.new(self._key, b"key " + digest, hashlib.sha256).hexdigest()
