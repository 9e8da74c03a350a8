"""`perdure doctor`: checks the settings of PostgreSQL and Redis; see `server_settings`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from perdure.cli import connecting
from perdure.cli.display import AsJson, write_json, write_table, write_text
from perdure.cli.errors import FAILED
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
    """One dangerous setting: where it is, what it is, what it puts at risk, and the way out."""

    where: str
    setting: str
    risk: str
    fix: str


def doctor(*, as_json: AsJson = False) -> None:
    """Check the servers that perdure uses for dangerous settings.

    Status 1 if there are any.
    """
    from perdure.cli.inspect.server_settings import findings

    with connecting.opened() as (settings, database):
        found = list(findings(settings, database))
    if as_json:
        write_json({"findings": [asdict(each) for each in found]})
    elif found:
        write_table(
            ("where", "setting", "risk", "fix"), [[each.where, each.setting, each.risk, each.fix] for each in found]
        )
    else:
        write_text("No dangerous setting was found.")
    if found:
        raise typer.Exit(FAILED)


def _postgres(database: Database) -> Iterator[Finding]:
    for row in database.run(_DURABILITY, {}):
        if row.setting == "off":
            risk = "a crash of the server loses messages that were accepted"
            yield Finding("PostgreSQL", f"{row.name} is off", risk, f"Set {row.name} = on.")
    if (quoting := serverlog.quoting(database)) is not None:
        fix = "Set log_min_error_statement = panic, log_error_verbosity = terse, log_statement = none."
        yield Finding("PostgreSQL", quoting, "the server's log quotes what users wrote; erasing does not reach it", fix)


def _redis(settings: Settings) -> Iterator[Finding]:
    """Findings about the Redis of `PERDURE_REDIS_URL`, or the embedded one.

    Raises:
        Unavailable: it cannot be reached.
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
            for setting in _OF_REDIS:  # Redis 6 takes one name at a time
                configured |= client.config_get(setting)
        except redis.ResponseError as error:  # a managed server forbids CONFIG
            typer.echo(f"perdure: the settings of {name} were not checked: {error}", err=True)
    policy = configured.get("maxmemory-policy")
    if policy not in (None, "noeviction"):
        risk = "a full Redis removes wake-ups, and turns wait for the sweeper"
        yield Finding(name, f"maxmemory-policy is {policy}", risk, "Set maxmemory-policy noeviction.")
    if configured.get("appendonly") == "yes" and not is_of(settings.data_dir / "redis", url):
        risk = "the append-only file keeps an erased user's words until Redis rewrites it"
        yield Finding(name, "appendonly is yes", risk, "Run BGREWRITEAOF after an erasure, or set appendonly no.")
    slower = configured.get("slowlog-log-slower-than")
    if slower not in (None, "-1"):
        risk = "the slow log quotes commands with what users wrote"
        yield Finding(name, f"slowlog-log-slower-than is {slower}", risk, "Set slowlog-log-slower-than -1.")
