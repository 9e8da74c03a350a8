"""`deliveries.send`: one attempt at one delivery."""

from __future__ import annotations

import json
from typing import Any, Protocol
from uuid import UUID

from celery import shared_task

from perdure.turns.outbox import DeliveryFailed, deliver
from tasks.task import PerdureTask

CELERYS_OWN_QUEUE = "celery"
"""Where a worker listens that was told nothing else."""


class Publisher(Protocol):
    """Sends a task message to the broker within about a second."""

    def publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        """Whether the broker took it."""
        ...


class TaskCarrier:
    """Replies as Celery tasks; delivered once the broker took them."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def carry(self, target: dict[str, Any], body: bytes) -> None:
        """Call the task that `target` names with the body's members as keyword arguments."""
        queue = target.get("queue") or CELERYS_OWN_QUEUE
        if not self._publisher.publish(target["task"], json.loads(body), queue=queue):
            raise DeliveryFailed("the broker did not take the task")


@shared_task(name="deliveries.send", bind=True, base=PerdureTask)
def send(self: PerdureTask, delivery_id: str) -> None:
    """Attempt the delivery, if it is due. Without room for it here, the sweeper publishes it again."""
    process = self.process
    if not process.deliveries.acquire(blocking=False):
        return
    try:
        deliver(process.runtime.database, process.carriers, UUID(delivery_id))
    finally:
        process.deliveries.release()
