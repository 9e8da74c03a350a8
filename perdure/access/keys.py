"""Entries of `PERDURE_API_KEYS` and `PERDURE_ADMIN_KEYS`.

An entry is `[TENANT=]KEY`, `[TENANT=]sha256:HEX` or `file:PATH`. If the text before the first `=` is not a valid
tenant, the `=` belongs to the key. No error message of this module contains any part of a key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from perdure.access.tenants import is_tenant
from perdure.text.patterns import compiled

SHORTEST = 16
"""The minimum length of a key in characters."""

OF_A_LINE = f"[TENANT=]KEY with a KEY of {SHORTEST} characters or more, or [TENANT=]sha256: and 64 hexadecimal digits"
ACCEPTED = f"{OF_A_LINE}, or file:PATH"

_SHA256 = compiled(r"sha256:([0-9a-fA-F]{64})")
_FILE = "file:"


@dataclass(frozen=True, slots=True)
class Key:
    """The SHA-256 digest of a key, and the key's tenant.

    A key with a tenant gives access to that tenant's users. A key without a tenant gives access to the users without a
    tenant.
    """

    tenant: str | None
    digest: bytes


def parse_entry(text: str) -> Key | Path:
    """The key in an entry or, for `file:PATH`, the path of the file that lists the keys.

    Raises:
        ValueError: the entry is invalid; the message says why, without the key.
    """
    return Path(text.removeprefix(_FILE)) if text.startswith(_FILE) else parse_key(text)


def parse_key(text: str) -> Key:
    """The key in an entry, or in a line of a file of keys.

    Raises:
        ValueError: the key is invalid; the message says why, without the key.
    """
    before, equals, rest = text.partition("=")
    tenant, key = (before, rest) if equals and is_tenant(before) else (None, text)
    if key.startswith(_FILE):
        raise ValueError(f"is {'TENANT=' if tenant else ''}file:…, which is not accepted here")
    if key.startswith("sha256:"):
        found = _SHA256.fullmatch(key)
        if found is None:
            raise ValueError("is sha256:… without 64 hexadecimal digits")
        return Key(tenant, bytes.fromhex(found[1]))
    if len(key) < SHORTEST:
        behind = " after TENANT=" if tenant else ""
        raise ValueError(f"has a key of fewer than {SHORTEST} characters{behind}")
    return Key(tenant, hashlib.sha256(key.encode()).digest())
