"""`perdure up` starts all of its processes, stops them, and starts them again with the same data."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from celery import Celery

from perdure.cli.serve.installation import typed, welcome
from tests.cli.conftest import COMMAND, Environment, Perdure


def free_ports(count: int) -> list[int]:
    """`count` free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def up(
    environment: Environment, directory: Path, *options: str, number: signal.Signals = signal.SIGINT
) -> Iterator[list[str]]:
    """Run `perdure up` for the block, then stop it with the signal `number`. Yields the lines printed at the start."""
    process = subprocess.Popen(
        [*COMMAND, "up", *options],
        env={**environment, "PERDURE_DATA_DIR": "data"},  # relative: every process must resolve it alike
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield _until_up(process.stdout)
        process.send_signal(number)
        rest = process.stdout.read()  # EOF means that every process which held the pipe has ended
        assert process.wait(timeout=60) == 0, rest
        # The gateway logs its shutdown phases first. Then the two workers log theirs, and beat logs one line.
        phases = re.findall(r"^(\w+) +\| .*shutdown(?:, (\d) of 4)?: (?!\d)", rest, re.MULTILINE)
        assert phases[:4] == [("gateway", each) for each in "1234"], rest
        assert sorted(phases[4:]) == [("beat", ""), *((f"worker{at}", each) for at in "12" for each in "1234")], rest
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(timeout=60)


STARTED = ("perdure chat", "worker1@", "worker2@", "beat runs until")
"""Parts of the lines that `perdure up`, both workers and beat print once they have started.

A process that is stopped before it prints its line logs no shutdown phases.
"""


def _until_up(output: Any) -> list[str]:
    lines: list[str] = []
    missing = set(STARTED)
    for line in output:
        lines.append(line)
        missing -= {each for each in missing if each in line and ("@" not in each or "ready" in line)}
        if not missing:
            return lines
    raise AssertionError("".join(lines))


def test_the_commands_to_try_are_typed_as_they_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If `perdure` is not on the `PATH`, as under `make up`, the welcome text shows the command's path."""
    program = tmp_path / ".venv" / "bin" / "perdure"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    assert typed() == ".venv/bin/perdure"
    monkeypatch.setenv("PATH", str(program.parent))
    assert typed() == "perdure"


QUERY = {
    "draw": "1",
    "start": "0",
    "length": "10",
    "search[value]": "",
    "order[0][column]": "0",
    "order[0][dir]": "asc",
    "columns[0][data]": "name",
}


def shown_by_flower(gateway: str, flower: str, credentials: tuple[str, str]) -> set[str]:
    """The names of the tasks that Flower shows.

    Flower misses early events, so the function sends messages until Flower shows a task.
    """
    deadline, pause = time.monotonic() + 60, threading.Event()
    while time.monotonic() < deadline:
        httpx2.post(f"{gateway}/v1/messages", json={"user_id": "ann", "text": "hello"}).raise_for_status()
        found = httpx2.post(f"{flower}/tasks/datatable", data=QUERY, auth=credentials).json()["data"]
        if found:
            return {task["name"] for task in found}
        pause.wait(0.5)
    raise AssertionError("Flower shows no task")


def submitted(printed: list[str]) -> dict[str, Any]:
    """Submit a message as a Celery client, over the broker URL that `perdure up` printed. Returns the task's result."""
    (url,) = {found[1] for line in printed if (found := re.match(r"  broker +(\S+)$", line))}
    client = Celery(broker=url, backend=url, set_as_current=False)
    message = {"user_id": "ann", "text": "hello from a service"}
    result: dict[str, Any] = client.send_task("turns.submit", kwargs=message, queue="ingress").get(timeout=30)
    client.close()
    return result


def test_the_welcome_shows_the_broker_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    """The welcome text hides the passwords of the broker and the result backend, because users share screenshots."""
    welcome(Path("data"), "127.0.0.1", 8080, None, ("amqp://ann:secret@rabbit//", "redis://:secret@redis:6379/0"))
    shown = capsys.readouterr().out

    assert "secret" not in shown
    assert re.findall(r"  (broker|results) +(\S+)", shown) == [
        ("broker", "amqp://ann:**@rabbit//"),
        ("results", "redis://:**@redis:6379/0"),
    ]


@pytest.mark.exhaustive
def test_everything_starts_answers_stops_and_remembers(perdure: Perdure, nowhere: Environment, tmp_path: Path) -> None:
    """`perdure up`, `perdure send` and Flower work together. After a restart, the earlier session is still listed."""
    port, flower = free_ports(2)
    options = ("--port", str(port), "--flower-port", str(flower))
    gateway = f"http://127.0.0.1:{port}"

    with up(nowhere, tmp_path, *options) as printed:
        accepted = submitted(printed)
        sent = perdure("send", "what is 12*7+5?", "--wait", "30", env=nowhere)
        ready = httpx2.get(f"{gateway}/readyz")
        (credentials,) = re.findall(
            rf"  Flower +http://127.0.0.1:{flower} +\(user (\w+), password (\S+)\)", "\n".join(printed)
        )
        tasks = shown_by_flower(gateway, f"http://127.0.0.1:{flower}", credentials)
    assert "89" in sent.stdout, sent.stderr
    assert ready.json() == {"status": "ready"}
    assert accepted["duplicate"] is False
    assert "turns.run" in tasks
    assert "perdure up" in perdure("sessions", "list", env=nowhere).stderr

    with up(nowhere, tmp_path, *options[:2], "--no-flower", number=signal.SIGTERM):
        listed = perdure("sessions", "list", "--user", "local", "--json", env=nowhere)
    assert listed.returncode == 0, listed.stderr
    assert [session["turn_count"] for session in json.loads(listed.stdout)] == [1]
