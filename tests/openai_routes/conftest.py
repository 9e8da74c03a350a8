"""A gateway whose turns run in threads of the test's process, and the official SDK as its client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import openai
import pytest
from starlette.testclient import TestClient

from perdure.channels.http.app import create_app
from perdure.runtime import Runtime
from perdure.turns.run.loop import Runner
from tests.channels.conftest import BASE_URL
from tests.conftest import RecordingWaker
from tests.turns.scripted import Scripted


class RunningWaker(RecordingWaker):
    """Runs the turns of each session that is woken, one after another, in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime: Runtime | None = None
        self.threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def session(self, session_id: UUID, priority: int) -> bool:
        """Run the session."""
        thread = threading.Thread(target=self._run, args=(session_id,), daemon=True)
        self.threads.append(thread)
        thread.start()
        return super().session(session_id, priority)

    def _run(self, session_id: UUID) -> None:
        assert self.runtime is not None
        with self._lock:
            runner = Runner(self.runtime, owner="test")
            runner.run(session_id)
            runner.close()


@pytest.fixture
def model() -> Scripted:
    """The model of the agents, whose lines the test sets. It takes all settings."""
    return Scripted()


@pytest.fixture
def running(runtime: Runtime, model: Scripted) -> Iterator[Runtime]:
    """A runtime whose turns run at once."""
    waker = RunningWaker()
    waker.runtime = made = replace(runtime, wake=waker, models=lambda _name: model)
    yield made
    for thread in waker.threads:
        thread.join(20)


@pytest.fixture
def http(running: Runtime) -> Iterator[TestClient]:
    """A client of a gateway without keys, whose turns run."""
    with TestClient(create_app(running, lambda: True), base_url=BASE_URL) as made:
        yield made


@pytest.fixture
def sdk(http: TestClient) -> openai.OpenAI:
    """The official SDK."""
    return openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="none", http_client=http, max_retries=0)
