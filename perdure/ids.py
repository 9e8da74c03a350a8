"""Identifiers: UUIDv7 (RFC 9562), which sort by creation time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from secrets import randbits
from uuid import UUID, uuid5

from perdure.clock import Clock

_VERSION_7 = 0x7 << 76
_VARIANT_RFC = 0b10 << 62
_MILLISECONDS = (1 << 48) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def new_id(clock: Clock) -> UUID:
    """A fresh UUIDv7: 48 bits of Unix milliseconds, 12 bits of the fraction of a millisecond, 62 random bits."""
    return new_id_of(clock.now())


def new_id_of(at: datetime) -> UUID:
    """A fresh UUIDv7 of something that is as old as `at`, such as an imported turn. 1970 is the earliest time."""
    milliseconds, microseconds = divmod(max(round(at.timestamp() * 1_000_000), 0), 1000)
    fraction = microseconds * 4096 // 1000
    return UUID(int=(milliseconds & _MILLISECONDS) << 80 | _VERSION_7 | fraction << 64 | _VARIANT_RFC | randbits(62))


def made_at(identifier: UUID) -> datetime:
    """When `new_id` made `identifier`, to the millisecond.

    >>> made_at(UUID("0196900a-1000-7000-8000-000000000000"))
    datetime.datetime(2025, 5, 2, 8, 8, 20, 736000, tzinfo=datetime.timezone.utc)
    """
    return _EPOCH + timedelta(milliseconds=identifier.int >> 80)


def first_id(at: datetime) -> UUID:
    """The smallest UUIDv7 of the millisecond `at`: every id that is made later is larger."""
    return UUID(int=(round(at.timestamp() * 1_000) & _MILLISECONDS) << 80)


def part_task_id(effect_id: UUID, part: int) -> UUID:
    """The id of the Celery task that runs part number `part` of the tool call `effect_id`.

    A tool call with a list of arguments has one part for each element of the list.
    """
    return uuid5(effect_id, str(part))
