"""Celery applications whose connection pools are independent of other applications in the process."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.amqp import AMQP
from kombu.pools import ProducerPool


class IsolatedAMQP(AMQP):  # type: ignore[misc]  # celery carries no types
    """The producers of an `IsolatedApp`."""

    _producer_pool: Any

    @property
    def producer_pool(self) -> Any:
        """Producers that use the application's connections."""
        if self._producer_pool is None:
            pool = self.app.pool
            self._producer_pool = ProducerPool(pool, limit=pool.limit)
        return self._producer_pool


class IsolatedApp(Celery):  # type: ignore[misc]  # the same
    """A Celery application with its own connection pool.

    Celery's pools share one limit per process, which the first publication of each application sets. A lower limit
    shrinks the pools of all applications, and fails with a `RuntimeError` while one of their connections is in use.
    """

    amqp_cls = IsolatedAMQP
    _pool: Any

    @property
    def pool(self) -> Any:
        """The connections to the broker."""
        if self._pool is None:
            self._ensure_after_fork()
            self._pool = self.connection_for_write().Pool(limit=self.conf.broker_pool_limit)
        return self._pool

    def close(self) -> None:
        """Close the application and its connections to the broker, those in use included."""
        pool = self._pool
        super().close()
        if pool is not None:
            pool.force_close_all()
