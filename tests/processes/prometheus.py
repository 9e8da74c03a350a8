"""A Prometheus that scrapes the processes under test and evaluates `deploy/alerts.yaml` every second.

The program comes from the system (Debian: `prometheus`). If it is not installed, the tests that need it are skipped; in
continuous integration (`CI=true`) they fail.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.observe.series import ALERTS
from tests.processes.faults import wait_until
from tests.programs import program

_START_S = 60.0


class Prometheus:
    """A Prometheus that runs at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def active(self) -> set[str]:
        """The names of the alerts whose expression is true now, whether or not they wait for their `for`."""
        return {each["labels"]["alertname"] for each in self._read("alerts")["alerts"]}

    def has_scraped(self, targets: int) -> bool:
        """Whether each of so many targets was scraped without an error."""
        found = self._read("targets")["activeTargets"]
        return [each["health"] for each in found] == ["up"] * targets

    def _read(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx2.get(f"{self._url}/api/v1/{what}").json()["data"]
        return found


@contextmanager
def running(directory: Path, targets: Sequence[str]) -> Iterator[Prometheus]:
    """Run a Prometheus within the block. It scrapes `/metrics` of the `targets`, each `HOST:PORT`."""
    directory.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "perdure", "static_configs": [{"targets": list(targets)}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    argv = [program("prometheus"), f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address={address}"], stdout=log, stderr=log)
    found = Prometheus(f"http://{address}")
    try:
        wait_until(lambda: _answers(found, process, len(targets)), "Prometheus has scraped", _START_S)
        yield found
    finally:
        process.kill()
        process.wait()


def _answers(prometheus: Prometheus, process: subprocess.Popen[bytes], targets: int) -> bool:
    assert process.poll() is None, "Prometheus has ended"
    try:
        return prometheus.has_scraped(targets)
    except (httpx2.TransportError, ValueError):
        return False
