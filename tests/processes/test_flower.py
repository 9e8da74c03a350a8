"""Flower shows the ids and times of tasks, but no text of a user. It requires a password."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from celery import Celery

from tests.cli.conftest import Perdure
from tests.cli.test_flower import free_port
from tests.cli.test_up import QUERY
from tests.processes.faults import wait_until
from tests.processes.installation import Installation

SECRET = "zyxomma-of-flower"
PAGES = ("", "workers", "tasks", "api/workers?refresh=1", "api/tasks", "api/task/types", "metrics", "healthcheck")


@contextmanager
def flower(perdure: Perdure, data: Path) -> Iterator[httpx2.Client]:
    """Run `perdure flower`; yields a client that sends Flower's password."""
    port = free_port()
    process = perdure.start("flower", "--port", str(port))
    client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)
    try:
        wait_until(lambda: _answers(client), "Flower answers", 60)
        client.auth = httpx2.BasicAuth("perdure", (data / "flower.password").read_text())
        yield client
    finally:
        client.close()
        process.kill()
        process.join()


def _answers(client: httpx2.Client) -> bool:
    try:
        return client.get("/healthcheck").is_success
    except httpx2.TransportError:
        return False


@pytest.fixture
def foreign(installation: Installation) -> Iterator[Celery]:
    """A Celery application outside of perdure. It sends task events to the exchange that Flower reads."""
    url = installation.environment["PERDURE_BROKER_URL"]
    app = Celery("foreign", broker=url, backend=url, set_as_current=False)
    app.conf.update(task_send_sent_event=True, event_exchange="perdure:celeryev")
    yield app
    app.close()


def sent(app: Celery, queue: str = "ingress", **message: Any) -> str:
    """Send `turns.submit` with `SECRET` in the user's id, the text and the task's `shadow`; returns the task's id."""
    kwargs = {"user_id": f"ann {SECRET}", "text": f"my PIN is {SECRET}", **message}
    return str(app.send_task("turns.submit", kwargs=kwargs, queue=queue, shadow=SECRET).id)


@pytest.mark.long
def test_no_text_of_a_user_is_in_flower(
    installation: Installation, perdure: Perdure, foreign: Celery, tmp_path: Path
) -> None:
    """Flower shows no user id and no text of a submission that is accepted, refused or never consumed."""
    worker = installation.worker("--task-events")
    worker.container.ready()
    with flower(perdure, tmp_path / "data") as client:
        states = _settled(client, foreign)
        assert {"SUCCESS", "FAILURE", "PENDING"} <= set(states.values())
        pages = [*PAGES, *(f"task/{id_}" for id_ in states), *(f"api/task/info/{id_}" for id_ in states)]
        (name,) = wait_until(lambda: client.get("api/workers?refresh=1").json(), "Flower knows the worker")
        pages.append(f"worker/{name}")
        shown = [client.get(page).raise_for_status().text for page in pages]
        table = client.post("tasks/datatable", data=QUERY).raise_for_status().text
        wait_until(lambda: sent(foreign) and "turns.run" in client.get("api/tasks").text, "Flower has seen a turn")
        wait_until(lambda: "turn_ids" in client.get("api/tasks").text, "Flower has the ids of a turn that ran")
        runs = [each for each in client.get("api/tasks").json().values() if each["name"] == "turns.run"]
    assert not [page for page, text in zip(pages, shown, strict=True) if SECRET in text]
    assert SECRET not in table
    assert all("'session_id': '" in run["kwargs"] for run in runs)
    assert SECRET not in worker.logs()


def _settled(client: httpx2.Client, foreign: Celery) -> dict[str, str]:
    """Send submissions until Flower lists each outcome: accepted, refused, unconsumed; returns states by task id."""
    ids: set[str] = set()

    def known() -> dict[str, str]:
        ids.add(sent(foreign))
        ids.add(sent(foreign, nonsense=SECRET))
        ids.add(sent(foreign, "elsewhere"))
        foreign.send_task("turns.submit", args=[SECRET], queue="ingress")
        tasks = client.get("api/tasks").raise_for_status().json()
        found = {id_: tasks[id_]["state"] for id_ in ids & tasks.keys()}
        return found if {"SUCCESS", "FAILURE", "PENDING"} <= set(found.values()) else {}

    return wait_until(known, "Flower lists the submissions")


@pytest.mark.long
def test_flower_requires_its_password_and_its_own_host_name(
    installation: Installation, perdure: Perdure, tmp_path: Path
) -> None:
    """Every page rejects unknown host names. Every page except `/metrics` and `/healthcheck` requires the password."""
    with flower(perdure, tmp_path / "data") as client:
        for page in PAGES:
            assert client.get(f"/{page}", headers={"Host": "evil.example"}).status_code == 403, page
            assert client.get(f"/{page}", headers={"Host": "localhost:1"}).status_code == 200, page
        for page in PAGES:
            expected = 200 if page in {"metrics", "healthcheck"} else 401
            assert client.get(f"/{page}", auth=None).status_code == expected, page
        client.auth = httpx2.BasicAuth("perdure", "guessed")
        assert client.get("/tasks").status_code == 401
    assert ((tmp_path / "data" / "flower.password").stat().st_mode & 0o777) == 0o600
