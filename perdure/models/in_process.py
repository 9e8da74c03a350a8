"""A model whose library runs in this process, such as those of sentence-transformers and WordLlama."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from perdure.errors import PerdureError, ProviderError
from perdure.models.protocol import ModelCall

BATCH = 32
"""Inputs between two checks of the deadline; also the default batch size of sentence-transformers."""

Given = TypeVar("Given")


class InProcess(Generic[Given]):
    """One model in memory. Threads may share it, but only one thread at a time uses it.

    `compute` returns a result for each input of a `batch`. `what` names the model in the messages of errors.
    """

    def __init__(self, what: str, compute: Callable[[list[Given]], Sequence[Any]], batch: int = BATCH) -> None:
        self._what = what
        self._compute = compute
        self._most = batch
        self._lock = threading.Lock()

    def run(self, inputs: Sequence[Given], call: ModelCall) -> Iterator[Any]:
        """The results, in the order of the inputs.

        The library cannot be interrupted: the deadline and an abort are checked between batches.

        Raises:
            CallAborted: `call` was aborted.
            ProviderError: the library failed, or the time is over.
        """
        for start in range(0, len(inputs), self._most):
            yield from self._batch([*inputs[start : start + self._most]], call)

    def _batch(self, batch: list[Given], call: ModelCall) -> Sequence[Any]:
        # The tokenizers are not thread-safe, and PyTorch uses all processors for one call.
        acquired = self._lock.acquire(timeout=call.remaining())
        try:
            if not acquired:
                call.expire()
            call.remaining()
            return self._compute(batch)
        except PerdureError:
            raise
        except Exception as error:  # libraries raise errors of all kinds: no memory, an index beyond a table
            raise ProviderError(f"The {self._what} failed.", transient=False) from error
        finally:
            if acquired:
                self._lock.release()
