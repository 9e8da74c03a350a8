"""`/healthz` reports that the process responds, and `/readyz` reports whether a message would be answered.

`/readyz` succeeds if the gateway accepts messages, the database accepts writes and this release can use it
(`perdure.database.compatibility`), the broker is available, Redis accepts writes, and a worker that runs turns was seen
within `PERDURE_READY__NO_WORKER_S` seconds. A gateway counts them from its own start, so that it is ready before the
workers of a new installation are, and from the end of an outage of the database, in which none can report. The response
lists the workers that were killed within the last hour (`perdure.resilience.kill_reports`). Neither route needs a key,
so their responses contain no address, user or table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Generic, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Request
from sqlalchemy.exc import SQLAlchemyError

from perdure.channels.http.dependencies import TheGateway
from perdure.channels.http.openapi import NO_KEY
from perdure.channels.http.schemas.answer import problems
from perdure.channels.http.schemas.health import Health, KilledWorker
from perdure.clock import Clock
from perdure.database.compatibility import require
from perdure.database.engine import Database
from perdure.errors import PerdureError, Unavailable, loggable
from perdure.observe import presence
from perdure.observe.queries import WRITABLE
from perdure.observe.readings import Source
from perdure.observe.servers import broker_state
from perdure.resilience.kill_reports import Kill
from perdure.runtime import Runtime

log = logging.getLogger(__name__)

router = APIRouter(tags=["health"], responses=problems(500, 503))

_TIMEOUT_S = 2.0

T = TypeVar("T")

KilledLately = Callable[[], Sequence[Kill]]
"""Returns the kills of workers within the last hour, oldest first. A call may block."""


class Lookup(Generic[T]):
    """Shares one call of `read` between concurrent requests, so a call that hangs occupies only one thread."""

    def __init__(self, read: Callable[[], T], timeout_s: float = _TIMEOUT_S) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._thread = CapacityLimiter(1)
        self._reading: asyncio.Future[T] | None = None

    async def result(self) -> T:
        """The result of `read`; concurrent callers share one call.

        Raises:
            TimeoutError: `read` does not return within `timeout_s` seconds.
        """
        reading = self._reading
        if reading is None or reading.done():
            reading = self._reading = asyncio.ensure_future(self._read_in_thread())
        done, _ = await asyncio.wait({reading}, timeout=self._timeout_s)
        if not done:
            raise TimeoutError
        return reading.result()  # another caller may have begun the next one

    async def _read_in_thread(self) -> T:
        return await to_thread.run_sync(self._read, abandon_on_cancel=True, limiter=self._thread)


class Check:
    """A check of a service. `find_fault` returns a message for an operator, or `None` if the service works."""

    def __init__(self, service: str, find_fault: Callable[[], str | None]) -> None:
        self._service = service
        self._fault = Lookup(find_fault)

    async def fault(self) -> str | None:
        """A message about the service's fault, or `None` if the service works. Takes at most `_TIMEOUT_S` seconds."""
        try:
            return await self._fault.result()
        except TimeoutError:
            return f"{self._service} does not answer."


def database_check(database: Database) -> Check:
    """A check that the database accepts writes and that this release can use it."""

    def find_fault() -> str | None:
        try:
            require(database)
            database.run(WRITABLE, {})
        except PerdureError as error:
            log.warning("not ready: %s", loggable(error))
            return error.message.replace("; please try again.", ".")
        except SQLAlchemyError as error:
            log.warning("not ready: the database cannot be reached (%s)", loggable(error))
            return "The database cannot be reached."
        return None

    return Check("The database", find_fault)


def broker_check(reachable: Callable[[], bool]) -> Check:
    return Check("The broker", lambda: broker_state(reachable).fault)


def worker_check(database: Database, clock: Clock, no_worker_s: float) -> Check:
    """A check that a worker that runs turns was seen within `no_worker_s` seconds, or since this call or an outage.

    Workers report every few seconds, so the check waits for at least `presence.GONE_S` seconds.
    """
    began = clock.monotonic()

    def find_fault() -> str | None:
        nonlocal began
        try:
            # A worker that has stopped counts, too: it may be about to start again.
            seen = [each.seen_s for each in presence.read_processes(database) if each.runs_turns]
        except (SQLAlchemyError, PerdureError):
            began = clock.monotonic()
            return None  # the database's own check reports the fault
        waited_s = min([*seen, clock.monotonic() - began])
        if waited_s < max(no_worker_s, presence.GONE_S):
            return None
        return f"No worker that runs turns was seen for {waited_s:.0f} s."

    return Check("The database", find_fault)


def checks(runtime: Runtime, broker_reachable: Callable[[], bool], source: Source) -> list[Check]:
    """What `/readyz` checks."""
    found = [database_check(runtime.database), broker_check(broker_reachable)]
    found += [Check("Redis", each.find_fault) for each in source.servers]
    if no_worker_s := runtime.settings.ready.no_worker_s:
        found.append(worker_check(runtime.database, runtime.clock, no_worker_s))
    return found


@router.head("/healthz", include_in_schema=False)
@router.get(
    "/healthz",
    response_description="Alive.",
    response_model_exclude_unset=True,
    responses={200: {"content": {"application/json": {"example": {"status": "alive"}}}}},
    openapi_extra=NO_KEY,
)
async def alive() -> Health:
    """Report that the process is alive."""
    return Health(status="alive")


async def _checks(request: Request) -> list[Check]:
    checks: list[Check] = request.app.state.checks
    return checks


async def _killed(request: Request) -> Lookup[Sequence[Kill]]:
    killed: Lookup[Sequence[Kill]] = request.app.state.killed
    return killed


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_description="Ready.", response_model_exclude_unset=True, openapi_extra=NO_KEY)
async def ready(
    gateway: TheGateway,
    checks: Annotated[list[Check], Depends(_checks)],
    killed: Annotated[Lookup[Sequence[Kill]], Depends(_killed)],
) -> Health:
    """Report whether a message would be answered: the gateway can accept it, wake workers, and workers run.

    The answer lists the workers that were killed within the last hour. Such kills do not make the gateway unready.
    """
    gateway.admit()
    kills, results = await asyncio.gather(_killed_workers(killed), asyncio.gather(*(check.fault() for check in checks)))
    faults = dict.fromkeys(fault for fault in results if fault is not None)
    if faults:
        raise Unavailable(" ".join(faults))
    return Health(status="ready", killed_workers=kills) if kills else Health(status="ready")


async def _killed_workers(killed: Lookup[Sequence[Kill]]) -> list[KilledWorker]:
    """The killed workers; empty if Redis does not answer."""
    try:
        kills = await killed.result()
    except TimeoutError:
        return []
    return [
        KilledWorker(
            worker=kill.worker,
            pid=kill.pid,
            silent_s=kill.silent_s,
            killed_at=datetime.fromtimestamp(kill.killed_at, UTC).isoformat(),
        )
        for kill in kills
    ]
