"""schemathesis derives valid and invalid requests from the OpenAPI document, and sends them to a gateway with keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.cli.conftest import Environment, Perdure
from tests.cli.schema_hooks import TASK
from tests.processes.gateway import serving

CONFIG = Path(__file__).with_name("schemathesis.toml")
ADMIN, SERVICE = "an-admin-key-of-the-tests", "a-service-key-of-the-tests"

_PATIENCE_S = 400.0


@pytest.fixture
def environment(environment: Environment) -> Environment:
    """The environment of a gateway that requires keys, and allows the reply task that the hooks use."""
    return {
        **environment,
        "PERDURE_ADMIN_KEYS": ADMIN,
        "PERDURE_API_KEYS": SERVICE,
        "PERDURE_REPLY_TASKS": TASK,
    }


@contextmanager
def working(perdure: Perdure) -> Iterator[None]:
    """Run a worker during the `with` block, because a stream or a completion ends only when its turn ends."""
    process = perdure.start("worker", "--concurrency", "8")
    try:
        yield
    finally:
        process.terminate()
        process.join(_PATIENCE_S)
        process.kill()
        process.join()


@pytest.mark.exhaustive
def test_the_gateway_keeps_to_its_document(environment: Environment, tmp_path: Path) -> None:
    """Each response of the gateway matches its OpenAPI document."""
    perdure = Perdure(environment, tmp_path, "tests.cli.unthrottled:main")
    with serving(perdure) as url, working(perdure):
        accepted = httpx2.post(
            f"{url}/v1/messages",
            json={"user_id": "ann", "text": "hello"},
            headers={"Authorization": f"Bearer {SERVICE}"},
        )
        ended = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", f"{url}/openapi.json"],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )

    assert accepted.status_code == 202
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Tested: 0" not in ended.stdout
