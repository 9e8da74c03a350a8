"""Sessions that end, and what runs when, from the command line and through a worker."""

from __future__ import annotations

import json

import pytest

from perdure.database.engine import Database
from perdure.sessions.reading import list_sessions
from tests.commands.conftest import Perdure
from tests.turns.stage import until


@pytest.mark.usefixtures("working")
def test_talk_leave_come_back(perdure: Perdure, database: Database) -> None:
    """A worker summarises what was left on the terminal; the next conversation is another one."""
    assert perdure("chat", stdin="what is 12*7+5?\n").stdout.strip().endswith("89.")
    until(lambda: [each["state"] for each in list_sessions(database)] == ["ended"], "the end of the conversation")
    ended = list_sessions(database)[0]
    assert ended["summary"]
    assert ended["key_topics"] is not None
    assert perdure("chat", stdin="hello\n").returncode == 0
    until(lambda: [each["state"] for each in list_sessions(database)] == ["ended", "ended"], "the end of the second")


@pytest.mark.usefixtures("working")
def test_a_session_is_ended_by_its_id(perdure: Perdure, database: Database) -> None:
    """Status 0 until it has ended, 1 afterwards and for one that there is not."""
    assert perdure("send", "hello", "--wait", "30").returncode == 0
    session_id = list_sessions(database)[0]["session_id"]
    assert perdure("sessions", "end", session_id).returncode == 0
    until(lambda: list_sessions(database)[0]["state"] == "ended", "the end")
    again = perdure("sessions", "end", session_id)
    assert (again.returncode, "ended already" in again.stderr) == (1, True)
    assert perdure("sessions", "end", "none").returncode == 1


def test_what_runs_when_is_listed(perdure: Perdure) -> None:
    """The entries whose tasks there are."""
    listed = json.loads(perdure("schedules", "list", "--json").stdout)
    assert [(each["entry"], each["task"], each["schedule"]) for each in listed] == [
        ("expire_idle", "sessions.expire_idle", "each minute")
    ]
    assert perdure("schedules", "list").stdout.startswith("expire_idle\teach minute\t")
