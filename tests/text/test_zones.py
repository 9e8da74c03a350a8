"""Time zones by their names: which are accepted, and how PostgreSQL reads them."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo, available_timezones

import pytest

from perdure.database.engine import Database, Statement
from perdure.text.zones import find_zone, zone_in_sql

TIMES = [datetime(2023, month, 15, 22, 30, tzinfo=UTC) for month in (1, 7)]

ABBREVIATIONS = Statement("test.abbreviations", "SELECT upper(abbrev) AS name FROM pg_timezone_abbrevs")
LOCAL = Statement(
    "test.local",
    """
    SELECT name, array_agg(at AT TIME ZONE sql ORDER BY at) AS local
    FROM unnest(%(names)s::text[], %(sql)s::text[]) AS zone (name, sql), unnest(%(at)s::timestamptz[]) AS at
    GROUP BY name
    """,
)


@pytest.mark.parametrize("name", ["localtime", "posixrules", "posix/Europe/Paris", "right/Europe/Paris", "", "Europe"])
def test_a_name_of_this_machine_alone_is_no_zone(name: str) -> None:
    """The IANA database does not have it: other machines and PostgreSQL may not know it, or as another zone."""
    assert find_zone(name) is None


def test_a_zone_is_no_abbreviation_of_postgresql(database: Database) -> None:
    """A zone whose name is one of PostgreSQL's abbreviations, too, has summer time in SQL as it has in Python."""
    abbreviations = {row.name for row in database.run(ABBREVIATIONS, {})}
    names = [each for each in sorted(available_timezones()) if each.upper() in abbreviations]
    assert {"CET", "EET", "MET", "WET"} < set(names)
    names.append("Europe/Paris")
    rows = database.run(LOCAL, {"names": names, "sql": [zone_in_sql(each) for each in names], "at": TIMES})
    expected = {each: [at.astimezone(ZoneInfo(each)).replace(tzinfo=None) for at in TIMES] for each in names}
    assert {row.name: row.local for row in rows} == expected
