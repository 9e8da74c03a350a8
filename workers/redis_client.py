"""One Redis client for each channel of kombu's Redis transport.

kombu makes a new `redis.Redis` for each command of a channel: when it publishes a message, records a delivered message
as unacknowledged, and acknowledges or rejects it. Making a client takes longer than the command. A client has no state
besides its connection pool, takes a connection from the pool for each command, and is safe for threads, so all commands
of a channel can share one. The blocking `client` and `subclient` of a channel stay separate.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis


def share_client(channel: Any) -> None:
    """Make `channel` use one client for all commands, if it is of kombu's Redis transport. Idempotent.

    When kombu replaces the channel's connection pool, after a lost connection or a fork, the next command makes a new
    client for the new pool.
    """
    if not isinstance(channel, redis.Channel) or "_create_client" in vars(channel):
        return
    own: Any = channel  # kombu carries no types
    create = own._create_client  # noqa: SLF001 (kombu has no public way)
    shared: Any = None

    def client(asynchronous: bool = False) -> Any:  # noqa: FBT001, FBT002 (kombu's signature)
        nonlocal shared
        if asynchronous:
            return create(asynchronous=True)
        found = shared
        if found is None or found.connection_pool is not own.pool:
            found = shared = create()
        return found

    own._create_client = client  # noqa: SLF001 (as above)
