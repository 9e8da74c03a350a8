"""A session ends with one summary, even if the worker that ends it is killed or shut down.

The summary does not delay the user's next session. All tests share two workers. Each test stops at most one
worker, and starts it again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from perdure.certify.boundaries import is_unrelated
from perdure.sessions.ending import request_end
from tests.databases import Databases
from tests.processes.boundaries import CaseRunner
from tests.processes.faults import Fired, Place, wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import Gate, ModelServer, answer_to, memory_of
from tests.processes.nodes import Worker
from tests.sessions.session_log import SessionLog

TURNS = 5
"""The number of turns of a session that is long enough for the extraction of memories."""

COMMITS = ("sessions.claim_ending", "sessions.save_summary", "snapshots.delete", "sessions.finish_ending")
"""The commits of one undisturbed end of a session, in order."""


SUMMARIZING = Place("within", "model")
PLACES = [SUMMARIZING, *(Place(moment, name) for name in COMMITS for moment in ("before", "after"))]

pytestmark = pytest.mark.timeout(300)


class Fleet:
    """An installation with two workers. `session_log` reads a table in which a trigger logs the changes of sessions."""

    def __init__(self, case_runner: CaseRunner) -> None:
        self.installation: Installation = case_runner.installation
        self.session_log = SessionLog(self.sql)
        self.session_log.begin()
        for worker in self.installation.workers:
            worker.container.ready()

    def sql(self, text: str, **parameters: Any) -> Any:
        """Run a statement; returns its rows."""
        with self.installation.database.engine.connect() as connection:
            result = connection.exec_driver_sql(text, parameters)
            return result.fetchall() if result.returns_rows else ()

    def talk(self, text: str, turns: int = 1) -> UUID:
        """Send `text` `turns` times, as a user named `text`, and wait for the replies; returns the session's id."""
        accepted = [self.installation.accept(text, user=text) for _ in range(turns)]
        self.installation.settled(*(each.turn_id for each in accepted))
        return accepted[0].session_id

    def request_end(self, session_id: UUID) -> None:
        """Request the session's end, and wake a worker for it."""
        assert request_end(self.installation.database, session_id, "enough").may_end
        self.installation.runtime.wake.ending(session_id)

    def state(self, session_id: UUID) -> str:
        """The session's current state."""
        found: str = self.sql("SELECT state FROM sessions WHERE session_id = %(id)s", id=session_id)[0].state
        return found

    def wait_ended(self, session_id: UUID) -> None:
        """Wait until the session has ended."""
        wait_until(lambda: self.state(session_id) == "ended", f"session {session_id} ends", 60)

    def wait_consolidated(self, session_id: UUID) -> list[str]:
        """Wait until the session is consolidated; returns its user's memories."""
        done = "SELECT FROM sessions WHERE session_id = %(id)s AND consolidated_at IS NOT NULL"
        wait_until(lambda: self.sql(done, id=session_id), f"session {session_id} is consolidated", 60)
        known = "SELECT m.content FROM memories AS m JOIN sessions AS s USING (user_id) WHERE s.session_id = %(id)s"
        return [row.content for row in self.sql(known, id=session_id)]

    def restart_killed(self, pid: int) -> int | None:
        """Wait until the worker `pid` has ended, then start it again; returns the exit status."""
        worker: Worker = next(each for each in self.installation.workers if each.pid == pid)
        status: int | None = worker.container.wait()
        worker.container.start()
        return status

    def holder(self, session_id: UUID) -> int:
        """The id of the process that is ending the session."""
        since = self.installation.faults.notes()
        assert self.state(session_id) == "summarizing"
        return next(note.pid for note in reversed(since) if (note.moment, note.name) == ("after", COMMITS[0]))


@pytest.fixture(scope="module")
def fleet(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The workers that these tests kill."""
    with databases.one() as (url, _):
        case_runner = CaseRunner(url.render_as_string(hide_password=False), tmp_path_factory.mktemp("ending"))
        try:
            yield Fleet(case_runner)
        finally:
            case_runner.close()


def summarised_as(text: str, turns: int = 1) -> str:
    """The conversation that the model gets to summarise, if `text` was sent `turns` times."""
    return "\n".join([f"user: {text}\nassistant: {answer_to(text)}"] * turns)


@pytest.mark.long
def test_the_enumeration_is_complete(fleet: Fleet) -> None:
    """`COMMITS` lists exactly the commits of an undisturbed end of a session."""
    session_id = fleet.talk("undisturbed")
    since = len(fleet.installation.faults.notes())
    fleet.request_end(session_id)
    last = ("after", COMMITS[-1])
    passed = wait_until(lambda: (found := _passed(fleet, since)) and found[-1] == last and found, "the session's end")
    assert passed == [(moment, name) for name in COMMITS for moment in ("before", "after")]
    fleet.session_log.check_ended(session_id)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_after_a_kill_a_session_ends_with_one_summary(fleet: Fleet, place: Place) -> None:
    """Wherever the worker that ends a session is killed, the session gets one summary and is consolidated once."""
    text = f"killed {place}"
    session_id = fleet.talk(text, TURNS)
    if place == SUMMARIZING:
        gate = fleet.installation.model_server.gate(summarised_as(text, TURNS))
        fleet.request_end(session_id)
        struck = _killed_in_call(fleet, gate, session_id)
    else:
        fleet.installation.faults.arm(place)
        fleet.request_end(session_id)
        struck = wait_until(fleet.installation.faults.fired, f"the fault at {place} fires")
    fleet.restart_killed(struck.pid)
    fleet.wait_ended(session_id)
    fleet.session_log.check_ended(session_id)
    fleet.session_log.check_arrows()
    row = fleet.sql("SELECT summary, summary_extractive FROM sessions WHERE session_id = %(id)s", id=session_id)[0]
    assert (row.summary, row.summary_extractive) == (answer_to(summarised_as(text, TURNS)).strip(), False)
    assert fleet.wait_consolidated(session_id) == [memory_of(text)]
    fleet.session_log.check_consolidated(session_id)


@pytest.mark.long
def test_after_a_shutdown_another_worker_summarises(fleet: Fleet) -> None:
    """A worker that shuts down during a summary exits with 0. Another worker repeats the model call."""
    text = "handed on"
    session_id = fleet.talk(text, TURNS)
    gate = fleet.installation.model_server.gate(summarised_as(text, TURNS))
    fleet.request_end(session_id)
    gate.wait()
    leaving = fleet.holder(session_id)
    os.kill(leaving, signal.SIGTERM)
    fleet.wait_ended(session_id)  # the gate is still closed, but holds back only the first call
    assert fleet.restart_killed(leaving) == 0
    gate.opened.set()
    fleet.session_log.check_ended(session_id)
    row = fleet.sql("SELECT summary_extractive, end_attempts FROM sessions WHERE session_id = %(id)s", id=session_id)[0]
    assert (row.summary_extractive, row.end_attempts) == (False, 1)
    assert fleet.wait_consolidated(session_id) == [memory_of(text)]
    fleet.session_log.check_consolidated(session_id)


@pytest.mark.long
def test_a_message_waits_for_no_summary(fleet: Fleet) -> None:
    """While a summary's model call hangs, the next session answers; its prompt contains the earlier conversation."""
    text = "before a long summary"
    session_id = fleet.talk(text)
    gate = fleet.installation.model_server.gate(summarised_as(text))
    fleet.request_end(session_id)
    gate.wait()
    accepted = fleet.installation.accept("and now?", user=text)
    fleet.installation.settled(accepted.turn_id)
    assert accepted.session_id != session_id
    assert fleet.state(session_id) == "summarizing"
    prompt = fleet.installation.model_server.server.requests[-1]["messages"]
    assert summarised_as(text) in prompt[0]["content"]
    gate.opened.set()
    fleet.wait_ended(session_id)
    fleet.session_log.check_ended(session_id)


@pytest.fixture
def thinking(fleet: Fleet) -> Iterator[ModelServer]:
    """The model thinks aloud, in tags that are split over the chunks of its stream."""
    server = fleet.installation.model_server
    server.thoughts = "The word for the vault is xylophone, which I must not tell."
    yield server
    server.thoughts, server.thinks_long = "", False


@pytest.mark.exhaustive
@pytest.mark.parametrize("ends", [True, False], ids=["closed", "cut off"])
def test_thoughts_of_a_model_are_kept_nowhere(fleet: Fleet, thinking: ModelServer, *, ends: bool) -> None:
    """No reply, stream, summary, title, memory or later prompt has a thought, whether a tag closes it or not."""
    thinking.thinks_long = not ends
    text = f"thoughts that are {'closed' if ends else 'cut off'}"
    tool_text, since = f"pure: {text}", len(thinking.server.requests)
    session_id = fleet.talk(text, TURNS)
    fleet.installation.settled(fleet.installation.accept(tool_text, user=text).turn_id)
    fleet.request_end(session_id)
    fleet.wait_ended(session_id)
    row = fleet.sql("SELECT summary, summary_extractive FROM sessions WHERE session_id = %(id)s", id=session_id)[0]
    assert row.summary_extractive is not ends
    if ends:
        assert fleet.wait_consolidated(session_id) == [memory_of(text)]
    fleet.installation.settled(fleet.installation.accept("what do you know?", user=text).turn_id)
    asked = ["\n".join(str(said) for said in each["messages"]) for each in thinking.server.requests[since:]]
    (last,) = [each for each in asked if "what do you know?" in each]
    assert row.summary[:10] in last, "the next session's prompt has the summary"
    assert [each for each in asked if "xylophone" in each] == []
    assert [name for name in _tables(fleet) if _mentions(fleet, name, "xylophone")] == []


def _tables(fleet: Fleet) -> list[str]:
    rows = fleet.sql("SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()")
    found = [row.table_name for row in rows]
    assert {"messages", "sessions", "memories", "turns"} <= set(found)
    return found


def _mentions(fleet: Fleet, table: str, secret: str) -> bool:
    found = f'SELECT 1 FROM "{table}" AS t WHERE strpos(t::text, %(secret)s) > 0 LIMIT 1'  # noqa: S608 (a table's name)
    return bool(fleet.sql(found, secret=secret))


def _passed(fleet: Fleet, since: int) -> list[tuple[str, str]]:
    """The places that a session's end has passed, in order of the first pass. Each place is listed once."""
    notes = fleet.installation.faults.notes(since)
    places = [(note.moment, note.name) for note in notes if not is_unrelated(note.name)]
    return list(dict.fromkeys(places))


def _killed_in_call(fleet: Fleet, gate: Gate, session_id: UUID) -> Fired:
    gate.wait()
    struck = Fired(0.0, fleet.holder(session_id))
    os.kill(struck.pid, signal.SIGKILL)
    gate.opened.set()
    return struck
