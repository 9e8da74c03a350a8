"""Creates models by name, and adds a circuit breaker, retries and a fallback to each of them.

Other packages add providers through entry points of the group `perdure.models`. The entry point's name is the scheme,
which is the part of a model's name before the colon. The entry point's object is a `ModelFactory`. It is called with
the text after the colon, the settings and the clock.

A scheme is looked up in this order: the built-in ones, the named endpoints (`perdure.models.endpoints`), the entry
points, and the providers that pydantic-ai names.

`PERDURE_FALLBACK` is `models` or the name of an entry point of the group `perdure.fallbacks`. The entry point's object
is a `FallbackFactory`. It is called with the settings, the clock and a `Guarded` function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from perdure import plugins
from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.models import endpoints
from perdure.models import settings as model_settings
from perdure.models.protocol import ForeignModel, Model, name_of
from perdure.models.resilient import (
    CallObserver,
    FallbackModels,
    GuardedModel,
    ModelFallback,
    ObservedModel,
    ResilientModel,
)
from perdure.plugins import Choice
from perdure.resilience.registry import BreakerRegistry, Breakers
from perdure.settings import Settings

if TYPE_CHECKING:
    from perdure.models.providers.endpoint import Endpoint

ENTRY_POINT_GROUP = "perdure.models"

FALLBACKS = Choice("PERDURE_FALLBACK", "perdure.fallbacks", ("models",))

ModelFactory = Callable[[str, Settings, Clock], Model]

Guarded = Callable[[str], Model]
"""A function that returns the model of a given name, with breaker and retries but without a fallback."""

FallbackFactory = Callable[[Settings, Clock, Guarded], ModelFallback]

_OFFLINE = "offline"


def resolve(
    model: str | ForeignModel,
    settings: Settings,
    clock: Clock,
    variable: str = "PERDURE_MODEL",
    refused: endpoints.Refused | None = None,
) -> Model:
    """Create a model, without breaker, retries and fallback, from its name or from a model object of pydantic-ai.

    `variable` is the name of the setting that selects the model. Error messages contain `variable`. Models with the
    same `refused` share what they learn of a server.

    Raises:
        SettingsError: there is no such model, or it cannot be set up.
    """
    if not isinstance(model, str):
        _require_pydantic_ai(name_of(model), variable)
        from perdure.models.adapted import adapt_model  # noqa: PLC0415 (pydantic-ai is optional, and slow to import)

        return adapt_model(model, clock)
    name = endpoints.canonical(model, settings)
    scheme, _, rest = name.partition(":")
    if name == _OFFLINE:
        from perdure.models.offline import OfflineModel  # noqa: PLC0415 (a process that only accepts messages calls no model)

        return OfflineModel()
    given = settings.endpoints.get(scheme)
    kind = scheme if given is None else given.kind
    if rest and kind in endpoints.OWN_KINDS:
        return _own(kind, rest, clock, variable, _server(name, settings), refused=refused)
    found = entry_points(group=ENTRY_POINT_GROUP)
    if rest and given is None and scheme in found.names:
        factory: ModelFactory = plugins.load(found[scheme], f"{variable} is {name!r}")
        return factory(rest, settings, clock)
    if rest and kind in endpoints.PROVIDERS:
        _require_pydantic_ai(name, variable)
        from perdure.models.adapted import adapted_model  # noqa: PLC0415 (the same)

        return adapted_model(name, clock, variable, _server(name, settings), kind, refused=refused)
    accepted = ["offline", "openai:NAME", "anthropic:NAME"]
    accepted += [f"{other}:NAME" for other in sorted({*settings.endpoints, *found.names})]
    raise SettingsError(
        f"{variable} is {name!r}: accepted: {', '.join(accepted)}, "
        "a server of your own (PERDURE_ENDPOINTS__NAME__URL) as NAME:MODEL, "
        "a provider of pydantic-ai such as google:NAME, "
        f"or the scheme of an installed entry point of the group {ENTRY_POINT_GROUP}"
    )


def _own(
    kind: str, model: str, clock: Clock, variable: str, server: Endpoint | None, *, refused: endpoints.Refused | None
) -> Model:
    from perdure.models.providers.endpoint import endpoint_of  # noqa: PLC0415 (httpx2 takes time to import)
    from perdure.models.providers.model import EndpointModel  # noqa: PLC0415 (the same)

    return EndpointModel(server or endpoint_of(kind, variable, f"{kind}:{model}"), model, clock, refused)


def _server(name: str, settings: Settings) -> Endpoint | None:
    """The named endpoint of the model called `name`; `None` for the server of a vendor."""
    from perdure.models.providers.endpoint import named_endpoint  # noqa: PLC0415 (the same)

    found = endpoints.find(name, settings)
    return None if found is None else named_endpoint(*found)


def _require_pydantic_ai(name: str, variable: str) -> None:
    """Check that pydantic-ai is installed, which the model `name` needs.

    Raises:
        SettingsError: it is not.
    """
    if find_spec("pydantic_ai") is None:
        raise SettingsError(
            f"{variable} is {name!r}: it needs the extra pydantic-ai, pip install 'perdure[pydantic-ai]'"
        )


def resolve_fallback(settings: Settings, clock: Clock, guarded: Guarded) -> ModelFallback | None:
    """Create the fallback strategy that `PERDURE_FALLBACK` names.

    Returns `None` if the value is `models`. In that case, the fallbacks are the models of `PERDURE_FALLBACK_MODELS`.

    Raises:
        SettingsError: there is no such strategy, or it cannot be set up.
    """
    factory: FallbackFactory | None = FALLBACKS.load(settings.fallback)
    return None if factory is None else factory(settings, clock, guarded)


class Models:
    """The models of one process, each created on first use. Thread-safe.

    Each model has retries, a breaker and a fallback strategy. The breaker's name is `llm:` plus the model's name, such
    as `llm:openai:gpt-5`. The built-in model `offline` cannot fail, and has no retries, breaker or fallback.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        breakers: BreakerRegistry | None = None,
        observe: CallObserver | None = None,
    ) -> None:
        """If `breakers` is `None`, creates breakers for this process only. `observe` is shown each call of a model.

        Raises:
            SettingsError: `PERDURE_MODEL_SETTINGS` or an endpoint is invalid, or the strategy of `PERDURE_FALLBACK`
                does not exist or cannot be set up.
        """
        endpoints.check(settings, lambda: entry_points(group=ENTRY_POINT_GROUP).names)
        model_settings.check(settings.model_settings, "PERDURE_MODEL_SETTINGS")
        self._settings = settings
        self._clock = clock
        self._observe = observe
        self._breakers = breakers or Breakers(settings.breaker, clock)
        self._lock = threading.RLock()
        self._guarded: dict[str | int, Model] = {}
        self._resolved: dict[str | int, Model] = {}
        self._refused: endpoints.Refused = {}
        self._defaults = model_settings.of_background(settings.model_settings)
        self._fallback = resolve_fallback(settings, clock, self.guarded)

    def get(self, model: str | ForeignModel | None = None, variable: str = "PERDURE_MODEL") -> Model:
        """The model with a name or from an object of pydantic-ai, or the model of `PERDURE_MODEL` if it is `None`.

        `variable` is the name of the setting that selects the model. Error messages contain `variable`.

        Raises:
            SettingsError: there is no such model, or the model or one of its fallbacks cannot be set up.
        """
        wanted = self._settings.model if model is None else model
        key = self._key(wanted)
        with self._lock:
            if key not in self._resolved:
                self._resolved[key] = self._with_fallback(wanted, variable)
            return self._resolved[key]

    def check_settings(self, model: str | ForeignModel, given: Mapping[str, Any], owner: str, variable: str) -> None:
        """Check that a model takes the settings in `given`. Messages name them by `owner`, and the model by `variable`.

        Raises:
            SettingsError: the model lacks one of the settings, or the model cannot be set up.
        """
        if given:
            model_settings.check_support(given, self.get(model, variable), owner)

    def guarded(self, name: str, variable: str = "PERDURE_FALLBACK") -> Model:
        """The model called `name`, with breaker and retries but without a fallback.

        Fallback strategies call this method.

        Raises:
            SettingsError: there is no such model, or it cannot be set up.
        """
        with self._lock:
            return self._guard(name, variable)

    def _key(self, model: str | ForeignModel) -> str | int:
        """The key of a model. Objects of pydantic-ai have no hash, and two with one name may have different clients."""
        return endpoints.canonical(model, self._settings) if isinstance(model, str) else id(model)

    def _with_fallback(self, wanted: str | ForeignModel, variable: str) -> Model:
        model = self._guard(wanted, variable)
        if wanted == _OFFLINE:
            return model
        if self._fallback is not None:
            return ResilientModel(model, self._fallback)
        named = dict.fromkeys(self._settings.fallback_models)
        others = [other for other in named if self._key(other) != self._key(wanted)]
        if not others:
            return model
        return ResilientModel(
            model, FallbackModels([self._guard(other, "PERDURE_FALLBACK_MODELS") for other in others])
        )

    def _guard(self, wanted: str | ForeignModel, variable: str) -> Model:
        key = self._key(wanted)
        if key not in self._guarded:
            model = resolve(wanted, self._settings, self._clock, variable, self._refused)
            if key != _OFFLINE:
                name = endpoints.canonical(name_of(wanted), self._settings)
                breaker, settings = self._breakers.get(f"llm:{name}"), self._settings
                model = GuardedModel(model, breaker, settings.retry, settings.model_timeout_s, defaults=self._defaults)
            if self._observe is not None:
                named = endpoints.canonical(name_of(wanted), self._settings)
                model = ObservedModel(model, named, self._clock, self._observe)
            self._guarded[key] = model
        return self._guarded[key]
