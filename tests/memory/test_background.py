"""A worker embeds messages in the background."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import CallAborted, ModelCall
from perdure.runtime import Runtime
from perdure.workers.embedder import Embedding
from tests.processes.faults import wait_until
from tests.turns.harness import Harness

_LACKING = "SELECT count(*) FROM unembedded"
_VECTORS = "SELECT count(*) FROM message_vectors WHERE half IS NOT NULL"


def _count(runtime: Runtime, sql: str) -> int:
    with runtime.database.engine.connect() as connection:
        return int(connection.exec_driver_sql(sql).scalar_one())


def test_messages_get_their_vectors(harness: Harness) -> None:
    """The background thread embeds a question and its answer."""
    harness.run(harness.send("I have a cat").session_id)
    runtime = replace(harness.runtime, embedder=HashEmbedder(64))
    embedding = Embedding(runtime)
    embedding.start()
    embedding.request()
    wait_until(lambda: _count(runtime, _VECTORS) == 2 and _count(runtime, _LACKING) == 0, "both lines have a vector")
    embedding.stop()


class _Hanging(HashEmbedder):
    """An embedder that blocks until its call is aborted."""

    def __init__(self) -> None:
        super().__init__(64)
        self.entered = threading.Event()
        self.ended = threading.Event()

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        assert call is not None
        with call.aborting(self.ended.set):
            self.entered.set()
            assert self.ended.wait(30)
        raise CallAborted("The call was ended.")


def test_a_shutdown_does_not_wait_for_the_embedder(harness: Harness) -> None:
    """A worker's shutdown aborts its call to the embedder. The texts stay in `unembedded` for another worker."""
    harness.run(harness.send("I have a cat").session_id)
    hanging = _Hanging()
    embedding = Embedding(replace(harness.runtime, embedder=hanging))
    embedding.start()
    embedding.request()
    assert hanging.entered.wait(30)
    embedding.stop()
    assert hanging.ended.wait(30)
    assert _count(harness.runtime, _VECTORS) == 0
