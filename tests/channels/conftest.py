"""Fixtures: a client of the gateway, and functions that send messages, run turns and count rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.database.engine import Database
from perdure.database.tables import metadata
from perdure.runtime import Runtime
from perdure.turns.run.loop import Runner

BASE_URL = "http://127.0.0.1:8080"
SERVICE_KEY, ADMIN_KEY = "key-of-a-service", "key-of-the-admin"


@pytest.fixture
def client(runtime: Runtime) -> Iterator[TestClient]:
    """A client of a gateway without keys, at a loopback address."""
    with TestClient(create_app(runtime, lambda: True), base_url=BASE_URL) as made:
        yield made


@pytest.fixture
def rows(database: Database) -> Callable[[], dict[str, int]]:
    """A function that counts the rows of each table but the audit, which records refused actions, too."""

    def count() -> dict[str, int]:
        with database.engine.connect() as connection:
            return {
                name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one()  # noqa: S608 (our own tables)
                for name in metadata.tables
                if name != "audit"
            }

    return count


@pytest.fixture
def run(runtime: Runtime) -> Iterator[Callable[[str], None]]:
    """A function that runs the turns of a session, as a worker would."""
    runner = Runner(runtime, owner="test")

    def run_session(session_id: str) -> None:
        runner.run(UUID(session_id))

    yield run_session
    runner.close()


@pytest.fixture
def say(client: TestClient) -> Callable[..., dict[str, Any]]:
    """A function that sends a message, asserts that the gateway accepts it, and returns the response's body."""

    def send(words: str = "what is 12*7+5?", **more: Any) -> dict[str, Any]:
        response = client.post("/v1/messages", json={"user_id": "ann", "text": words, **more})
        assert response.status_code in {200, 202}, response.text
        answer: dict[str, Any] = response.json()
        return answer

    return send
