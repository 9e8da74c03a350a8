"""The file by which a probe without Python sees that beat or `perdure channels` runs: its loop touches the file.

    test -n "$(find $PERDURE_DATA_DIR/beat.alive -mmin -3)"

Workers and gateways have ports instead.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def alive_file(data_dir: Path, process: str) -> Path:
    """The file of a process, `beat` or `channels`. Processes of one kind with the same data directory share it."""
    return data_dir / f"{process}.alive"


def touch(file: Path) -> None:
    """Say that the process runs. Where its directory cannot be written, only the probe fails."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
