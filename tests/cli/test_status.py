"""`perdure status` says what works, with an exit status for probes."""

from __future__ import annotations

import json

import pytest

from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.observe.presence import WORKER, Presence
from tests.cli.conftest import Environment, Perdure


def test_the_exit_status_tells_whether_messages_are_answered(perdure: Perdure, database_url: str) -> None:
    """Without a worker the status is 1, and with one 0. Both outputs name the part at fault."""
    down, text = perdure("status", "--json"), perdure("status")
    database = Database(database_url)
    Presence(database, SystemClock(), WORKER, "w@h", lambda: ["turns"]).report()
    database.close()
    up = perdure("status", "--json")
    found, works = json.loads(down.stdout), json.loads(up.stdout)

    assert (down.returncode, text.returncode, up.returncode) == (1, 1, 0)
    assert [each["part"] for each in found["faults"]] == ["workers"]
    assert "No worker runs turns: none was seen today." in text.stdout
    assert (found["status"], works["status"]) == ("down", "ok")
    assert [each["state"] for each in works["processes"]] == ["alive"]
    assert works["redis"][0]["policy"] == "noeviction"
    assert works["database"]["size_bytes"] > 0


def test_a_lost_server_is_a_fault_and_no_crash(perdure: Perdure, environment: Environment) -> None:
    """If a server cannot be reached, the command still prints the rest, and its exit status is 1."""
    lost = {"PERDURE_REDIS_URL": "redis://127.0.0.1:1", "PERDURE_DATABASE_URL": "postgresql://x@127.0.0.1:1/x"}
    for name, part in (("PERDURE_REDIS_URL", "redis"), ("PERDURE_DATABASE_URL", "database")):
        ran = perdure("status", "--json", env={**environment, name: lost[name]})
        found = json.loads(ran.stdout)
        assert ran.returncode == 1
        assert (part, "down") in {(each["part"], each["severity"]) for each in found["faults"]}


@pytest.mark.parametrize("broker_url", ["amqp://guest:guest@127.0.0.1:1//", "redis://127.0.0.1:1;redis://127.0.0.1:2"])
def test_a_broker_that_is_down_is_a_fault(perdure: Perdure, environment: Environment, broker_url: str) -> None:
    """No turn is woken without the broker, whichever it is, so the exit status is 1."""
    ran = perdure("status", "--json", env={**environment, "PERDURE_BROKER_URL": broker_url})
    found = {(each["part"], each["severity"]) for each in json.loads(ran.stdout)["faults"]}
    assert ran.returncode == 1
    assert found == {("broker", "down"), ("workers", "down")}


@pytest.mark.parametrize("seconds", ["6e16", "nan", "inf", "-1"])
def test_a_time_that_no_interval_holds_is_refused(perdure: Perdure, seconds: str) -> None:
    """The message names the option, and no statement fails."""
    ran = perdure("status", "--stuck-after", seconds)
    assert ran.returncode == 2
    assert "--stuck-after" in ran.stderr


@pytest.mark.long
def test_budgets_show_what_is_spent_and_what_is_not_bounded(
    perdure: Perdure, environment: Environment, database_url: str
) -> None:
    """`status` shows today's sums, and `doctor` an agent whose replies may cost more than is reserved."""
    database = Database(database_url)
    with database.engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO day_spendings VALUES"
            " ('tenant', 'acme', (now() AT TIME ZONE 'UTC')::date, 1.5), ('tenant', 'old', '2020-01-01', 1)"
        )
    database.close()
    set_up = {"PERDURE_BUDGET__TENANT_DAY": "2", "PERDURE_MODEL": "openai:gpt-5-mini", "PERDURE_TIMEZONE": "UTC"}
    found = json.loads(perdure("status", "--json", env={**environment, **set_up}).stdout)
    assert found["budgets"] == [{"tenant": "acme", "user": None, "spent_usd": "1.5", "limit_usd": "2"}]
    assert "Budgets of today" in perdure("status", env={**environment, **set_up}).stdout
    findings = json.loads(perdure("doctor", "--json", env={**environment, **set_up}).stdout)["findings"]
    assert "no max_tokens, but a budget is set" in {each["setting"] for each in findings}
    bounded = {**set_up, "PERDURE_MODEL_SETTINGS": '{"max_tokens": 1000}'}
    findings = json.loads(perdure("doctor", "--json", env={**environment, **bounded}).stdout)["findings"]
    assert "no max_tokens, but a budget is set" not in {each["setting"] for each in findings}
