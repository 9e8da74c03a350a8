"""`/healthz`: the process answers. `/readyz`: it takes messages in, and PostgreSQL and the broker answer.

The database must be one that this release can use (`perdure.database.compatibility`). Neither needs a key, so their
answers name no address, no user and no table. `/readyz` names the workers that were killed lately
(`perdure.resilience.kill_reports`); they do not change its status, since this gateway is as ready without them.
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

_PATIENCE_S = 2.0

T = TypeVar("T")

KilledLately = Callable[[], Sequence[Kill]]
"""The workers that their watchdog killed lately, oldest first; may block."""


class Question(Generic[T]):
    """A question to a service, asked by one thread at a time however many requests want the answer. `ask` may hang."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._thread = CapacityLimiter(1)
        self._asking: asyncio.Future[T] | None = None

    async def answer(self) -> T:
        """What `ask` returns.

        Raises:
            TimeoutError: there is no answer within `_PATIENCE_S` seconds.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._asked())
        done, _ = await asyncio.wait({self._asking}, timeout=_PATIENCE_S)
        if not done:
            raise TimeoutError
        return self._asking.result()

    async def _asked(self) -> T:
        return await to_thread.run_sync(self._ask, abandon_on_cancel=True, limiter=self._thread)


class Check:
    """Whether a service works. `ask` returns what is wrong, None if nothing is. If it hangs, that is the answer."""

    def __init__(self, service: str, ask: Callable[[], str | None]) -> None:
        self._service = service
        self._question = Question(ask)

    async def answer(self) -> str | None:
        """What is wrong with the service, None if nothing is; within `_PATIENCE_S` seconds."""
        try:
            return await self._question.answer()
        except TimeoutError:
            return f"{self._service} does not answer."


def database_check(database: Database) -> Check:
    """Whether the database is reached and this release can use it."""

    def ask() -> str | None:
        try:
            require(database)
        except IncompatibleDatabase as error:
            log.warning("not ready: %s", error.message)
            return error.message
        except (SQLAlchemyError, PerdureError) as error:
            log.warning("not ready: the database cannot be reached (%s)", loggable(error))
            return "The database cannot be reached."
        return None

    return Check("The database", ask)


def broker_check(reachable: Callable[[], bool]) -> Check:
    """Whether the broker is reached."""
    return Check("The broker", lambda: None if reachable() else "The broker cannot be reached.")


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", response_description="Alive.", response_model_exclude_unset=True, openapi_extra=NO_KEY)
async def alive() -> Health:
    """Say that the process answers."""
    return Health(status="alive")


async def _checks(request: Request) -> list[Check]:
    found: list[Check] = request.app.state.checks
    return found


async def _killed(request: Request) -> Question[Sequence[Kill]]:
    found: Question[Sequence[Kill]] = request.app.state.killed
    return found


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_description="Ready.", response_model_exclude_unset=True, openapi_extra=NO_KEY)
async def ready(
    gateway: TheGateway,
    checks: Annotated[list[Check], Depends(_checks)],
    killed: Annotated[Question[Sequence[Kill]], Depends(_killed)],
) -> Health:
    """Say that messages can be accepted and workers woken, or why not; and which workers were killed lately."""
    gateway.admit()
    kills, answers = await asyncio.gather(_named(killed), asyncio.gather(*(check.answer() for check in checks)))
    wrong = [answer for answer in answers if answer is not None]
    if wrong:
        raise Unavailable(" ".join(wrong))
    return Health(status="ready", killed_workers=kills) if kills else Health(status="ready")


async def _named(killed: Question[Sequence[Kill]]) -> list[KilledWorker]:
    """The kills as the answer has them; none if Redis does not answer."""
    try:
        kills = await killed.answer()
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
