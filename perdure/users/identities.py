"""Linked identities: a person on several channels is one user, with the same sessions and the same memory.

An identity is a person on a channel: `(channel, external id)` within a tenant. Without a link, each identity is a
separate user. To link an identity to an existing user, the person mints a one-time code as that user (`perdure link`,
`POST /v1/links`), and sends the code from the identity's channel (`/link CODE`). Messages that the identity sent before
the link stay with its separate user.

A code has 60 random bits, is stored as its hash, is valid for ten minutes, and is used up by one atomic statement. An
identity may send five codes in ten minutes, valid or not.

The CLI's commands, the HTTP routes and the channels call this module.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.exc import IntegrityError

from perdure.access.tenants import UserKey, tenant_of
from perdure.database.engine import Database, Executor
from perdure.errors import InvalidRequest, NotFound, RateLimited
from perdure.text.untrusted import is_identifier, is_storable
from perdure.users import queries

VALID_S = 600
"""Seconds for which a code can be used."""

MOST_ATTEMPTS = 5
WINDOW_S = 600

MOST_LISTED = 1_000
LONGEST_EXTERNAL_ID = 200

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: five bits a character, without letters that look like digits."""

_LOOKALIKES = str.maketrans({"I": "1", "L": "1", "O": "0"})
_GROUPS, _GROUP = 3, 4
_LONGEST_CODE = 100
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Code:
    """A one-time code, with the hyphens that people see, and its expiry time."""

    code: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Link:
    """An identity that has been linked to a user since `created_at`."""

    channel: str
    external_id: str
    created_at: datetime


def mint_code(database: Database, user: UserKey) -> Code:
    """Return a new one-time code for the user with the key `user`. The user's earlier code becomes invalid.

    Creates the user if it does not exist.
    """
    code = "-".join("".join(secrets.choice(_ALPHABET) for _ in range(_GROUP)) for _ in range(_GROUPS))
    given = {"user_id": user, "code_hash": _hashed(code), "valid_s": VALID_S}
    for tries_left in reversed(range(_TRIES)):
        try:
            return Code(code, database.run(queries.MINT_CODE, given)[0].expires_at)
        except IntegrityError:  # the user is erased concurrently
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def redeem(database: Database, channel: str, external_id: str, code: str, tenant: str | None) -> UserKey:
    """Link an identity to the user who minted `code`; returns the user's key. Replaces an earlier link.

    Each call counts as an attempt. The count is committed before the code is checked. The code may be written in any
    case, with or without hyphens and blanks.

    Raises:
        InvalidRequest: the channel or the external id cannot be stored.
        NotFound: the code is wrong, used, expired or another tenant's.
        RateLimited: the identity has made too many attempts.
        Unavailable: the database cannot be reached. The code may nevertheless have been used up.
    """
    identity = _identity(tenant, channel, external_id)
    [counted] = database.run(queries.COUNT_ATTEMPT, {**identity, "most": MOST_ATTEMPTS, "window_s": WINDOW_S})
    if counted.attempts > MOST_ATTEMPTS:
        raise RateLimited("Too many codes were sent. Please try again later.", retry_after_s=max(1, counted.wait_s))
    rows = database.run(queries.REDEEM_CODE, {**identity, "code_hash": _hashed(code)})
    if not rows:
        raise NotFound("That code is wrong, has expired or was used already. Get a new one.")
    return UserKey(rows[0].user_id)


def user_of_identity(executor: Executor, tenant: str | None, channel: str, external_id: str) -> UserKey | None:
    """The key of the user that an identity is linked to; `None` if the identity is not linked.

    Raises:
        InvalidRequest: the channel or the external id cannot be stored.
    """
    rows = executor.run(queries.USER_OF_IDENTITY, _identity(tenant, channel, external_id))
    return UserKey(rows[0].user_id) if rows else None


def list_links(executor: Executor, user: UserKey) -> list[Link]:
    """The identities that are linked to a user, ordered by channel and external id; at most `MOST_LISTED`."""
    rows = executor.run(queries.LINKS, {"user_id": user, "most": MOST_LISTED})
    return [Link(row.channel, row.external_id, row.created_at) for row in rows]


def remove_link(executor: Executor, user: UserKey, channel: str, external_id: str) -> bool:
    """Remove a user's link; returns whether there was one. Earlier messages stay with the user."""
    if not _is_identity(channel, external_id):
        return False
    given = {"user_id": user, **_identity(tenant_of(user), channel, external_id)}
    return bool(executor.run(queries.UNLINK, given))


def _identity(tenant: str | None, channel: str, external_id: str) -> dict[str, str]:
    if not _is_identity(channel, external_id):
        raise InvalidRequest(f"external_id: must be text of 1 to {LONGEST_EXTERNAL_ID} characters, without NUL.")
    return {"tenant": tenant or "", "channel": channel, "external_id": external_id}


def _is_identity(channel: str, external_id: str) -> bool:
    return is_identifier(channel) and is_storable(external_id) and 0 < len(external_id) <= LONGEST_EXTERNAL_ID


def _hashed(code: str) -> bytes:
    """The hash of a typed code. Ignores case, hyphens and blanks, and reads I, L and O as digits."""
    typed = code[:_LONGEST_CODE].upper().replace("-", "").translate(_LOOKALIKES)
    return hashlib.sha256("".join(typed.split()).encode("utf-8", "replace")).digest()
