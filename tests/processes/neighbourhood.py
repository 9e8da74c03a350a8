"""Control of an installation's neighbour: an ordinary Celery application on the same Redis database."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from celery import Celery

from tests.processes.installation import Installation
from tests.processes.neighbour import QUEUE
from tests.processes.nodes import Worker, WorkerContainer


class Neighbour:
    """The neighbour application: its worker, and a client that publishes its tasks."""

    def __init__(self, installation: Installation, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.app = Celery("a program of the neighbour", broker=installation.redis.url, set_as_current=False)
        self.app.conf.update(task_default_queue=QUEUE)
        self._installation = installation

    def worker(self, *options: str) -> Worker:
        """Start a worker of the application."""
        url = self._installation.redis.url
        environment = {
            **{name: value for name, value in self._installation.environment.items() if "PERDURE" not in name},
            "NEIGHBOUR_REDIS_URL": url,
            "NEIGHBOUR_DIRECTORY": str(self.directory),
        }
        container = WorkerContainer("neighbour", environment, self.directory, options, "tests.processes.neighbour")
        self._installation.workers.append(Worker(container, app=None))
        container.start()
        container.ready()
        return self._installation.workers[-1]

    def runs(self) -> Counter[str]:
        """How often each task ran, by the task's name."""
        path = self.directory / "runs"
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def open_gate(self) -> None:
        """Open the gate, so that the tasks that wait for it end."""
        (self.directory / "gate").touch()

    def send_timed(self, count: int, long_s: float, countdown_s: float) -> list[str]:
        """Send `count` tasks that run for `long_s`, and `count` tasks with a countdown; returns the tasks' names."""
        names = [f"{kind}-{number}" for kind in ("long", "postponed") for number in range(count)]
        for name in names:
            if name.startswith("long"):
                self.app.send_task("neighbour.timed", args=[name, long_s])
            else:
                self.app.send_task("neighbour.named", args=[name], countdown=countdown_s)
        return names

    def close(self) -> None:
        """Open the gate, and close the client's connections."""
        self.open_gate()
        self.app.close()
