"""The state of the broker, and of a Redis server: whether it accepts writes, its memory, and what it does when full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from perdure.errors import Unavailable
from perdure.network.tls import normalised, split
from perdure.network.tls import remedy as tls_remedy
from perdure.observe.redis_access import denied
from perdure.redis import connect, remedy

_PROBE_S = 60

NEARLY_FULL = 0.9
"""The part of a memory limit above which a server is soon full."""


@dataclass(frozen=True, slots=True)
class RedisState:
    """The state of a Redis server. `fault` says why no wake-up can be published; `None`: the server accepts writes.

    `name` is `redis` or `broker`. A number is `None` if the server does not tell it. `limit_bytes` 0: no limit.
    """

    name: str
    fault: str | None
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    policy: str | None = None
    evicted: int | None = None

    @property
    def fill(self) -> float | None:
        """Which part of the memory limit is used; `None` without a limit."""
        return self.memory_bytes / self.limit_bytes if self.memory_bytes and self.limit_bytes else None


@dataclass(frozen=True, slots=True)
class BrokerState:
    """The state of the broker, of any kind. `fault` says why workers cannot be woken; `None`: it can be reached."""

    fault: str | None


def broker_state(reachable: Callable[[], bool]) -> BrokerState:
    """The state of the broker to which `reachable` tries to connect; it may raise `Unavailable` with the reason."""
    try:
        return BrokerState(None if reachable() else "The broker cannot be reached.")
    except Unavailable as error:
        return BrokerState(error.message)


class RedisServer:
    """A Redis server at `url`: the one of `PERDURE_REDIS_URL` (`redis`), or the broker. Thread-safe."""

    def __init__(self, name: str, url: str, prefix: str, *, is_broker: bool) -> None:
        self.name = name
        self._client: Any = connect(url)
        self._key = f"{prefix}probe"
        self._prefix = prefix
        self._is_broker = is_broker

    def find_fault(self) -> str | None:
        """Why the server accepts no write, in one sentence without addresses; `None` if it does. Writes one key.

        Takes about a second if the server does not answer.
        """
        title = "The broker" if self.name == "broker" else "Redis"
        try:
            self._client.set(self._key, "1", ex=_PROBE_S)
        except redis.OutOfMemoryError:
            return (
                f"{title} is full: it refuses writes, so no turn is woken. Raise its maxmemory, or free memory in it."
            )
        except redis.ReadOnlyError:
            return f"{title} is read-only: it is a replica."
        except redis.ResponseError as error:
            return f"{title} refuses writes. {remedy(error)}"
        except redis.RedisError as error:
            fix = tls_remedy(error, f"PERDURE_{self.name.upper()}_URL")
            return f"{title} cannot be reached. {fix}" if fix else f"{title} cannot be reached."
        return None

    def find_denied(self) -> str | None:
        """What an ACL denies to perdure's user, in one sentence; `None`: nothing, or the server does not answer."""
        lacking = denied(self._client, self._prefix, is_broker=self._is_broker)
        if not lacking:
            return None
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        title = "The broker" if self.name == "broker" else "Redis"
        return (
            f"{title} denies perdure's user the {lacking[0]}{more}: `perdure doctor` shows the ACL rule that suffices."
        )

    def read(self) -> RedisState:
        """The server's state. Never raises."""
        fault, found, evicted = self.find_denied() or self.find_fault(), {}, None
        try:
            found = self._client.info("memory")
            evicted = self._client.info("stats").get("evicted_keys")
        except redis.RedisError:  # it cannot be reached, as `fault` says, or a managed server forbids INFO
            pass
        return RedisState(
            self.name, fault, found.get("used_memory"), found.get("maxmemory"), found.get("maxmemory_policy"), evicted
        )

    def close(self) -> None:
        self._client.close()


def redis_urls(redis_url: str | None, broker_url: str | None) -> list[tuple[str, str]]:
    """The names and URLs of Redis, and of the broker if it is another Redis server, or several of them."""
    found = [] if redis_url is None else [("redis", normalised(redis_url))]
    brokers = split(broker_url) if broker_url is not None and broker_url.startswith("redis") else []
    known = {url for _, url in found}
    return [*found, *(("broker", url) for url in map(normalised, brokers) if url not in known)]


def redis_servers(redis_url: str | None, broker_url: str | None, prefix: str) -> list[RedisServer]:
    """Redis, and the broker if it is another Redis server. Of several brokers, any but one may be a standby."""
    found = redis_urls(redis_url, broker_url)
    several = broker_url is not None and len(split(broker_url)) > 1
    return [
        RedisServer(name, url, prefix, is_broker=is_broker(name, url, broker_url))
        for name, url in found
        if not (several and name == "broker")
    ]


def is_broker(name: str, url: str, broker_url: str | None) -> bool:
    """Whether the server `name` of `redis_urls`, at `url`, is the broker, or one of several."""
    return name == "broker" or broker_url is None or url in map(normalised, split(broker_url))
