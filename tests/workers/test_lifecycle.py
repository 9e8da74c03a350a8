"""How a worker handles Celery's start-up signals."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.utils.dispatch import Signal

from perdure.assembly import Addresses
from perdure.settings import Settings
from perdure.workers import lifecycle, logs

SIGNALS = (
    "setup_logging",
    "worker_init",
    "worker_ready",
    "worker_shutdown",
    "worker_shutting_down",
)


def test_the_log_is_configured_before_anything_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is configured at `worker_init`, before perdure's start-up check. Celery sends `setup_logging` later."""
    steps: list[str] = []
    signals = {name: Signal() for name in SIGNALS}
    for name, signal in signals.items():
        monkeypatch.setattr(lifecycle, name, signal)
    monkeypatch.setattr(logs, "configure", lambda **_: steps.append("log"))
    monkeypatch.setattr(lifecycle.Lifecycle, "check", lambda _: steps.append("check"))
    monkeypatch.setattr(lifecycle.Lifecycle, "start", lambda _: steps.append("start"))

    lifecycle.follow(Celery(set_as_current=False), Settings(_env_file=None), Addresses("", "", ""))
    signals["worker_init"].send(sender=None)

    assert steps == ["log", "check", "start"]
