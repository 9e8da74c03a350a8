"""A program that sends a message with a file, and kills itself at a commit.

    killing DATABASE_URL DIRECTORY POINT

The message of `ana` has a content that is an object in DIRECTORY, and one in rows. POINT counts the moments before and
after each commit, from 0. If there are fewer moments, the program just ends. After each kill, it may run again.
"""

from __future__ import annotations

import base64
import itertools
import os
import signal
import sys
from typing import Any

from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.database.engine import Database, Moment
from perdure.models.resolve import Models
from perdure.runtime import Runtime
from perdure.settings import FileSettings, Settings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from tests.conftest import RecordingWaker
from tests.files.contents import png

BIG, SMALL = png(padding=3 * 2**20), png()


def send(url: str, directory: str, point: int) -> None:
    """Send the message. The process ends at its moment `point`."""
    seen = itertools.count()

    def observe(_moment: Moment, _name: str) -> None:
        if next(seen) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    clock, database = SystemClock(), Database(url, observe=observe)
    settings = Settings(_env_file=None, files=FileSettings(url=f"file://{directory}", row_bytes=2**20))
    agents, models = Agents.from_module("perdure.builtin"), Models(settings, clock)
    runtime = Runtime(settings, clock, database, agents, models.get, RecordingWaker(), PostgresSnapshots(database))
    parts: list[dict[str, Any]] = [
        {"type": "image", "data": base64.b64encode(content).decode()} for content in (BIG, SMALL)
    ]
    accept(runtime, Incoming.model_validate({"user": UserKey("ana"), "parts": parts, "message_id": "m"}))
    runtime.close()


def main() -> None:
    """Run the program with the arguments in `sys.argv`."""
    send(sys.argv[1], sys.argv[2], int(sys.argv[3]))
