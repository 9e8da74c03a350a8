"""Creates models by name, and adds a circuit breaker, retries and a fallback to each of them.

Other packages add providers through entry points of the group `perdure.models`. The entry point's name is the scheme,
which is the part of a model's name before the colon. The entry point's object is a `ModelFactory`. It is called with
the text after the colon, the settings and the clock.

`PERDURE_FALLBACK` is `models` or the name of an entry point of the group `perdure.fallbacks`. The entry point's object
is a `FallbackFactory`. It is called with the settings, the clock and a `Guarded` function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.models.protocol import Model
from perdure.models.resilient import FallbackModels, GuardedModel, ModelFallback, ResilientModel
from perdure.resilience.registry import BreakerRegistry, Breakers
from perdure.settings import Settings

ENTRY_POINT_GROUP = "perdure.models"

FALLBACKS_GROUP = "perdure.fallbacks"

ModelFactory = Callable[[str, Settings, Clock], Model]

Guarded = Callable[[str], Model]
"""A function that returns the model of a given name, with breaker and retries but without a fallback."""

FallbackFactory = Callable[[Settings, Clock, Guarded], ModelFallback]

_OFFLINE = "offline"
_OTHER_MODELS = "models"


def resolve(name: str, settings: Settings, clock: Clock, variable: str = "PERDURE_MODEL") -> Model:
    """Create the model called `name`, without breaker, retries and fallback.

    `variable` is the name of the setting that selects the model. Error messages contain `variable`.

    Raises:
        SettingsError: there is no such model, or it cannot be set up.
    """
    scheme, _, rest = name.partition(":")
    if name == _OFFLINE:
        from perdure.models.offline import OfflineModel  # noqa: PLC0415 (a process that only accepts messages calls no model)

        return OfflineModel()
    if scheme == "openai" and rest:
        from perdure.models.providers.openai import OpenAIModel  # noqa: PLC0415 (the SDK takes a second to import)

        return OpenAIModel(rest, clock, variable)
    if scheme == "anthropic" and rest:
        from perdure.models.providers.anthropic import AnthropicModel  # noqa: PLC0415 (the same)

        return AnthropicModel(rest, clock, variable)
    found = entry_points(group=ENTRY_POINT_GROUP)
    if rest and scheme in found.names:
        factory: ModelFactory = _load(f"{variable} is {name!r}", found[scheme])
        return factory(rest, settings, clock)
    accepted = ["offline", "openai:NAME", "anthropic:NAME", *[f"{other}:NAME" for other in sorted(found.names)]]
    raise SettingsError(
        f"{variable} is {name!r}: accepted: {', '.join(accepted)}, "
        f"or the scheme of an installed entry point of the group {ENTRY_POINT_GROUP}"
    )


def resolve_fallback(settings: Settings, clock: Clock, guarded: Guarded) -> ModelFallback | None:
    """Create the fallback strategy that `PERDURE_FALLBACK` names.

    Returns `None` if the value is `models`. In that case, the fallbacks are the models of `PERDURE_FALLBACK_MODELS`.

    Raises:
        SettingsError: there is no such strategy, or it cannot be set up.
    """
    name = settings.fallback
    if name == _OTHER_MODELS:
        return None
    found = entry_points(group=FALLBACKS_GROUP)
    if name in found.names:
        factory: FallbackFactory = _load(f"PERDURE_FALLBACK is {name!r}", found[name])
        return factory(settings, clock, guarded)
    raise SettingsError(
        f"PERDURE_FALLBACK is {name!r}: accepted: {', '.join([_OTHER_MODELS, *sorted(found.names)])}, "
        f"or the name of an installed entry point of the group {FALLBACKS_GROUP}"
    )


def _load(setting: str, entry_point: EntryPoint) -> Any:
    try:
        return entry_point.load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{setting}: the entry point {entry_point.value!r} cannot be loaded: {error}") from error


class Models:
    """The models of one process, each created on first use. Thread-safe.

    Each model has retries, a breaker and a fallback strategy. The breaker's name is `llm:` plus the model's name, such
    as `llm:openai:gpt-5`. The argument `fallback` replaces the strategy of `PERDURE_FALLBACK`. The built-in model
    `offline` cannot fail, and has no retries, breaker or fallback.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        breakers: BreakerRegistry | None = None,
        fallback: ModelFallback | None = None,
    ) -> None:
        """If `breakers` is `None`, creates breakers for this process only.

        Raises:
            SettingsError: the strategy of `PERDURE_FALLBACK` does not exist or cannot be set up.
        """
        self._settings = settings
        self._clock = clock
        self._breakers = breakers or Breakers(settings.breaker, clock)
        self._lock = threading.RLock()
        self._guarded: dict[str, Model] = {}
        self._resolved: dict[str, Model] = {}
        self._fallback = fallback or resolve_fallback(settings, clock, self.guarded)

    def get(self, name: str | None = None, variable: str = "PERDURE_MODEL") -> Model:
        """The model called `name`, or the model of `PERDURE_MODEL` if `name` is `None`.

        `variable` is the name of the setting that selects the model. Error messages contain `variable`.

        Raises:
            SettingsError: there is no such model, or the model or one of its fallbacks cannot be set up.
        """
        wanted = name or self._settings.model
        with self._lock:
            if wanted not in self._resolved:
                self._resolved[wanted] = self._with_fallback(wanted, variable)
            return self._resolved[wanted]

    def guarded(self, name: str, variable: str = "PERDURE_FALLBACK") -> Model:
        """The model called `name`, with breaker and retries but without a fallback.

        Fallback strategies call this method.

        Raises:
            SettingsError: there is no such model, or it cannot be set up.
        """
        with self._lock:
            return self._guard(name, variable)

    def _with_fallback(self, name: str, variable: str) -> Model:
        model = self._guard(name, variable)
        if name == _OFFLINE:
            return model
        if self._fallback is not None:
            return ResilientModel(model, self._fallback)
        others = [other for other in dict.fromkeys(self._settings.fallback_models) if other != name]
        if not others:
            return model
        return ResilientModel(
            model, FallbackModels([self._guard(other, "PERDURE_FALLBACK_MODELS") for other in others])
        )

    def _guard(self, name: str, variable: str) -> Model:
        if name not in self._guarded:
            model = resolve(name, self._settings, self._clock, variable)
            if name != _OFFLINE:
                breaker = self._breakers.get(f"llm:{name}")
                model = GuardedModel(model, breaker, self._settings.retry, self._settings.model_timeout_s)
            self._guarded[name] = model
        return self._guarded[name]
