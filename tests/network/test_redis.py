"""Clients of Redis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis import exceptions

from perdure.redis import connect, remedy


def test_each_thread_of_a_large_worker_has_a_connection(redis_url: str) -> None:
    """redis-py's own limit of 100 connections is lower than the number of a worker's threads."""
    threads = 120
    with connect(redis_url) as client, ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda _: client.blpop("an empty list", 0.5), range(threads)))

    assert answers == [None] * threads


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (exceptions.ClusterCrossSlotError("Keys in request don't hash to the same slot"), "It runs in cluster mode"),
        (exceptions.MovedError("3999 127.0.0.1:6381"), "It runs in cluster mode"),
        (redis.BusyLoadingError("Redis is loading the dataset in memory"), "Wait until it has loaded its data."),
        (redis.ConnectionError("max number of clients reached"), "Raise Redis's maxclients."),
        (redis.ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused."), "Start it, or set"),
        (
            redis.ReadOnlyError("You can't write against a read only replica."),
            "PERDURE_REDIS_URL must name the primary",
        ),
    ],
)
def test_an_error_has_its_own_remedy(error: redis.RedisError, said: str) -> None:
    """A server that runs is not to be started."""
    assert remedy(error).startswith(said)
