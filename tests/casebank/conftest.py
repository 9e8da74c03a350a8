"""Fixtures of the CaseBank's tests."""

from __future__ import annotations

import pytest

from perdure.database.engine import Database
from tests.casebank.bank import fill


@pytest.fixture
def filled(database: Database) -> Database:
    """A bank with a case for each rule."""
    fill(database)
    return database
