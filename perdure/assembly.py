"""Finds the addresses of a process's servers, and assembles the parts of its runtime.

If the settings omit a server's address, a process uses the embedded server that `perdure up` runs under the data
directory. The functions open a process's connections; importing this module opens none.

Modules that only some processes need are imported inside functions. `perdure send` starts a process for each message,
so it must import few modules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from perdure.agents import Agent, Agents
from perdure.clock import Clock, SystemClock
from perdure.database.engine import Database
from perdure.errors import IncompatibleDatabase, MissingKey, Unavailable
from perdure.files.store import Files
from perdure.observe.traces import OFF, Traces
from perdure.settings import Settings
from perdure.tools.leaks import Leaks
from perdure.tools.mcp.server import McpServer
from perdure.tools.mcp.server import check as check_servers

if TYPE_CHECKING:
    from perdure.models.resolve import Models
    from perdure.observe.measures import Measures
    from perdure.runtime import AcceptingRuntime, Runtime, Waker
    from perdure.servers.rewriting import AppendOnlyFile
    from perdure.tools.awaited.port import TaskCalls

log = logging.getLogger(__name__)

_NO_REDIS = "redis://127.0.0.1:0"
"""A placeholder URL for a process without Redis. Every command fails with a connection error."""

BUILT_IN_AGENT = "assistant"
"""The name of the agent in `perdure.builtin`."""

_LOOKED_UP = (
    "model", "model_settings", "endpoints", "summary_model", "fallback_models", "fallback", "embedder", "snapshots",
)  # fmt: skip
"""The settings that `check` resolves by name, in addition to `PERDURE_BREAKER__REGISTRY`."""

_NO_DATABASE = "postgresql://"
"""A placeholder URL for a process that does not use the database."""

_START_IT = "Start it with `perdure up`, or set {variable} to a server of your own."


@dataclass(frozen=True, slots=True)
class Addresses:
    """The URLs of the servers. `redis_url` and `broker_url` are in kombu's form."""

    database_url: str
    redis_url: str
    broker_url: str


def addresses(settings: Settings, *, database: bool = True) -> Addresses:
    """The servers' addresses, from the settings or from the running embedded servers.

    `database` is False for a process that does not use the database.

    Raises:
        Unavailable: a server's address is not set, and the embedded server does not run.
    """
    redis_url = redis_address(settings)
    broker_url = settings.broker_url.get_secret_value() if settings.broker_url else redis_url
    return Addresses(database_address(settings) if database else _NO_DATABASE, redis_url, broker_url)


def database_address(settings: Settings) -> str:
    """`PERDURE_DATABASE_URL`, or the URL of the running embedded PostgreSQL.

    Raises:
        Unavailable: the setting is unset, and no embedded PostgreSQL runs.
    """
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    from perdure.servers import postgres

    found = postgres.find(settings.data_dir / "postgres")
    if found is None:
        raise Unavailable(
            f"No PostgreSQL runs in {settings.data_dir}. " + _START_IT.format(variable="PERDURE_DATABASE_URL")
        )
    return found.url


def has_embedded_database(settings: Settings) -> bool:
    """Whether the database is the embedded PostgreSQL, whose URL `perdure up` gives to its processes."""
    if settings.database_url is None:
        return True
    from perdure.servers import postgres

    return postgres.is_of(settings.data_dir / "postgres", settings.database_url.get_secret_value())


def migration_address(settings: Settings, environment: Mapping[str, str] | None = None) -> str:
    """The setting `PERDURE_MIGRATE_URL`, else `PERDURE_DATABASE_URL` in `environment`, else `database_address`.

    Raises:
        Unavailable: no address is set and no embedded PostgreSQL runs.
    """
    if settings.migrate_url is not None:
        return settings.migrate_url.get_secret_value()
    given = (environment or {}).get("PERDURE_DATABASE_URL")
    return given or database_address(settings)


def open_database(settings: Settings, database_url: str) -> Database:
    return Database(
        database_url,
        schema=settings.database_schema,
        prepare=settings.database_prepare,
        lease_s=settings.turn.lease_s,
    )


def redis_address(settings: Settings) -> str:
    """`PERDURE_REDIS_URL`, or the URL of the running embedded Redis.

    Raises:
        Unavailable: the setting is unset, and no embedded Redis runs.
    """
    if settings.redis_url is not None:
        return settings.redis_url.get_secret_value()
    from perdure.servers import redis

    found = redis.find(settings.data_dir / "redis")
    if found is None:
        raise Unavailable(f"No Redis runs in {settings.data_dir}. " + _START_IT.format(variable="PERDURE_REDIS_URL"))
    return found.url


def check(settings: Settings, *, asks_models: bool = True, asks_embedder: bool = True, signs: bool = True) -> None:
    """Check the settings that name agents, models, the embedder, breakers, the snapshot store and channels.

    The gateway, the channels, workers, beat and Flower call this before they connect to a server, so a wrong value
    stops each of them at its start. This opens no connection and loads no model. Without `asks_models`, the models' API
    keys may be missing. Without `asks_embedder`, the embedder's API key may be missing. Unless `signs` is False, this
    creates the secret that signs tokens, and with `asks_models` the one that signs callbacks, if no setting has them.

    Raises:
        SettingsError: a setting or an agent names something that does not exist or cannot be set up. Also raised if
            `PERDURE_MCP__COMMANDS` does not allow the command of an agent's MCP server, or if the file of a generated
            secret cannot be used.
    """
    from perdure.channels.services import configured
    from perdure.files import objects
    from perdure.memory.consolidation.judging import JUDGES
    from perdure.memory.recall.reranking import RERANKERS
    from perdure.models.embedders.resolve import check as check_embedder
    from perdure.models.resolve import Models
    from perdure.resilience.resolve import resolve as resolve_breakers
    from perdure.snapshots.resolve import resolve

    agents, clock = load_agents(settings), SystemClock()
    check_servers(_servers(agents), settings.mcp)
    breakers = resolve_breakers(settings, clock, _NO_REDIS, lambda _: None)
    _check_models(Models(settings, clock, breakers), settings, agents, called=asks_models)
    breakers.close()
    for each in configured.channels(settings, clock).values():
        each.close()
    with suppress(*(() if asks_embedder else (MissingKey,))):
        check_embedder(settings.embedder, settings, clock)
    resolve(settings.snapshots, settings, Database(_NO_DATABASE), _NO_REDIS).close()
    JUDGES.check(settings.memory.judge)
    RERANKERS.check(settings.memory.reranker)
    if settings.files.url is not None:
        objects.check(settings.files.url)
    if signs:
        settings.signing_key()
    if signs and asks_models:
        settings.webhook_keys()


def require_database(settings: Settings, database_url: str) -> None:
    """Check that this release can use the database; warn if the server's log quotes users' texts.

    If the database cannot be reached, this logs a warning: the program starts, and connects later.

    Raises:
        IncompatibleDatabase: PostgreSQL, pgvector or the schema is too old, or the schema is too new.
    """
    from perdure.database import compatibility, serverlog

    database = open_database(settings, database_url)
    try:
        compatibility.require(database)
        if (why := serverlog.quoting(database)) is not None:
            log.warning("PostgreSQL's log quotes users' messages (%s); an erasure does not remove them", why)
    except IncompatibleDatabase:
        raise
    except Unavailable as error:
        log.warning("the database could not be checked at the start: %s", error.explained)
    finally:
        database.close()


@dataclass(frozen=True, slots=True)
class _AcceptingRuntime:
    """The parts of a process that only accepts messages."""

    settings: Settings
    clock: Clock
    database: Database
    agents: Agents
    wake: Waker
    files: Files
    traces: Traces = OFF


def assemble_accepting(settings: Settings, database_url: str, wake: Waker) -> AcceptingRuntime:
    """Assemble the parts of a process that only accepts messages.

    Raises:
        SettingsError: see `check`. Missing API keys raise no error.
    """
    agents = _agents_by_name(settings)
    if not _has_defaults(settings, agents):
        check(settings, asks_models=False, asks_embedder=False, signs=False)
    clock, database = SystemClock(), open_database(settings, database_url)
    return _AcceptingRuntime(settings, clock, database, agents, wake, Files(database, settings.files, clock))


def assemble(
    settings: Settings,
    database_url: str,
    wake: Waker,
    redis_url: str | None = None,
    *,
    turns: bool = False,
    calls: TaskCalls | None = None,
    measures: Measures | None = None,
) -> Runtime:
    """Assemble the parts of one process. `redis_url` is required to run turns and to end sessions.

    `measures` counts and times what the process does; `None`: new ones.

    `calls` sends the tasks of Celery tools.

    With `turns`, this connects to the agents' MCP servers (so call it after a fork), and requires the models' API keys.
    Without `turns`, a missing key raises an error only when a model is called.

    Raises:
        SettingsError: see `check`; or the embedder's model cannot be loaded.
    """
    from perdure.events.writer import EventWriter
    from perdure.memory.redis.memory import RedisMemory
    from perdure.models.embedders.guarded import guard_with
    from perdure.models.embedders.resolve import resolve as resolve_embedder
    from perdure.models.resolve import Models
    from perdure.observe.measures import Measures
    from perdure.observe.traces import configured
    from perdure.resilience.resolve import resolve as resolve_breakers
    from perdure.runtime import Runtime
    from perdure.snapshots.resolve import resolve
    from perdure.tools.mcp.connections import Connections
    from perdure.turns.lease.wait_for_model import recall

    agents = load_agents(settings)
    servers = _servers(agents)
    check_servers(servers, settings.mcp)
    clock = SystemClock()
    database = open_database(settings, database_url)
    breakers = resolve_breakers(settings, clock, redis_url or _redis_if_found(settings), partial(recall, database))
    measures = measures or Measures()
    models = Models(settings, clock, breakers, observe=partial(measures.model_called, settings=settings))
    _check_models(models, settings, agents, called=turns)
    connections = Connections(settings, breakers, clock) if turns else None
    made = Runtime(
        settings=settings,
        clock=clock,
        database=database,
        agents=agents,
        models=models.get,
        wake=wake,
        snapshots=resolve(settings.snapshots, settings, database, redis_url or _redis_of_snapshots(settings)),
        redis_memory=RedisMemory.at(redis_url, settings.memory, clock, settings.redis_prefix) if redis_url else None,
        redis_url=redis_url,
        calls=calls,
        events=EventWriter(redis_url, settings.redis_prefix, settings.stream, clock) if turns and redis_url else None,
        embedder=resolve_embedder(settings.embedder, settings, clock, guard_with(breakers, settings, clock)),
        breakers=breakers,
        connections=connections,
        leaks=Leaks(settings.turn.max_leaked_threads),
        quoting_key=settings.signing_key() if turns else b"",
        redis_file=_embedded_file(settings, redis_url),
        measures=measures,
        traces=configured(database),
    )
    if connections is not None:
        connections.open(servers)  # the last step, since no code would end the server processes if a later step failed
    return made


def _agents_by_name(settings: Settings) -> Agents:
    """The configured agents. The built-in agent has no tools here: importing them would slow down `perdure send`."""
    if _has_built_in_agent(settings):
        return Agents([Agent(BUILT_IN_AGENT, instructions="")])
    return load_agents(settings)


def _has_built_in_agent(settings: Settings) -> bool:
    return bool(settings.agents == type(settings).model_fields["agents"].default)


def load_agents(settings: Settings) -> Agents:
    """The configured agents. Sets up their application, which the built-in agent does not have."""
    if _has_built_in_agent(settings):
        return Agents.from_module(settings.agents)
    from perdure import host

    return host.load_agents(settings.agents)


def _has_defaults(settings: Settings, agents: Agents) -> bool:
    """Whether everything that `check` looks up has its default value. The slow `check` can then be skipped."""
    fields, breaker = type(settings).model_fields, type(settings.breaker).model_fields
    return (
        all(getattr(settings, name) == fields[name].default for name in _LOOKED_UP)
        and settings.breaker.registry == breaker["registry"].default
        and not any(agent.model or agent.servers for agent in agents)
    )


def _servers(agents: Agents) -> list[McpServer]:
    return [server for agent in agents for server in agent.servers]


def _check_models(models: Models, settings: Settings, agents: Agents, *, called: bool) -> None:
    """Set up each model that a setting or an agent names, so that a wrong name stops the program at its start.

    Each agent's model must take the agent's settings and those of `PERDURE_MODEL_SETTINGS`.

    An API key may be missing if the process calls no model (`called` is False).
    """
    from perdure.turns.costs import check_prices

    of_agent = f"the model of agent {{!r}} (PERDURE_AGENTS is {settings.agents!r})"
    tolerated = () if called else (MissingKey,)
    for name, variable in ((settings.model, "PERDURE_MODEL"), (settings.summary_model, "PERDURE_SUMMARY_MODEL")):
        with suppress(*tolerated):
            if name:
                models.get(name, variable)
    for agent in agents:
        check_prices(agent, settings)
        with suppress(*tolerated):
            model = agent.model or settings.model
            variable = of_agent.format(agent.name) if agent.model else "PERDURE_MODEL"
            models.get(model, variable)
            models.check_settings(model, agent.settings, f"agent {agent.name!r}", variable)
            defaults = {name: each for name, each in settings.model_settings.items() if name not in agent.settings}
            models.check_settings(model, defaults, "PERDURE_MODEL_SETTINGS", variable)
    if (cheaper := settings.budget.cheaper_model) is not None:
        with suppress(*tolerated):
            models.get(cheaper, "PERDURE_BUDGET__ON_EXCEEDED")
    for name in settings.fallback_models:
        with suppress(*tolerated):
            models.guarded(name, "PERDURE_FALLBACK_MODELS")


def _embedded_file(settings: Settings, redis_url: str | None) -> AppendOnlyFile | None:
    from perdure.servers import redis
    from perdure.servers.rewriting import AppendOnlyFile

    if redis_url is None or not redis.is_of(settings.data_dir / "redis", redis_url):
        return None
    return AppendOnlyFile(redis_url)


def _redis_of_snapshots(settings: Settings) -> str:
    """The URL of Redis for the snapshot store, in a process that does not otherwise use Redis."""
    return (_redis_if_found(settings) if settings.snapshots == "redis" else None) or _NO_REDIS


def _redis_if_found(settings: Settings) -> str | None:
    try:
        return redis_address(settings)
    except Unavailable:
        return None
