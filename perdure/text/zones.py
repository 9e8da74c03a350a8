"""Time zones by their names in the IANA database, which come from settings, users and models."""

from __future__ import annotations

from zoneinfo import ZoneInfo, ZoneInfoNotFoundError


def find_zone(name: object) -> ZoneInfo | None:
    """The zone called `name`, such as `Europe/Paris`; `None` if there is no such zone."""
    if not isinstance(name, str) or len(name) > _LONGEST:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


_LONGEST = 64
