"""`sentence-transformers:NAME-OR-DIRECTORY`: a model of the library sentence-transformers, run in this process.

The library is an extra (`pip install 'perdure[sentence-transformers]'`), because it needs PyTorch. The library
downloads a named model once; a directory needs no network. Each process that embeds loads the model into memory.
"""

from __future__ import annotations

from typing import Any

from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.models.embedders.in_process import InProcessEmbedder
from perdure.models.in_process import BATCH


def load(model: str, clock: Clock, timeout_s: float) -> InProcessEmbedder:
    """Load the model, which takes seconds.

    Raises:
        SettingsError: the extra is not installed, or the library cannot load the model.
    """
    name = f"sentence-transformers:{model}"
    transformer = _load(name, model)

    def encode(texts: list[str]) -> Any:
        return transformer.encode(texts, batch_size=BATCH, show_progress_bar=False).tolist()

    return InProcessEmbedder(name, encode, clock, timeout_s)


def _load(name: str, model: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: it needs the extra sentence-transformers, "
            f"pip install 'perdure[sentence-transformers]' ({error})"
        ) from error
    try:
        return SentenceTransformer(model)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: accepted: a model's name on the library's hub or its directory; "
            f"this one cannot be loaded: {error}"
        ) from error
