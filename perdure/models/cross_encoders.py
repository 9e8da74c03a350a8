"""`cross-encoder:NAME-OR-DIRECTORY`: a model of sentence-transformers that reads two texts side by side.

A cross-encoder gives a pair of texts one score, how well the second answers the first, or a score for each of its
labels, such as `entailment`. The library is an extra (`pip install 'perdure[sentence-transformers]'`), because it needs
PyTorch. It downloads a named model once; a directory needs no network.

A process loads a model at its first use, in a thread of its own: loading takes seconds, a download minutes, and neither
can be interrupted. A call waits for it within its time. A failure is remembered for `RETRY_S` seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from perdure.errors import ProviderError
from perdure.models.in_process import InProcess
from perdure.models.protocol import ModelCall
from perdure.plugins import Scheme
from perdure.text.untrusted import first_line, storable

CROSS_ENCODERS = Scheme("cross-encoder", extra="sentence-transformers", library="sentence_transformers")

RETRY_S = 60.0
_POLL_S = 0.5
_PAIRS = 8
"""Pairs between two checks of the deadline: fewer than the library's batch of 32, since a pair may be long."""


class CrossEncoder:
    """One model in memory. Threads may share it. `labels` are the names of the scores, in lower case."""

    def __init__(self, model: Any) -> None:
        named = model.config.id2label
        self.labels = tuple(str(named[number]).lower() for number in sorted(named))
        self._model = InProcess[tuple[str, str]]("cross-encoder", lambda pairs: _scores(model, pairs), _PAIRS)

    def scores(self, pairs: Sequence[tuple[str, str]], call: ModelCall) -> list[list[float]]:
        """For each pair, a score for each label. The scores are not scaled.

        Raises:
            CallAborted: `call` was aborted.
            ProviderError: the library failed, or the time is over.
        """
        given = [(storable(one) or " ", storable(other) or " ") for one, other in pairs]
        return list(self._model.run(given, call))


def _scores(model: Any, pairs: list[tuple[str, str]]) -> list[list[float]]:
    found = model.predict(pairs, batch_size=_PAIRS, show_progress_bar=False, activation_fn=_unscaled).tolist()
    return [each if isinstance(each, list) else [each] for each in found]


def _unscaled(scores: Any) -> Any:
    """The activation function: without one, the library scales the scores of some models, but not of others."""
    return scores


class Loader:
    """The models of a process, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[str, Future[CrossEncoder]] = {}
        self._failed_at: dict[str, float] = {}

    def load(self, model: str, call: ModelCall) -> CrossEncoder:
        """The model, which this process loads once.

        Raises:
            CallAborted: `call` was aborted.
            ProviderError: the model cannot be loaded, or the time is over. Loading goes on, for a later call.
        """
        loading = self._started(model)
        while True:
            left = call.remaining()
            try:
                return loading.result(min(left, _POLL_S))
            except TimeoutError:
                continue

    def _started(self, model: str) -> Future[CrossEncoder]:
        with self._lock:
            if model in self._failed_at and time.monotonic() >= self._failed_at[model] + RETRY_S:
                del self._failed_at[model], self._loads[model]
            if model not in self._loads:
                self._loads[model] = Future()
                threading.Thread(target=self._run, args=(model, self._loads[model]), daemon=True).start()
            return self._loads[model]

    def _run(self, model: str, loading: Future[CrossEncoder]) -> None:
        try:
            loading.set_result(_load(model))
        except ProviderError as error:
            with self._lock:
                self._failed_at[model] = time.monotonic()
            loading.set_exception(error)


def _load(model: str) -> CrossEncoder:
    name = f"{CROSS_ENCODERS.name}:{model}"
    try:
        from sentence_transformers import CrossEncoder as Model  # noqa: PLC0415 (an extra, and slow to import)

        return CrossEncoder(Model(model))
    except ImportError as error:
        raise ProviderError(f"{name}: {CROSS_ENCODERS.missing} ({error})", transient=False) from error
    except OSError as error:  # also a hub that cannot be reached
        raise ProviderError(f"{name} cannot be loaded: {first_line(str(error))}", transient=True) from error
    except Exception as error:  # libraries raise errors of all kinds
        raise ProviderError(f"{name} cannot be loaded: {first_line(str(error))}", transient=False) from error


LOADER = Loader()
