"""The baseline for throughput: a bare Celery task that makes as many commits as a turn, without an agent.

It is the cheapest durable task that this stack can run. The Celery application sets the pool, the pool's size and a
prefetch multiplier of 1, and ignores results. Its other settings are Celery's defaults. The task uses SQLAlchemy Core
on psycopg2, with as many connections as perdure. Each commit is a single-row INSERT in autocommit, which takes one
round trip. `celery -A benchmarks.floor worker` starts the worker.
"""

from __future__ import annotations

import os
from functools import cache

from celery import Celery
from sqlalchemy import Engine, create_engine

from perdure.workers.celery_application import CONCURRENCY

TABLE = """
    CREATE TABLE floor_rows (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        step integer NOT NULL,
        at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""
INSERT = "INSERT INTO floor_rows (step) VALUES (%(step)s)"

app = Celery("floor", broker=os.environ.get("PERDURE_REDIS_URL"))
app.conf.update(
    worker_pool="threads",
    worker_concurrency=CONCURRENCY,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
)


@cache
def engine() -> Engine:
    """The process's connection pool."""
    return create_engine(os.environ["PERDURE_DATABASE_URL"], isolation_level="AUTOCOMMIT", pool_size=32, max_overflow=0)


def commit(step: int) -> None:
    """Insert and commit one row."""
    with engine().connect() as connection:
        connection.exec_driver_sql(INSERT, {"step": step})


def commit_each(commits: int) -> None:
    """Insert `commits` rows, each in its own transaction."""
    for step in range(1, commits + 1):
        commit(step)


run = app.task(name="floor.run")(commit_each)
