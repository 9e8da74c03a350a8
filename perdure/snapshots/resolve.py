"""Creates the store that `PERDURE_SNAPSHOTS` names.

A third party adds a store with an entry point in the group `perdure.snapshots`. The entry point's name is the scheme of
the store's URL. The entry point refers to a function that takes the value of `PERDURE_SNAPSHOTS` and the settings, and
returns the store.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perdure import plugins
from perdure.database.engine import Database
from perdure.errors import SettingsError
from perdure.settings import Settings
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.redis import RedisSnapshots
from perdure.snapshots.store import SnapshotStore
from perdure.text.patterns import compiled

ENTRY_POINT_GROUP = "perdure.snapshots"

SnapshotStoreFactory = Callable[[str, Settings], SnapshotStore]

_SQLITE = "sqlite:///"
_CREDENTIALS = compiled("://[^/@]*@")


def resolve(url: str, settings: Settings, database: Database, redis_url: str) -> SnapshotStore:
    """Create the store that `url`, the value of `PERDURE_SNAPSHOTS`, names.

    Args:
        url: `postgres`, `redis`, `sqlite:///PATH`, `file:///DIR`, or the URL of a third party's store.
        settings: Passed to a third party's store.
        database: The database for the store `postgres`.
        redis_url: The URL for the store `redis`, in kombu's syntax.

    Raises:
        SettingsError: there is no such store, or it cannot be set up.
    """
    if url == "postgres":
        return PostgresSnapshots(database, settings.memory.working_turns)
    if url == "redis":
        return RedisSnapshots(redis_url, settings.redis_prefix)
    if url.startswith(_SQLITE):
        return _sqlite(_sqlite_path(url))
    if url.startswith("file:"):
        return FileSnapshots(_directory(url))
    scheme, third_party = url.partition(":")[0], entry_points(group=ENTRY_POINT_GROUP)
    if scheme in third_party.names:
        factory: SnapshotStoreFactory = plugins.load(third_party[scheme], _setting(url))
        return factory(url, settings)
    accepted = ["postgres", "redis", "sqlite:///PATH", "file:///DIR", *sorted(third_party.names)]
    raise _refused(
        url,
        f"accepted: {', '.join(accepted)}, or the scheme of an installed entry point of the group {ENTRY_POINT_GROUP}",
    )


def _sqlite(path: Path) -> SnapshotStore:
    """The store in the file `path`. Other stores do without SQLite, which takes 2 MB of each process."""
    made: SnapshotStore = import_module("perdure.snapshots.sqlite").SqliteSnapshots(path)
    return made


def _sqlite_path(url: str) -> Path:
    """The path in `url`. As in SQLAlchemy's URLs, an absolute path has four slashes: `sqlite:////PATH`."""
    given = url.removeprefix(_SQLITE)
    path = Path(given).absolute()
    if not given or given == ":memory:" or path.is_dir():
        raise _refused(
            url, "accepted: sqlite:///PATH with the path of a file, such as sqlite:////var/lib/perdure/snapshots.db"
        )
    _make(url, path.parent)
    return path


def _directory(url: str) -> Path:
    """The directory in `url` (RFC 8089): an absolute path on this machine."""
    try:
        parts = urlsplit(url)
        local = parts.netloc in {"", "localhost"} and not (parts.query or parts.fragment)
    except ValueError:
        local = False
    if not local or not url.startswith("file://") or not parts.path.strip("/"):
        raise _refused(url, "accepted: file:///DIR with an absolute path, such as file:///var/lib/perdure/snapshots")
    path = Path("/", unquote(parts.path).lstrip("/"))
    _make(url, path)
    return path


def _make(url: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, ValueError) as error:
        raise _refused(url, f"the directory {directory} cannot be created: {error}") from error


def _refused(url: str, why: str) -> SettingsError:
    return SettingsError(f"{_setting(url)}: {why}")


def _setting(url: str) -> str:
    """The begin of an error about `PERDURE_SNAPSHOTS`, which shows `url` without credentials."""
    shown = _CREDENTIALS.sub(lambda _: "://…@", url)
    return f"PERDURE_SNAPSHOTS is {shown!r}"
