"""A process that is killed while it stores files leaves nothing that is not deleted later, and loses no message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.files.store import UNUSED_S
from perdure.settings import FileSettings
from tests import forked
from tests.files.killing import BIG, SMALL
from tests.turns.harness import Harness


@pytest.fixture
def file_settings(directory: Path) -> FileSettings:
    """Contents of more than a megabyte in a directory."""
    return FileSettings(url=f"file://{directory}", row_bytes=2**20)


@pytest.mark.exhaustive
def test_killed_at_each_commit(
    harness: Harness, database_url: str, directory: Path, stored: Callable[[], dict[str, int]], tmp_path: Path
) -> None:
    """After each kill the message is sent again: it is accepted once, with its two files, each stored once.

    Two days later, only these are left. Then the user is erased: nothing is left.
    """

    def send(point: int) -> bool:
        argv, errors = ["killing", database_url, str(directory), str(point)], tmp_path / "errors"
        process = forked.start(
            forked.Program("tests.files.killing:main", argv, dict(os.environ), tmp_path, stderr=errors)
        )
        process.join(60)
        assert process.exitcode in {0, -9}, errors.read_text()
        return process.exitcode == 0

    point, sent = 0, False
    while not sent:
        sent = send(point)
        assert send(10**6)
        assert harness.counts()["inbox"] == 1
        records = harness.sql("SELECT parts FROM inbox")[0].parts
        used = harness.sql("SELECT file_id FROM files WHERE used_at IS NOT NULL")
        rows = harness.runtime.files.rows(row.file_id for row in used)
        assert sorted(harness.runtime.files.read(row) for row in rows.values()) == sorted([BIG, SMALL])
        assert {each["file_id"] for each in records} == {str(file_id) for file_id in rows}
        harness.move(2 * UNUSED_S)
        for _ in range(2):
            harness.runtime.files.collect()
        assert stored() == {"files": 2, "file_contents": 2, "file_chunks": 1, "objects": 1}
        harness.runtime.eraser.erase(harness.sql("SELECT user_id FROM users")[0].user_id)
        assert set(stored().values()) == {0}
        point += 1
    assert point >= 9
