"""Finds settings of PostgreSQL and Redis that can lose accepted messages or keep erased users' text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import redis
import typer

from perdure.database import serverlog
from perdure.database.engine import Database, Statement
from perdure.embedded.redis import is_of
from perdure.errors import Unavailable
from perdure.redis import connect, remedy, where
from perdure.settings import Settings
from perdure.workers.assembly import redis_address

_DURABILITY = Statement(
    "doctor.durability",
    """
    SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')
    """,
    writes=False,
)


_OF_REDIS = ("maxmemory-policy", "appendonly", "slowlog-log-slower-than")


@dataclass(frozen=True, slots=True)
class Finding:
    """A dangerous setting: its server, its name and value, the risk, and how to fix it."""

    where: str
    setting: str
    risk: str
    fix: str


def findings(settings: Settings, database: Database) -> Iterator[Finding]:
    """The dangerous settings of PostgreSQL and of Redis.

    Raises:
        Unavailable: a server cannot be reached.
    """
    yield from _postgres(database)
    yield from _redis(settings)


def _postgres(database: Database) -> Iterator[Finding]:
    for row in database.run(_DURABILITY, {}):
        if row.setting == "off":
            risk = "a crash of the server loses messages that were accepted"
            yield Finding("PostgreSQL", f"{row.name} is off", risk, f"Set {row.name} = on.")
    if (quoting := serverlog.quoting(database)) is not None:
        fix = "Set log_min_error_statement = panic, log_error_verbosity = terse, log_statement = none."
        yield Finding(
            "PostgreSQL", quoting, "the server's log quotes users' messages; erasing a user does not remove them", fix
        )


def _redis(settings: Settings) -> Iterator[Finding]:
    """Findings about the Redis of `PERDURE_REDIS_URL`, or the embedded one.

    Raises:
        Unavailable: Redis cannot be reached.
    """
    url = redis_address(settings)
    name = f"Redis at {where(url)}"
    with connect(url) as client:
        try:
            client.ping()
        except redis.RedisError as error:
            raise Unavailable(f"{name} cannot be reached. {remedy(error)}") from error
        configured: dict[str, str] = {}
        try:
            for setting in _OF_REDIS:  # Redis 6 accepts one name per command
                configured |= client.config_get(setting)
        except redis.ResponseError as error:  # a managed server may forbid CONFIG
            typer.echo(f"perdure: the settings of {name} were not checked: {error}", err=True)
    policy = configured.get("maxmemory-policy")
    if policy not in (None, "noeviction"):
        risk = "a full Redis evicts wake-ups, and turns wait for the sweeper"
        yield Finding(name, f"maxmemory-policy is {policy}", risk, "Set maxmemory-policy noeviction.")
    if configured.get("appendonly") == "yes" and not is_of(settings.data_dir / "redis", url):
        risk = "the append-only file keeps an erased user's data until Redis rewrites it"
        yield Finding(name, "appendonly is yes", risk, "Run BGREWRITEAOF after an erasure, or set appendonly no.")
    slower = configured.get("slowlog-log-slower-than")
    if slower not in (None, "-1"):
        risk = "the slow log quotes commands that contain users' messages"
        yield Finding(name, f"slowlog-log-slower-than is {slower}", risk, "Set slowlog-log-slower-than -1.")
