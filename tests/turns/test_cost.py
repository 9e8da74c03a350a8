"""The tests count a turn's statements and commits, and fail if the numbers differ from the expected ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2.extensions
import pytest
from sqlalchemy import event

from perdure import ToolContext, tool
from perdure.database.engine import Database
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says, spoken


@tool(effect="pure")
def double(number: int) -> int:
    """Double the number."""
    return number * 2


@contextmanager
def counted(database: Database) -> Iterator[tuple[list[str], list[str]]]:
    """Yield two lists that collect the block's statements and the names of its commits."""
    commits: list[str] = []
    database.observe = lambda moment, name: commits.append(name) if moment == "after" else None
    try:
        with driven(database) as statements:
            yield statements, commits
    finally:
        database.observe = None


@contextmanager
def driven(database: Database) -> Iterator[list[str]]:
    """Yield a list that collects the block's statements as the driver gets them."""
    statements: list[str] = []

    class Noting(psycopg2.extensions.cursor):
        def execute(self, query: Any, parameters: Any = None) -> None:
            if query != "DISCARD PLANS":  # at a few runs of a connection, whatever they are
                statements.append(query)
            super().execute(query, parameters)

    def use(connection: Any, *_: object) -> None:
        connection.cursor_factory = Noting

    def leave(connection: Any, *_: object) -> None:
        if connection is not None:
            connection.cursor_factory = None

    event.listen(database.engine, "checkout", use)
    event.listen(database.engine, "checkin", leave)
    try:
        yield statements
    finally:
        event.remove(database.engine, "checkout", use)
        event.remove(database.engine, "checkin", leave)


def _talk(harness: Harness) -> None:
    harness.script(calls(("double", {"number": 4})), says("8"))
    assert harness.ask()["status"] == "done"


def test_a_turn_of_two_model_calls_and_a_tool(harness: Harness) -> None:
    """The turn takes six statements: accept, claim, the first read, two steps and settle.

    Each statement takes one commit, except the one that reads the transcript and the past.
    """
    harness.equip(double)
    for _ in range(3):
        _talk(harness)  # opens the session and prepares all statements
    harness.script(calls(("double", {"number": 4})), says("8"))
    with counted(harness.database) as (statements, commits):
        sent = harness.send()
        harness.run(sent.session_id)
    assert commits == ["turns.enqueue", "turns.claim", "turns.step", "turns.step", "turns.settle"]
    assert len(statements) == 6, statements
    assert harness.sql("SELECT count(*) FROM snapshots")[0][0] == 0


def test_the_first_message_of_a_user(harness: Harness) -> None:
    """Two statements look for the session and the message, one opens the session, and one accepts, as it tries first.

    Over a slow network, each takes a round trip.
    """
    for user in ("bob", "cho", "dan"):
        harness.send(user_id=user)  # prepares all statements
    with counted(harness.database) as (statements, commits):
        harness.send(user_id="eve")
    assert commits == ["turns.enqueue", "turns.accept"]
    assert len(statements) == 5, statements


def test_changed_working_variables_cost_a_row_and_no_statement(harness: Harness) -> None:
    """The claim statement reads the working variables, and the step statement writes them as a row in `snapshots`."""

    @tool(effect="pure")
    def count(context: ToolContext, *, further: bool) -> int:
        """Return the variable `n`. If `further`, first add one to it."""
        with context.working_variables as variables:
            if further:
                variables["n"] = variables.get("n", 0) + 1
            return int(variables["n"])

    harness.equip(count)
    for further in (True, False, True):
        harness.script(calls(("count", {"further": further})), says("counted"))
        with counted(harness.database) as (statements, commits):
            sent = harness.send()
            harness.run(sent.session_id)
    assert commits == ["turns.enqueue", "turns.claim", "turns.step", "turns.step", "turns.settle"]
    assert len(statements) == 6, statements
    assert harness.sql("SELECT count(*) FROM snapshots")[0][0] == 2


def test_concurrent_tools_cost_a_commit_each(harness: Harness) -> None:
    """Each result of concurrent calls is committed as it arrives, so that a crash loses no result."""
    harness.equip(double)
    _talk(harness)
    harness.script(calls(("double", {"number": 4}), ("double", {"number": 5})), says("8, 10"))
    with counted(harness.database) as (_, commits):
        harness.ask()
    assert commits.count("turns.finish_effect") == 2
    assert len(commits) == 7


def test_a_turn_that_follows_under_the_same_lease_is_not_claimed_again(harness: Harness) -> None:
    """The second turn begins with one commit, `turns.begin_next`, and no claim."""
    sent = [harness.send(), harness.send()]
    with counted(harness.database) as (_, commits):
        harness.run(sent[0].session_id)
    assert commits == ["turns.claim", "turns.settle", "turns.begin_next", "turns.settle"]


@pytest.mark.long
def test_the_cost_does_not_grow_with_the_conversation(harness: Harness) -> None:
    """A prompt contains a limited number of turns: turn 61 has as many messages as turn 41, but for the summary."""
    harness.equip(double)
    for _ in range(41):
        _talk(harness)
    at_41 = harness.model.requests[-1]
    for _ in range(20):
        _talk(harness)
    assert len(spoken(harness.model.requests[-1])) == len(spoken(at_41))
