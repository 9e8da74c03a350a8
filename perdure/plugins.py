"""What an optional package or another one's entry point brings, by the name that a setting gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from perdure.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Scheme:
    """The part of a built-in choice's name before the colon. The choice needs the module `library` of `extra`."""

    name: str
    extra: str
    library: str

    @property
    def missing(self) -> str:
        """What to do if the extra is not installed."""
        return f"it needs the extra {self.extra}, pip install 'perdure[{self.extra}]'"


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting, the environment variable `variable`, that names a built-in choice or an entry point of `group`.

    `built_in` are whole names. A name of the `scheme` continues after a colon, as in `cross-encoder:NAME`.
    """

    variable: str
    group: str
    built_in: tuple[str, ...]
    scheme: Scheme | None = None

    def find(self, name: str) -> EntryPoint | None:
        """The entry point of that name, or `None` if it is built in.

        Raises:
            SettingsError: there is no such entry point.
        """
        if name in self.built_in or self.of_scheme(name) is not None:
            return None
        found = entry_points(group=self.group)
        if name not in found.names:
            raise SettingsError(
                f"{self.variable} is {name!r}: accepted: {', '.join(self._accepted(found.names))}, "
                f"or the name of an installed entry point of the group {self.group}"
            )
        return found[name]

    def of_scheme(self, name: str) -> str | None:
        """What follows the scheme in `name`; `None` if the name has another scheme, or none."""
        scheme, _, rest = name.partition(":")
        return rest if rest and self.scheme is not None and scheme == self.scheme.name else None

    def _accepted(self, names: Iterable[str]) -> list[str]:
        schemes = () if self.scheme is None else (f"{self.scheme.name}:NAME-OR-DIRECTORY",)
        return [*self.built_in, *schemes, *sorted(names)]

    def check(self, name: str) -> None:
        """Check that there is such a choice, without loading it.

        Raises:
            SettingsError: there is none, or the extra that it needs is not installed.
        """
        self.find(name)
        scheme = self.scheme
        if scheme is not None and self.of_scheme(name) is not None and find_spec(scheme.library) is None:
            raise SettingsError(f"{self.variable} is {name!r}: {scheme.missing}")

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
