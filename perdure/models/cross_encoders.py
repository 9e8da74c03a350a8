"""`cross-encoder:NAME-OR-DIRECTORY`: a model of sentence-transformers that reads two texts side by side.

A cross-encoder gives a pair of texts one score, how well the second answers the first, or a score for each of its
labels, such as `entailment`. The library is an extra (`pip install 'perdure[sentence-transformers]'`), because it needs
PyTorch. It downloads a named model once; a directory needs no network. A process loads the model at its first use.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from perdure.errors import ProviderError
from perdure.models.in_process import BATCH, InProcess
from perdure.models.protocol import ModelCall
from perdure.plugins import Scheme
from perdure.text.untrusted import storable

CROSS_ENCODERS = Scheme("cross-encoder", extra="sentence-transformers", library="sentence_transformers")

_MOST_LOADED = 2
"""As many settings name a cross-encoder."""

_loading = threading.Lock()


class CrossEncoder:
    """One model in memory. Threads may share it.

    `labels` are the names of the scores, in lower case. A model with one score may name it as it likes.
    """

    def __init__(self, model: Any) -> None:
        named = model.config.id2label
        self.labels = tuple(str(named[number]).lower() for number in sorted(named))
        self._model = InProcess[tuple[str, str]]("cross-encoder", lambda pairs: _scores(model, pairs))

    def scores(self, pairs: Sequence[tuple[str, str]], call: ModelCall) -> list[list[float]]:
        """For each pair, a score for each label. The scores are not scaled.

        Raises:
            CallAborted: `call` was aborted.
            ProviderError: the library failed, or the time is over.
        """
        given = [(storable(one) or " ", storable(other) or " ") for one, other in pairs]
        return list(self._model.run(given, call))


def _scores(model: Any, pairs: list[tuple[str, str]]) -> list[list[float]]:
    found = model.predict(pairs, batch_size=BATCH, show_progress_bar=False, activation_fn=_unscaled).tolist()
    return [each if isinstance(each, list) else [each] for each in found]


def _unscaled(scores: Any) -> Any:
    """The activation function: without one, the library scales the scores of some models, but not of others."""
    return scores


def load(model: str, variable: str) -> CrossEncoder:
    """Load the model, which takes seconds, unless this process has it. `variable` is the setting that names it.

    Raises:
        ProviderError: the extra is not installed, or the library cannot load the model.
    """
    with _loading:
        return _load(model, variable)


@lru_cache(maxsize=_MOST_LOADED)
def _load(model: str, variable: str) -> CrossEncoder:
    setting = f"{variable} is {f'{CROSS_ENCODERS.name}:{model}'!r}"
    try:
        from sentence_transformers import CrossEncoder as Model  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise ProviderError(f"{setting}: {CROSS_ENCODERS.missing} ({error})", transient=False) from error
    try:
        return CrossEncoder(Model(model))
    except (OSError, ValueError) as error:
        raise ProviderError(
            f"{setting}: accepted: a model's name on the library's hub or its directory; "
            f"this one cannot be loaded: {error}",
            transient=False,
        ) from error
