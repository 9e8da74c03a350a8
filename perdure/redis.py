"""Redis clients, for caches and hints that may be lost.

Makes clients (every wait bounded to a second, addresses in kombu's or redis-py's form) and maps each of their errors to
a message with a way out. Used by snapshots, breakers and the first two layers of memory.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

_TIMEOUT_S = 1.0
_SOCKET_SCHEME = "redis+socket://"


def connect(url: str) -> redis.Redis:
    """A client for the Redis at `url`; it connects when it is first used. Shared by threads."""
    return redis.Redis.from_url(
        client_url(url),
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        # One retry: after a restart of Redis every pooled connection is dead.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )


def client_url(url: str) -> str:
    """`url` in redis-py's form, which has `unix://` for `redis+socket://`; any other URL is unchanged."""
    if not url.startswith(_SOCKET_SCHEME):
        return url
    return f"unix://{url.removeprefix(_SOCKET_SCHEME)}".replace("virtual_host=", "db=")


def where(url: str) -> str:
    """The server's address for messages, without user and password."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def way_out(error: redis.RedisError, otherwise: str = "See to that server.") -> str:
    """How the operator can resolve `error`; `otherwise` is returned for other errors."""
    match error:
        case redis.OutOfMemoryError():
            return "Raise Redis's maxmemory, or make room in it."
        case redis.ReadOnlyError():
            return "PERDURE_REDIS_URL must name the primary server, not a replica."
        case redis.AuthenticationError() | redis.exceptions.NoPermissionError():
            return "PERDURE_REDIS_URL must carry a user and password that may write."
        case redis.ResponseError():
            return otherwise
        case _:
            return "Start it, or set PERDURE_REDIS_URL to one that runs."
