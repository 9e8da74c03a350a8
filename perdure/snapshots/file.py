"""Snapshots in files, one snapshot per file: `DIR/<session>/<token>-<tick>.json`.

The file's name contains the snapshot's version: the fencing token and the tick. `load` reads the file with the highest
version, so `save` needs no lock. A paused or killed writer neither blocks other writers nor replaces a newer snapshot.

`save` writes a temporary file in the same directory, syncs it, renames it, and syncs the directory, so a snapshot is
complete or absent. `save` then removes the files of lower versions, so a session normally has one file.

No operation has a timeout: a network file system that hangs blocks the caller.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

from perdure.errors import InvalidRequest
from perdure.snapshots.codec import dump
from perdure.snapshots.snapshot import AgentSnapshot
from perdure.snapshots.store import (
    SnapshotUnavailable,
    Stored,
    Version,
    parse_stored,
    refuse_stale,
    report_set_aside,
    version_of,
)
from perdure.text.patterns import compiled

_NAME = compiled(r"([0-9]{1,16})-([0-9]{1,16})\.(json|[0-9a-f]+\.tmp)")
_ASIDE = ".set-aside"
_TRIES = 20
_MOVING = frozenset({errno.ENOENT, errno.ENOTEMPTY})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileSnapshots:
    """A directory of snapshots. Threads and processes may use it concurrently."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.as_uri()

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        data = dump(snapshot).encode()
        version = version_of(snapshot, token)
        folder = self._folder(snapshot.agent_id)
        with self._mapped_errors():
            for _ in range(_TRIES):
                refuse_stale(snapshot.agent_id, version, _newest(folder))
                self._make(folder)
                # A concurrent `delete`, or a concurrent `save` of a newer version, may remove the temporary file. The
                # loop then tries again.
                with suppress(FileNotFoundError):
                    _write_whole(folder / _file(version), data)
                    _remove_below(folder, version)
                    return
        raise SnapshotUnavailable(
            self.name,
            f"files vanish from {folder} while they are written",
            "Find the process that removes files there.",
        )

    def load(self, agent_id: UUID) -> Stored | None:
        folder = self._folder(agent_id)
        with self._mapped_errors():
            while (version := _newest(folder)) is not None:
                path = folder / _file(version)
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue  # a newer snapshot replaced it
                try:
                    return parse_stored(data, agent_id, version)
                except InvalidRequest as error:
                    self._keep(agent_id, path, error.message, damaged=data)
            self._require_directory()
        return None

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        """See `SnapshotStore.set_aside`; renames the file."""
        folder = self._folder(agent_id)
        with self._mapped_errors():
            version = _newest(folder)
            if version is not None and version <= upto:
                self._keep(agent_id, folder / _file(version), reason)
                _remove_below(folder, version)

    def delete(self, agent_id: UUID) -> None:
        folder = self._folder(agent_id)
        with self._mapped_errors():
            for _ in range(_TRIES):
                try:
                    shutil.rmtree(folder)
                except OSError as error:
                    if error.errno not in _MOVING:
                        raise
                if not folder.exists():
                    _sync_directory(self.directory)
                    return
        raise SnapshotUnavailable(self.name, f"{folder} is written to while it is removed", "Try again.")

    def close(self) -> None:
        """Nothing to close."""

    def _folder(self, agent_id: UUID) -> Path:
        return self.directory / str(agent_id)

    def _make(self, folder: Path) -> None:
        """Create the agent's directory. A missing parent directory is an error: its disk may not be mounted."""
        self._require_directory()
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            _sync_directory(self.directory)

    def _require_directory(self) -> None:
        if not self.directory.is_dir():
            raise SnapshotUnavailable(
                self.name, "there is no such directory", "Make it, or mount the disk that holds it."
            )

    def _keep(self, agent_id: UUID, path: Path, reason: str, damaged: bytes | None = None) -> None:
        """Set the file at `path` aside. If `damaged` is given and the file has other content, do nothing."""
        kept = path.with_name(path.name + _ASIDE)
        try:
            path.rename(kept)
        except FileNotFoundError:
            return
        if damaged is not None and kept.read_bytes() != damaged:
            kept.rename(path)  # the same version was saved again after `load` had read the file
            return
        report_set_aside(self.name, agent_id, str(kept), reason)
        for other in path.parent.glob(f"*{_ASIDE}"):
            if other != kept:
                other.unlink(missing_ok=True)

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = error.strerror or str(error)
            raise SnapshotUnavailable(self.name, what[:1].lower() + what[1:], _remedy(error)) from error


def _remedy(error: OSError) -> str:
    if error.errno in _FULL:
        return "Make room on its disk."
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return "Give perdure's account write permission there."
    return "Check its disk, or set PERDURE_SNAPSHOTS to another store."


def _file(version: Version) -> str:
    return f"{version.token}-{version.tick}.json"


def _versions(folder: Path) -> Iterator[tuple[Version, str]]:
    """The version and name of each snapshot file in `folder`, including temporary files."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return
    for name in names:
        if found := _NAME.fullmatch(name):
            yield Version(int(found[1]), int(found[2])), name


def _newest(folder: Path) -> Version | None:
    return max((version for version, name in _versions(folder) if name.endswith(".json")), default=None)


def _remove_below(folder: Path, version: Version) -> None:
    for lower, name in _versions(folder):
        if lower < version:
            (folder / name).unlink(missing_ok=True)


def _write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably."""
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
