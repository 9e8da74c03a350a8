"""Embeds new messages in the background, in the worker that sweeps.

Search by words needs none of it, so nothing waits for this; an embedder that is slow or away
holds up neither the sweep nor a turn.
"""

from __future__ import annotations

import logging
import threading

from perdure.errors import Unavailable
from perdure.memory.embedding import embed_missing
from perdure.models.protocol import CallAborted, ModelCall
from perdure.runtime import Runtime

log = logging.getLogger(__name__)


class Embedding:
    """One thread of a worker, which embeds what lacks vectors whenever it is told to look."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._call: ModelCall | None = None
        self._thread = threading.Thread(target=self._run, name="perdure-embedding", daemon=True)

    def start(self) -> None:
        """Begin to wait to be told."""
        self._thread.start()

    def look(self) -> None:
        """There may be something without a vector."""
        self._wanted.set()

    def leave(self) -> None:
        """The process shuts down: end the call under way; what it was for is due again later."""
        with self._lock:
            self._leaving.set()
            call = self._call
        self._wanted.set()
        if call is not None:
            call.abort()

    def _run(self) -> None:
        while not self._leaving.is_set():
            self._wanted.wait()
            self._wanted.clear()
            try:
                while self._batch():
                    pass
            except CallAborted:
                return
            except Unavailable as error:
                log.warning("vectors wait: %s", error.message)
            except Exception:
                log.exception("the embedding thread met an error and goes on")

    def _batch(self) -> bool:
        """Embed one batch; whether there is more to do."""
        call = ModelCall(self._runtime.clock, self._runtime.settings.model_timeout_s)
        with self._lock:
            if self._leaving.is_set():
                return False
            self._call = call
        return embed_missing(self._runtime.database, self._runtime.embedder, call=call).more
