"""Every setting, in one place: `PERDURE_*` environment variables or a `.env` file.

Nested groups join with `__` (`PERDURE_TURN__LEASE_S`). Each number that the documents
name is a setting with that number as its default. `Settings.load()` is called once by each
program; a value that is wrong raises `SettingsError`, which names the variable, the value
and what is accepted.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as Unparsable
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from perdure.errors import SettingsError

log = logging.getLogger(__name__)

_PREFIX = "PERDURE_"
_BROKERS = ("redis", "rediss", "redis+socket", "amqp", "amqps", "pyamqp")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Scope(StrEnum):
    """What one live session spans: all of a user's channels, or one of them."""

    USER = "user"
    CHANNEL = "channel"


class OnBusy(StrEnum):
    """What becomes of a message whose session has a turn that is not settled."""

    ENQUEUE = "enqueue"
    REJECT = "reject"
    INTERRUPT = "interrupt"
    MERGE = "merge"


class PruneApproval(StrEnum):
    """Whether a plan of the CaseBank is applied as it is, or waits for a person."""

    AUTO = "auto"
    MANUAL = "manual"


class _Group(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)  # `load` tells of what is unknown


class SessionSettings(_Group):
    """`PERDURE_SESSION__*`."""

    scope: Scope = Scope.USER


class TurnSettings(_Group):
    """`PERDURE_TURN__*`: limits of one turn and of the lease it runs under."""

    max_steps: Count = 15
    timeout_s: Seconds = 300
    tool_timeout_s: Seconds = 30
    max_attempts: Count = 5
    lease_s: Seconds = 30
    heartbeat_s: Seconds = 10
    sweep_s: Seconds = 5
    on_busy: OnBusy = OnBusy.ENQUEUE

    @model_validator(mode="after")
    def _renewed_before_it_expires(self) -> Self:
        if self.heartbeat_s > self.lease_s / 2:
            raise ValueError(
                f"PERDURE_TURN__HEARTBEAT_S is {self.heartbeat_s:g} and PERDURE_TURN__LEASE_S {self.lease_s:g}: "
                "the heartbeat must be at most half the lease, so that one lost renewal does not lose the session"
            )
        return self


class GuardSettings(_Group):
    """`PERDURE_GUARD__*`: what is refused before it is accepted."""

    max_chars: Count = 10_000


class ShutdownSettings(_Group):
    """`PERDURE_SHUTDOWN__*`: the budgets of a worker's warm shutdown."""

    drain_s: Seconds = 15
    hard_exit_s: Seconds = 30

    @model_validator(mode="after")
    def _hard_exit_is_last(self) -> Self:
        if self.hard_exit_s < self.drain_s:
            raise ValueError(
                f"PERDURE_SHUTDOWN__HARD_EXIT_S is {self.hard_exit_s:g}, shorter than "
                f"PERDURE_SHUTDOWN__DRAIN_S ({self.drain_s:g}): the hard exit must come last"
            )
        return self


class CasebankSettings(_Group):
    """`PERDURE_CASEBANK__*`: which cases go, which are spared, and who is told."""

    low_success_percent: Annotated[float, Field(ge=0, le=100)] = 30
    low_success_min_usage: Annotated[int, Field(ge=0)] = 10
    duplicate_similarity: Annotated[float, Field(gt=0, lt=1)] = 0.95
    duplicate_batch: Annotated[int, Field(ge=1, le=100)] = 100
    duplicate_guard: bool = True
    inactive_days: Annotated[int, Field(ge=1)] = 90
    inactive_exempt_usage: Annotated[int, Field(ge=0)] = 100
    recent_access_days: Annotated[int, Field(ge=1)] = 7
    protected_usage: Annotated[int, Field(ge=0)] = 500
    load_percent: Annotated[int, Field(ge=1, le=100)] = 25
    approval: PruneApproval = PruneApproval.AUTO
    approval_expires_s: Seconds = 259_200
    notify_url: SecretStr | None = None

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


class Settings(BaseSettings):
    """All settings of one program, checked and immutable."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        env_nested_delimiter="__",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        validate_default=False,
    )

    database_url: SecretStr | None = None
    redis_url: SecretStr | None = None
    broker_url: SecretStr | None = None
    data_dir: Path = Path(".perdure")
    timezone: str = "UTC"
    model: str = "offline"
    model_timeout_s: Seconds = 120
    agents: str = "perdure.builtin"
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    admin_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    secret_key: SecretStr | None = None
    reply_tasks: Annotated[tuple[str, ...], NoDecode] = ()
    session: SessionSettings = SessionSettings()
    turn: TurnSettings = TurnSettings()
    guard: GuardSettings = GuardSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    casebank: CasebankSettings = CasebankSettings()

    @field_validator("api_keys", "admin_keys", "reply_tasks", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError("accepted: a name of the IANA time zone database, such as Europe/Paris") from error
        return value

    @field_validator("database_url")
    @classmethod
    def _postgresql(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        try:
            name = make_url(value.get_secret_value()).drivername
        except ArgumentError:
            name = ""
        if name not in {"postgresql", "postgresql+psycopg2"}:
            raise ValueError("it must be a SQLAlchemy URL that begins with postgresql:// or postgresql+psycopg2://")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(("redis://", "rediss://", "redis+socket://")):
            raise ValueError("it must be a URL that begins with redis://, rediss:// or redis+socket://")
        return value

    @field_validator("broker_url")
    @classmethod
    def _broker(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and value.get_secret_value().partition("://")[0] not in _BROKERS:
            raise ValueError(f"it must be a URL that begins with one of {', '.join(f'{each}://' for each in _BROKERS)}")
        return value

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read the environment and `.env`. A name that is no setting is warned of: it may be misspelt.

        Raises:
            SettingsError: a value is wrong; the message names variable, value and what is accepted.
        """
        for name in _unknown(os.environ):
            log.warning("%s is no setting of this release of perdure, and is ignored", name)
        try:
            return cls(**overrides)
        except ValidationError as error:
            raise SettingsError("\n".join(_sentence(item) for item in error.errors())) from None
        except Unparsable:  # a group, which pydantic-settings takes for JSON
            raise SettingsError(
                "\n".join(_is_group(name) for name in _groups() if _PREFIX + name in os.environ)
            ) from None

    def signing_key(self) -> bytes:
        """The key that signs callbacks: `PERDURE_SECRET_KEY`, or one made once under the data dir."""
        if self.secret_key is not None:
            return self.secret_key.get_secret_value().encode()
        path = self.data_dir / "secret.key"
        if not path.exists():
            _make_once(path, secrets.token_hex(32))
        return path.read_text().strip().encode()

    def require_keys_for(self, host: str) -> None:
        """Refuse to serve `host` to others without keys.

        Raises:
            SettingsError: the host is not loopback and no key is configured.
        """
        if host not in _LOOPBACK and not (self.api_keys or self.admin_keys):
            raise SettingsError(
                f"PERDURE_API_KEYS is empty and the address to bind is {host!r}: set PERDURE_API_KEYS "
                "(comma-separated, each KEY, sha256:HEX or file:PATH), or bind 127.0.0.1"
            )


def _make_once(path: Path, text: str) -> None:
    """Write a private file whole, unless another process does so first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as file:  # created with mode 0600
        file.write(text)
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def _sentence(item: ErrorDetails) -> str:
    location = "__".join(str(part) for part in item["loc"] if not isinstance(part, int)).upper()
    message = item["msg"].removeprefix("Value error, ")
    if message.startswith(_PREFIX):
        return message
    if item["type"] in {"model_type", "model_attributes_type"}:
        return _is_group(location)
    secret = any(word in location for word in ("KEY", "URL"))
    said = "(its value is not shown) cannot be used" if secret else f"is {item['input']!r}"
    return f"{_PREFIX}{location} {said}: {message[:1].lower()}{message[1:]}"


def _unknown(names: Iterable[str]) -> list[str]:
    """The names that look like settings and are none."""
    known = {_PREFIX + name.upper() for name in Settings.model_fields}
    known |= {variable for group in _groups() for variable in _of_group(group)}
    return sorted(name for name in names if name.upper().startswith(_PREFIX) and name.upper() not in known)


def _groups() -> list[str]:
    return [name.upper() for name, field in Settings.model_fields.items() if isinstance(field.default, _Group)]


def _of_group(group: str) -> list[str]:
    """The variables of a group."""
    settings = type(Settings.model_fields[group.lower()].default).model_fields
    return [f"{_PREFIX}{group.upper()}__{name.upper()}" for name in settings]


def _is_group(group: str) -> str:
    return f"{_PREFIX}{group} is a group: set {', '.join(_of_group(group))}"
