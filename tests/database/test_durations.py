"""Statements compute with seconds as floating-point numbers, whatever PostgreSQL would infer for a parameter.

In `%(lease_s)s * 2`, it infers an integer: a lease of 2.5 s became 3 s in the database, and one of more than 34 years
failed with "integer out of range".
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest

import perdure
from perdure.database.engine import Database, Statement
from perdure.database.schema import EXTENSION_SCHEMA

_COUNTED = {"turns.full_for"}
"""Its seconds are those of a minute and of an hour."""

_TYPES = "SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = '{}'"


def _statements() -> Iterator[Statement]:
    for module in pkgutil.walk_packages(perdure.__path__, "perdure."):
        if "queries" in module.name or module.name.startswith(("perdure.turns", "perdure.timetable")):
            yield from (each for each in vars(import_module(module.name)).values() if isinstance(each, Statement))


@pytest.fixture
def fresh(database_url: str) -> Iterator[Database]:
    made = Database(database_url)
    yield made
    made.close()


def test_no_statement_takes_seconds_as_an_integer(fresh: Database) -> None:
    """Each parameter whose name ends in `_s` has a type with fractions, in each statement that is prepared."""
    found: dict[str, list[str]] = {}
    seen = 0
    with fresh.engine.connect() as connection:
        names = connection.info["perdure"].names
        names.vector = connection.exec_driver_sql(EXTENSION_SCHEMA).scalar_one()
        for name, statement in {each.name: each for each in _statements()}.items():
            if not any(each.endswith("_s") for each in statement.parameters):
                continue
            connection.exec_driver_sql(names.render(statement.prepare))
            types = connection.exec_driver_sql(_TYPES.format(name)).scalar_one()
            given = dict(zip(statement.parameters, types, strict=True))
            seen += sum(each.endswith("_s") for each in given)
            if whole := [each for each, kind in given.items() if each.endswith("_s") and kind in {"integer", "bigint"}]:
                found[name] = whole
    assert seen > 50, "the statements were found"
    assert found.keys() - _COUNTED == set()
