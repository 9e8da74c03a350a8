"""How full the disks are that perdure's data is on: an embedded server's, and PostgreSQL's as far as it is known.

PostgreSQL tells no client how much room its disk has. So `PERDURE_DATABASE_CAPACITY_GB` tells it, and the size of the
database is held against it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from perdure.settings import Settings

_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DiskState:
    """How full a disk is. `name`: `database`, or `data_dir` for the disk of `PERDURE_DATA_DIR`."""

    name: str
    used_bytes: int
    size_bytes: int

    @property
    def fill(self) -> float:
        return self.used_bytes / self.size_bytes

    @property
    def of(self) -> str:
        """What is full, for people."""
        if self.name == "database":
            return f"PERDURE_DATABASE_CAPACITY_GB ({self.size_bytes / _GB:g})"
        return "the disk of PERDURE_DATA_DIR, which has the embedded servers,"


def disk_states(settings: Settings, database_bytes: int | None, *, embedded: bool) -> Iterator[DiskState]:
    """The disks whose size is known. `database_bytes`: the size of the database, if it was read.

    `embedded`: whether the database is in `PERDURE_DATA_DIR`.

    Raises:
        OSError: the data directory cannot be read.
    """
    if settings.database_capacity_gb and database_bytes is not None:
        yield DiskState("database", database_bytes, int(settings.database_capacity_gb * _GB))
    if embedded and settings.data_dir.exists():
        found = shutil.disk_usage(settings.data_dir)
        yield DiskState("data_dir", found.total - found.free, found.total)
