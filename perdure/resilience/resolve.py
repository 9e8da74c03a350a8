"""Creates the registry of circuit breakers that `PERDURE_BREAKER__REGISTRY` selects.

Other packages add registries through entry points of the group `perdure.breakers`. The setting's value is the name of
such an entry point, or `fleet` for perdure's own registry. An entry point's object is a callable that takes the
settings, the clock and a callback, and returns the registry. The registry must call the callback for each change of a
breaker's state, because parked turns resume when a model's breaker closes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.resilience.registry import Breakers, Listener, Switchboard
from perdure.settings import Settings

ENTRY_POINT_GROUP = "perdure.breakers"

SwitchboardFactory = Callable[[Settings, Clock, Listener], Switchboard]

_OWN = "fleet"
_VARIABLE = "PERDURE_BREAKER__REGISTRY"


def resolve(settings: Settings, clock: Clock, redis_url: str | None, listen: Listener) -> Switchboard:
    """Create the registry of circuit breakers that the settings select.

    If breakers are disabled in the settings, returns perdure's own registry, and its breakers admit every call.

    Raises:
        SettingsError: no registry has the configured name, or the registry cannot be loaded.
    """
    name = settings.breaker.registry
    own = partial(Breakers, settings.breaker, clock, redis_url, listen, prefix=settings.redis_prefix)
    if name == _OWN:
        return own()
    found = entry_points(group=ENTRY_POINT_GROUP)
    if name not in found.names:
        accepted = ", ".join([_OWN, *sorted(found.names)])
        raise SettingsError(
            f"{_VARIABLE} is {name!r}: accepted: {accepted}, "
            f"or the name of an installed entry point of the group {ENTRY_POINT_GROUP}"
        )
    return _load(found[name])(settings, clock, listen) if settings.breaker.enabled else own()


def _load(entry_point: EntryPoint) -> SwitchboardFactory:
    try:
        factory: SwitchboardFactory = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"{_VARIABLE} is {entry_point.name!r}: the entry point {entry_point.value!r} cannot be loaded: {error}"
        ) from error
    return factory
