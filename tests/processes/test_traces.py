"""A turn that several processes run is one trace, which a receiver of OTLP gets once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from celery import Celery

from tests.processes.collector import Collector, Exported
from tests.processes.faults import done, wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to
from tests.processes.receiver import Receiver

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
"""The trace and the span of the program that sends the message."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    """The receiver of the workers' traces."""
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def sender(installation: Installation) -> Iterator[Celery]:
    """A program that sends messages by `turns.submit`."""
    app = Celery("a sender", broker=installation.redis.url, backend=installation.redis.url)
    yield app
    app.close()


def _tree(spans: list[Exported]) -> dict[str, str]:
    """The name of each span's parent. Steps have their numbers."""
    names = {SPAN: "the sender"} | {each.span_id: _name(each) for each in spans}
    return {_name(each): names.get(each.parent_id, each.parent_id) for each in spans}


def _name(span: Exported) -> str:
    number = span.attributes.get("perdure.step", span.attributes.get("perdure.attempt"))
    return span.name if number is None else f"{span.name} {number}"


@pytest.mark.long
def test_a_turn_is_one_trace_across_processes_and_a_kill(
    installation: Installation, collector: Collector, receiver: Receiver, sender: Celery
) -> None:
    """A worker accepts, one runs the first step and is killed within the second, another one goes on and delivers."""
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    for _ in range(2):
        installation.worker(**traced)
    for each in installation.workers:
        each.container.ready()
    text = "pure: traced"
    gate = installation.model_server.gate(text, nth=2)
    message = {"user_id": "ana", "text": text, "agent": "tester", "reply_to": {"url": receiver.url}}
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    accepted = sender.send_task("turns.submit", kwargs=message, queue="ingress", headers=headers).get(timeout=20)
    gate.wait()
    wait_until(lambda: [each.name for each in collector.of(TRACE)] == ["accept"], "the accept is exported")
    victim = next(each for each in installation.workers if each.pid == installation.lease_owner(accepted["session_id"]))
    victim.kill()
    gate.opened.set()
    (turn,) = installation.settled(accepted["turn_id"])
    assert turn["reply"]["text"] == answer_to(text, done("pure", text))
    wait_until(lambda: "deliver" in {each.name for each in collector.of(TRACE)}, "the delivery is exported")
    wait_until(lambda: "queue" in {each.name for each in collector.of(TRACE)}, "the turn is exported")
    spans = collector.of(TRACE)
    whole = "invoke_agent tester"
    assert _tree(spans) == {
        "accept": "the sender",
        "queue": "accept",
        whole: "accept",
        "chat test 1": whole,
        "execute_tool pure": whole,
        "chat test 2": whole,
        "deliver 1": "accept",
    }
    assert max(Counter(map(_name, spans)).values()) == 1
    assert {each.service for each in spans} == {"perdure"}
    assert not any(each.failed for each in spans)
    assert text not in str(spans)
    (delivery,) = receiver.of(accepted["turn_id"])
    of_delivery = next(each for each in spans if each.name == "deliver")
    assert delivery.headers["traceparent"] == f"00-{TRACE}-{of_delivery.span_id}-01"


@pytest.mark.exhaustive
def test_a_worker_that_stops_exports_its_turns(installation: Installation, collector: Collector) -> None:
    """At SIGTERM, what waits for the next export is exported; an unreachable receiver does not hold the worker up."""
    waiting = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
    worker = installation.worker(OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **waiting)
    worker.container.ready()
    accepted = installation.accept("hello")
    installation.settled(accepted.turn_id)
    worker.container.kill("SIGTERM")
    assert {each.name for each in collector.of(accepted.turn_id.hex)} == {"queue", "invoke_agent tester", "chat test"}
    lost = installation.worker(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", **waiting)
    lost.container.ready()
    installation.settled(installation.accept("hello again").turn_id)
    lost.container.kill("SIGTERM")  # waits 20 s at most
    assert lost.container.status == "exited"
