"""Identifiers: UUIDv7 (RFC 9562), so that ids sort by the time they were made."""

from __future__ import annotations

import secrets
from uuid import UUID

from perdure.clock import Clock

_VERSION_7 = 0x7 << 76
_VARIANT_RFC = 0b10 << 62


def new_id(clock: Clock) -> UUID:
    """A fresh UUIDv7: 48 bits of Unix milliseconds, then 74 random bits."""
    milliseconds = int(clock.now().timestamp() * 1000) & ((1 << 48) - 1)
    rand_a, rand_b = secrets.randbits(12) << 64, secrets.randbits(62)
    return UUID(int=milliseconds << 80 | _VERSION_7 | rand_a | _VARIANT_RFC | rand_b)
