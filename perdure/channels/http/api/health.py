"""`/healthz` reports that the process responds, and `/readyz` reports whether the gateway can accept messages.

`/readyz` succeeds if the gateway accepts messages, the broker is available, and this release can use the database
(`perdure.database.compatibility`). Its response lists the workers that were killed within the last hour
(`perdure.resilience.kill_reports`). These kills do not change the status, because the gateway works without workers.
Neither route needs a key, so their responses contain no address, user or table.
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
from perdure.database.compatibility import require
from perdure.database.engine import Database
from perdure.errors import IncompatibleDatabase, PerdureError, Unavailable, loggable
from perdure.resilience.kill_reports import Kill

log = logging.getLogger(__name__)

router = APIRouter(tags=["health"], responses=problems(500, 503))

_TIMEOUT_S = 2.0

T = TypeVar("T")

KilledLately = Callable[[], Sequence[Kill]]
"""Returns the kills of workers within the last hour, oldest first. A call may block."""


class Lookup(Generic[T]):
    """Shares one call of `read` between concurrent requests, so a call that hangs occupies only one thread."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._thread = CapacityLimiter(1)
        self._reading: asyncio.Future[T] | None = None

    async def result(self) -> T:
        """The result of `read`; concurrent callers share one call.

        Raises:
            TimeoutError: `read` does not return within `_TIMEOUT_S` seconds.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_in_thread())
        done, _ = await asyncio.wait({self._reading}, timeout=_TIMEOUT_S)
        if not done:
            raise TimeoutError
        return self._reading.result()

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
    """A check that the database is available and that this release can use it."""

    def find_fault() -> str | None:
        try:
            require(database)
        except IncompatibleDatabase as error:
            log.warning("not ready: %s", error.message)
            return error.message
        except (SQLAlchemyError, PerdureError) as error:
            log.warning("not ready: the database cannot be reached (%s)", loggable(error))
            return "The database cannot be reached."
        return None

    return Check("The database", find_fault)


def broker_check(reachable: Callable[[], bool]) -> Check:
    return Check("The broker", lambda: None if reachable() else "The broker cannot be reached.")


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
    """Report whether the gateway can accept messages and wake workers.

    The answer lists the workers that were killed within the last hour. Such kills do not make the gateway unready.
    """
    gateway.admit()
    kills, results = await asyncio.gather(_killed_workers(killed), asyncio.gather(*(check.fault() for check in checks)))
    faults = [fault for fault in results if fault is not None]
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
