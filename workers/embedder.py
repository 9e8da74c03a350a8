"""Embeds new messages and memories in a background thread of a worker.

Keyword search needs no vectors, so a slow or unavailable embedder delays neither a turn nor the sweep.
"""

from __future__ import annotations

import threading

from perdure.memory.embedding import embed_missing
from perdure.models.protocol import CallAborted, ModelCall
from perdure.runtime import Runtime


class Embedding:
    """A thread that embeds all messages and memories without a vector, each time `request` is called."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._requested = threading.Event()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._call: ModelCall | None = None
        self._thread = threading.Thread(target=self._run, name="perdure-embedding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self) -> None:
        """Make the thread embed the messages and memories that have no vector. Does not wait."""
        self._requested.set()

    def stop(self) -> None:
        """Stop the thread and abort its call of the embedder. Another worker embeds the batch later."""
        with self._lock:
            self._stopping.set()
            call = self._call
        self._requested.set()
        if call is not None:
            call.abort()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._requested.wait()
            self._requested.clear()
            self._runtime.duties.run("embedding", self._batches)

    def _batches(self) -> None:
        try:
            while self._batch():
                pass
        except CallAborted:
            return  # `stop` was called

    def _batch(self) -> bool:
        """Embed one batch; returns whether messages or memories without a vector remain."""
        call = ModelCall(self._runtime.clock, self._runtime.settings.model_timeout_s)
        with self._lock:
            if self._stopping.is_set():
                return False
            self._call = call
        days = self._runtime.settings.retention.vectors_days
        return embed_missing(self._runtime.database, self._runtime.embedder, call=call, vectors_days=days).more
