"""Time zones by their names in the IANA database, which come from settings, users and models."""

from __future__ import annotations

import logging
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from perdure.errors import loggable

log = logging.getLogger(__name__)

_LONGEST = 64
_UTC = frozenset({"UTC", "Etc/UTC", "Etc/UCT", "Etc/GMT", "GMT"})

# Files of some systems beside those of the zones. They are this machine's own zone, and zones under other names, which
# other machines and PostgreSQL may lack.
_OF_A_MACHINE = ("localtime", "posixrules", "posix/", "right/")

_ABBREVIATIONS = {"CET": "Europe/Brussels", "EET": "Europe/Athens", "MET": "Europe/Brussels", "WET": "Europe/Lisbon"}
"""Zones with summer time whose names PostgreSQL reads as abbreviations of winter time, and what they are links to."""


def find_zone(name: object) -> ZoneInfo | None:
    """The zone called `name`, such as `Europe/Paris`; `None` if there is no such zone."""
    if not isinstance(name, str) or len(name) > _LONGEST or name.startswith(_OF_A_MACHINE):
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def zone_in_sql(name: str) -> str:
    """The name of the zone `name` in SQL, for `AT TIME ZONE`."""
    return _ABBREVIATIONS.get(name, name)


def zone_here() -> str | None:
    """The time zone of this machine, for the messages of the person at its terminal.

    Returns `None` if the machine does not tell, and if it is UTC: servers are set to UTC wherever their users are.
    """
    from tzlocal import get_localzone_name  # noqa: PLC0415 (only terminals need it)

    try:
        name = get_localzone_name()
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        log.info("the time zone of this machine is unknown: %s", loggable(error))
        return None
    return None if name in _UTC or find_zone(name) is None else name
