"""Celery applications whose connection pools are independent of other applications in the process.

Their channels on Redis have one client each (`perdure.workers.redis_client`).
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from celery import Celery
from celery.app.amqp import AMQP
from kombu import Connection
from kombu.connection import ConnectionPool
from kombu.pools import ProducerPool
from kombu.utils.functional import lazy

from perdure.workers.redis_client import share_client


class _Connections(ConnectionPool):
    def collect_resource(self, resource: Any, socket_timeout: float = 0.1) -> None:  # noqa: ARG002 (kombu's signature)
        """Close a connection. kombu's own method would set the default timeout of all new sockets of the process."""
        if not isinstance(resource, lazy):
            self.close_resource(resource)  # type: ignore[no-untyped-call]  # kombu carries no types


class _Pools(NamedTuple):
    """The pools of one application in one process."""

    connections: _Connections
    producers: ProducerPool

    @classmethod
    def of(cls, connection: Connection, limit: int) -> _Pools:
        """Pools for at most `limit` connections. Opens none of them."""
        connections = _Connections(connection, limit)  # type: ignore[no-untyped-call]  # the same
        return cls(connections, ProducerPool(connections, limit=limit))


class _BrokerConnection(Connection):
    def channel(self) -> Any:
        """Open a channel, with one Redis client for all its commands."""
        channel = super().channel()  # type: ignore[no-untyped-call]  # the same
        share_client(channel)
        return channel


class IsolatedAMQP(AMQP):  # type: ignore[misc]  # celery carries no types
    """The connections and producers of an `IsolatedApp`."""

    Connection = _BrokerConnection

    @property
    def producer_pool(self) -> Any:
        return self.app.pools.producers


class IsolatedApp(Celery):  # type: ignore[misc]  # celery carries no types
    """A Celery application with its own connection pool.

    Celery's pools share one limit per process, which the first publication of each application sets. A lower limit
    shrinks the pools of all applications, and fails with a `RuntimeError` while one of their connections is in use.
    """

    amqp_cls = IsolatedAMQP

    def on_init(self) -> None:
        """Prepare the pools. Celery calls this when it has initialised the application."""
        self._pools: dict[int, _Pools] = {}

    @property
    def pools(self) -> _Pools:
        """The pools of this process. A forked process has pools of its own: it must not use its parent's sockets."""
        process = os.getpid()
        if (found := self._pools.get(process)) is None:
            made = _Pools.of(self.connection_for_write(), self.conf.broker_pool_limit)
            found = self._pools.setdefault(process, made)  # atomic: another thread may have made pools meanwhile
        return found

    @property
    def pool(self) -> Any:
        return self.pools.connections

    def close(self) -> None:
        """Close the application and this process's connections to the broker, including those in use."""
        super().close()
        if (pools := self._pools.pop(os.getpid(), None)) is not None:
            pools.connections.force_close_all()  # type: ignore[no-untyped-call]  # the same
