"""Redis clients for data that may be lost, such as caches.

`connect` creates a client from a URL in kombu's or redis-py's form. The client waits at most one second for a
connection or a response. `remedy` suggests a remedy for an error of a client.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from perdure.network.tls import normalised
from perdure.network.tls import remedy as tls_remedy

_TIMEOUT_S = 1.0
_CONNECTIONS = 10_000  # a thread uses one connection, for the duration of one command
_SOCKET_SCHEME = "redis+socket://"


def connect(url: str) -> redis.Redis:
    """Create a thread-safe client for the Redis at `url`. The client connects on first use."""
    return redis.Redis.from_url(
        client_url(url),
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        max_connections=_CONNECTIONS,
        # Retry once, without delay: after a restart of Redis every pooled connection is broken.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    )


def client_url(url: str) -> str:
    """`url` in redis-py's form: `redis+socket://` becomes `unix://`, and the options of `rediss://` are normalised."""
    if not url.startswith(_SOCKET_SCHEME):
        return normalised(url)
    return f"unix://{url.removeprefix(_SOCKET_SCHEME)}".replace("virtual_host=", "db=")


def where(url: str) -> str:
    """The address of the server in `url`, without user and password, for messages."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def remedy(error: redis.RedisError, otherwise: str = "Check that server.") -> str:  # noqa: PLR0911 (one for each error)
    """One sentence that names a remedy for `error`.

    Returns `otherwise` if the server sent an error for which this function has no remedy.
    """
    match error:
        case redis.OutOfMemoryError():
            return "Raise Redis's maxmemory, or free memory in it."
        case redis.ReadOnlyError():
            return "PERDURE_REDIS_URL must name the primary server, not a replica."
        case redis.AuthenticationError() | exceptions.NoPermissionError():
            return "PERDURE_REDIS_URL must carry a password, and a user that has the ACL of docs/operating.md."
        case exceptions.MovedError() | exceptions.ClusterCrossSlotError() | exceptions.ClusterDownError():
            return "It runs in cluster mode: PERDURE_REDIS_URL must name a Redis with cluster-enabled no."
        case redis.ResponseError():
            return otherwise
        case redis.BusyLoadingError():
            return "Wait until it has loaded its data."
        case redis.ConnectionError() if "max number of clients" in str(error):
            return "Raise Redis's maxclients."
        case _:
            return tls_remedy(error, "PERDURE_REDIS_URL") or "Start it, or set PERDURE_REDIS_URL to one that runs."
