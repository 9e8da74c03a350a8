"""`perdure doctor` on servers whose settings are right, and on servers whose settings are dangerous."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from redis import Redis

from perdure.database.engine import Database
from perdure.redis import client_url
from tests.cli.conftest import Environment, Perdure


@pytest.fixture
def server(redis_url: str) -> Iterator[Redis]:
    """The test's Redis; its settings are restored afterwards."""
    with Redis.from_url(client_url(redis_url)) as client:
        names = ("maxmemory-policy", "slowlog-log-slower-than", "appendonly")
        before = {name: client.config_get(name)[name] for name in names}
        yield client
        for name in names:
            client.config_set(name, before[name])


def test_servers_as_perdure_starts_them_have_no_dangerous_setting(perdure: Perdure, server: Redis) -> None:
    """Status 0. The append-only file of a server of another's is one, so it is off here."""
    server.config_set("appendonly", "no")
    ended = perdure("doctor")
    assert (ended.returncode, ended.stdout) == (0, "No dangerous setting was found.\n"), ended.stderr


def test_each_dangerous_setting_is_named_with_the_way_out(
    perdure: Perdure, environment: Environment, server: Redis
) -> None:
    """Status 1; the same as a table and as JSON."""
    server.config_set("appendonly", "yes")
    server.config_set("maxmemory-policy", "allkeys-lru")
    server.config_set("slowlog-log-slower-than", "10000")
    database = Database(environment["PERDURE_DATABASE_URL"])
    with database.engine.connect() as connection:
        for setting in ("synchronous_commit = off", "log_min_error_statement = error"):
            connection.exec_driver_sql(f"ALTER DATABASE {database.url.database} SET {setting}")
    database.close()

    ended = perdure("doctor", "--json")
    found = {each["setting"]: each for each in json.loads(ended.stdout)["findings"]}

    assert ended.returncode == 1
    assert set(found) == {
        "synchronous_commit is off",
        "log_min_error_statement is error",
        "maxmemory-policy is allkeys-lru",
        "appendonly is yes",
        "slowlog-log-slower-than is 10000",
    }
    assert all(each["risk"] and each["fix"] for each in found.values())
    assert "maxmemory-policy is allkeys-lru" in perdure("doctor").stdout
