"""Every SQL statement that writes a session's state takes the state from the table of transitions.

The check reads SQL as text. It knows the forms of SQL that this code base uses, and fails on an unknown form.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from perdure.database.engine import Statement
from perdure.sessions.states import State, Trigger, sql
from tests.repository.source import modules

BY_ITSELF = {
    "sessions.open": "a session is opened in the initial state, to which no transition leads",
    "exchange.open": "an imported session is inserted in the state `ended`",
}
"""The names of the statements that set a state without the table of transitions, each with the reason."""

_WRITES = re.compile(r"\b(?:UPDATE|INSERT\s+INTO)\s+(?:ONLY\s+)?sessions\b", re.IGNORECASE)
_UPDATE = re.compile(r"\bUPDATE\s+(?:ONLY\s+)?sessions(?:\s+AS\s+\w+)?\s+SET\s+(.*?)(?:\b(?:WHERE|FROM|RETURNING)\b|$)")
_INSERT = re.compile(r"\bINSERT\s+INTO\s+sessions\s+(?:AS\s+\w+\s+)?\((.*?)\)\s+(SELECT|VALUES)\b(.*)")
_UPSERT = re.compile(r"\bDO\s+UPDATE\s+SET\s+(.*?)(?:\b(?:WHERE|RETURNING)\b|$)")
_INNERMOST = re.compile(r"\([^()]*\)")
_COLUMNS = ("state", "s.state", f"'{State.INITIALIZING}'")
_KEPT = {"state", "s.state"}
_TABLE = "BY_THE_TABLE"

_EXAMPLES = {
    "<claimed>": sql(Trigger.TURN_CLAIMED),
    "<due>": sql(Trigger.END_DUE, "s.state"),
    "<created>": sql(Trigger.SESSION_CREATED, _COLUMNS[2]),
}


def _sources() -> dict[str, Path]:
    """The paths of the modules whose SQL writes to the table `sessions`, by module name."""
    return {name: path for name, path in modules() if _WRITES.search(path.read_text())}


def _statements() -> dict[str, Statement]:
    """The statements in the modules of `_sources`, by the name of the statement."""
    found: dict[str, Statement] = {}
    for name in _sources():
        module = importlib.import_module(name)
        found |= {each.name: each for each in vars(module).values() if isinstance(each, Statement)}
    return found


def _faults(statement: str) -> list[str]:
    """The SQL expressions with which a statement sets a state without using the table of transitions."""
    text = " ".join(statement.split())
    for trigger in Trigger:
        for column in _COLUMNS:
            text = text.replace(" ".join(sql(trigger, column).split()), _TABLE)
    return [*_inserted(text), *_updated(text)]


def _flat(text: str) -> str:
    """The text without its parenthesised parts. The remaining commas separate the statement's columns."""
    while (shorter := _INNERMOST.sub("", text)) != text:
        text = shorter
    return text


def _updated(text: str) -> list[str]:
    # Common table expressions are in parentheses. Each is checked separately, and then the rest of the statement.
    pieces = []
    while (found := _INNERMOST.search(text)) is not None:
        pieces.append(found.group()[1:-1])
        text = text[: found.start()] + text[found.end() :]
    pieces.append(text)
    clauses = [clause for piece in pieces for clause in _UPDATE.findall(piece)]
    clauses += [clause for piece in pieces if "INSERT INTO sessions" in piece for clause in _UPSERT.findall(piece)]
    assignments = [each.strip() for clause in clauses for each in clause.split(",")]
    given = [each.removeprefix("state = ") for each in assignments if re.match(r"state\s*=|=", each)]
    return [each for each in given if not _is_by_the_table(each)]


def _inserted(text: str) -> list[str]:
    faults = []
    for columns, kind, rest in _INSERT.findall(text):
        names = [name.strip() for name in columns.split(",")]
        given = _flat(rest).split(",") if kind == "SELECT" else []
        place = names.index("state")
        if given[place : place + 1] != [f" {_TABLE}"]:
            faults.append(f"{kind} {given[place : place + 1]}")
    return faults


def _is_by_the_table(expression: str) -> bool:
    """Whether the expression takes the state from the table of transitions or leaves the state unchanged."""
    if expression == _TABLE:
        return True
    results = set(re.findall(r"\b(?:THEN|ELSE)\s+(\S+)", expression))
    return expression.startswith("CASE ") and _TABLE in results and results <= {_TABLE, *_KEPT}


def _filled(statement: str) -> str:
    for name, expression in _EXAMPLES.items():
        statement = statement.replace(name, expression)
    return statement


def test_every_state_comes_from_the_table() -> None:
    """Exactly the statements in `BY_ITSELF` set a state without the table of transitions."""
    faults = {name for name, statement in _statements().items() if _faults(statement.sql)}
    assert faults == set(BY_ITSELF)


@pytest.mark.long
def test_all_sql_that_writes_to_sessions_is_in_statements() -> None:
    """All SQL that writes to the table `sessions` is in a `Statement`, because the check reads only statements."""
    known = [" ".join(statement.sql.split()) for statement in _statements().values()]
    lines = [line for path in _sources().values() for line in path.read_text().splitlines() if _WRITES.search(line)]
    fixed = [" ".join(line.partition("{")[0].split()) for line in lines]
    assert len(fixed) > len(Trigger)
    assert [line for line in fixed if not any(line in each for each in known)] == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sessions SET state = 'active'",
        "UPDATE sessions AS s SET token = (SELECT 1), state = 'active' WHERE true",
        "WITH a AS (UPDATE sessions SET wakes = 0, state = %(state)s WHERE (true) RETURNING 1) SELECT * FROM a",
        "UPDATE sessions SET (wakes, state) = (0, 'active')",
        "UPDATE sessions SET state = CASE WHEN unsettled > 0 THEN 'active' ELSE state END",
        "UPDATE sessions SET state = CASE WHEN true THEN <claimed> ELSE 'ended' END",
        "UPDATE sessions SET state = state",
        "INSERT INTO sessions (session_id, state) VALUES (1, 'ended')",
        "INSERT INTO sessions (session_id, state) SELECT f(1, 2), 'ended' FROM x",
        "INSERT INTO sessions (state) SELECT <created> ON CONFLICT DO UPDATE SET state = 'active'",
    ],
)
def test_a_state_set_without_the_table_is_found(statement: str) -> None:
    """The check finds each form of SQL that writes a state without the table of transitions."""
    assert _faults(_filled(statement))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE sessions SET wakes = 0, state = <claimed> WHERE state = 'active'",
        "UPDATE sessions AS s SET state = CASE WHEN (x) THEN <due> ELSE s.state END, wakes = 1",
        "UPDATE turns SET status = 'done'",
        "UPDATE sessions SET wakes = 0 WHERE state = 'active'",
        "INSERT INTO sessions (session_id, state) SELECT f(1, 2), <created>, 3",
    ],
)
def test_valid_statements_pass(statement: str) -> None:
    """The check accepts statements that use the table, write no state, or write to other tables."""
    assert not _faults(_filled(statement))
