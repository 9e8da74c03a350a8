"""Celery applications whose connection pools are independent of other applications in the process."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from kombu.pools import ProducerPool


class IsolatedAMQP(AMQP):  # type: ignore[misc]  # celery carries no types
    """Gives an `IsolatedApp` its own pool of producers."""

    _producer_pool: Any

    @property
    def producer_pool(self) -> Any:
        """The pool of producers, which use the application's own connections."""
        if self._producer_pool is None:
            pool = self.app.pool
            self._producer_pool = ProducerPool(pool, limit=pool.limit)
        return self._producer_pool


class IsolatedApp(Celery):  # type: ignore[misc]  # celery carries no types
    """A Celery application with its own connection pool.

    Celery's own pools share one limit per process. Each application sets the limit when it first publishes. A lower
    limit shrinks the pools of all applications, and raises a `RuntimeError` if one of their connections is in use.
    """

    amqp_cls = IsolatedAMQP
    _pool: Any

    @property
    def pool(self) -> Any:
        """The pool of connections to the broker."""
        if self._pool is None:
            self._ensure_after_fork()
            self._pool = self.connection_for_write().Pool(limit=self.conf.broker_pool_limit)
        return self._pool

    def close(self) -> None:
        """Close the application and its connections to the broker, including connections in use."""
        pool = self._pool
        super().close()
        if pool is not None:
            pool.force_close_all()
