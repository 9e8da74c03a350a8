"""A starting program warns if PostgreSQL's settings allow users' messages in the server's log."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy.engine import make_url

from perdure.assembly import require_database
from perdure.database.engine import Database
from perdure.database.serverlog import quoting
from perdure.settings import Settings
from tests.databases import Databases


def test_the_embedded_servers_log_quotes_nothing(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The embedded server causes no warning, because its settings keep statements and DETAIL lines out of the log."""
    with caplog.at_level(logging.WARNING):
        require_database(Settings(_env_file=None), database_url)
    assert caplog.text == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("log_min_error_statement", "error"),
        ("log_error_verbosity", "default"),
        ("log_statement", "all"),
        ("log_min_duration_statement", "100000"),
    ],
)
def test_another_servers_log_is_reported(
    databases: Databases, database_url: str, setting: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names each setting that allows users' messages in the log, and the setting's value."""
    databases.administer(f"ALTER DATABASE {make_url(database_url).database} SET {setting} = '{value}'")
    require_database(Settings(_env_file=None), database_url)
    assert f"PostgreSQL's log quotes users' messages ({setting} is " in caplog.text
    again = Database(database_url)
    assert (quoting(again) or "").startswith(f"{setting} is ")
    again.close()
