"""Finds settings of PostgreSQL and Redis that can lose accepted messages or keep erased users' text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import redis
import typer

from perdure.assembly import has_embedded_database, redis_address
from perdure.cli import connecting
from perdure.database import serverlog
from perdure.database.compatibility import ENCODING
from perdure.database.engine import Database, Statement
from perdure.errors import Unavailable, loggable
from perdure.network import tls
from perdure.network.tls import split, unverified
from perdure.observe.disks import disk_states
from perdure.observe.queries import SEES_TRANSACTIONS, WRITABLE
from perdure.observe.redis_access import acl_rule, denied
from perdure.observe.servers import NEARLY_FULL, RedisServer, is_broker, redis_urls
from perdure.redis import connect, remedy, where
from perdure.servers.redis import is_of
from perdure.settings import Settings
from perdure.text.untrusted import first_line

_CHECKED = Statement(
    "doctor.settings",
    """
    SELECT name, setting FROM pg_settings
    WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'server_encoding', 'transaction_timeout')
    """,
    writes=False,
)


_SIZE = Statement("doctor.size", "SELECT pg_database_size(current_database()) AS size_bytes", writes=False)

_BROKER = "PERDURE_BROKER_URL"
_OF_RABBITMQ = (403, 530)
"""Codes of AMQP: the user or the password is wrong; the virtual host does not exist, or is not the user's."""

_OF_REDIS = ("cluster-enabled", "maxmemory-policy", "appendonly", "slowlog-log-slower-than")


@dataclass(frozen=True, slots=True)
class Finding:
    """A dangerous setting: its server, its name and value, the risk, and how to fix it."""

    where: str
    setting: str
    risk: str
    fix: str


def findings(settings: Settings, database: Database) -> Iterator[Finding]:
    """The dangerous settings of PostgreSQL and of Redis, and of the connections to the servers.

    Raises:
        Unavailable: a server cannot be reached, or the database accepts no writes.
    """
    yield from _connections(settings)
    database.run(WRITABLE, {})
    yield from _pooler(settings, database)
    yield from _postgres(database)
    yield from _disks(settings, database)
    yield from _redis_servers(settings)


def _pooler(settings: Settings, database: Database) -> Iterator[Finding]:
    """PgBouncer in statement mode runs single statements, and closes the connection when a transaction begins."""
    if settings.database_prepare:
        return
    try:
        with database.transaction("doctor.transaction") as transaction:
            transaction.run(_CHECKED, {})
    except Unavailable:
        database.run(WRITABLE, {})  # the database can be reached
        risk = "the pooler closes connections that begin a transaction: no message is accepted, and no turn runs"
        fix = "Set pool_mode = transaction or session for perdure's database."
        yield Finding("PgBouncer", "pool_mode is statement", risk, fix)


def _postgres(database: Database) -> Iterator[Finding]:
    for row in database.run(_CHECKED, {}):
        match row.name, row.setting:
            case "server_encoding", encoding if encoding != ENCODING:
                risk = "a message with a character that the encoding lacks fails"
                fix = f"Move the data to a database with ENCODING '{ENCODING}'."
                yield Finding("PostgreSQL", f"server_encoding is {encoding}", risk, fix)
            case "transaction_timeout", limit if limit != "0":
                risk = "an erasure, or a lock that a process holds for as long as it runs, ends after this time"
                fix = "Set transaction_timeout = 0 for perdure's role."
                yield Finding("PostgreSQL", f"transaction_timeout is {limit} ms", risk, fix)
            case "fsync" | "full_page_writes" | "synchronous_commit" as name, "off":
                risk = "a crash of the server loses messages that were accepted"
                yield Finding("PostgreSQL", f"{name} is off", risk, f"Set {name} = on.")
            case _:
                pass
    if not database.run(SEES_TRANSACTIONS, {})[0].sees:
        text = "the role sees no transactions of other roles, which may keep PostgreSQL from removing dead rows"
        typer.echo(f"perdure: {text}: GRANT pg_read_all_stats to it", err=True)
    if (quoting := serverlog.quoting(database)) is not None:
        fix = "Set log_min_error_statement = panic, log_error_verbosity = terse, log_statement = none."
        yield Finding(
            "PostgreSQL", quoting, "the server's log quotes users' messages; erasing a user does not remove them", fix
        )


def _disks(settings: Settings, database: Database) -> Iterator[Finding]:
    size = database.run(_SIZE, {})[0].size_bytes
    for each in disk_states(settings, size, embedded=has_embedded_database(settings)):
        if each.fill > NEARLY_FULL:
            where, text = "PostgreSQL", f"{each.fill * 100:.0f} % of {each.of} are used"
            fix = "Enlarge the disk, or shorten PERDURE_RETENTION__*_DAYS."
            yield Finding(where, text, "a full disk stops PostgreSQL, and no message is accepted", fix)


def _connections(settings: Settings) -> Iterator[Finding]:
    for url, variable, fix in (
        (settings.database_url, "PERDURE_DATABASE_URL", "Set sslmode=verify-full, and sslrootcert."),
        (settings.migrate_url, "PERDURE_MIGRATE_URL", "Set sslmode=verify-full, and sslrootcert."),
        (settings.redis_url, "PERDURE_REDIS_URL", "Remove the option, and set ssl_ca_certs."),
        (settings.broker_url, "PERDURE_BROKER_URL", "Remove the option, and set ssl_ca_certs."),
    ):
        if url is not None and (option := unverified(url.get_secret_value())) is not None:
            risk = "another server can take the place of this one, and read and change messages"
            yield Finding(variable, option, risk, fix)


def _redis_servers(settings: Settings) -> Iterator[Finding]:
    """Findings about Redis, and about the broker if it is another server.

    Raises:
        Unavailable: Redis cannot be reached, or the broker, or none of several.
    """
    broker_url = None if settings.broker_url is None else settings.broker_url.get_secret_value()
    failed: list[Unavailable] = []
    for name, url in redis_urls(redis_address(settings), broker_url):
        try:
            yield from _redis(settings, url, f"PERDURE_{name.upper()}_URL")
            yield from _denied(settings, url, serves=is_broker(name, url, broker_url))
        except Unavailable as error:
            if name == "redis":
                raise
            failed.append(error)
    if failed and len(failed) == len(split(broker_url or "")):
        raise failed[0]
    if broker_url is not None and not broker_url.startswith("redis"):
        with connecting.broker(settings) as waker:
            if waker is not None and (failure := waker.failure()) is not None:
                fix = tls.remedy(failure, _BROKER) or f"Start it, or set {_BROKER} to one that runs."
                if getattr(failure, "code", None) in _OF_RABBITMQ:
                    fix = f"{_BROKER} must have a user, a password and a virtual host that RabbitMQ accepts."
                raise Unavailable(f"The broker cannot be reached. {fix}", reason=loggable(failure)) from failure


def _redis(settings: Settings, url: str, variable: str) -> Iterator[Finding]:
    """Findings about the Redis at `url`, the value of `variable`."""
    name = f"Redis at {where(url)}"
    with connect(url) as client:
        try:
            client.ping()
        except redis.RedisError as error:
            fix = remedy(error).replace("PERDURE_REDIS_URL", variable)
            raise Unavailable(f"{name} cannot be reached. {fix}", reason=first_line(str(error))) from error
        configured: dict[str, str] = {}
        try:
            for setting in _OF_REDIS:  # Redis 6 accepts one name per command
                configured |= client.config_get(setting)
        except redis.ResponseError as error:  # a managed server may forbid CONFIG
            typer.echo(f"perdure: the settings of {name} were not checked: {error}", err=True)
    if (full := _fill(url, settings)) is not None:
        yield Finding(name, full, "a full Redis refuses wake-ups, and no turn runs", "Raise maxmemory, or free memory.")
    yield from _dangerous(name, configured, embedded=is_of(settings.data_dir / "redis", url))


def _denied(settings: Settings, url: str, *, serves: bool) -> Iterator[Finding]:
    """What the ACL of the Redis at `url` denies to the user in `url`. `serves`: it is the broker."""
    with connect(url) as client:
        lacking = denied(client, settings.redis_prefix, is_broker=serves)
        known = client.get_connection_kwargs()
    if lacking:
        user = known.get("username") or "default"
        fix = f"ACL SETUSER {user} {acl_rule(settings.redis_prefix, known.get('db') or 0)}"
        risk = "tasks are not published or fetched, and turns do not run or are not shown"
        yield Finding(f"Redis at {where(url)}", f"the ACL denies {user}: {', '.join(lacking)}", risk, fix)


def _dangerous(name: str, configured: Mapping[str, str], *, embedded: bool) -> Iterator[Finding]:
    """What is dangerous among the settings that the Redis `name` has shown."""
    if configured.get("cluster-enabled") == "yes":
        risk = "it refuses Celery's commands, which use keys of several slots, and no turn is woken"
        yield Finding(name, "cluster-enabled is yes", risk, "Use a Redis with cluster-enabled no.")
    policy = configured.get("maxmemory-policy")
    if policy not in (None, "noeviction"):
        risk = "a full Redis evicts wake-ups, and turns wait for the sweeper"
        yield Finding(name, f"maxmemory-policy is {policy}", risk, "Set maxmemory-policy noeviction.")
    if configured.get("appendonly") == "yes" and not embedded:
        risk = "the append-only file keeps an erased user's data until Redis rewrites it"
        yield Finding(name, "appendonly is yes", risk, "Run BGREWRITEAOF after an erasure, or set appendonly no.")
    slower = configured.get("slowlog-log-slower-than")
    if slower not in (None, "-1"):
        risk = "the slow log quotes commands that contain users' messages"
        yield Finding(name, f"slowlog-log-slower-than is {slower}", risk, "Set slowlog-log-slower-than -1.")


def _fill(url: str, settings: Settings) -> str | None:
    """How full Redis is, if it is nearly full or refuses writes."""
    server = RedisServer("redis", url, settings.redis_prefix, is_broker=False)
    state = server.read()
    server.close()
    if state.fill is not None and state.fill > NEARLY_FULL:
        return f"{state.fill * 100:.0f} % of maxmemory are used"
    return None
