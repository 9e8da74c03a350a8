"""Snapshots as files: `DIR/<session>/<token>-<tick>.json`, each one `AgentSnapshot`.

A file is written beside its place, synced, and renamed into it; its directory is synced then.
So it is there whole or not at all, and there is nothing to lock: the order of two snapshots
is in their names, `load` takes the highest, and a paused or killed writer neither holds
anybody up nor puts an old snapshot in the place of a new one. Lower ones are removed once a
higher one is durable; at rest there is one file a session.

Bounds of the disk's own (a network file system that hangs) are not perdure's to set.
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
    refuse_stale,
    report_set_aside,
    restored,
    version_of,
)
from perdure.text.patterns import compiled

_NAME = compiled(r"([0-9]{1,16})-([0-9]{1,16})\.(json|[0-9a-f]+\.tmp)")
_ASIDE = ".set-aside"
_TRIES = 20
_MOVING = frozenset({errno.ENOENT, errno.ENOTEMPTY})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileSnapshots:
    """A directory of snapshots. Many threads and processes may use it at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.as_uri()

    def save(self, snapshot: AgentSnapshot, token: int) -> None:
        """Store `snapshot` in place of an older one; see `SnapshotStore.save`."""
        data = dump(snapshot).encode()
        version = version_of(snapshot, token)
        folder = self._folder(snapshot.agent_id)
        with self._explained():
            for _ in range(_TRIES):
                refuse_stale(snapshot.agent_id, version, _newest(folder))
                self._make(folder)
                # What stands beside the place may be removed by whoever saves a newer one or
                # deletes the agent at this moment: then look again.
                with suppress(FileNotFoundError):
                    _write_whole(folder / _file(version), data)
                    _remove_below(folder, version)
                    return
        raise SnapshotUnavailable(
            self.name, f"files vanish from {folder} while they are written", "See what else removes files there."
        )

    def load(self, agent_id: UUID) -> Stored | None:
        """The agent's newest snapshot, or None; see `SnapshotStore.load`."""
        folder = self._folder(agent_id)
        with self._explained():
            while (version := _newest(folder)) is not None:
                path = folder / _file(version)
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue  # a newer one has taken its place
                try:
                    return restored(data, agent_id, version)
                except InvalidRequest as error:
                    self._keep(agent_id, path, error.message, damaged=data)
            self._require_directory()
        return None

    def set_aside(self, agent_id: UUID, upto: Version, reason: str) -> None:
        """Rename what is no newer than `upto`; see `SnapshotStore.set_aside`."""
        folder = self._folder(agent_id)
        with self._explained():
            version = _newest(folder)
            if version is not None and version <= upto:
                self._keep(agent_id, folder / _file(version), reason)
                _remove_below(folder, version)

    def delete(self, agent_id: UUID) -> None:
        """Remove the agent's directory; see `SnapshotStore.delete`."""
        folder = self._folder(agent_id)
        with self._explained():
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
        """Nothing is held open."""

    def _folder(self, agent_id: UUID) -> Path:
        return self.directory / str(agent_id)

    def _make(self, folder: Path) -> None:
        """Make the agent's directory, not its parent: a disk that is not mounted must not be imitated."""
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
        """Rename what is at `path`; not so if it is no longer `damaged`, where that is given."""
        kept = path.with_name(path.name + _ASIDE)
        try:
            path.rename(kept)
        except FileNotFoundError:
            return
        if damaged is not None and kept.read_bytes() != damaged:
            kept.rename(path)  # the same version was saved again meanwhile, whole
            return
        report_set_aside(self.name, agent_id, str(kept), reason)
        for other in path.parent.glob(f"*{_ASIDE}"):
            if other != kept:
                other.unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = error.strerror or str(error)
            raise SnapshotUnavailable(self.name, what[:1].lower() + what[1:], _way_out(error)) from error


def _way_out(error: OSError) -> str:
    if error.errno in _FULL:
        return "Make room on its disk."
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return "Let perdure's account write there."
    return "See to its disk, or set PERDURE_SNAPSHOTS to another store."


def _file(version: Version) -> str:
    return f"{version.token}-{version.tick}.json"


def _versions(folder: Path) -> Iterator[tuple[Version, str]]:
    """The version and name of each file in `folder`, those that are being written included."""
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
    """Have `path` hold `data`, durably; never a part of it, not even after a power cut."""
    beside = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
