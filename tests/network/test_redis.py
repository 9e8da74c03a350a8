"""Clients of Redis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from perdure.redis import connect


def test_each_thread_of_a_large_worker_has_a_connection(redis_url: str) -> None:
    """redis-py's own limit of 100 connections is lower than the number of a worker's threads."""
    threads = 120
    with connect(redis_url) as client, ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda _: client.blpop("an empty list", 0.5), range(threads)))

    assert answers == [None] * threads
