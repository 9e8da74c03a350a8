"""All settings, which are read from `PERDURE_*` environment variables or a `.env` file.

In the name of a variable, `__` separates a group from its setting (`PERDURE_TURN__LEASE_S`). Each program calls
`Settings.load()` once. An invalid value raises `SettingsError`, which names the variable, the value and the accepted
values.

The vendors' SDKs and Flower read their own variables from the process's environment. Therefore, if the name of a
variable in `.env` begins with a prefix in `VENDORS`, `load` copies the variable into that environment.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from datetime import time
from decimal import Decimal
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import SplitResult, parse_qs, parse_qsl, quote, unquote_plus, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as Unparsable
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from perdure import environment
from perdure.access import keys
from perdure.access.generated_secrets import made_once
from perdure.errors import SettingsError
from perdure.network import tls
from perdure.network.queues import ReplyTask
from perdure.network.reply_urls import Reachable
from perdure.network.webhook_signatures import make_secret, parse_secrets
from perdure.text.patterns import compiled
from perdure.text.untrusted import load_object
from perdure.text.zones import find_zone

log = logging.getLogger(__name__)

SCHEMA = "perdure"
"""The default of `PERDURE_DATABASE_SCHEMA`, the schema of all tables."""

REDIS_PREFIX = "perdure:"
"""The default of `PERDURE_REDIS_PREFIX`, the prefix of all of perdure's keys."""

VENDORS = (
    "OPENAI_", "ANTHROPIC_", "FLOWER_",
    # of pydantic-ai's providers
    "ALIBABA_", "AWS_", "AZURE_OPENAI_", "CEREBRAS_", "CO_", "CRUSOE_", "DASHSCOPE_", "DEEPSEEK_", "FIREWORKS_",
    "GEMINI_", "GITHUB_", "GOOGLE_", "GROQ_", "HEROKU_INFERENCE_", "HF_", "META_", "MISTRAL_", "MOONSHOTAI_", "NEBIUS_",
    "OLLAMA_", "OPENROUTER_", "OVHCLOUD_", "SAMBANOVA_", "SNOWFLAKE_", "TOGETHER_", "VERCEL_", "VLLM_", "XAI_", "ZAI_",
)  # fmt: skip
"""Prefixes of the variables in `.env` that other libraries read from the process's environment."""

_KEY_PREFIX = compiled(r"[A-Za-z0-9:._-]{1,64}")

_EXAMPLE_URL = "http://127.0.0.1:8000/v1"
_ENDPOINT_NAME = compiled(r"[a-z0-9_-]{1,64}")

_LONGEST_NAME = 63
"""The maximum length of a name in PostgreSQL, in bytes."""

READABLE, NOTHING = ("images", "pdf"), "none"
"""The kinds of files that a model may read, as named in `PERDURE_ENDPOINTS__NAME__READS`."""

BROKERS = ("redis", "rediss", "redis+socket", "amqp", "amqps", "pyamqp")
_LAST_PORT = 65_535
_PORT = f"the port is malformed; accepted: a number from 1 to {_LAST_PORT}, such as postgresql://localhost:5432/perdure"
_HOST = compiled(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Seconds = Annotated[float, Field(gt=0, le=3_153_600_000, allow_inf_nan=False)]
"""At most a hundred years: PostgreSQL computes times with it, which end in the year 294276."""

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Limit = Annotated[int, Field(ge=0, le=1_000_000_000)]
"""At most a billion: statements compute with it in PostgreSQL's type `integer`."""

Money = Annotated[Decimal, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=100)]


class Scope(StrEnum):
    """What one live session covers: all of a user's channels, or one of them."""

    USER = "user"
    CHANNEL = "channel"


class OnBusy(StrEnum):
    """What happens to a message whose session has an unsettled turn."""

    ENQUEUE = "enqueue"
    REJECT = "reject"
    INTERRUPT = "interrupt"
    MERGE = "merge"
    STEER = "steer"


class PruneApproval(StrEnum):
    """Whether the CaseBank applies a pruning plan at once, or only after approval."""

    AUTO = "auto"
    MANUAL = "manual"


class CaseScope(StrEnum):
    """Whose prompts may contain a case that was made from a user's messages: that user's, or all users'."""

    USER = "user"
    ALL = "all"


class FlowerAuth(StrEnum):
    """Authentication of Flower's pages if no `FLOWER_*` variable configures it: a generated password, or none."""

    PASSWORD = "password"  # noqa: S105 (the value of a setting)
    NONE = "none"


class LogFormat(StrEnum):
    """The form of the log's lines."""

    TEXT = "text"
    JSON = "json"


class OnUnavailable(StrEnum):
    """What happens to a turn if neither its model nor a fallback replies."""

    FAIL = "fail"
    PARK = "park"


def _split(value: Any) -> Any:
    """The parts of a comma-separated string. A value of another type is returned unchanged."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def check_server_url(variable: str, url: str, example: str) -> None:
    """Check the base URL of a server. Messages name it by `variable`.

    Raises:
        ValueError: `url` is not an HTTP URL, or has a user name or a password, which perdure would not send.
    """
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_server = is_server and "@" not in parts.netloc and url.isprintable()
    except ValueError:
        is_server = False
    if not is_server:
        shown = "(its value is not shown)" if "@" in url else f"is {url!r}"
        raise ValueError(
            f"{variable} {shown}: accepted: a URL that begins with http:// or https:// and has no user name, such as "
            f"{example}"
        )


def _check_api_url(variable: str, url: str | None, example: str) -> str | None:
    if url is not None:
        check_server_url(f"{environment.PREFIX}{variable}", url, example)
    return url


def _checked(url: SecretStr) -> SecretStr:
    """The URL of Redis or of a broker, in the one spelling that all libraries accept. Messages do not show the URL.

    Raises:
        ValueError: the address of a server, its port, its database or an option cannot be used.
    """
    servers = tls.split(url.get_secret_value())
    for number, server in enumerate(servers, start=1):
        try:
            parts = urlsplit(server)
            is_usable = parts.port != 0 and server.isprintable()
        except ValueError:  # a port, or an address in brackets
            is_usable = False
        if not is_usable:
            scheme = server.partition("://")[0]
            example = f"{scheme}://localhost:{5672 if 'amqp' in scheme else 6379}"
            raise ValueError(
                f"the address of server {number} is malformed; accepted: a host and a port from 1 to {_LAST_PORT}, "
                f"such as {example}, with special characters of a password as %40"
            )
        query, path = parse_qs(parts.query), "" if parts.scheme == "redis+socket" else parts.path.strip("/")
        database = (query.get("db") or query.get("virtual_host") or [path])[0]
        if parts.scheme.startswith("redis") and database and not (database.isascii() and database.isdigit()):
            raise ValueError(
                f"the database of server {number} is {database!r}; accepted: a number, such as redis://localhost:6379/0"
            )
    return SecretStr(tls.normalised(";".join(map(_without_options, servers))))


def _check_libpq(query: Mapping[str, Any]) -> None:
    """Check the names in the query of a PostgreSQL URL.

    Raises:
        ValueError: the driver would refuse each connection, because it does not know an option.
    """
    if not query:
        return
    from psycopg2 import ProgrammingError, extensions  # noqa: PLC0415 (its import takes 70 ms)

    for name in query:
        try:
            extensions.make_dsn(**{name: ""})
        except ProgrammingError:
            shown = name if _OPTION.fullmatch(name) else "an option (its name is not shown)"
            raise ValueError(
                f"{shown} is not accepted in the query; accepted: the options of libpq, such as sslmode and host"
            ) from None


_MOVED = {"db", "virtual_host", "username", "password"}
"""The options of a Redis URL that belong into its other parts. redis-py reads them; kombu and Celery fail."""

_OPTION = compiled(r"[a-z_]{1,64}")


def _without_options(server: str) -> str:
    """The URL of a server of Redis or of a broker, with the options of its query in the parts where they belong.

    >>> _without_options("redis://here?db=5&password=a%40b")
    'redis://:a%40b@here/5'

    Raises:
        ValueError: an option is unknown: a program would begin and end with it, or ignore it.
    """
    parts = urlsplit(server)
    is_redis = parts.scheme.startswith("redis")
    known = _MOVED if is_redis else {"login_method"}
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(query.keys() - known - {name for name in query if name.startswith("ssl_")}):
        shown = ", ".join(unknown) if all(map(_OPTION.fullmatch, unknown)) else "an option (its name is not shown)"
        raise ValueError(
            f"{shown} is not accepted in the query; accepted: the options of TLS, whose names begin with ssl_, and "
            f"{'db, username, password' if is_redis else 'login_method'}"
        )
    moved = {name: value for name, value in query.items() if is_redis and name in _MOVED}
    return _with_parts(parts, moved) if moved else server


def _with_parts(parts: SplitResult, moved: Mapping[str, str]) -> str:
    """A Redis URL with the `moved` options in the parts where they belong. A user in the address has precedence."""
    given, at, host = parts.netloc.rpartition("@")
    user, _, password = given.partition(":")
    user = user or quote(moved.get("username", ""), safe="")
    password = password or quote(moved.get("password", ""), safe="")
    address = f"{user}:{password}@{host}" if user or password else f"{given}{at}{host}"
    query = [each for each in parts.query.split("&") if unquote_plus(each.partition("=")[0]) not in moved]
    database, path = moved.get("db", moved.get("virtual_host")), parts.path
    if database is not None and parts.scheme == "redis+socket":  # whose path is that of the socket
        query.append(f"virtual_host={quote(database, safe='')}")
    elif database is not None:
        path = f"/{database}"
    return f"{parts.scheme}://{address}{path}" + (f"?{'&'.join(query)}" if query else "")


class _Group(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)  # `load` warns about unknown names


class SessionSettings(_Group):
    """`PERDURE_SESSION__*`: what one session covers, and when an idle session ends."""

    scope: Scope = Scope.USER
    idle_timeout_s: Seconds = 1_800


class TurnSettings(_Group):
    """`PERDURE_TURN__*`: limits of one turn and of its session's lease."""

    max_steps: Count = 15
    timeout_s: Seconds = 300
    tool_timeout_s: Seconds = 30
    max_attempts: Count = 5
    user_concurrency: Count = 10
    lease_s: Seconds = 30
    heartbeat_s: Seconds = 10
    sweep_s: Seconds = 5
    priority_aging_s: Annotated[float, Field(ge=0, le=3_153_600_000, allow_inf_nan=False)] = 30
    on_busy: OnBusy = OnBusy.ENQUEUE
    on_unavailable: OnUnavailable = OnUnavailable.FAIL
    hook_timeout_s: Seconds = 5
    max_leaked_threads: Count = 50
    unknown_agent_s: Seconds = 600
    pin_agents: bool = False
    delegation_depth: Annotated[int, Field(ge=0, le=100)] = 3

    @model_validator(mode="after")
    def _renewed_before_it_expires(self) -> Self:
        if self.heartbeat_s > self.lease_s / 2:
            raise ValueError(
                f"PERDURE_TURN__HEARTBEAT_S is {self.heartbeat_s:g} and PERDURE_TURN__LEASE_S {self.lease_s:g}: "
                "the heartbeat must be at most half the lease, so that one lost renewal does not lose the session"
            )
        return self


class OnExceeded(StrEnum):
    """What happens to a turn whose next model call exceeds a budget. Any other value is the name of a cheaper model."""

    FAIL = "fail"
    PARK = "park"


class BudgetSettings(_Group):
    """`PERDURE_BUDGET__*`: what turns may cost, in US dollars.

    `turn` limits a turn, with what other agents use for it; `user_day` and `tenant_day` a user's and a tenant's turns
    of a day, which begins at midnight in `PERDURE_TIMEZONE`. Users without a tenant count as one tenant.
    """

    turn: Money | None = None
    user_day: Money | None = None
    tenant_day: Money | None = None
    on_exceeded: Annotated[str, Field(min_length=1)] = OnExceeded.FAIL.value

    @property
    def limits(self) -> dict[str, Decimal]:
        """The limits that are set, by the names of their settings."""
        given = {"TURN": self.turn, "USER_DAY": self.user_day, "TENANT_DAY": self.tenant_day}
        return {f"{environment.PREFIX}BUDGET__{name}": limit for name, limit in given.items() if limit is not None}

    @property
    def cheaper_model(self) -> str | None:
        """The model that gets the calls that exceed a budget, if one is named."""
        return None if self.on_exceeded in [*OnExceeded] else self.on_exceeded


class ApprovalSettings(_Group):
    """`PERDURE_APPROVAL__*`: tool calls that need a person's approval."""

    expires_s: Seconds = 3_600


class ClientInstructions(StrEnum):
    """From whom the OpenAI-compatible endpoints add instructions to an agent's own."""

    SERVICES = "services"
    ALL = "all"
    IGNORE = "ignore"


class GuardSettings(_Group):
    """`PERDURE_GUARD__*`: limits that are checked before a message is accepted. A rate of 0 means no limit.

    Side requests and forks count as messages. `client_instructions` says whose instructions the OpenAI-compatible
    endpoints add to an agent's: those of callers with a service key (a user token's are refused), `all`, or none
    (`ignore`).
    """

    per_minute: Limit = 0
    per_hour: Limit = 0
    max_chars: Count = 10_000
    open_forks: Count = 100
    side_requests: bool = True
    client_instructions: ClientInstructions = ClientInstructions.SERVICES


class ScheduleSettings(_Group):
    """`PERDURE_SCHEDULE__*`: limits of users' schedules. `quiet_hours` apply in each schedule's time zone."""

    user_limit: Count = 100
    quiet_hours: str = ""

    @field_validator("quiet_hours")
    @classmethod
    def _times_of_day(cls, value: str) -> str:
        _quiet_times(value)
        return value

    @property
    def quiet_times(self) -> tuple[time, time] | None:
        """The local times of day at which the quiet hours begin and end; `None` without quiet hours."""
        return _quiet_times(self.quiet_hours)


def _quiet_times(value: str) -> tuple[time, time] | None:
    if not value:
        return None
    try:
        begin, end = (time.fromisoformat(each.strip()) for each in value.split("-"))
    except ValueError:
        begin = end = time()
    if begin == end or begin.tzinfo or end.tzinfo:
        raise ValueError("accepted: two different times of day, such as 22:00-07:00")
    return begin, end


class EndpointSettings(_Group):
    """`PERDURE_ENDPOINTS__NAME__*`: a server of models and embedders, used as `NAME:MODEL`.

    `kind` is the protocol: `openai` (Chat Completions), `anthropic` (Messages), or a provider that pydantic-ai names.
    With `thinks`, each reply begins with thoughts, up to a tag `</think>`: some servers omit the opening tag.
    `show_received` logs the first 200 characters of what cannot be read; by default, only of a server on loopback.
    `reads` says which files its models read: `images`, `pdf`, or `none`; by default, what the protocol has. `caches`
    says whether it accepts the protocol's option about its prompt cache; by default, only the vendor's own server does.
    """

    model_config = ConfigDict(extra="forbid")

    url: str | None = None
    key: SecretStr | None = None
    kind: str = "openai"
    thinks: bool = False
    show_received: bool | None = None
    reads: Annotated[tuple[str, ...] | None, NoDecode] = None
    caches: bool | None = None

    @field_validator("reads", mode="before")
    @classmethod
    def _kinds_of_files(cls, value: Any) -> Any:
        kinds = _split(value)
        if kinds is not None and not (set(kinds) <= set(READABLE) or kinds == (NOTHING,)):
            raise ValueError(f"accepted: {NOTHING}, or some of {', '.join(READABLE)}, separated by commas")
        return kinds


class MemorySettings(_Group):
    """`PERDURE_MEMORY__*`: how much a prompt contains from each layer of memory, and how long layers are kept.

    Without `recall_vector`, the weight of vectors is the one that fits the embedder. Without `budget_tools`, the budget
    of an agent's tools is a share of its model's window. `judge` decides what a new statement is to the known memories:
    `guard` (rules), `model`, `cross-encoder:NAME`, or the name of another package's entry point. `reranker` orders what
    recall has found: `none`, `model`, `cross-encoder:NAME`, or an entry point.
    """

    working_turns: Count = 20
    working_ttl_s: Seconds = 3_600
    archive_sessions: Annotated[int, Field(ge=0, le=1_000)] = 10
    budget_system: Count = 8_000
    budget_working: Count = 40_000
    budget_stream: Limit = 2_000
    budget_semantic: Limit = 12_000
    budget_concepts: Limit = 4_000
    budget_archive: Limit = 4_000
    budget_meta: Limit = 2_000
    budget_tools: Limit | None = None
    budget_files: Limit = 100_000
    recall_timeout_s: Seconds = 2
    recall_text: Weight = 1
    recall_vector: Weight | None = None
    recall_related: Weight = 1
    recall_neighbours: Weight = 0.6
    recall_time: Weight = 0.5
    exact_rows: Count = 5_000
    index_rows: Count = 10_000
    judge: str = "guard"
    reranker: str = "none"


class ConsolidationSettings(_Group):
    """`PERDURE_CONSOLIDATION__*`: when and how memories are extracted from sessions.

    A session of fewer than `min_turns` turns is skipped. Memories with a cosine similarity above `similarity` are
    merged unless the judge finds a difference, and the importance of the merged memory grows by `importance_boost`.
    After `max_runs` failed runs, the consolidation of a session is abandoned.
    """

    interval_hours: Annotated[int, Field(ge=1, le=24)] = 6
    batch_size: Annotated[int, Field(ge=1, le=10_000)] = 50
    min_turns: Limit = 5
    similarity: Annotated[float, Field(gt=0, lt=1)] = 0.92
    importance_boost: Annotated[float, Field(ge=0, le=1)] = 0.1
    max_runs: Count = 5


class BreakerSettings(_Group):
    """`PERDURE_BREAKER__*`: when calls to a failing service are refused, and when probes of that service begin.

    `registry` is `fleet` (perdure's own breakers), or the name of another package's entry point.
    """

    enabled: bool = True
    registry: str = "fleet"
    failure_threshold: Count = 5
    cooldown_s: Seconds = 60
    half_open_max_probes: Count = 1


class RetrySettings(_Group):
    """`PERDURE_RETRY__*`: the number of attempts, and the delay before each attempt after the first.

    The first delay is `base_s`. Each further delay is longer by the factor `multiplier`, up to `cap_s`. Random jitter
    changes each delay by at most the fraction `jitter`.
    """

    max_attempts: Count = 3
    base_s: Seconds = 0.2
    multiplier: Annotated[float, Field(ge=1, le=100)] = 2
    cap_s: Seconds = 10
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.25


class McpSettings(_Group):
    """`PERDURE_MCP__*`: what MCP servers may do on this machine.

    `commands` lists the executables that perdure may start as servers, each spelled as in the server's declaration.
    """

    commands: Annotated[tuple[str, ...], NoDecode] = ()

    @field_validator("commands", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        return _split(value)


class FlowerSettings(_Group):
    """`PERDURE_FLOWER__*`: access to Flower's pages.

    `hosts` lists the host names under which Flower is served, in addition to loopback names.
    """

    auth: FlowerAuth = FlowerAuth.PASSWORD
    hosts: Annotated[tuple[str, ...], NoDecode] = ()

    _split_at_commas = field_validator("hosts", mode="before")(_split)


class ShutdownSettings(_Group):
    """`PERDURE_SHUTDOWN__*`: the time limits of a graceful shutdown, and of a drain of the fleet."""

    drain_s: Seconds = 15
    flush_s: Seconds = 10
    hard_exit_s: Seconds = 30

    @model_validator(mode="after")
    def _hard_exit_is_last(self) -> Self:
        if self.hard_exit_s < self.drain_s:
            raise ValueError(
                f"PERDURE_SHUTDOWN__HARD_EXIT_S is {self.hard_exit_s:g}, shorter than "
                f"PERDURE_SHUTDOWN__DRAIN_S ({self.drain_s:g}): the hard exit must come last"
            )
        return self


class OnDisconnect(StrEnum):
    """What becomes of a turn whose client closes its connection, on the OpenAI-compatible endpoints."""

    CONTINUE = "continue"
    CANCEL = "cancel"


class StreamSettings(_Group):
    """`PERDURE_STREAM__*`: event streams of turns.

    `max_open` limits the open streams of one gateway, and `max_open_per_user` those of one user. `on_disconnect` says
    what becomes of a turn whose client closes its connection, on the OpenAI-compatible endpoints.
    """

    batch_ms: Annotated[float, Field(ge=1, le=1_000)] = 50
    max_open: Count = 1_000
    max_open_per_user: Count = 100
    ttl_s: Seconds = 3_600
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE

    @property
    def user_share(self) -> int:
        """What one user may have open: `max_open_per_user`, and at most half of `max_open`."""
        return min(self.max_open_per_user, max(1, self.max_open // 2))


class MetricsSettings(_Group):
    """`PERDURE_METRICS__*`: the metrics of workers, and how old those of the gateway may be.

    A worker serves its metrics at `worker_address`, on `worker_port` or, if another worker has it, on one of the next
    nine ports; 0 switches them off. The gateway reads its own at most every `every_s` seconds.
    """

    worker_port: Annotated[int, Field(ge=0, le=65_526)] = 0
    worker_address: str = "127.0.0.1"
    every_s: Seconds = 5

    @field_validator("worker_address")
    @classmethod
    def _can_be_bound(cls, value: str) -> str:
        try:
            ip_address(value)
        except ValueError:
            if _HOST.fullmatch(value) is None:
                raise ValueError(
                    "accepted: an address or a host name of this machine, such as 127.0.0.1, 0.0.0.0 or ::"
                ) from None
        return value


class ReadinessSettings(_Group):
    """`PERDURE_READY__*`: when `/readyz` fails.

    `no_worker_s`: seconds without a worker that runs turns, at least 30; 0 ignores workers. A gateway counts from its
    own start.
    """

    no_worker_s: Annotated[float, Field(ge=0, le=3_153_600_000, allow_inf_nan=False)] = 60


Days = Annotated[int, Field(ge=0, le=36_500)]


class RetentionSettings(_Group):
    """`PERDURE_RETENTION__*`: after how many days rows are deleted that are no longer read; 0 keeps them for ever.

    `transcripts_days` deletes what users see: ended sessions of which nothing else needs a message.
    """

    inbox_days: Days = 90
    events_days: Days = 90
    effects_days: Days = 365
    deliveries_days: Days = 30
    executions_days: Days = 90
    snapshots_days: Days = 90
    audit_days: Days = 30
    vectors_days: Days = 0
    transcripts_days: Days = 0


class LogSettings(_Group):
    """`PERDURE_LOG__*`: the form of the log, `text` or `json` (one object a line)."""

    format: LogFormat = LogFormat.TEXT


class FileSettings(_Group):
    """`PERDURE_FILES__*`: where files are stored, and how large they may be, in bytes.

    Files of more than `row_bytes` are stored under `url`, a URL of fsspec such as `s3://bucket/perdure`. Without it,
    all are stored in rows of PostgreSQL. A user has at most `user_bytes` of files (0: no limit). A prompt has at most
    `prompt_bytes` of files; the older ones are described.
    """

    url: str | None = None
    row_bytes: Count = 2**20
    max_bytes: Annotated[int, Field(ge=1, le=2**29)] = 2**25
    user_bytes: Annotated[int, Field(ge=0)] = 2**30
    prompt_bytes: Annotated[int, Field(ge=0)] = 2**25

    @field_validator("url")
    @classmethod
    def _a_url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError("accepted: a URL of fsspec, such as file:///var/lib/perdure/files or s3://bucket/perdure")
        return value


class CasebankSettings(_Group):
    """`PERDURE_CASEBANK__*`: which cases enter prompts, which are pruned or kept, and where notices are sent."""

    scope: CaseScope = CaseScope.USER
    min_similarity: Annotated[float, Field(ge=0, le=1)] | None = None
    low_success_percent: Annotated[float, Field(ge=0, le=100)] = 30
    low_success_min_usage: Limit = 10
    duplicate_similarity: Annotated[float, Field(gt=0, lt=1)] = 0.95
    duplicate_batch: Annotated[int, Field(ge=1, le=100)] = 100
    duplicate_guard: bool = True
    inactive_days: Annotated[int, Field(ge=1, le=36_500)] = 90
    inactive_exempt_usage: Limit = 100
    recent_access_days: Annotated[int, Field(ge=1, le=36_500)] = 7
    protected_usage: Limit = 500
    load_percent: Annotated[int, Field(ge=1, le=100)] = 25
    approval: PruneApproval = PruneApproval.AUTO
    approval_expires_s: Seconds = 259_200
    notify_url: SecretStr | None = None
    suggestions: bool = False

    @field_validator("notify_url")
    @classmethod
    def _http(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(("http://", "https://")):
            raise ValueError("it must be a URL that begins with http:// or https://")
        return value

    @model_validator(mode="after")
    def _recent_is_not_inactive(self) -> Self:
        if self.inactive_days < self.recent_access_days:
            raise ValueError(
                f"PERDURE_CASEBANK__INACTIVE_DAYS is {self.inactive_days}, fewer than "
                f"PERDURE_CASEBANK__RECENT_ACCESS_DAYS ({self.recent_access_days}): "
                "a case that is protected as recently accessed cannot be inactive"
            )
        return self


class DiscordSettings(_Group):
    """`PERDURE_DISCORD__*`: the channel `discord`, enabled by `token`.

    `public_key` verifies interactions that arrive by webhook. `api_url` is the base URL of the REST API; the default is
    Discord's own.
    """

    token: SecretStr | None = None
    public_key: str | None = None
    api_url: str | None = None

    @field_validator("api_url")
    @classmethod
    def _a_server(cls, value: str | None) -> str | None:
        return _check_api_url("DISCORD__API_URL", value, "https://discord.com/api/v10")


class SlackSettings(_Group):
    """`PERDURE_SLACK__*`: the channel `slack`, enabled by `token`.

    `signing_secret` verifies events that arrive by webhook. If `app_token` is set, events arrive over Socket Mode.
    `api_url` is the base URL of the Web API; the default is Slack's own.
    """

    token: SecretStr | None = None
    signing_secret: SecretStr | None = None
    app_token: SecretStr | None = None
    api_url: str | None = None

    @field_validator("api_url")
    @classmethod
    def _a_server(cls, value: str | None) -> str | None:
        return _check_api_url("SLACK__API_URL", value, "https://slack.com/api/")


class TelegramSettings(_Group):
    """`PERDURE_TELEGRAM__*`: the channel `telegram`, enabled by `token`.

    `webhook_secret` verifies updates that arrive by webhook. Without `webhook_secret`, `perdure channels` polls for
    updates. `api_url` is the base URL of the Bot API; the default is Telegram's own.
    """

    token: SecretStr | None = None
    webhook_secret: SecretStr | None = None
    api_url: str | None = None

    @field_validator("api_url")
    @classmethod
    def _a_server(cls, value: str | None) -> str | None:
        return _check_api_url("TELEGRAM__API_URL", value, "https://api.telegram.org")


class Settings(BaseSettings):
    """All settings of one program, validated and immutable."""

    model_config = SettingsConfigDict(
        env_prefix=environment.PREFIX,
        env_nested_delimiter="__",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        validate_default=False,
    )

    database_url: SecretStr | None = None
    database_schema: str = SCHEMA
    database_prepare: bool = True
    database_capacity_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    migrate_url: SecretStr | None = None
    redis_url: SecretStr | None = None
    broker_url: SecretStr | None = None
    redis_prefix: str = REDIS_PREFIX
    data_dir: Path = Path(".perdure")
    timezone: str = "UTC"
    model: str = "offline"
    model_settings: Annotated[dict[str, Any], NoDecode] = {}
    model_window: Count | None = None
    endpoints: dict[str, EndpointSettings] = {}
    fallback: str = "models"
    fallback_models: Annotated[tuple[str, ...], NoDecode] = ()
    summary_model: str | None = None
    embedder: str = "hash:384"
    model_timeout_s: Seconds = 120
    agents: str = "perdure.builtin"
    snapshots: str = "postgres"
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    admin_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    secret_key: SecretStr | None = None
    secret_key_before: SecretStr | None = None
    reply_tasks: Annotated[tuple[str, ...], NoDecode] = ()
    reply_urls: Annotated[tuple[str, ...], NoDecode] = ()
    webhook_secret: SecretStr | None = None
    session: SessionSettings = SessionSettings()
    turn: TurnSettings = TurnSettings()
    budget: BudgetSettings = BudgetSettings()
    approval: ApprovalSettings = ApprovalSettings()
    guard: GuardSettings = GuardSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    memory: MemorySettings = MemorySettings()
    consolidation: ConsolidationSettings = ConsolidationSettings()
    breaker: BreakerSettings = BreakerSettings()
    retry: RetrySettings = RetrySettings()
    mcp: McpSettings = McpSettings()
    flower: FlowerSettings = FlowerSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    retention: RetentionSettings = RetentionSettings()
    stream: StreamSettings = StreamSettings()
    metrics: MetricsSettings = MetricsSettings()
    ready: ReadinessSettings = ReadinessSettings()
    log: LogSettings = LogSettings()
    files: FileSettings = FileSettings()
    casebank: CasebankSettings = CasebankSettings()
    discord: DiscordSettings = DiscordSettings()
    slack: SlackSettings = SlackSettings()
    telegram: TelegramSettings = TelegramSettings()

    @field_validator("api_keys", "admin_keys", "fallback_models", "reply_tasks", "reply_urls", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        return _split(value)

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _keys_can_be_used(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for number, entry in enumerate(value, start=1):
            try:
                keys.parse_entry(entry.get_secret_value())
            except ValueError as error:
                raise ValueError(f"entry {number} {error}; accepted: {keys.ACCEPTED}") from None
        return value

    @field_validator("model_settings", mode="before")
    @classmethod
    def _json_object(cls, value: Any) -> Any:
        try:
            return load_object(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f'{error}; accepted: a JSON object, such as {{"temperature": 0.2}}') from None

    @field_validator("endpoints")
    @classmethod
    def _reachable_endpoints(cls, value: dict[str, EndpointSettings]) -> dict[str, EndpointSettings]:
        for name, endpoint in value.items():
            variable = f"{environment.PREFIX}ENDPOINTS__{name.upper()}__URL"
            if _ENDPOINT_NAME.fullmatch(name) is None:
                raise ValueError(f"{variable}: a name has 1 to 64 lower-case letters, digits, _ and -, such as vllm")
            if endpoint.url is None:
                raise ValueError(f"{variable} is not set: set it to the server's base URL, such as {_EXAMPLE_URL}")
            check_server_url(variable, endpoint.url, _EXAMPLE_URL)
        return value

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        if find_zone(value) is None:
            raise ValueError("accepted: a name of the IANA time zone database, such as Europe/Paris")
        return value

    @field_validator("database_schema")
    @classmethod
    def _can_be_created(cls, value: str) -> str:
        own = value.startswith("pg_") or value == "information_schema"
        own = own or value == "$user"
        strange = not value.isprintable() or "%" in value or ":" in value
        if not 1 <= len(value.encode()) <= _LONGEST_NAME or own or strange:
            raise ValueError(
                "accepted: the name of a schema, such as perdure, of 1 to 63 bytes without %, : and control "
                "characters; $user, information_schema and the names that begin with pg_ are PostgreSQL's own"
            )
        return value

    @field_validator("database_url", "migrate_url")
    @classmethod
    def _postgresql(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        try:
            url = make_url(value.get_secret_value())
        except ArgumentError:
            url = make_url("unknown://")
        except ValueError:  # the port is no number
            raise ValueError(_PORT) from None
        if url.port is not None and not 0 < url.port <= _LAST_PORT:
            raise ValueError(_PORT)
        if url.drivername not in {"postgresql", "postgresql+psycopg2"}:
            raise ValueError("it must be a SQLAlchemy URL that begins with postgresql:// or postgresql+psycopg2://")
        if "%00" in value.get_secret_value():  # the driver would raise an error that names no setting
            raise ValueError("it has %00, which no part of the URL of PostgreSQL can have; a percent sign is %25")
        _check_libpq(url.query)
        tls.check_postgresql(url.query)
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(("redis://", "rediss://", "redis+socket://")):
            raise ValueError("it must be a URL that begins with redis://, rediss:// or redis+socket://")
        return None if value is None else _checked(value)

    @field_validator("redis_prefix")
    @classmethod
    def _plain_prefix(cls, value: str) -> str:
        # The prefix becomes part of pub/sub patterns, of the names of exchanges, and of keys with hash tags of Redis
        # Cluster.
        if _KEY_PREFIX.fullmatch(value) is None:
            raise ValueError("accepted: 1 to 64 letters, digits and the characters : . _ -, such as perdure:")
        return value

    @field_validator("broker_url")
    @classmethod
    def _broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and value.get_secret_value().partition("://")[0] not in BROKERS:
            raise ValueError(f"it must be a URL that begins with one of {', '.join(f'{each}://' for each in BROKERS)}")
        return None if value is None else _checked(value)

    @field_validator("webhook_secret")
    @classmethod
    def _usable_secrets(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_secrets(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _usable_receivers(self) -> Self:
        for entry in self.reply_tasks:
            try:
                ReplyTask.parse(entry, self.redis_prefix)
            except ValueError as error:
                raise ValueError(f"{environment.PREFIX}REPLY_TASKS has the entry {entry!r}: {error}") from None
        try:
            self.reachable()
        except ValueError as error:
            raise ValueError(f"{environment.PREFIX}REPLY_URLS: {error}") from None
        return self

    def allowed_reply_tasks(self) -> tuple[ReplyTask, ...]:
        """`PERDURE_REPLY_TASKS`: the tasks that replies may be sent to, and their queues."""
        return tuple(ReplyTask.parse(entry, self.redis_prefix) for entry in self.reply_tasks)

    def reachable(self) -> Reachable:
        """`PERDURE_REPLY_URLS`: receivers that replies may be sent to, in addition to public addresses."""
        return Reachable.parse(self.reply_urls)

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read the environment and `.env`; the environment takes precedence.

        Logs a warning for each `PERDURE_*` name that is not a setting, and copies the `VENDORS` variables of `.env`
        into the process's environment unless they are set there.

        Raises:
            SettingsError: a value is invalid; the message names the variable, the value and what is accepted.
        """
        written = environment.read(cls, overrides.get("_env_file", cls.model_config.get("env_file")))
        for name in environment.unknown(cls, [*os.environ, *written]):
            log.warning("%s is not a setting of this release of perdure and is ignored", name)
        for name, value in written.items():
            if name.startswith(VENDORS) and not os.environ.get(name):
                os.environ[name] = value
        try:
            made = cls(**overrides)
        except ValidationError as error:
            raise SettingsError(environment.explain(cls, error)) from None
        except Unparsable:  # a variable sets a whole group, which pydantic-settings parses as JSON
            raise SettingsError(environment.given_groups(cls, [*os.environ, *written])) from None
        for name, secret in (("SECRET_KEY", made.secret_key), ("SECRET_KEY_BEFORE", made.secret_key_before)):
            if secret is not None and len(secret.get_secret_value()) < keys.SHORTEST:
                raise SettingsError(
                    f"{environment.PREFIX}{name} (its value is not shown) is too short: accepted: {keys.SHORTEST} "
                    "characters or more, such as what `openssl rand -hex 32` prints"
                )
        return made

    def signing_key(self) -> bytes:
        """The key that signs: the first of `signing_keys`.

        The key signs user tokens and the tokens of chat buttons. The codes that mark quotations in prompts are derived
        from the same key.
        """
        return self.signing_keys()[0]

    def signing_keys(self) -> tuple[bytes, ...]:
        """`PERDURE_SECRET_KEY` and, during a rotation, `PERDURE_SECRET_KEY_BEFORE`: what either signed is accepted.

        If the first is not set, the key in the file `secret.key` in `PERDURE_DATA_DIR`. Creates the file with a random
        key if it does not exist.

        Raises:
            SettingsError: the file cannot be created or read.
        """
        if self.secret_key is not None:
            first = self.secret_key.get_secret_value()
        else:
            first = made_once(
                self.data_dir / "secret.key", lambda: secrets.token_hex(32), f"{environment.PREFIX}SECRET_KEY"
            )
        before = () if self.secret_key_before is None else (self.secret_key_before.get_secret_value(),)
        return tuple(key.encode() for key in (first, *before))

    def webhook_keys(self) -> tuple[bytes, ...]:
        """The keys that sign callbacks: those in `PERDURE_WEBHOOK_SECRET`, or one generated in `PERDURE_DATA_DIR`.

        Raises:
            SettingsError: the file in `PERDURE_DATA_DIR` cannot be created or read, or is malformed.
        """
        if self.webhook_secret is not None:
            return parse_secrets(self.webhook_secret.get_secret_value())
        path = self.data_dir / "webhook.secret"
        try:
            return parse_secrets(made_once(path, make_secret, f"{environment.PREFIX}WEBHOOK_SECRET"))
        except ValueError as error:
            raise SettingsError(f"{path} cannot be used: {error}") from None

    def require_keys_for(self, host: str) -> None:
        """Check that an API key or admin key is configured if other hosts can reach a server bound to `host`.

        Raises:
            SettingsError: `host` is not loopback and no key is configured.
        """
        if host not in _LOOPBACK and not (self.api_keys or self.admin_keys):
            raise SettingsError(
                f"PERDURE_API_KEYS is empty and the address to bind is {host!r}: set PERDURE_API_KEYS "
                f"(comma-separated, each {keys.ACCEPTED}), or bind 127.0.0.1"
            )
