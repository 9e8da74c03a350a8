"""A rolling restart under load, with default settings and model calls of one to twenty seconds."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from perdure.settings import ShutdownSettings, TurnSettings
from perdure.turns.inbox.accept import Accepted
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to
from tests.processes.nodes import Worker
from tests.processes.receiver import Receiver

BUDGET, TURN = ShutdownSettings(), TurnSettings()

AS_SHIPPED = {
    "PERDURE_SHUTDOWN__DRAIN_S": str(BUDGET.drain_s),
    "PERDURE_SHUTDOWN__HARD_EXIT_S": str(BUDGET.hard_exit_s),
    "PERDURE_TURN__LEASE_S": str(TURN.lease_s),
    "PERDURE_TURN__HEARTBEAT_S": str(TURN.heartbeat_s),
    "PERDURE_TURN__SWEEP_S": str(TURN.sweep_s),
    "PERDURE_TURN__TOOL_TIMEOUT_S": str(TURN.tool_timeout_s),
}

LATENCIES_S = (20, 1, 16, 5, 18, 9, 17, 3, 19, 13)
"""Latencies of successive model calls, in seconds. At each shutdown, some calls exceed the drain time."""

EVERY_S = 0.4
"""Seconds between messages. At this rate, about twenty calls run concurrently, and no worker runs out of slots."""

HANDED_OVER_S = 2.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A message and the latency of its model call."""

    text: str
    latency_s: float
    accepted: Accepted


class Load:
    """Sends a message every `EVERY_S` seconds, each from a different user."""

    def __init__(self, installation: Installation, receiver: Receiver) -> None:
        self.sent: list[Sent] = []
        self._installation = installation
        self._reply_to = {"url": receiver.url}
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._send, name="load")
        self._thread.start()

    def stop(self) -> None:
        """Stop sending."""
        self._enough.set()
        self._thread.join()

    def _send(self) -> None:
        for number, latency_s in enumerate(itertools.cycle(LATENCIES_S)):
            text = f"hello {number}"
            self._installation.model_server.latencies[text] = latency_s
            accepted = self._installation.accept(text, user=f"user {number}", reply_to=self._reply_to)
            self.sent.append(Sent(text, latency_s, accepted))
            if self._enough.wait(EVERY_S):
                return


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_rolling_restart_delays_a_reply_only_by_the_repeated_call(
    installation: Installation, receiver: Receiver
) -> None:
    """While three workers restart one by one, no reply is lost or repeated. Only repeated model calls delay replies."""
    workers = [installation.worker(**AS_SHIPPED) for _ in range(3)]
    for worker in workers:
        worker.container.ready()
    load = Load(installation, receiver)
    try:
        wait_until(lambda: len(load.sent) > len(LATENCIES_S), "each latency has been used")
        deadlines = [_replaced(worker) + BUDGET.drain_s for worker in workers]
    finally:
        load.stop()

    turns = installation.settled(*(each.accepted.turn_id for each in load.sent), within_s=60)
    for sent, turn in zip(load.sent, turns, strict=True):
        begun = installation.model_server.called_at[sent.text]
        assert turn["status"] == "done"
        assert turn["reply"]["text"] == answer_to(sent.text)
        assert _took_s(turn) <= len(begun) * sent.latency_s + HANDED_OVER_S, (sent, begun)
        for again in begun[1:]:
            assert any(0 <= again - deadline <= HANDED_OVER_S for deadline in deadlines), (sent, again, deadlines)
    assert any(len(installation.model_server.called_at[each.text]) > 1 for each in load.sent), "some were parked"
    installation.check()
    wait_until(lambda: not _undelivered(installation), "every reply is delivered")
    assert [len(receiver.of(turn["turn_id"])) for turn in turns] == [1] * len(turns)


def _replaced(worker: Worker) -> float:
    """Restart a worker with SIGTERM; returns the monotonic time of the signal."""
    signalled_at = time.monotonic()
    worker.container.signal(signal.SIGTERM)
    assert worker.container.wait(BUDGET.hard_exit_s) == 0
    worker.container.start()
    worker.container.ready()
    return signalled_at


def _took_s(turn: dict[str, Any]) -> float:
    accepted_at, settled_at = (datetime.fromisoformat(turn[name]) for name in ("accepted_at", "settled_at"))
    return (settled_at - accepted_at).total_seconds()


def _undelivered(installation: Installation) -> int:
    return int(installation.query("SELECT count(*) AS n FROM deliveries WHERE status <> 'delivered'")[0].n)
