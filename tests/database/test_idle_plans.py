"""Statements whose plans are made while little is due, or while tables are empty, stay fast when much is due."""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, event

import perdure
from perdure.database.engine import Database, Statement
from perdure.database.schema import EXTENSION_SCHEMA
from tests.databases import engine_of

_KEY = re.compile(r"\b(session_id|turn_id|effect_id|delivery_id|user_id) = ")
_ROOMS = ("perdure.turns", "perdure.sessions", "perdure.memory", "perdure.snapshots")

# Many sessions and turns, none of which is due.
_IDLE = """
    INSERT INTO users SELECT 'user ' || n, now() FROM generate_series(1, 5000) AS n;
    INSERT INTO sessions (session_id, user_id, scope, routable, agent, state, created_at, last_activity_at, channels,
                          turn_count, message_count)
    SELECT gen_random_uuid(), 'user ' || n, '', true, 'assistant', 'active', now(), now(), ARRAY['http'], 4, 8
    FROM generate_series(1, 5000) AS n;
    INSERT INTO turns (turn_id, session_id, seq, user_id, agent, channel, priority, status, accepted_at, settled_at,
                       first_seq, reply_seq)
    SELECT gen_random_uuid(), session_id, n, user_id, 'assistant', 'http', 5, 'done', now(), now(), 2 * n - 1, 2 * n
    FROM sessions, generate_series(1, 4) AS n;
    INSERT INTO messages (session_id, seq, turn_id, role, content, channel, token_count, created_at)
    SELECT session_id, first_seq + n, turn_id, CASE n WHEN 0 THEN 'user' ELSE 'assistant' END, 'hello', 'http', 6, now()
    FROM turns, generate_series(0, 1) AS n;
    INSERT INTO inbox SELECT user_id, 'http', turn_id::text, turn_id, 1, 'hello', now() FROM turns;
    INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status, intended_at,
                              decide_at)
    SELECT gen_random_uuid(), turn_id, 2, 0, 'search', '{}', 'pure', 'done', now(), now() FROM turns;
    INSERT INTO deliveries (delivery_id, turn_id, user_id, scope, target, status, due_at, created_at)
    SELECT gen_random_uuid(), turn_id, user_id, '', '{}', 'delivered', now(), now() FROM turns;
    ANALYZE;
"""


def _statements() -> dict[str, Statement]:
    found: dict[str, Statement] = {}
    for module in pkgutil.walk_packages(perdure.__path__, "perdure."):
        if module.name.startswith(_ROOMS):
            members = vars(import_module(module.name)).values()
            found |= {each.name: each for each in members if isinstance(each, Statement)}
    return found


def _nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _explained(connection: Connection, statement: Statement) -> list[Mapping[str, Any]]:
    given = f"({', '.join(['NULL'] * len(statement.parameters))})" if statement.parameters else ""
    plan = connection.exec_driver_sql(f'EXPLAIN (FORMAT JSON) EXECUTE "{statement.name}"{given}').scalar_one()
    return list(_nodes((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]))


def _reads_all(node: Mapping[str, Any]) -> bool:
    """Whether the node reads much of an index, although the statement gives a key of the rows that it wants."""
    condition = node.get("Filter", "")
    is_optional = "IS NULL) OR" in condition  # a list with optional filters
    is_keyed = _KEY.search(condition) is not None and not is_optional
    return "Index" in node["Node Type"] and is_keyed and not _KEY.search(node.get("Index Cond", ""))


@pytest.fixture
def fresh(database_url: str) -> Iterator[Database]:
    """A pool of its own: without plans that an earlier test made."""
    made = Database(database_url)
    yield made
    made.close()


def test_no_statement_reads_all_that_is_due_to_find_a_row_by_its_key(database_url: str, fresh: Database) -> None:
    made = engine_of(database_url)
    with made.begin() as connection:
        connection.exec_driver_sql(_IDLE)
    made.dispose()
    statements = _statements()
    assert {"turns.claim", "turns.claim_due", "turns.enqueue", "turns.begin_next"} <= set(statements)
    bad: dict[str, list[str]] = {}
    with fresh.engine.connect() as connection:
        connection.exec_driver_sql("SET cpu_operator_cost = 1")  # so that an empty index is cheaper than a large one
        names = connection.info["perdure"].names
        names.vector = connection.exec_driver_sql(EXTENSION_SCHEMA).scalar_one()
        for name, statement in statements.items():
            connection.exec_driver_sql(names.render(statement.prepare))
            if found := [each["Index Name"] for each in _explained(connection, statement) if _reads_all(each)]:
                bad[name] = found
    assert bad == {}


_OTHER_WAYS = """
    DROP INDEX memories_user_id_idx, message_words_user_id_idx;
    ALTER TABLE message_words DROP CONSTRAINT message_words_pkey CASCADE;
    SET LOCAL enable_seqscan = off;
"""
_WORDS = {"memories_words_idx", "message_words_words_idx"}


def test_only_recall_looks_words_up_among_all_users(fresh: Database) -> None:
    """An index of words finds the rows of all users, so a search in one user's few rows may not read it.

    Recall adds a word that only the user's rows have. Without the other indexes, the planner would use that of words
    wherever it can: so it may do so for data of some size, too.
    """
    statements, found = _statements(), set()
    with fresh.engine.connect() as connection:
        names = connection.info["perdure"].names
        names.vector = connection.exec_driver_sql(EXTENSION_SCHEMA).scalar_one()
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql(_OTHER_WAYS)
        for name, statement in statements.items():
            connection.exec_driver_sql(names.render(statement.prepare))
            if _WORDS & {each.get("Index Name") for each in _explained(connection, statement)}:
                found.add(name)
        connection.exec_driver_sql("ROLLBACK")
    assert {each for each in found if not each.startswith("recall.")} == set()
    assert found, "the index is used where it can be"


_FIND = Statement("test.find", "SELECT at FROM public.found WHERE id = %(id)s", writes=False)


def test_a_plan_made_for_an_empty_table_is_made_again_when_the_table_has_grown(
    database_url: str, fresh: Database
) -> None:
    made = engine_of(database_url)
    with made.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE public.found (id uuid PRIMARY KEY, at timestamptz)")
        connection.exec_driver_sql(
            "CREATE INDEX found_at_idx ON public.found (at, id)"
        )  # as good as any while it is empty
    for _ in range(20):
        fresh.run(_FIND, {"id": uuid4()})
    with made.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO public.found SELECT gen_random_uuid(), now() FROM generate_series(1, 5000)"
        )
    made.dispose()
    for _ in range(128):
        fresh.run(_FIND, {"id": uuid4()})
    with fresh.engine.connect() as connection:  # the pool's only connection
        [node] = _explained(connection, _FIND)
    assert node["Index Name"] == "found_pkey"


def test_a_connection_plans_anew_when_the_number_of_its_statements_has_doubled(fresh: Database) -> None:
    statement, sent, at = Statement("test.one", "SELECT 1 AS one", writes=False), [], []
    event.listen(fresh.engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    for number in range(1, 600):
        fresh.run(statement, {})
        at += [number] * sent.count("DISCARD PLANS")
        sent.clear()
    assert at == [128, 256, 512]
