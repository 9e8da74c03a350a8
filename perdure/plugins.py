"""What other packages bring through entry points, by the name that a setting gives."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from perdure.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, the environment variable `variable`, that names one of `built_in` or an entry point of `group`."""

    variable: str
    group: str
    built_in: tuple[str, ...]

    def find(self, name: str) -> EntryPoint | None:
        """The entry point of that name, or `None` if it is built in.

        Raises:
            SettingsError: there is no such entry point.
        """
        if name in self.built_in:
            return None
        found = entry_points(group=self.group)
        if name not in found.names:
            raise SettingsError(
                f"{self.variable} is {name!r}: accepted: {', '.join([*self.built_in, *sorted(found.names)])}, "
                f"or the name of an installed entry point of the group {self.group}"
            )
        return found[name]

    def load(self, name: str) -> Any:
        """What the entry point of that name refers to, or `None` if it is built in.

        Raises:
            SettingsError: there is no such entry point, or it cannot be loaded.
        """
        found = self.find(name)
        return None if found is None else load(found, f"{self.variable} is {name!r}")


def load(found: EntryPoint, setting: str) -> Any:
    """What an entry point refers to. `setting` begins the message of an error.

    Raises:
        SettingsError: it cannot be loaded.
    """
    try:
        return found.load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{setting}: the entry point {found.value!r} cannot be loaded: {error}") from error
