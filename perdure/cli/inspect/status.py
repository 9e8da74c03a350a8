"""`perdure status`: what works and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_fields, write_json, write_table, write_text
from perdure.cli.errors import FAILED
from perdure.cli.finite import finite

if TYPE_CHECKING:
    from perdure.observe.readings import Source
    from perdure.observe.status import Fault

_SHOWN = 20
_YEAR_S = 366 * 86_400


def status(
    *,
    as_json: AsJson = False,
    stuck_after: Annotated[
        float,
        typer.Option(min=0, max=_YEAR_S, callback=finite, metavar="SECONDS", help="Show sessions that wait longer."),
    ] = 60,
) -> None:
    """Show what works and what does not.

    The exit status is 1 if no message would be answered.
    """
    from perdure.errors import PerdureError
    from perdure.observe.status import Status, explain, judge

    with _source() as (source, missing, spent):
        read = source.read()
        stuck, budgets = [], []
        if read.server is not None:  # else each of them would wait for PostgreSQL once more
            with suppress(PerdureError):  # it does not answer since the readings
                stuck, budgets = [explain(row, read) for row in source.stuck(stuck_after, _SHOWN)], spent()
        found = Status(read, (*missing, *judge(read)), tuple(stuck), tuple(budgets))
    if as_json:
        write_json(found.to_dict())
    else:
        _write(found.to_dict())
    if not found.is_up:
        raise typer.Exit(FAILED)


@contextmanager
def _source() -> Iterator[tuple[Source, list[Fault], Callable[[], list[dict[str, Any]]]]]:
    """The source of the readings, a fault for each server whose address is unknown, and what is spent of budgets."""
    from perdure.assembly import redis_address
    from perdure.clock import SystemClock
    from perdure.errors import Unavailable
    from perdure.observe.status import Fault
    from perdure.resilience.resolve import resolve
    from perdure.turns.budgets import spent_today
    from perdure.workers.observed import observed

    with connecting.opened() as (settings, database), connecting.broker(settings) as waker:
        clock, missing, redis_url = SystemClock(), [], None
        try:
            redis_url = redis_address(settings)
        except Unavailable as error:
            missing.append(Fault("redis", "down", error.message))
        breakers = None if redis_url is None else resolve(settings, clock, redis_url, lambda _: None)
        broker_url = redis_url if settings.broker_url is None else settings.broker_url.get_secret_value()
        source = observed(
            settings,
            database,
            clock,
            breakers=breakers,
            redis_url=redis_url,
            broker_url=broker_url,
            broker_reachable=None if waker is None else waker.reachable,
        )
        try:
            yield source, missing, lambda: spent_today(database, settings, _SHOWN)
        finally:
            source.close()
            if breakers is not None:
                breakers.close()


def _write(found: dict[str, Any]) -> None:
    """Print the status: what is broken, the processes, the backlog, the servers, and the stuck sessions."""
    write_fields({"status": found["status"], "release": found["release"]})
    for title, columns, rows in (
        ("Faults", ("severity", "part", "message"), found["faults"]),
        ("Processes", ("kind", "name", "release", "state", "seen", "queues"), list(map(_process, found["processes"]))),
        ("Backlog", ("what", "number", "oldest"), _amounts(found)),
        ("Budgets of today", ("tenant", "user", "spent_usd", "limit_usd"), found["budgets"]),
        ("Disks", ("name", "used_bytes", "size_bytes"), found["disks"]),
        ("Redis", ("name", "memory_bytes", "limit_bytes", "policy"), found["redis"]),
        (
            "Sessions without a result",
            ("session_id", "agent", "status", "age", "reason"),
            list(map(_aged, found["stuck"])),
        ),
    ):
        if rows:
            write_text(f"\n{title}")
            write_table(columns, rows)
    if (database := found["database"]) is not None:
        write_text("\nDatabase")
        write_fields(database)


def _amounts(found: dict[str, Any]) -> list[dict[str, Any]]:
    due = {f"due, priority {priority}": each for priority, each in found["due"].items()}
    return [
        {"what": what.replace("_", " "), "number": each["number"], "oldest": _seconds(each["oldest_s"])}
        for what, each in {**due, **found["amounts"]}.items()
        if each["number"]
    ]


def _process(each: dict[str, Any]) -> dict[str, Any]:
    return {**each, "seen": _seconds(each["seen_s"])}


def _aged(each: dict[str, Any]) -> dict[str, Any]:
    return {**each, "age": _seconds(each["age_s"])}


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.0f} s"
