"""Fixtures of the CaseBank's tests."""

from __future__ import annotations

import pytest

from perdure.database.engine import Database
from tests.casebank.bank import fill


@pytest.fixture
def filled(database: Database) -> Database:
    """A CaseBank with the cases that `fill` writes."""
    fill(database)
    return database
