"""From a name, as in `PERDURE_MODEL`, to a model.

A third party adds a provider by an entry point of the group `perdure.models`: its name is
the scheme, and its object is called with what follows the colon, the settings and the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Model
from perdure.settings import Settings

ENTRY_POINT_GROUP = "perdure.models"

ModelFactory = Callable[[str, Settings, Clock], Model]


def resolve(name: str, settings: Settings, clock: Clock) -> Model:
    """Make the model called `name`.

    Raises:
        SettingsError: there is none of that name, or it cannot be set up.
    """
    scheme, _, rest = name.partition(":")
    if name == "offline":
        return OfflineModel()
    if scheme == "openai" and rest:
        from perdure.models.openai import OpenAIModel  # noqa: PLC0415 (the SDK takes a second to import)

        return OpenAIModel(rest, clock)
    found = entry_points(group=ENTRY_POINT_GROUP)
    if rest and scheme in found.names:
        return _load(name, found[scheme])(rest, settings, clock)
    accepted = ["offline", "openai:NAME", *[f"{other}:NAME" for other in sorted(found.names)]]
    raise SettingsError(
        f"PERDURE_MODEL is {name!r}: accepted: {', '.join(accepted)}, "
        f"or the scheme of an installed entry point of the group {ENTRY_POINT_GROUP}"
    )


def _load(name: str, entry_point: EntryPoint) -> ModelFactory:
    try:
        factory: ModelFactory = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"PERDURE_MODEL is {name!r}: the entry point {entry_point.value!r} cannot be loaded: {error}"
        ) from error
    return factory


class Models:
    """The models of one process, each made once. Threads may share it."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._made: dict[str, Model] = {}

    def get(self, name: str | None = None) -> Model:
        """The model called `name`, or the one of `PERDURE_MODEL`.

        Raises:
            SettingsError: there is none of that name, or it cannot be set up.
        """
        wanted = name or self._settings.model
        with self._lock:
            if wanted not in self._made:
                self._made[wanted] = resolve(wanted, self._settings, self._clock)
            return self._made[wanted]
