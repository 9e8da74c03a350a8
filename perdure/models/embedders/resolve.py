"""Makes an embedder from its name, as in `PERDURE_EMBEDDER`.

The embedders of a named endpoint (`perdure.models.endpoints`) of the kind `openai` are `ENDPOINT:NAME`.

Other packages add embedders through entry points of the group `perdure.embedders`. The entry point's name is the
scheme, the part of an embedder's name before the colon. The entry point's object is called with the text after the
colon, the settings and the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec

from perdure import plugins
from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.models import endpoints
from perdure.models.embedders import wordllama
from perdure.models.embedders.cache import CachedEmbedder
from perdure.models.embedders.hashing import FEWEST_DIMENSIONS, MOST_DIMENSIONS, HashEmbedder
from perdure.models.embedders.protocol import Embedder
from perdure.models.embedders.static import DIMENSIONS, StaticEmbedder
from perdure.settings import EndpointSettings, Settings

ENTRY_POINT_GROUP = "perdure.embedders"

EmbedderFactory = Callable[[str, Settings, Clock], Embedder]

Guard = Callable[[Embedder], Embedder]
"""Wraps an embedder in a circuit breaker and retries.

`resolve` puts a cache around this wrapper. Texts that are in the cache therefore bypass the wrapper.
"""


def _unguarded(embedder: Embedder) -> Embedder:
    return embedder


def resolve(name: str, settings: Settings, clock: Clock, guard: Guard = _unguarded) -> Embedder:
    """Make the embedder `name`, wrapped by `guard` and a cache.

    Raises:
        SettingsError: there is no such embedder, or it cannot be set up.
    """
    embedder = _factory(name, settings)(name.partition(":")[2], settings, clock)
    return CachedEmbedder(guard(embedder))


def check(name: str, settings: Settings, clock: Clock) -> None:
    """Check that the embedder `name` can be made, without loading a model into memory.

    Raises:
        SettingsError: there is no such embedder, or it cannot be set up.
    """
    scheme, _, rest = name.partition(":")
    factory = _factory(name, settings)
    if factory not in _IN_PROCESS:
        factory(rest, settings, clock)
    elif find_spec(_IN_PROCESS[factory]) is None:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r}: it needs the extra {scheme}, pip install 'perdure[{scheme}]'"
        )
    elif factory is _wordllama:
        wordllama.check(rest)


def _factory(name: str, settings: Settings) -> EmbedderFactory:
    scheme, _, rest = name.partition(":")
    endpoints.check(settings, lambda: entry_points(group=ENTRY_POINT_GROUP).names)
    if scheme in _BUILT_IN and rest:
        return _BUILT_IN[scheme]
    if rest and (given := endpoints.find(name, settings)) is not None:
        return _of_endpoint(name, *given)
    found = entry_points(group=ENTRY_POINT_GROUP)
    if rest and scheme in found.names:
        factory: EmbedderFactory = plugins.load(found[scheme], f"PERDURE_EMBEDDER is {name!r}")
        return factory
    in_process = ["fastembed:NAME-OR-DIRECTORY", "sentence-transformers:NAME-OR-DIRECTORY", "wordllama:256"]
    accepted = ["hash:384", "openai:NAME", "static:384", *in_process]
    accepted += [f"{other}:NAME" for other in sorted({*settings.endpoints, *found.names})]
    raise SettingsError(
        f"PERDURE_EMBEDDER is {name!r}: accepted: {', '.join(accepted)}, "
        f"or the scheme of an installed entry point of the group {ENTRY_POINT_GROUP}"
    )


def _hash(dimensions: str, settings: Settings, clock: Clock) -> Embedder:  # noqa: ARG001 (as all factories)
    is_number = dimensions.isascii() and dimensions.isdigit() and len(dimensions) <= len(str(MOST_DIMENSIONS))
    if not is_number or not FEWEST_DIMENSIONS <= int(dimensions) <= MOST_DIMENSIONS:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {f'hash:{dimensions}'!r}: accepted: hash:N with N from {FEWEST_DIMENSIONS} "
            f"to {MOST_DIMENSIONS} dimensions, such as hash:384"
        )
    return HashEmbedder(int(dimensions))


def _static(dimensions: str, settings: Settings, clock: Clock) -> Embedder:  # noqa: ARG001 (as all factories)
    if dimensions != str(DIMENSIONS):
        raise SettingsError(f"PERDURE_EMBEDDER is {f'static:{dimensions}'!r}: accepted: static:{DIMENSIONS}")
    return StaticEmbedder()


def _openai(model: str, settings: Settings, clock: Clock) -> Embedder:
    from perdure.models.embedders.openai import OpenAIEmbedder  # noqa: PLC0415 (httpx2 takes time to import)

    return OpenAIEmbedder(model, clock, settings.model_timeout_s)


def _of_endpoint(name: str, endpoint: str, given: EndpointSettings) -> EmbedderFactory:
    if given.kind != endpoints.OPENAI:
        raise SettingsError(
            f"PERDURE_EMBEDDER is {name!r} and {endpoints.variable(endpoint, 'KIND')} is {given.kind!r}: "
            f"accepted for an embedder: an endpoint of the kind {endpoints.OPENAI}"
        )

    def make(model: str, settings: Settings, clock: Clock) -> Embedder:
        from perdure.models.embedders.openai import OpenAIEmbedder  # noqa: PLC0415 (httpx2 takes time to import)
        from perdure.models.providers.endpoint import named_endpoint  # noqa: PLC0415 (the same)

        return OpenAIEmbedder(model, clock, settings.model_timeout_s, named_endpoint(endpoint, given))

    return make


def _sentence_transformers(model: str, settings: Settings, clock: Clock) -> Embedder:
    from perdure.models.embedders.sentence_transformers import load  # noqa: PLC0415 (the same)

    return load(model, clock, settings.model_timeout_s)


def _fastembed(model: str, settings: Settings, clock: Clock) -> Embedder:
    from perdure.models.embedders.fastembed import load  # noqa: PLC0415 (the same)

    return load(model, clock, settings.model_timeout_s)


def _wordllama(dimensions: str, settings: Settings, clock: Clock) -> Embedder:
    return wordllama.load(dimensions, clock, settings.model_timeout_s)


_BUILT_IN: dict[str, EmbedderFactory] = {
    "fastembed": _fastembed,
    "hash": _hash,
    "openai": _openai,
    "sentence-transformers": _sentence_transformers,
    "static": _static,
    "wordllama": _wordllama,
}

_IN_PROCESS: dict[EmbedderFactory, str] = {
    _fastembed: "fastembed",
    _sentence_transformers: "sentence_transformers",
    _wordllama: "wordllama",
}
"""The factories that load a model into memory, with the module of their extra."""
