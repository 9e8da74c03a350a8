"""Connects commands to the database and the workers of an installation.

Each function that opens the database raises `Unavailable` if it cannot be reached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from perdure.access.tenants import UserKey, parse_tenant, user_key
from perdure.cli import audited
from perdure.cli.display import prints_on_stderr
from perdure.cli.errors import WRONG_USAGE, Failure
from perdure.errors import Unavailable
from perdure.workers import logs

if TYPE_CHECKING:
    from perdure.agents import Agents
    from perdure.database.engine import Database
    from perdure.runtime import AcceptingRuntime, Runtime
    from perdure.settings import Settings
    from perdure.workers.publish.wake import CeleryWaker

log = logging.getLogger(__name__)

Tenant = Annotated[str | None, typer.Option(metavar="TENANT", help="The user's tenant; default: none.")]
OnlyTenant = Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="Only users of this tenant.")]


class _UnavailableBroker:
    """Replaces `CeleryWaker` if the broker is unavailable. Publishes nothing: a periodic task finds accepted work."""

    def session(self, session_id: UUID, priority: int) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def drain(self, session_id: UUID, priority: int) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def has_enough(self) -> bool:
        return False

    def delivery(self, delivery_id: UUID) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def ending(self, session_id: UUID) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def consolidation(self, session_id: UUID | None) -> bool:  # noqa: ARG002 (the port's signature)
        return False

    def casebank(self) -> bool:
        return False

    def ask(self, question: str, within_s: float) -> dict[str, Any]:  # noqa: ARG002 (CeleryWaker's signature)
        """Wait for `within_s` seconds, so that a polling caller does not spin; returns no answers."""
        time.sleep(within_s)
        return {}

    def close(self) -> None:
        """Do nothing: no connection is open."""


@contextmanager
def opened() -> Iterator[tuple[Settings, Database]]:
    """The settings and the database, for a command that needs neither broker nor models.

    Raises:
        Unavailable: no database URL is set, and no embedded PostgreSQL runs.
    """
    from perdure.assembly import database_address, open_database
    from perdure.settings import Settings

    settings = Settings.load()
    logs.configure(logging.WARNING)
    made = open_database(settings, database_address(settings))
    try:
        with audited.recorded(made):
            yield settings, made
    finally:
        made.close()


@contextmanager
def database() -> Iterator[Database]:
    with opened() as (_, made):
        yield made


@contextmanager
def runtime() -> Iterator[Runtime]:
    """The runtime, for commands that accept messages, cancel turns or call models. The broker may be unavailable."""
    from perdure.assembly import assemble

    with _waking() as (settings, database_url, waker):
        with prints_on_stderr():
            made = assemble(settings, database_url, waker, _redis_url(settings))
        try:
            with audited.recorded(made.database):
                yield made
        finally:
            made.close()


@contextmanager
def accepting_runtime() -> Iterator[AcceptingRuntime]:
    """The parts of a runtime for accepting messages, without models, embedder and breakers."""
    from perdure.assembly import assemble_accepting

    with _waking() as (settings, database_url, waker):
        with prints_on_stderr():
            made = assemble_accepting(settings, database_url, waker)
        try:
            yield made
        finally:
            made.database.close()


@contextmanager
def _waking() -> Iterator[tuple[Settings, str, CeleryWaker | _UnavailableBroker]]:
    """The settings, the address of the database, and what publishes wake-ups."""
    from perdure.assembly import database_address
    from perdure.settings import Settings

    settings = Settings.load()
    logs.configure(logging.WARNING)
    database_url = database_address(settings)
    waker = _waker(settings)
    try:
        yield settings, database_url, waker
    finally:
        waker.close()


def load_agents(settings: Settings) -> Agents:
    """The configured agents. What their module prints goes to stderr.

    Raises:
        SettingsError: the agents cannot be loaded.
    """
    from perdure.assembly import load_agents as load

    with prints_on_stderr():
        return load(settings)


@contextmanager
def control() -> Iterator[Callable[[str, float], dict[str, Any]]]:
    """A function that sends a question to all workers and waits the given number of seconds for answers.

    The function returns the answers by worker name. The dictionary is empty if no worker or no broker is available.
    """
    from perdure.settings import Settings

    waker = _waker(Settings.load())
    try:
        yield waker.ask
    finally:
        waker.close()


@contextmanager
def broker(settings: Settings) -> Iterator[CeleryWaker | None]:
    """What connects to the broker; `None` if the broker's address is unknown."""
    from perdure.assembly import addresses
    from perdure.workers.publish.wake import CeleryWaker

    try:
        waker = CeleryWaker(settings, addresses(settings, database=False))
    except Unavailable:
        yield None
        return
    try:
        yield waker
    finally:
        waker.close()


def parse_user(user: str | None, tenant: str | None) -> tuple[UserKey | None, str | None]:
    """The user's key (`None` if `user` is `None`) and the tenant.

    Raises:
        InvalidRequest: the user's id or the tenant's name is invalid.
    """
    named = parse_tenant(tenant)
    return None if user is None else user_key(named, user), named


def parse_id(text: str, thing: str) -> UUID:
    """The UUID in a command's argument.

    Raises:
        Failure: the text is not a UUID.
    """
    try:
        return UUID(text)
    except ValueError:
        raise Failure(f"{text!r} is not the id of a {thing}: it must be a UUID.", WRONG_USAGE) from None


def _redis_url(settings: Settings) -> str | None:
    """The address of Redis; `None` if no address is set and no embedded Redis runs."""
    from perdure.assembly import redis_address

    try:
        return redis_address(settings)
    except Unavailable:
        return None


def _waker(settings: Settings) -> CeleryWaker | _UnavailableBroker:
    from perdure.assembly import addresses
    from perdure.workers.publish.wake import CeleryWaker

    try:
        return CeleryWaker(settings, addresses(settings))
    except Unavailable as error:
        log.warning("%s Accepted messages are answered once the broker is available.", error.message)
        return _UnavailableBroker()
