"""Creates the registry of circuit breakers that `PERDURE_BREAKER__REGISTRY` selects.

Other packages add registries through entry points of the group `perdure.breakers`. The setting's value is the name of
such an entry point, or `fleet` for perdure's own registry. An entry point's object is a callable that takes the
settings, the clock and a callback, and returns the registry. The registry must call the callback for each change of a
breaker's state, because parked turns resume when a model's breaker closes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from perdure.clock import Clock
from perdure.plugins import Choice
from perdure.resilience.registry import Breakers, Listener, Switchboard
from perdure.settings import Settings

REGISTRIES = Choice("PERDURE_BREAKER__REGISTRY", "perdure.breakers", ("fleet",))

SwitchboardFactory = Callable[[Settings, Clock, Listener], Switchboard]


def resolve(settings: Settings, clock: Clock, redis_url: str | None, listen: Listener) -> Switchboard:
    """Create the registry of circuit breakers that the settings select.

    If breakers are disabled in the settings, returns perdure's own registry, and its breakers admit every call.

    Raises:
        SettingsError: no registry has the configured name, or the registry cannot be loaded.
    """
    own = partial(Breakers, settings.breaker, clock, redis_url, listen, prefix=settings.redis_prefix)
    found = REGISTRIES.find(settings.breaker.registry)
    if found is None or not settings.breaker.enabled:
        return own()
    factory: SwitchboardFactory = REGISTRIES.load(found.name)
    return factory(settings, clock, listen)
