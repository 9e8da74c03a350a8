"""Clients of the gateway that follow the events of turns, and resume after each cut."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from tests.processes.streams import Reader

STREAMS = 4
"""The most streams that are read concurrently."""

CUTS = 4
"""How often a reader closes its stream and resumes."""


class Listeners:
    """Follow turns within a `with` block, each to its end; `readers` has what each has seen.

    A turn must be done `patience_s` seconds after it is followed.
    """

    def __init__(self, drawn: random.Random, url: str, patience_s: float) -> None:
        self.readers: list[Reader] = []
        self._drawn = drawn
        self._url = url
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(STREAMS)
        self._reading: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for each in self._reading:
            each.result()

    def follow(self, turn_id: str) -> None:
        """Follow the turn's events, unless all readers are busy."""
        if sum(not each.done() for each in self._reading) < STREAMS:
            seed = random.Random(self._drawn.random())  # noqa: S311 (repeatable draws)
            reader = Reader(self._url, turn_id, seed, CUTS, patience_s=self._patience_s)
            self.readers.append(reader)
            self._reading.append(self._threads.submit(reader.read))
