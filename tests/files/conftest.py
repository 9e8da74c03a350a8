"""Fixtures: a process of perdure whose files are in rows, or in rows and a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.settings import FileSettings, Settings
from tests.conftest import RecordingWaker
from tests.turns.harness import Harness


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of `PERDURE_FILES__URL`."""
    return tmp_path / "files"


@pytest.fixture(params=["rows", "directory"])
def file_settings(request: pytest.FixtureRequest, directory: Path) -> FileSettings:
    """All contents in rows; or those above 100 bytes in a directory."""
    return FileSettings() if request.param == "rows" else FileSettings(url=f"file://{directory}", row_bytes=100)


@pytest.fixture
def harness(
    settings: Settings, file_settings: FileSettings, clock: MovedClock, database: Database, waker: RecordingWaker
) -> Harness:
    """A process of perdure."""
    return Harness(settings.model_copy(update={"files": file_settings}), clock, database, waker)


@pytest.fixture
def stored(harness: Harness, directory: Path) -> Callable[[], dict[str, int]]:
    """Counts what is stored: files, contents, rows of bytes, and objects."""

    def count() -> dict[str, int]:
        tables = ("files", "file_contents", "file_chunks")
        rows: dict[str, Any] = {name: harness.sql(f"SELECT count(*) FROM {name}")[0][0] for name in tables}  # noqa: S608
        return {**rows, "objects": sum(each.is_file() for each in directory.rglob("*"))}

    return count
