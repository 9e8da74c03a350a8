"""User tokens: signed tokens that expire, each for one user. A service requests one for a browser or a phone.

A token is a JWT (RFC 7519, HS256) with the claims `sub` (the user's id), `tenant` if the user has one, `aud`, `exp` and
`iat`. The signing key is derived from `PERDURE_SECRET_KEY`. No token is stored. Changing `PERDURE_SECRET_KEY` revokes
every token, but for those of `PERDURE_SECRET_KEY_BEFORE`.

The gateway calls this module to mint and verify tokens.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import jwt

from perdure.access.tenants import UserKey, tenant_of, user_key, user_of
from perdure.clock import Clock
from perdure.errors import InvalidRequest, Unauthorized
from perdure.text.patterns import compiled

_ALGORITHM = "HS256"
_AUDIENCE = "perdure:user"
_PURPOSE = b"perdure: tokens of users"
_MOST_CHARS = 4_096
_UNKNOWN = "That key is not known."
_FORM = compiled(r"eyJ[\w-]*\.[\w-]+\.[\w-]+")


class ExpiredToken(Unauthorized):
    """The token was valid, and has expired: its holder needs a new one."""


class Tokens:
    """Mints tokens with the first of `secrets`, and verifies tokens of all of them (`Settings.signing_keys`)."""

    def __init__(self, secrets: Sequence[bytes], clock: Clock) -> None:
        self._keys = [hmac.digest(secret, _PURPOSE, hashlib.sha256) for secret in secrets]
        self._clock = clock

    def mint(self, user: UserKey, ttl_s: int) -> tuple[str, datetime]:
        """A token for `user` (a user key) that is valid for `ttl_s` seconds, and the token's expiry time."""
        now = self._clock.now().replace(microsecond=0)
        expires_at = now + timedelta(seconds=ttl_s)
        claims = {"sub": user_of(user), "aud": _AUDIENCE, "iat": now, "exp": expires_at}
        tenant = tenant_of(user)
        if tenant is not None:
            claims["tenant"] = tenant
        return jwt.encode(claims, self._keys[0], _ALGORITHM), expires_at

    def user(self, token: str) -> UserKey:
        """The user key that `token` was minted for.

        Raises:
            ExpiredToken: the token has expired.
            Unauthorized: `token` is not a token of this installation.
        """
        if len(token) > _MOST_CHARS or not looks_like_token(token):
            raise Unauthorized(_UNKNOWN)
        try:
            claims = self._claims(token)
            expires_s = float(claims["exp"])
            user = user_key(claims.get("tenant"), claims["sub"])
        except (jwt.InvalidTokenError, InvalidRequest, TypeError, ValueError) as error:
            raise Unauthorized(_UNKNOWN) from error
        if expires_s <= self._clock.now().timestamp():
            raise ExpiredToken("That token has expired. Get a new one.")
        return user

    def _claims(self, token: str) -> dict[str, Any]:
        wrong: jwt.InvalidTokenError = jwt.InvalidSignatureError("no key")
        for key in self._keys:
            try:
                return jwt.decode(
                    token,
                    key,
                    [_ALGORITHM],
                    audience=_AUDIENCE,
                    options={"require": ["sub", "exp", "iat"], "verify_exp": False, "verify_iat": False},
                )
            except jwt.InvalidSignatureError as error:
                wrong = error
        raise wrong


def looks_like_token(text: str) -> bool:
    return _FORM.fullmatch(text) is not None
