"""`wordllama:256`: the token vectors of the library WordLlama, averaged for each text, in this process.

The library is an extra (`pip install 'perdure[wordllama]'`). It needs no PyTorch and no network: its package has the
weights and the tokenizer. 64 and 128 dimensions are the first ones of the 256.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.models.embedders.in_process import InProcessEmbedder

_WEIGHTS = 256
_DIMENSIONS = {"64": 64, "128": 128, "256": _WEIGHTS}


def check(dimensions: str) -> None:
    """Check the number of dimensions.

    Raises:
        SettingsError: the library has no vectors of this number of dimensions.
    """
    if dimensions not in _DIMENSIONS:
        accepted = ", ".join(f"wordllama:{each}" for each in _DIMENSIONS)
        raise SettingsError(f"PERDURE_EMBEDDER is {f'wordllama:{dimensions}'!r}: accepted: {accepted}")


def load(dimensions: str, clock: Clock, timeout_s: float) -> InProcessEmbedder:
    """Load the vectors, which takes a second or two.

    Raises:
        SettingsError: the extra is not installed, or `dimensions` is not accepted.
    """
    check(dimensions)
    name = f"wordllama:{dimensions}"
    try:
        import wordllama  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: it needs the extra wordllama, pip install 'perdure[wordllama]' ({error})"
        ) from error
    # The library looks for its tokenizer under the directory of its cache, but the package has it beside its modules.
    inside = Path(wordllama.__file__).parent
    wanted = _DIMENSIONS[dimensions]
    model = wordllama.WordLlama.load(
        dim=_WEIGHTS, trunc_dim=None if wanted == _WEIGHTS else wanted, cache_dir=inside, disable_download=True
    )

    def encode(texts: list[str]) -> Any:
        return model.embed(texts, norm=False).tolist()

    return InProcessEmbedder(name, encode, clock, timeout_s)
