"""`/healthz`: the process answers. `/readyz`: it takes messages in, and PostgreSQL and the broker answer.

The database must be one that this release can use (`perdure.database.compatibility`). Neither needs a key, so their
answers name no address, no user and no table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Request
from sqlalchemy.exc import SQLAlchemyError

from perdure.channels.http.gateway import TheGateway
from perdure.channels.http.schema import HEALTH, Health
from perdure.database.compatibility import require
from perdure.database.engine import Database
from perdure.errors import IncompatibleDatabase, PerdureError, Unavailable

log = logging.getLogger(__name__)

router = APIRouter(tags=["health"])

_PATIENCE_S = 2.0


class Check:
    """A question to a service, asked by one thread at a time however many ask for the answer.

    `ask` returns what is wrong, None if nothing is. It may hang; then that is the answer.
    """

    def __init__(self, service: str, ask: Callable[[], str | None]) -> None:
        self._service = service
        self._ask = ask
        self._thread = CapacityLimiter(1)
        self._asking: asyncio.Future[str | None] | None = None

    async def answer(self) -> str | None:
        """What is wrong with the service, None if nothing is; within `_PATIENCE_S` seconds."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._asked())
        done, _ = await asyncio.wait({self._asking}, timeout=_PATIENCE_S)
        return self._asking.result() if done else f"{self._service} does not answer."

    async def _asked(self) -> str | None:
        return await to_thread.run_sync(self._ask, abandon_on_cancel=True, limiter=self._thread)


def database_check(database: Database) -> Check:
    """Whether the database is reached and this release can use it."""

    def ask() -> str | None:
        try:
            require(database)
        except IncompatibleDatabase as error:
            log.warning("not ready: %s", error.message)
            return error.message
        except (SQLAlchemyError, PerdureError) as error:
            log.warning("not ready: the database cannot be reached (%s)", error)
            return "The database cannot be reached."
        return None

    return Check("The database", ask)


def broker_check(reachable: Callable[[], bool]) -> Check:
    """Whether the broker is reached."""
    return Check("The broker", lambda: None if reachable() else "The broker cannot be reached.")


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", responses=HEALTH)
async def alive() -> Health:
    """Say that the process answers."""
    return Health(status="alive")


async def _checks(request: Request) -> list[Check]:
    found: list[Check] = request.app.state.checks
    return found


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses=HEALTH)
async def ready(gateway: TheGateway, checks: Annotated[list[Check], Depends(_checks)]) -> Health:
    """Say that messages can be accepted and workers woken, or why not."""
    gateway.admit()
    wrong = [answer for answer in await asyncio.gather(*(check.answer() for check in checks)) if answer is not None]
    if wrong:
        raise Unavailable(" ".join(wrong))
    return Health(status="ready")
