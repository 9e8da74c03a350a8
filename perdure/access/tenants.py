"""Tenants: the customers of one installation, each with separate users.

Every table stores a user under the *user key*. For a user without a tenant, the user key is the user's id. For a user
of a tenant, the user key is the tenant's name, U+001F and the user's id. A caller may not send an id that contains
U+001F, so no id equals the user key of another tenant's user.

Each entry point (route, task, command, imported file) makes the user key with `user_key`. Each statement that selects
the rows of a user therefore also selects by tenant. Each response splits the user key with `tenant_of` and `user_of`.
"""

from __future__ import annotations

import string
from typing import NewType

from perdure.errors import InvalidRequest

UserKey = NewType("UserKey", str)
"""A user key. An id, as callers know it, is a `str`, so a type checker reports an id in place of a key."""

SEPARATOR = "\x1f"

ACCEPTED = "1 to 32 of the characters a-z, 0-9 and -"
"""The accepted names of tenants, as error messages describe them."""

LONGEST = 32

PATTERN = "^[a-z0-9-]{1,32}$"
"""The accepted names of tenants as a regular expression, for the OpenAPI document."""

NOT_A_USER = "user_id: contains U+001F, which no user's id may."

_CHARACTERS = frozenset(string.ascii_lowercase + string.digits + "-")

OF_TENANT = "strpos({column}, chr(31)) > 0 AND split_part({column}, chr(31), 1) = %(tenant)s::text"
"""SQL: whether the user key in `column` belongs to the tenant `%(tenant)s`. Indexes use the same expressions."""

WITHOUT_TENANT = "strpos({column}, chr(31)) = 0"
"""SQL: whether the user key in `column` has no tenant."""


def is_tenant(text: str) -> bool:
    return 0 < len(text) <= LONGEST and _CHARACTERS.issuperset(text)


def parse_tenant(given: object) -> str | None:
    """`given`, if it is `None` or a valid name of a tenant.

    Raises:
        InvalidRequest: `given` is not a valid name.
    """
    if given is None or (isinstance(given, str) and is_tenant(given)):
        return given
    raise InvalidRequest(f"tenant: must be {ACCEPTED}.")


def line_tenant(named: object, given: str | None) -> str | None:
    """The tenant of a line in an imported file: the line's own (`named`) or, if the line has none, `given`.

    `given` is the tenant that the file is imported for.

    Raises:
        InvalidRequest: the line's tenant is invalid, or differs from `given`.
    """
    tenant = parse_tenant(named)
    if tenant is not None and given is not None and tenant != given:
        raise InvalidRequest(f"tenant: is {tenant}, but the file is imported for {given}.")
    return tenant or given


def user_key(tenant: str | None, user_id: str) -> UserKey:
    """The key that a user is stored under.

    Raises:
        InvalidRequest: `user_id` contains U+001F, which separates a tenant from a user's id.
    """
    if SEPARATOR in user_id:
        raise InvalidRequest(NOT_A_USER)
    return UserKey(user_id if tenant is None else f"{tenant}{SEPARATOR}{user_id}")


def everybodys(tenant: str) -> UserKey:
    """The user key of a case that belongs to all users of `tenant`. No user has this key."""
    return UserKey(f"{tenant}{SEPARATOR}{SEPARATOR}")


def tenant_of(key: UserKey | None) -> str | None:
    """The tenant of a stored user key; `None` if the user has no tenant."""
    if key is None or SEPARATOR not in key:
        return None
    return key.partition(SEPARATOR)[0]


def user_of(key: UserKey) -> str:
    return key.partition(SEPARATOR)[2] if SEPARATOR in key else key


def decider_of(stored: str) -> str:
    """Who decided about a tool call, as shown: the stored `user:KEY` becomes `user:ID`, others stay the same."""
    kind, colon, key = stored.partition(":")
    return f"{kind}{colon}{user_of(UserKey(key))}"


def author_of(key: UserKey | None) -> str | None:
    """The id of a case's author, from the case's user key; `None` if the case belongs to all users of a tenant.

    Also returns `None` for the user key `None`: the case belongs to all users without a tenant.
    """
    return None if key is None or key.endswith(SEPARATOR * 2) else user_of(key)
