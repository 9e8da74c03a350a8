"""The task `deliveries.send`, which attempts a delivery once, and the carrier that delivers replies as tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol, assert_never
from uuid import UUID

from perdure.network.queues import ReplyTask, reply_queue
from perdure.observe.measures import Measures
from perdure.tasks.task import PerdureTask, declare
from perdure.turns.outbox import (
    Delivered,
    DeliveryFailed,
    DeliveryNotDue,
    DeliveryOutcome,
    DeliveryPostponed,
    Undeliverable,
    deliver,
    leave_to_sweeper,
    sharers_of,
)


class Publisher(Protocol):
    """Publishes task messages."""

    def publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        """Publish within about a second; returns whether the broker accepted the message."""
        ...


class TaskCarrier:
    """Delivers replies as Celery tasks. `allowed` is `PERDURE_REPLY_TASKS`.

    A reply counts as delivered when the broker has accepted the task.
    """

    def __init__(self, publisher: Publisher, allowed: Sequence[ReplyTask]) -> None:
        self._publisher = publisher
        self._allowed = allowed

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:  # noqa: ARG002 (the body has it)
        """Publish the task that `target` names, with the body's members as keyword arguments.

        Raises:
            DeliveryFailed: the broker did not accept the task.
            Undeliverable: `PERDURE_REPLY_TASKS` does not allow the task with this queue.
        """
        queue = reply_queue(self._allowed, target["task"], target.get("queue"))
        if queue is None:
            named = f" in the queue {target['queue']!r}" if "queue" in target else ""
            raise Undeliverable(f"PERDURE_REPLY_TASKS does not allow the task {target['task']!r}{named}")
        if not self._publisher.publish(target["task"], json.loads(body), queue=queue):
            raise DeliveryFailed("the broker did not accept the task")


@declare("deliveries.send", base=PerdureTask)
def send(self: PerdureTask, delivery_id: str) -> dict[str, Any]:
    """Attempt the delivery if it is due; returns its outcome.

    If the deliveries to its service or of its user take their share of this process's attempts, the sweeper publishes
    the task again.
    """
    process, wanted = self.process, UUID(delivery_id)
    database = process.runtime.database
    sharers = sharers_of(database, wanted)
    if sharers is None:
        return {"outcome": "erased"}
    with (
        process.deliveries.slot(sharers.service) as for_service,
        process.user_deliveries.slot(sharers.user_id) as for_user,
    ):
        if not (for_service and for_user):
            leave_to_sweeper(database, wanted)
            return {"outcome": "left to the sweeper"}
        with process.runtime.traces.delivering(wanted) as attempt:
            outcome = deliver(database, process.carriers, wanted)
            result = _result(process.runtime.measures, outcome)
            attempt.ended(result["outcome"])
    if not isinstance(outcome, DeliveryNotDue) and outcome.next_id is not None:
        process.runtime.wake.delivery(outcome.next_id)
    if isinstance(outcome, Delivered) and outcome.following_id is not None:
        process.runtime.wake.delivery(outcome.following_id)
    return result


def _result(measures: Measures, outcome: DeliveryOutcome) -> dict[str, Any]:
    """Count the attempt; returns the task's result."""
    match outcome:
        case Delivered():
            measures.stage("delivery", outcome.seconds)
            measures.delivery(outcome.kind, "delivered")
            return {"outcome": "delivered"}
        case DeliveryPostponed(retry_s=None):
            measures.delivery(outcome.kind, "failed")
            return {"outcome": "failed"}
        case DeliveryPostponed():
            measures.delivery(outcome.kind, "postponed")
            return {"outcome": "postponed", "retry_s": outcome.retry_s}
        case DeliveryNotDue():
            return {"outcome": "not due"}
        case _:
            assert_never(outcome)
