"""Fixtures: a process of perdure whose files are in rows, or in rows and objects.

The objects are in a directory, or in the memory of the process. `PERDURE_TEST_FILES_URL` names a bucket for the same
tests, such as one of a server that speaks S3's protocol; it must be empty before each run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
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


BUCKET = os.environ.get("PERDURE_TEST_FILES_URL")


@pytest.fixture(params=["rows", "directory", "memory", *(["bucket"] if BUCKET else [])])
def file_settings(request: pytest.FixtureRequest, directory: Path) -> FileSettings:
    """All contents in rows; or those above 100 bytes in objects."""
    if request.param == "rows":
        return FileSettings()
    name = uuid4().hex
    urls = {"directory": f"file://{directory}", "memory": f"memory://{name}", "bucket": f"{BUCKET}/{name}"}
    return FileSettings(url=urls[request.param], row_bytes=100)


@pytest.fixture
def harness(
    settings: Settings, file_settings: FileSettings, clock: MovedClock, database: Database, waker: RecordingWaker
) -> Harness:
    """A process of perdure."""
    return Harness(settings.model_copy(update={"files": file_settings}), clock, database, waker)


@pytest.fixture
def stored(harness: Harness, file_settings: FileSettings) -> Callable[[], dict[str, int]]:
    """Counts what is stored: files, contents, rows of bytes, and objects."""

    def count() -> dict[str, int]:
        tables = ("files", "file_contents", "file_chunks")
        rows: dict[str, Any] = {name: harness.sql(f"SELECT count(*) FROM {name}")[0][0] for name in tables}  # noqa: S608
        if file_settings.url is None:
            return {**rows, "objects": 0}
        filesystem, path = fsspec.core.url_to_fs(file_settings.url)
        filesystem.invalidate_cache()
        return {**rows, "objects": len(filesystem.find(path))}

    return count
