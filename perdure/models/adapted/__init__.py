"""Adapts the models of pydantic-ai: every provider that perdure's own wires do not speak to.

`adapted_model` creates a model by name, such as `google:gemini-3-pro`, and `adapt_model` adapts a model object of
pydantic-ai. Both give a `Model` like any other: breakers, retries, fallbacks and deadlines are around it. pydantic-ai
translates messages and speaks to the vendor's SDK; no `Agent` takes part. The calls run on the event loop of the
process (`event_loop`), and the thread of the turn waits for them. Tool calls run only if the reply ended properly, as
with any other model.

The room needs the extra `perdure[pydantic-ai]`, and is imported on use only: pydantic-ai takes a second to import.
"""

from perdure.errors import SettingsError

try:
    import pydantic_ai  # noqa: F401 (the modules of this room import parts of it)
except ImportError as _error:
    raise SettingsError(
        f"pydantic-ai cannot be imported ({_error}): its models and agents need pip install 'perdure[pydantic-ai]'"
    ) from _error

from perdure.models.adapted.model import AdaptedModel, adapt_model, adapted_model

__all__ = ["AdaptedModel", "adapt_model", "adapted_model"]
