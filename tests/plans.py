"""PostgreSQL's plans for a statement, and the number of rows that a plan reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from perdure.database.engine import Database, Statement
from perdure.database.schema import Names


def _nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def plans(database: Database, statement: Statement, parameters: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Execute the statement with a custom and with a generic plan, then roll back; returns the nodes of each plan."""
    found = []
    for mode in ("force_custom_plan", "force_generic_plan"):
        with database.engine.connect() as connection:
            connection.exec_driver_sql(f"SET plan_cache_mode = {mode}")
            found.append(_explained(connection, statement, parameters))
            connection.exec_driver_sql("RESET plan_cache_mode")
    return found


def _explained(connection: Connection, statement: Statement, parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    connection.exec_driver_sql("DEALLOCATE ALL")
    shared = connection.info["perdure"]
    connection.info.clear()
    connection.info["perdure"] = shared
    connection.exec_driver_sql(Names("perdure", "public").render(statement.prepare))
    connection.exec_driver_sql("BEGIN")
    try:
        result = connection.exec_driver_sql(
            "EXPLAIN (ANALYZE, FORMAT JSON) " + statement.execute,
            tuple(parameters[name] for name in statement.parameters),
        )
        plan = result.scalar_one()
    finally:
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("DEALLOCATE ALL")
    return list(_nodes((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]))


def rows_read(nodes: Sequence[Mapping[str, Any]]) -> float:
    """The number of rows that the nodes read from tables, including rows that a filter removes."""
    read: float = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes
        if "Relation Name" in node
    )
    return read


def outline(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """The type, table and number of rows of each node, for a failing test's message."""
    return [(node["Node Type"], node.get("Relation Name", ""), node["Actual Rows"]) for node in nodes]
