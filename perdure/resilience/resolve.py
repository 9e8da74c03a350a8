"""Creates the breakers that `PERDURE_BREAKER__REGISTRY` names.

Other packages add registries through entry points of the group `perdure.breakers`. The entry point's name is the
setting's value. The entry point's object is called with the settings, the clock and a callback. The registry calls the
callback for each change of a breaker's state: when a model's breaker closes, parked turns resume.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Create the breakers that the settings name.

    If breakers are disabled, returns perdure's own breakers, which then admit every call.

    Raises:
        SettingsError: no registry has that name, or it cannot be loaded.
    """
    name = settings.breaker.registry
    found = entry_points(group=ENTRY_POINT_GROUP)
    if name != _OWN and name not in found.names:
        accepted = ", ".join([_OWN, *sorted(found.names)])
        raise SettingsError(
            f"{_VARIABLE} is {name!r}: accepted: {accepted}, "
            f"or the name of an installed entry point of the group {ENTRY_POINT_GROUP}"
        )
    if name == _OWN or not settings.breaker.enabled:
        return Breakers(settings.breaker, clock, redis_url, listen, prefix=settings.redis_prefix)
    return _load(found[name])(settings, clock, listen)


def _load(entry_point: EntryPoint) -> SwitchboardFactory:
    try:
        factory: SwitchboardFactory = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"{_VARIABLE} is {entry_point.name!r}: the entry point {entry_point.value!r} cannot be loaded: {error}"
        ) from error
    return factory
