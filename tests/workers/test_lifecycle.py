"""How a worker handles Celery's start-up signals."""

from __future__ import annotations

from unittest.mock import Mock

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


@pytest.mark.parametrize(
    ("signal", "step"), [("worker_init", "check"), ("worker_init", "start"), ("worker_ready", "watch")]
)
def test_an_error_of_a_receiver_ends_the_worker(monkeypatch: pytest.MonkeyPatch, signal: str, step: str) -> None:
    """Celery only logs an error of a receiver. A worker without one of its parts would take tasks and fail them."""
    signals = {name: Signal() for name in SIGNALS}
    for name, each in signals.items():
        monkeypatch.setattr(lifecycle, name, each)
    monkeypatch.setattr(lifecycle, "require_threads", lambda _: None)
    for name in ("check", "start", "watch"):
        monkeypatch.setattr(lifecycle.Lifecycle, name, Mock(side_effect=OSError("no space") if name == step else None))
    monkeypatch.setattr(lifecycle, "gc", Mock(get_threshold=lambda: (700, 10, 10)))

    lifecycle.follow(Celery(set_as_current=False), Settings(_env_file=None), Addresses("", "", ""))
    with pytest.raises(SystemExit) as ended:
        signals[signal].send(sender=Mock(hostname="worker@here"))

    assert ended.value.code == 1
