"""Where Django is set up, its connections are closed around each call of the application's functions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import django
import pytest
from celery import Celery
from django.apps import apps
from django.contrib.auth import get_user_model
from django.db import OperationalError, connection, connections
from fastapi import FastAPI, Request
from sqlalchemy.engine import make_url
from starlette.testclient import TestClient

import perdure
from perdure import DidNotHappen, ToolContext, tool
from perdure.errors import OutcomeUnknown, SettingsError
from perdure.tools import around
from perdure.tools.registry import ProbeOutcome
from tests.turns import django_apps
from tests.turns.harness import Harness, until
from tests.turns.scripted import calls, says

CALLS = 8


def _query() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


async def _query_asynchronously() -> None:
    """Query as Django's asynchronous functions do; the table of users does not exist."""
    with pytest.raises(django.db.ProgrammingError):
        await get_user_model().objects.acount()


@tool(effect="pure")
def count() -> str:
    """Query."""
    _query()
    return "counted"


@tool(effect="pure")
async def count_asynchronously() -> str:
    """Query."""
    await _query_asynchronously()
    return "counted"


def _probe(_context: ToolContext) -> ProbeOutcome:
    _query()
    return DidNotHappen()


@tool(probe=_probe)
def doubt() -> str:
    """Query, with an unknown outcome."""
    _query()
    raise OutcomeUnknown("It may have happened.")


def _is_large(_arguments: object) -> bool:
    _query()
    return False


@tool(requires_approval=_is_large)
def pay() -> str:
    """Pay."""
    return "paid"


@pytest.fixture
def shop(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Django, set up for the test's database. Nothing collects the connections that are not closed."""
    django_apps.configure()
    url = make_url(database_url)
    monkeypatch.setattr(apps, "ready", True)
    monkeypatch.setitem(
        connections.settings,
        "default",
        connections.configure_settings(
            {
                "default": {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": url.database,
                    "USER": url.username,
                    "PASSWORD": url.password or "",
                    "HOST": url.host or url.query["host"],
                    "PORT": url.port or "",
                    "OPTIONS": {"application_name": "shop"},
                }
            }
        )["default"],
    )
    _forget_connection()  # that `django.setup` may have made, without a database
    gc.disable()
    yield
    gc.enable()
    _forget_connection()


def _forget_connection() -> None:
    with suppress(AttributeError):  # this thread has no connection
        del connections["default"]


def _none_open(harness: Harness) -> bool:
    """Whether Django has no connection. A server process ends shortly after the client has closed its connection."""
    until(
        lambda: not harness.sql("SELECT FROM pg_stat_activity WHERE application_name = 'shop'"),
        "Django's connections are closed",
    )
    return True


@pytest.mark.parametrize(
    "wanted", ["count", "count_asynchronously", "doubt", "pay"], ids=["tool", "async tool", "probe", "approval"]
)
@pytest.mark.usefixtures("shop")
def test_a_burst_of_calls_leaves_no_connection(harness: Harness, wanted: str) -> None:
    """Each call has a thread of its own, and Django closes connections only around requests."""
    harness.equip(count, count_asynchronously, doubt, pay)
    harness.script(calls(*[(wanted, {})] * CALLS), says("done"))
    assert harness.ask()["status"] == "done"
    assert _none_open(harness)


@pytest.mark.usefixtures("shop")
def test_hooks_leave_no_connection(harness: Harness) -> None:
    """Hooks have a thread of their own, too, and may be coroutine functions."""

    async def ask_asynchronously(_seen: object) -> None:
        await _query_asynchronously()

    hooks: list[Callable[[Any], object]] = [lambda _seen: _query(), ask_asynchronously]
    harness.equip(pay, before_turn=hooks, after_turn=hooks, before_tool=hooks, after_tool=hooks)
    harness.script(calls(("pay", {})), says("done"))
    assert harness.ask()["status"] == "done"
    assert _none_open(harness)


@pytest.mark.usefixtures("shop")
def test_a_connection_that_cannot_be_closed_does_not_fail_the_call(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool has taken effect, so its result stands."""

    def fail() -> None:
        raise OperationalError("no")

    monkeypatch.setattr(connections, "close_all", fail)
    harness.equip(pay)
    harness.script(calls(("pay", {})), says("done"))
    turn = harness.ask()
    assert [text for role, text in harness.lines(turn["session_id"]) if role == "tool"] == ["paid"]


async def _signed_in(_request: Request) -> str:
    await _query_asynchronously()
    return "ana"


def _signed_in_plainly(_request: Request) -> str:
    _query()
    return "ana"


def _signed_in_later(request: Request) -> Any:
    """Return a coroutine, as a plain wrapper around a coroutine function does."""
    return _signed_in(request)


@pytest.mark.parametrize("authenticate", [_signed_in, _signed_in_plainly, _signed_in_later])
@pytest.mark.usefixtures("shop")
def test_a_sign_in_survives_the_end_of_its_connection(
    harness: Harness, database_url: str, redis_url: str, authenticate: Callable[[Request], Any]
) -> None:
    """PostgreSQL ends Django's connections, for example in a restart; the next request opens new ones."""
    agents = perdure.gateway(
        authenticate=authenticate, database_url=database_url, redis_url=redis_url, model="offline", _env_file=None
    )
    app = FastAPI(lifespan=lambda _: agents.running())
    app.mount("/agents", agents)
    with TestClient(app, base_url="http://shop.example") as client:
        for _ in range(3):
            assert client.get("/agents/v1/sessions").status_code == 200
            assert _none_open(harness)
            harness.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'shop'")


def test_around_call_surrounds_tools_hooks_and_probes(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context manager is entered in the calling thread, and its context variables reach coroutines."""
    monkeypatch.setattr(around, "_around_call", around._around_call)
    entered: list[str] = []
    inside = False

    @contextmanager
    def surround() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False
        entered.append("left")

    @tool
    def note() -> str:
        """Note."""
        return f"inside: {inside}"

    @tool
    async def note_asynchronously() -> str:
        """Note."""
        return f"inside: {inside}"

    perdure.install(Celery("shop", broker="memory://"), around_call=surround)
    hooked: list[bool] = []
    harness.equip(note, note_asynchronously, before_turn=[lambda _turn: hooked.append(inside)])
    harness.script(calls(("note", {})), calls(("note_asynchronously", {})), says("done"))
    turn = harness.ask()
    assert [text for role, text in harness.lines(turn["session_id"]) if role == "tool"] == ["inside: True"] * 2
    assert hooked == [True]
    assert len(entered) == 3


def test_an_invalid_around_call_is_refused() -> None:
    """A context manager that exists already could be entered only once."""
    for given in ("no function", memoryview(b"")):
        with pytest.raises(SettingsError, match="accepted: a function that returns a context manager"):
            perdure.install(Celery("shop", broker="memory://"), around_call=given)  # type: ignore[arg-type]
