"""`fastembed:NAME-OR-DIRECTORY`: a model of the library FastEmbed, run by the ONNX Runtime in this process.

The library is an extra (`pip install 'perdure[fastembed]'`). It needs no PyTorch. The library downloads a named model
once; a directory needs no network. It has a model in the layout of sentence-transformers, with its ONNX file, as the
model hub's repositories do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.models.embedders.in_process import InProcessEmbedder
from perdure.models.in_process import BATCH

_ONNX = ("onnx/model.onnx", "model.onnx")
_POOLING = "1_Pooling/config.json"
_POOLINGS = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST_TOKEN",
}


def load(model: str, clock: Clock, timeout_s: float) -> InProcessEmbedder:
    """Load the model, which takes a second or two.

    Raises:
        SettingsError: the extra is not installed, or the library cannot load the model.
    """
    name = f"fastembed:{model}"
    loaded = _load(name, model)

    def encode(texts: list[str]) -> Any:
        return [vector.tolist() for vector in loaded.embed(texts, batch_size=BATCH)]

    return InProcessEmbedder(name, encode, clock, timeout_s)


def _load(name: str, model: str) -> Any:
    try:
        from fastembed import TextEmbedding  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: it needs the extra fastembed, pip install 'perdure[fastembed]' ({error})"
        ) from error
    directory = Path(model)
    try:
        if not directory.is_dir():
            return TextEmbedding(model)
        _register(TextEmbedding, directory)
        return TextEmbedding(str(directory), specific_model_path=str(directory))
    except Exception as error:  # of the library, of the ONNX Runtime, or of the model's files
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: accepted: the name of a model that FastEmbed supports, or the directory of "
            f"a model with an ONNX file; this one cannot be loaded: {error}"
        ) from error


def _register(library: Any, directory: Path) -> None:
    """Tell the library how the directory's model makes a vector of a text's tokens.

    Raises:
        OSError, ValueError, LookupError: a file is missing, or has something else.
    """
    from fastembed.common.model_description import ModelSource, PoolingType  # noqa: PLC0415 (the same)

    if any(each["model"].lower() == str(directory).lower() for each in library.list_supported_models()):
        return
    files = [each for each in _ONNX if (directory / each).is_file()]
    if not files:
        raise ValueError(f"{directory} has neither {' nor '.join(_ONNX)}")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    library.add_custom_model(
        model=str(directory),
        pooling=PoolingType[_pooling(directory)],
        normalization=True,
        sources=ModelSource(hf=str(directory)),  # required, and not used: the files are in the directory
        dim=config["hidden_size"],
        model_file=files[0],
    )


def _pooling(directory: Path) -> str:
    path = directory / _POOLING
    if not path.is_file():
        return "MEAN"
    config = json.loads(path.read_text(encoding="utf-8"))
    wanted = [pooling for key, pooling in _POOLINGS.items() if config.get(key)]
    if len(wanted) != 1:
        raise ValueError(f"{path} has {len(wanted)} of the accepted poolings: {', '.join(_POOLINGS)}")
    return wanted[0]
