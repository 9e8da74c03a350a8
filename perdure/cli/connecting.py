"""What a command needs of the system that runs: its database, and a way to wake its workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from uuid import UUID

import typer

from perdure.access.tenants import parse_tenant, user_key
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.database.engine import Database
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.workers import logs
from perdure.workers.assembly import addresses, assemble, database_address, redis_address
from perdure.workers.publish.wake import CeleryWaker

log = logging.getLogger(__name__)

Tenant = Annotated[str | None, typer.Option(metavar="TENANT", help="The user's tenant; default none.")]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="Only this tenant's users.")]


class _NobodyToWake:
    """Stands in for a broker that does not run: the sweeper finds what was accepted."""

    def session(self, session_id: UUID, priority: int) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def delivery(self, delivery_id: UUID) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def ending(self, session_id: UUID) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def consolidation(self, session_id: UUID | None) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def casebank(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def opened() -> Iterator[tuple[Settings, Database]]:
    """The settings and the database, for a command that only reads.

    Raises:
        Unavailable: no embedded PostgreSQL runs, and no URL is set.
    """
    settings = Settings.load()
    logs.configure(logging.WARNING)
    made = Database(database_address(settings))
    try:
        yield settings, made
    finally:
        made.close()


@contextmanager
def database() -> Iterator[Database]:
    """The database alone; see `opened`."""
    with opened() as (_, made):
        yield made


@contextmanager
def runtime() -> Iterator[Runtime]:
    """The parts of a process that accepts messages and cancels turns.

    Raises:
        Unavailable: the database is not there. That the broker is not there is no error.
    """
    settings = Settings.load()
    logs.configure(logging.WARNING)
    database_url = database_address(settings)
    waker = _waker(settings)
    made = assemble(settings, database_url, waker, _redis_url(settings))
    try:
        yield made
    finally:
        if made.redis_memory is not None:
            made.redis_memory.close()
        made.database.close()
        if made.breakers is not None:
            made.breakers.close()
        waker.close()


@contextmanager
def control() -> Iterator[Callable[[str, float], dict[str, Any]]]:
    """A way to ask all workers something, waiting for so many seconds: their answers by their names, none if away."""
    settings = Settings.load()
    waker = _waker(settings)

    def ask(question: str, within_s: float) -> dict[str, Any]:
        if isinstance(waker, CeleryWaker):
            return waker.ask(question, within_s)
        time.sleep(within_s)
        return {}

    try:
        yield ask
    finally:
        waker.close()


def parse_user(user: str | None, tenant: str | None) -> tuple[str | None, str | None]:
    """The key of the user that a person named, if any, and the tenant.

    Raises:
        InvalidRequest: no user has that id, or no tenant that name.
    """
    named = parse_tenant(tenant)
    return None if user is None else user_key(named, user), named


def parse_id(text: str, thing: str) -> UUID:
    """The id that a person typed.

    Raises:
        Failure: it is none.
    """
    try:
        return UUID(text)
    except ValueError:
        raise Failure(
            f"{text!r} is no id of a {thing}: an id is a UUID, as `perdure send` prints it.", WRONG_USAGE
        ) from None


def _redis_url(settings: Settings) -> str | None:
    """Where Redis is; None if none runs: then a worker sees to what is there."""
    try:
        return redis_address(settings)
    except Unavailable:
        return None


def _waker(settings: Settings) -> CeleryWaker | _NobodyToWake:
    try:
        return CeleryWaker(settings, addresses(settings))
    except Unavailable as error:
        log.warning("%s A message is accepted nevertheless, and answered once it is back.", error.message)
        return _NobodyToWake()
