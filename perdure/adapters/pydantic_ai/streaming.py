"""Which models of pydantic-ai stream their text. A turn asks all others without streaming."""

from __future__ import annotations

from pydantic_ai.models import Model
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.wrapper import WrapperModel


def streams(model: Model | str) -> bool:
    """Whether the model can stream. The name of a model is that of a provider's, which can.

    >>> from pydantic_ai.models.test import TestModel
    >>> streams(TestModel()), streams(FunctionModel(lambda messages, info: ...))
    (True, False)
    """
    if isinstance(model, str):
        return True
    bare = unwrapped(model)
    if isinstance(bare, FallbackModel):
        return all(map(streams, bare.models))
    if isinstance(bare, FunctionModel):
        return bare.stream_function is not None
    return getattr(type(bare), "request_stream", None) is not Model.request_stream


def unwrapped(model: object) -> object:
    """The model that a chain of `WrapperModel` wraps."""
    while isinstance(model, WrapperModel):
        model = model.wrapped
    return model
