"""What works and what does not, from the readings, for `perdure status`.

A fault is `down` if no message would be answered, else a `warning`. Each has the part that is at fault, a sentence for
an operator, and no user's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey, tenant_of, user_of
from perdure.observe.presence import BEAT, RELEASE, WORKER, Running
from perdure.observe.readings import MOST, Amount, Readings
from perdure.observe.servers import NEARLY_FULL
from perdure.resilience.circuit import CircuitState

LATE_S = 60.0
"""Seconds after which a sweep or a slot that is due counts as late."""

_WAITED_S = 30.0
"""Seconds after which work that could be done at once counts as a backlog."""

_LONG_TRANSACTION_S = 30.0
_SKEW_S = 5.0
_MANY_FAILURES = 20
_PERCENT = 100

Severity = Literal["down", "warning"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A part that does not work, or will not for long."""

    part: str
    severity: Severity
    message: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """A session whose oldest unsettled turn was accepted `age_s` seconds ago, and why it has no result yet."""

    session_id: UUID
    turn_id: UUID
    agent: str
    status: str
    age_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    """The condition of an installation. `budgets` are those who spent most today, as JSON objects."""

    readings: Readings
    faults: tuple[Fault, ...]
    stuck: tuple[Stuck, ...] = ()
    budgets: tuple[dict[str, Any], ...] = ()

    @property
    def is_up(self) -> bool:
        """Whether a message would be answered."""
        return all(fault.severity != "down" for fault in self.faults)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `perdure status --json`."""
        read = self.readings
        return {
            "status": "down" if not self.is_up else "warning" if self.faults else "ok",
            "release": RELEASE,
            "faults": [asdict(each) for each in self.faults],
            "processes": [_process(each) for each in read.processes],
            "intake_closed": read.intake_closed,
            "due": {str(priority): asdict(each) for priority, each in read.due.items() if each.number},
            "amounts": {name: asdict(each) for name, each in read.amounts.items()},
            "unsettled": [dict(zip(("agent", "status", "turns"), _flat(each), strict=True)) for each in read.unsettled],
            "failures": [dict(zip(("agent", "code", "turns"), _flat(each), strict=True)) for each in read.failures],
            "parked": [dict(zip(("model", "sessions"), _flat(each), strict=True)) for each in read.parked],
            "sweeps_late_s": dict(read.sweeps),
            "schedules_late_s": dict(read.schedules),
            "breakers": [each.to_dict() for each in read.breakers],
            "database": None if read.server is None else asdict(read.server),
            "broker": None if read.broker is None else asdict(read.broker),
            "redis": [asdict(each) for each in read.redis],
            "disks": [asdict(each) for each in read.disks],
            "stuck": [
                {**asdict(each), "session_id": str(each.session_id), "turn_id": str(each.turn_id)}
                for each in self.stuck
            ],
            "budgets": list(self.budgets),
            "unread": dict(read.failed),
            "counted_up_to": MOST,
        }


def judge(read: Readings) -> tuple[Fault, ...]:
    """The faults in the readings; those that are `down` come first."""
    found = [*_of_database(read), *_of_redis(read), *_of_processes(read), *_of_work(read)]
    return tuple(sorted(found, key=lambda each: each.severity != "down"))


def explain(row: Row[Any], read: Readings) -> Stuck:
    """Why the session in `row` (of `observe.stuck`) has no result yet."""
    return Stuck(row.session_id, row.turn_id, row.agent, row.status, row.age_s, _reason(row, read))


def describe_live(row: Row[Any], read: Readings) -> dict[str, Any]:
    """The session in `row` (of `observe.stuck`) for the operator: its state, and what its oldest turn waits for."""
    stuck = explain(row, read)
    key = UserKey(row.user_id)
    return {
        "session_id": str(stuck.session_id),
        "tenant": tenant_of(key),
        "user_id": user_of(key),
        "state": row.state,
        "unsettled": row.unsettled,
        "turn_id": str(stuck.turn_id),
        "agent": stuck.agent,
        "status": stuck.status,
        "age_s": stuck.age_s,
        "reason": stuck.reason,
    }


def _reason(row: Row[Any], read: Readings) -> str:  # noqa: C901, PLR0911 (each way to wait)
    if row.held:
        holder = next((each for each in read.processes if each.owner == row.lease_owner and not each.stopped), None)
        gone = "" if holder is None or holder.is_alive else ", which no longer reports"
        return f"held by {row.lease_owner}{gone} until {_moment(row.lease_until)}"
    if row.queued and row.paused:
        return "paused (`perdure pause` lists the pauses, and `perdure resume` ends one)"
    if row.queued:
        return "waits for its user's other turns (PERDURE_TURN__USER_CONCURRENCY)"
    if row.unequipped_since is not None:
        return f"no worker has its agent and tools, since {_moment(row.unequipped_since)}"
    if row.postponed and row.status == "waiting_approval":
        return f"waits for a person to decide about a call, until {_moment(row.not_before)}"
    if row.postponed and row.waits_for is not None:
        return f"waits for {_WAITS[row.waits_for]}, until {_moment(row.not_before)}"
    if row.postponed and (row.parked_for or "").startswith(_BUDGETS):
        return f"would exceed {row.parked_for}, and is tried again at {_moment(row.not_before)}"
    if row.postponed and row.parked_for is not None:
        return f"waits for the model {row.parked_for or 'of its agent'}, until {_moment(row.not_before)}"
    if row.postponed:
        return f"parked until {_moment(row.not_before)}"
    if row.lease_until is not None:
        return f"the lease of {row.lease_owner} expired at {_moment(row.lease_until)}; no worker has claimed it since"
    woken = "never woken" if row.woken_at is None else f"woken {row.wakes} times, last at {_moment(row.woken_at)}"
    return f"due, {woken}; no worker has claimed it"


_BUDGETS = "PERDURE_BUDGET__"
"""The names of the settings for which a turn waits as for a model (`turns.budgets`)."""

_WAITS = {
    "task": "a Celery task",
    "timer": "a time",
    "client": "results of its client",
    "agent": "another agent",
    "user": "an answer of its user",
}


def _of_database(read: Readings) -> Iterator[Fault]:
    if read.server is None:
        yield Fault("database", "down", read.failed.get("server", "The database cannot be read."))
    elif read.server.oldest_transaction_s > _LONG_TRANSACTION_S:
        age = _for(read.server.oldest_transaction_s)
        yield Fault(
            "database", "warning", f"A transaction has been open for {age}: no dead rows are removed meanwhile."
        )
    if read.server is not None and read.server.connections > NEARLY_FULL * read.server.max_connections:
        of = f"{read.server.connections} of {read.server.max_connections}"
        yield Fault("database", "warning", f"{of} connections are in use.")
    for disk in read.disks:
        if disk.fill > NEARLY_FULL:
            yield Fault("disk", "warning", f"{disk.fill * _PERCENT:.0f} % of {disk.of} are used.")


def _of_redis(read: Readings) -> Iterator[Fault]:
    broker = None if read.broker is None else read.broker.fault
    if broker is not None and not any(each.name == "broker" and each.fault for each in read.redis):
        yield Fault("broker", "down", broker)
    for each in read.redis:
        if each.fault is not None:
            yield Fault(each.name, "down", each.fault)
        elif each.fill is not None and each.fill > NEARLY_FULL:
            yield Fault(each.name, "warning", f"{each.fill * _PERCENT:.0f} % of maxmemory are used.")
        if each.policy not in (None, "noeviction"):
            text = f"maxmemory-policy is {each.policy}: a full server evicts wake-ups, and turns wait for the sweeper."
            evicted = f" It has evicted {each.evicted:,} keys." if each.evicted else ""
            yield Fault(each.name, "warning", f"{text}{evicted}")


def _of_processes(read: Readings) -> Iterator[Fault]:
    alive = [each for each in read.processes if each.is_alive]
    if read.has("processes") and not read.workers:
        last = min((each.seen_s for each in read.processes if each.runs_turns), default=None)
        seen = "none was seen today" if last is None else f"the last one was seen {_for(last)} ago"
        yield Fault("workers", "down", f"No worker runs turns: {seen}.")
    if read.intake_closed:
        yield Fault("intake", "down", "The intake is closed: `perdure drain --resume` opens it.")
    beats = [each for each in read.processes if each.kind == BEAT]
    if beats and not any(each.is_alive for each in beats):
        last = min(each.seen_s for each in beats)
        text = f"No beat runs: the last one was seen {_for(last)} ago. The workers' sweepers fire the slots, if later."
        yield Fault("beat", "warning", text)
    for each in read.lost:
        if each.kind == WORKER:
            text = f"{each.name} has not reported for {_for(each.seen_s)}: it was killed or hangs."
            yield Fault("workers", "warning", text)
    yield from _of_differences(alive)
    yield from _of_rounds(read)


def _of_differences(alive: Sequence[Running]) -> Iterator[Fault]:
    releases = sorted({each.release for each in alive if each.kind == WORKER})
    if len(releases) > 1:
        yield Fault("workers", "warning", f"Workers of several releases run: {', '.join(releases)}.")
    for each in alive:
        if abs(each.skew_s) > _SKEW_S:
            way = "ahead of" if each.skew_s > 0 else "behind"
            yield Fault("clock", "warning", f"The clock of {each.name} is {_for(abs(each.skew_s))} {way} PostgreSQL's.")


def _of_rounds(read: Readings) -> Iterator[Fault]:
    for name, late_s in read.sweeps.items():
        if late_s > LATE_S and name in {"turns", "schedules"}:
            yield Fault("sweeper", "warning", f"The sweep of {name} is {_for(late_s)} late.")
    for name, late_s in read.schedules.items():
        if late_s > LATE_S:
            yield Fault("schedules", "warning", f"The newest slot of {name} is {_for(late_s)} late.")


def _of_work(read: Readings) -> Iterator[Fault]:
    due = Amount(
        sum(each.number for each in read.due.values()),
        max((each.oldest_s for each in read.due.values() if each.oldest_s is not None), default=None),
    )
    for what, amount, text in (
        ("backlog", due, "sessions wait for a worker"),
        ("messages", read.amounts.get("unrouted"), "messages of applications are not routed"),
        ("deliveries", read.amounts.get("deliveries_pending"), "replies are not delivered"),
        ("reminders", read.amounts.get("reminders_late"), "users' schedules are late"),
    ):
        if amount is not None and amount.oldest_s is not None and amount.oldest_s > _WAITED_S:
            yield Fault(what, "warning", f"{number(amount)} {text}; the oldest for {_for(amount.oldest_s)}.")
    yield from _of_models(read)
    yield from _of_failures(read)


def _of_models(read: Readings) -> Iterator[Fault]:
    if (turns := sum(each.number for each in read.failures)) > _MANY_FAILURES:
        worst = max(read.failures, key=lambda each: each.number)
        text = f"{turns:,} turns of the last hour failed, {worst.number:,} of {worst.labels[0]} with {worst.labels[1]}."
        yield Fault("turns", "warning", text)
    for parked in read.parked:
        what = parked.labels[0] or "the models of their agents"
        yield Fault("models", "warning", f"{parked.number:,} sessions wait for {what}.")


def _of_failures(read: Readings) -> Iterator[Fault]:
    for what, name, text in (
        ("deliveries", "deliveries_failing", "replies are tried again, because an attempt failed"),
        (
            "deliveries",
            "deliveries_failed_lately",
            "deliveries were abandoned within the last hour: `perdure deliveries list --status failed`",
        ),
        (
            "consolidation",
            "consolidations_failing",
            "ended sessions have no memories yet, because a run failed: `perdure memory consolidate`",
        ),
        ("consolidation", "consolidations_given_up", "ended sessions have no memories: `perdure memory consolidate`"),
    ):
        if (found := read.amounts.get(name)) is not None and found.number:
            yield Fault(what, "warning", f"{number(found)} {text}.")
    for breaker in read.breakers:
        if breaker.state is CircuitState.OPEN:
            yield Fault("breakers", "warning", f"The breaker {breaker.name} is open.")
    for name, why in read.failed.items():
        if name != "server":
            yield Fault("status", "warning", f"{name} could not be read: {why}")


def number(amount: Amount) -> str:
    """The number, which may be the bound of what is counted."""
    return f"{amount.number:,} or more" if amount.number >= MOST else f"{amount.number:,}"


def _process(each: Running) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "name": each.name,
        "owner": each.owner,
        "release": each.release,
        "queues": list(each.queues),
        "started_at": each.started_at.isoformat(),
        "state": "stopped" if each.stopped else "alive" if each.is_alive else "gone",
        "seen_s": each.seen_s,
        "skew_s": each.skew_s,
    }


def _flat(counted: Any) -> tuple[Any, ...]:
    return (*counted.labels, counted.number)


def _moment(at: datetime) -> str:
    return at.isoformat(timespec="seconds")


def _for(seconds: float) -> str:
    """A duration for people.

    >>> _for(90), _for(7_300)
    ('2 min', '2 h')
    """
    for limit, unit, name in ((90, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"
