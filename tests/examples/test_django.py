"""The example shop in Django: the users of `django.contrib.auth` are the agents' users."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import UUID

import httpx2
import pytest

from perdure.database.engine import Database
from perdure.turns.reading import read_turn
from tests.examples.conftest import QUEUES, Example
from tests.processes.faults import wait_until

EXAMPLE = "django"


def _sign_in(client: httpx2.Client, name: str) -> None:
    form = client.get("/admin/login/").text
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form)
    assert token is not None
    fields = {"username": name, "password": "a long password", "csrfmiddlewaretoken": token[1], "next": "/admin/"}
    assert client.post("/admin/login/", data=fields).status_code == 302


@pytest.fixture
def shop(example: Example) -> Example:
    """The shop with agents, tables and articles, and two members of its staff, `ana` (user 1) and `ben` (user 2)."""
    example.environment |= {
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "DJANGO_SUPERUSER_PASSWORD": "a long password",
        "DJANGO_SUPERUSER_EMAIL": "a@b.example",
        "PERDURE_AGENTS": "shop.agents",
    }
    example.script("manage.py", "migrate", "--verbosity", "0")
    example.script("manage.py", "loaddata", "articles", "--verbosity", "0")
    for name in ("ana", "ben"):
        example.environment["DJANGO_SUPERUSER_USERNAME"] = name
        example.script("manage.py", "createsuperuser", "--noinput")
    return example


def _ask(client: httpx2.Client, text: str) -> tuple[str, dict[str, Any]]:
    turn = client.post("/agents/v1/messages", json={"user_id": "1", "text": text}).json()["turn_id"]
    return turn, client.get(f"/agents/v1/turns/{turn}?wait=20").json()


def _connections(database: Database) -> int:
    """The number of the connections that the shop's programs have opened with Django."""
    with database.engine.connect() as connection:
        counted = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'django of the shop'"
        found: int = connection.exec_driver_sql(counted).scalar_one()
        return found


def _end_connections(database: Database) -> None:
    with database.engine.connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'django of the shop'"
        )


def _ask_and_wait(client: httpx2.Client, text: str) -> tuple[str, dict[str, Any]]:
    """Send a message whose turn waits for a decision; the turn's id, and the call that waits."""
    turn = client.post("/agents/v1/messages", json={"user_id": "1", "text": text}).json()["turn_id"]
    calls = wait_until(lambda: client.get(f"/agents/v1/turns/{turn}").json()["pending_approvals"], "the call waits")
    return turn, calls[0]


def _decide(client: httpx2.Client, turn_id: str, waiting: dict[str, Any]) -> int:
    approve = {"call_id": waiting["call_id"], "decision": "approve"}
    return client.post(f"/agents/v1/turns/{turn_id}/approval", json=approve).status_code


@pytest.mark.exhaustive
def test_a_user_of_django_talks_to_the_agent(shop: Example, database: Database) -> None:
    """Django's session cookie authenticates a user of the agent. Another user cannot read the first user's turn.

    The agent's six tools use Django's models, and leave no connection. A customer confirms a cancellation. Staff
    approves a refund, and the customer cannot. The sign-in survives the end of its connections to PostgreSQL.
    """
    shop.environment["PGAPPNAME"] = "django of the shop"  # Django's libpq reads it; perdure names its own connections
    address = shop.serve("shop.asgi:application")
    shop.worker("shop", f"celery,{QUEUES}")
    with httpx2.Client(base_url=address, timeout=30) as ana, httpx2.Client(base_url=address, timeout=30) as ben:
        hello = {"user_id": "1", "text": "hello"}
        assert ana.post("/agents/v1/messages", json=hello).status_code == 401
        _sign_in(ana, "ana")
        _sign_in(ben, "ben")
        assert '<meta name="user" content="1">' in ana.get("/agents/").text
        form = {"article": "Desk lamp", "pieces": "2", "request": str(UUID(int=1))}
        for _ in range(2):
            given = {**form, "csrfmiddlewaretoken": ana.cookies["csrftoken"]}
            ordered = ana.post("/orders/", data=given).json()["turn_id"]
        assert ana.get(f"/agents/v1/turns/{ordered}?wait=20").json()["status"] == "done"
        refused = ana.post("/orders/", data={**given, "pieces": "11", "request": str(UUID(int=2))})
        assert (refused.status_code, "10 are in stock" in refused.text) == (400, True)
        for name, arguments, found in (
            ("search_articles", {"words": "lamp"}, "Desk lamp, 39.00 euros, 10 in stock"),
            ("place_order", {"article": "pencil", "pieces": 3}, "order 2: 3 of Pencil, placed"),
            ("place_order", {"article": "lamp", "pieces": 1}, "Search the articles first"),
            ("add_note", {"order": 2, "note": "sharpened"}, "The packers will read it."),
            ("orders", {}, "order 1: 2 of Desk lamp, placed"),
        ):
            turn, answered = _ask(ana, f"call {name} with {json.dumps(arguments)}")
            assert found in answered["reply"]["text"]
        assert ben.get(f"/agents/v1/turns/{turn}").status_code == 404
        wait_until(lambda: _connections(database) == 0, "the tools' connections are closed")

        turn, waiting = _ask_and_wait(ana, 'call cancel_order with {"order": 2}')
        assert _decide(ana, turn, waiting) == 202
        done = ana.get(f"/agents/v1/turns/{turn}?wait=20").json()
        assert "order 2: 3 of Pencil, cancelled" in done["reply"]["text"]

        with database.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE public.shop_order SET status = 'shipped' WHERE id = 1")
        turn, waiting = _ask_and_wait(ana, 'call refund with {"order": 1}')
        assert [each["call_id"] for each in ben.get("/agents/v1/approvals").json()] == [waiting["call_id"]]
        assert [_decide(ana, turn, waiting), _decide(ben, turn, waiting)] == [403, 202]
        done = ana.get(f"/agents/v1/turns/{turn}?wait=20").json()
        assert "order 1: 2 of Desk lamp, refunded" in done["reply"]["text"]
        assert done["decisions"][0]["decided_by"] == "user:2"
        with database.engine.connect() as connection:
            stock = connection.exec_driver_sql("SELECT name, stock FROM public.shop_article ORDER BY id").all()
            assert [tuple(each) for each in stock[:2]] == [("Pencil", 500), ("Desk lamp", 12)]

        for _ in range(3):
            _end_connections(database)
            assert ana.get(f"/agents/v1/turns/{turn}").status_code == 200


@pytest.mark.exhaustive
def test_models_work_in_a_child_process_and_in_commands(shop: Example, database: Database) -> None:
    """A turn that has ended two workers runs in a child process; a command imports the agents, too."""
    shop.environment |= {
        "PERDURE_AGENTS": "tests.examples.deadly_shop",
        "PERDURE_TURN__LEASE_S": "1.5",
        "PERDURE_TURN__HEARTBEAT_S": "0.5",
        "PERDURE_TURN__SWEEP_S": "0.3",
        "PERDURE_TURN__TOOL_TIMEOUT_S": "5",
    }
    shop.script_of("perdure.cli:main", "perdure", "send", "--user", "1", "call count with {}")
    shop.script_of("perdure.cli:main", "perdure", "send", "--user", "2", 'call refund with {"order": 1}')

    def turns() -> dict[str, tuple[str, str]]:
        with database.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT user_id, turn_id, status FROM turns").all()
            return {row.user_id: (row.status, str(row.turn_id)) for row in rows}

    for _ in range(2):
        shop.worker("shop", f"celery,{QUEUES}")
        shop.wait_for_death()
    shop.worker("shop", f"celery,{QUEUES}")
    wait_until(lambda: turns()["1"][0] == "done", "the turn has run in a child process")
    wait_until(lambda: turns()["2"][0] == "waiting_approval", "the refund waits")
    turn_id = turns()["2"][1]
    [waiting] = read_turn(database, UUID(turn_id))["pending_approvals"]
    shop.script_of("perdure.cli:main", "perdure", "turns", "approve", turn_id, waiting["call_id"])
    wait_until(lambda: turns()["2"][0] == "done", "the approved call has run")
