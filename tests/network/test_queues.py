"""`PERDURE_REPLY_TASKS` accepts no queue whose name is a Redis key of kombu, Celery or perdure."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import SettingsError
from perdure.network.queues import QUEUES, ReplyTask, reply_queue
from perdure.settings import Settings
from perdure.tasks.deliveries import TaskCarrier
from perdure.turns.outbox import DeliveryFailed, Undeliverable

NOT_FOR_REPLIES = [
    *QUEUES,
    "turns\x06\x163",  # a priority level of one of perdure's queues
    "shop\x06\x163",
    "sh\nop",
    "shop\u200b",
    "unacked",
    "unacked_index",
    "unacked_mutex",
    "_kombu.binding.shop",
    "_kombu.binding_permanent.shop",
    "celery-task-meta-1",
    "celeryev",
    "celery@host.celery.pidbox",
    "amq.gen-1",
    "perdure:stream:ana",
    "perdure:working:01a20501-43ff-7152-9363-e4b105eb51a7",
    "perdure:unacked_index",
    "q" * 201,
]


@pytest.mark.parametrize("queue", NOT_FOR_REPLIES)
def test_a_queue_that_is_not_an_applications_stops_the_start(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reserved queue name is refused. A reply to that queue would change keys of kombu, Celery or perdure."""
    monkeypatch.setenv("PERDURE_REPLY_TASKS", f"billing.*,shop.*@{queue}")
    with pytest.raises(SettingsError, match=r"PERDURE_REPLY_TASKS has the entry .*accepted: TASK or TASK@QUEUE"):
        Settings.load(_env_file=None)


def test_the_prefix_is_the_installations_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue whose name begins with the configured `PERDURE_REDIS_PREFIX` is refused."""
    monkeypatch.setenv("PERDURE_REDIS_PREFIX", "agents:")
    monkeypatch.setenv("PERDURE_REPLY_TASKS", "shop.*@agents:stream:ana")
    with pytest.raises(SettingsError, match="begins with PERDURE_REDIS_PREFIX"):
        Settings.load(_env_file=None)


@pytest.mark.parametrize("entry", ["@shop", "shop.replied@"])
def test_an_entry_without_a_task_or_a_queue_stops_the_start(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry with `@` must name both a task and a queue."""
    monkeypatch.setenv("PERDURE_REPLY_TASKS", entry)
    with pytest.raises(SettingsError, match="accepted: TASK or TASK@QUEUE"):
        Settings.load(_env_file=None)


ENTRIES = tuple(
    ReplyTask.parse(entry, "perdure:") for entry in ("billing.paid", "shop.*@shop", "shop.vip@w1@host.dq", "news.*")
)
QUEUE_OF: list[tuple[str, str | None, str | None]] = [
    ("billing.paid", None, "celery"),
    ("billing.paid", "celery", "celery"),
    ("billing.paid", "shop", None),
    ("billing.other", None, None),
    ("shop.replied", None, "shop"),
    ("shop.replied", "shop", "shop"),
    ("shop.replied", "celery", None),
    ("shop.replied", "unacked_index", None),
    ("shop.vip", None, "shop"),
    ("shop.vip", "w1@host.dq", "w1@host.dq"),
    ("news.of.today", None, "celery"),
]


@pytest.mark.parametrize(("task", "requested", "queue"), QUEUE_OF)
def test_the_queue_of_a_reply_is_its_entrys(task: str, requested: str | None, queue: str | None) -> None:
    """A reply goes to the queue of the first entry that matches the reply's task.

    If the message requests a queue, the reply goes to that queue, but only if a matching entry has that queue.
    """
    assert reply_queue(ENTRIES, task, requested) == queue


class Broker:
    """A fake broker that records each published task."""

    def __init__(self) -> None:
        self.unavailable = False
        self.sent: list[tuple[str, dict[str, Any], Any]] = []

    def publish(self, task: str, arguments: dict[str, Any], **options: Any) -> bool:
        """Record the task; returns False while `unavailable` is true."""
        self.sent.append((task, arguments, options["queue"]))
        return not self.unavailable


def test_a_stored_queue_is_checked_again_before_each_attempt() -> None:
    """The stored task and queue are checked before each delivery. If they are not allowed, nothing is published."""
    broker = Broker()
    to_task = TaskCarrier(broker, ENTRIES)
    for stored in ({"task": "shop.replied", "queue": "unacked_index"}, {"task": "os.system"}):
        with pytest.raises(Undeliverable, match="PERDURE_REPLY_TASKS does not allow the task"):
            to_task.carry(stored, b"{}", "id")
    assert broker.sent == []
    to_task.carry({"task": "shop.replied"}, b'{"a": 1}', "id")
    assert broker.sent == [("shop.replied", {"a": 1}, "shop")]
    broker.unavailable = True
    with pytest.raises(DeliveryFailed) as failed:
        to_task.carry({"task": "shop.replied"}, b"{}", "id")
    assert not isinstance(failed.value, Undeliverable)
