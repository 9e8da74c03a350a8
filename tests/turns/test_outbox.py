"""Deliveries of settled turns: sent at least once, by one worker at a time, with bounded retries."""

from __future__ import annotations

import json
import threading
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.sessions.ending import request_end
from perdure.turns.outbox import (
    ATTEMPT_S,
    FIRST_RETRY_S,
    LONGEST_RETRY_S,
    MAX_ATTEMPTS,
    Carrier,
    Delivered,
    DeliveryFailed,
    DeliveryNotDue,
    DeliveryOutcome,
    DeliveryPostponed,
    NotAsked,
    Undeliverable,
    deliver,
    due,
    note_sent,
    retry_after,
)
from perdure.users.export import export_user
from tests.turns.harness import PATIENCE_S, Harness, side_by_side

DAY_S = 86_400.0


class Recipient:
    """A carrier that fails `failures` times, then records each delivery in `arrived`."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.arrived: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """Record the target and the parsed body, or fail."""
        if self.failures:
            self.failures -= 1
            raise DeliveryFailed("503 Service Unavailable")
        self.arrived.append((target, json.loads(body)))


class Gone:
    """A carrier whose receiver accepts nothing any more."""

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        """Refuse for good."""
        raise Undeliverable("answered with status 410")


def _delivery(harness: Harness, **reply_to: str) -> UUID:
    """Settle a turn with this `reply_to`; returns the id of the turn's delivery."""
    sent = harness.send(reply_to=reply_to or {"url": "https://a.example/hook"})
    harness.run(sent.session_id)
    return harness.waker.deliveries[-1]


def _deliver(harness: Harness, recipient: Recipient, delivery_id: UUID) -> DeliveryOutcome:
    return deliver(harness.database, {"url": recipient, "task": recipient}, delivery_id)


def _row(harness: Harness, delivery_id: UUID) -> Any:
    return harness.sql("SELECT * FROM deliveries WHERE delivery_id = %(id)s", id=delivery_id)[0]


def test_it_is_delivered_once(harness: Harness) -> None:
    """The body contains the turn and the delivery's id. A second wake-up for the delivery sends nothing."""
    delivery_id = _delivery(harness)
    recipient = Recipient()
    assert _deliver(harness, recipient, delivery_id) == Delivered()
    assert _deliver(harness, recipient, delivery_id) == DeliveryNotDue()
    ((target, body),) = recipient.arrived
    turn_id = _row(harness, delivery_id).turn_id
    assert target == {"url": "https://a.example/hook"}
    assert body == {**harness.turn(turn_id), "delivery_id": str(delivery_id)}
    assert _row(harness, delivery_id).status == "delivered"
    assert due(harness.database, 10, 5) == []


def test_the_target_selects_the_carrier(harness: Harness) -> None:
    """A delivery to a task uses the task carrier, not the URL carrier."""
    harness.settings = harness.settings.model_copy(update={"reply_tasks": ("shop.*@shop",)})
    delivery_id = _delivery(harness, task="shop.answered", queue="shop")
    wrong, right = Recipient(), Recipient()
    assert deliver(harness.database, {"url": wrong, "task": right}, delivery_id) == Delivered()
    assert wrong.arrived == []
    assert right.arrived[0][0] == {"task": "shop.answered", "queue": "shop"}


def test_a_failed_delivery_is_retried_later(harness: Harness) -> None:
    """After a failed attempt, the delivery is due again after a pause. The error is stored for the operator."""
    delivery_id = _delivery(harness)
    recipient = Recipient(failures=2)
    assert _deliver(harness, recipient, delivery_id) == DeliveryPostponed(FIRST_RETRY_S)
    assert _deliver(harness, recipient, delivery_id) == DeliveryNotDue()
    assert "503" in _row(harness, delivery_id).last_error
    harness.move(FIRST_RETRY_S)
    assert due(harness.database, 10, 5) == [delivery_id]
    assert _deliver(harness, recipient, delivery_id) == DeliveryPostponed(FIRST_RETRY_S * 2)
    harness.move(FIRST_RETRY_S * 2)
    assert _deliver(harness, recipient, delivery_id) == Delivered()
    assert _row(harness, delivery_id).last_error is None


def test_a_later_reply_waits_for_an_earlier_one(harness: Harness) -> None:
    """A receiver gets a session's replies in order. `deliver` returns the id of the next delivery to wake."""
    recipient = Recipient(failures=1)
    first, second, third = _delivery(harness), _delivery(harness), _delivery(harness)
    assert _deliver(harness, recipient, first) == DeliveryPostponed(FIRST_RETRY_S)
    assert _deliver(harness, recipient, third) == DeliveryNotDue()
    assert _deliver(harness, recipient, second) == DeliveryNotDue()
    harness.move(FIRST_RETRY_S)
    assert _deliver(harness, recipient, first) == Delivered(second)
    assert _deliver(harness, recipient, second) == Delivered(third)
    assert _deliver(harness, recipient, third) == Delivered()

    assert [body["seq"] for _, body in recipient.arrived] == [1, 2, 3]
    assert len({body["session_id"] for _, body in recipient.arrived}) == 1


def test_order_spans_the_sessions_of_a_conversation(harness: Harness) -> None:
    """Deliveries of a conversation keep their order across its sessions. Other conversations do not wait for them."""
    recipient = Recipient(failures=1)
    reply_to = {"url": "https://a.example/hook"}
    owed, sessions = [], set()
    for message, receiver in enumerate((reply_to, None, reply_to, reply_to)):
        sent = harness.send(f"{message}", reply_to=receiver, conversation="trip")
        harness.run(sent.session_id)
        request_end(harness.database, sent.session_id, "enough")
        sessions.add(sent.session_id)
        owed += harness.waker.deliveries[-1:] if receiver else []
    first, second, third = owed
    assert len(sessions) == 4
    other = harness.send("other", reply_to=reply_to, conversation="work")
    harness.run(other.session_id)

    assert _deliver(harness, recipient, first) == DeliveryPostponed(FIRST_RETRY_S)
    assert _deliver(harness, recipient, third) == DeliveryNotDue()
    assert _deliver(harness, recipient, second) == DeliveryNotDue()
    assert _deliver(harness, recipient, harness.waker.deliveries[-1]) == Delivered()
    harness.move(FIRST_RETRY_S)
    assert _deliver(harness, recipient, first) == Delivered(second)
    assert _deliver(harness, recipient, second) == Delivered(third)
    assert _deliver(harness, recipient, third) == Delivered()
    assert _deliver(harness, recipient, third) == DeliveryNotDue()


def test_a_request_for_approval_comes_before_its_turns_reply(harness: Harness) -> None:
    """If a turn has both a request for approval and a reply to deliver, the reply waits for the request."""
    recipient = Recipient()
    reply = _delivery(harness)
    question = uuid4()
    harness.sql(
        """
        INSERT INTO deliveries (delivery_id, turn_id, user_id, scope, asking_seq, target, status, due_at, created_at)
        SELECT %(question)s, turn_id, user_id, scope, 2, target, status, due_at, created_at FROM deliveries
        """,
        question=question,
    )
    assert _deliver(harness, recipient, reply) == DeliveryNotDue()
    assert _deliver(harness, recipient, question) == Delivered(reply)
    assert _deliver(harness, recipient, reply) == Delivered()


def test_a_failed_delivery_releases_the_next_one(harness: Harness) -> None:
    """After its last failed attempt, a delivery no longer delays later deliveries to the same receiver."""
    recipient = Recipient(failures=MAX_ATTEMPTS)
    first, second = _delivery(harness), _delivery(harness)
    for _ in range(MAX_ATTEMPTS - 1):
        assert isinstance(_deliver(harness, recipient, first), DeliveryPostponed)
        assert _deliver(harness, recipient, second) == DeliveryNotDue()
        harness.move(LONGEST_RETRY_S)
    assert _deliver(harness, recipient, first) == DeliveryPostponed(None, second)
    assert _deliver(harness, recipient, second) == Delivered()


def test_receivers_and_sessions_do_not_wait_for_each_other(harness: Harness) -> None:
    """A failing delivery delays neither deliveries to another URL nor another user's deliveries to the same URL."""
    recipient = Recipient(failures=1)
    failing = _delivery(harness)
    assert _deliver(harness, recipient, failing) == DeliveryPostponed(FIRST_RETRY_S)
    assert _deliver(harness, recipient, _delivery(harness, url="https://b.example/hook")) == Delivered()
    sent = harness.send(user_id="bea", reply_to={"url": "https://a.example/hook"})
    harness.run(sent.session_id)
    assert _deliver(harness, recipient, harness.waker.deliveries[-1]) == Delivered()


@pytest.mark.parametrize(("carrier", "outcome"), [(Recipient(), Delivered()), (Gone(), DeliveryPostponed(None))])
def test_only_a_due_reply_to_the_same_receiver_is_next(
    harness: Harness, carrier: Carrier, outcome: DeliveryOutcome
) -> None:
    """Not another user's, another conversation's or another receiver's, and none that is delivered or postponed."""
    others: list[dict[str, Any]] = [
        {}, {}, {"user_id": "bea"}, {"conversation": "work"}, {"reply_to": {"url": "https://b.example/hook"}},
    ]  # fmt: skip
    for other in [{}, *others]:
        harness.run(harness.send(**{"reply_to": {"url": "https://a.example/hook"}, **other}).session_id)
    first, delivered, postponed, *_ = harness.waker.deliveries
    harness.sql("UPDATE deliveries SET status = 'delivered' WHERE delivery_id = %(id)s", id=delivered)
    harness.sql(
        "UPDATE deliveries SET due_at = perdure_now() + interval '1 minute' WHERE delivery_id = %(id)s", id=postponed
    )
    assert deliver(harness.database, {"url": carrier}, first) == outcome


def test_the_queues_of_a_task_do_not_wait_for_each_other(harness: Harness) -> None:
    """A task in two queues is two receivers: of one conversation, a failing queue does not delay the other."""
    harness.settings = harness.settings.model_copy(update={"reply_tasks": ("shop.*@a", "shop.*@b")})
    carriers = {"task": Recipient(failures=1)}
    failing, other, later = (_delivery(harness, task="shop.answered", queue=queue) for queue in "aba")
    assert deliver(harness.database, carriers, failing) == DeliveryPostponed(FIRST_RETRY_S)
    assert deliver(harness.database, carriers, other) == Delivered()
    assert deliver(harness.database, carriers, later) == DeliveryNotDue()
    harness.move(FIRST_RETRY_S)
    assert deliver(harness.database, carriers, failing) == Delivered(later)
    assert deliver(harness.database, carriers, later) == Delivered()
    refused, _ = (_delivery(harness, task="shop.answered", queue=queue) for queue in "ab")
    assert deliver(harness.database, {"task": Gone()}, refused) == DeliveryPostponed(None)


def test_a_pause_from_a_clock_that_was_ahead_is_ignored(harness: Harness) -> None:
    """If the server's clock is set back a day during a delivery's pause, the delivery is due at once."""
    harness.move(DAY_S)
    delivery_id = _delivery(harness)
    recipient = Recipient(failures=1)
    assert _deliver(harness, recipient, delivery_id) == DeliveryPostponed(FIRST_RETRY_S)
    harness.move(-DAY_S)
    assert due(harness.database, 10, 5) == [delivery_id]
    assert _deliver(harness, recipient, delivery_id) == Delivered()


def test_a_delivery_fails_after_its_last_attempt(harness: Harness) -> None:
    """After `MAX_ATTEMPTS` failed attempts, a delivery has failed and is never due again."""
    delivery_id = _delivery(harness)
    recipient = Recipient(failures=1_000)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert _deliver(harness, recipient, delivery_id) == DeliveryPostponed(retry_after(attempt))
        harness.move(LONGEST_RETRY_S)
    assert _row(harness, delivery_id).status == "failed"
    assert _row(harness, delivery_id).attempts == MAX_ATTEMPTS
    assert _deliver(harness, recipient, delivery_id) == DeliveryNotDue()
    assert due(harness.database, 10, 5) == []


def test_a_permanently_refused_delivery_is_not_retried(harness: Harness) -> None:
    """If the carrier raises `Undeliverable`, for example after HTTP status 410, the delivery fails without a retry."""
    delivery_id = _delivery(harness)

    assert deliver(harness.database, {"url": Gone()}, delivery_id) == DeliveryPostponed(None)
    row = _row(harness, delivery_id)
    assert (row.status, row.attempts, row.last_error) == ("failed", 1, "answered with status 410")
    harness.move(LONGEST_RETRY_S)
    assert due(harness.database, 10, 5) == []


def test_an_attempts_error_is_not_shown_to_the_sender(harness: Harness) -> None:
    """Turns and exports omit an attempt's error. Otherwise a sender could use `reply_to` to explore the network."""
    sent = harness.send(reply_to={"url": "https://a.example/hook"})
    harness.run(sent.session_id)
    (delivery_id,) = harness.waker.deliveries

    class Talkative:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            raise DeliveryFailed("a.example is refused: 10.9.8.7 is not public")

    deliver(harness.database, {"url": Talkative()}, delivery_id)
    assert "10.9.8.7" in _row(harness, delivery_id).last_error
    exported = export_user(harness.database, harness.clock, None, UserKey("ana"))
    assert exported["tables"]["deliveries"][0]["target"] == {"url": "https://a.example/hook"}
    assert "10.9.8.7" not in json.dumps([exported, harness.turn(sent.turn_id)])


def test_a_delivery_whose_attempts_all_crash_fails(harness: Harness) -> None:
    """An attempt counts toward `MAX_ATTEMPTS` even if it ends with an unexpected exception or a killed process."""
    delivery_id = _delivery(harness)

    class Broken:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            raise RuntimeError("a bug")

    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(RuntimeError):
            deliver(harness.database, {"url": Broken(), "task": Broken()}, delivery_id)
        harness.move(ATTEMPT_S)
    assert deliver(harness.database, {"url": Broken(), "task": Broken()}, delivery_id) == DeliveryPostponed(None)
    assert _row(harness, delivery_id).status == "failed"


def test_the_pauses_double_up_to_a_limit() -> None:
    """The pauses are 5 s, 10 s, 20 s and so on, up to an hour. After the last attempt, `retry_after` returns `None`."""
    pauses = [retry_after(attempt) for attempt in range(1, MAX_ATTEMPTS + 1)]
    assert pauses[:3] == [5, 10, 20]
    assert pauses[-2] == LONGEST_RETRY_S
    assert pauses[-1] is None


def test_one_of_concurrent_attempts_sends(harness: Harness) -> None:
    """If six workers attempt a delivery concurrently, one of them sends it."""
    delivery_id = _delivery(harness)
    recipient = Recipient()
    found = side_by_side(*[lambda: _deliver(harness, recipient, delivery_id)] * 6)
    assert sorted(type(each).__name__ for each in found) == ["Delivered"] + ["DeliveryNotDue"] * 5
    assert len(recipient.arrived) == 1


def test_an_attempt_that_died_is_repeated(harness: Harness) -> None:
    """If a process dies between sending and recording a delivery, the delivery is sent again under the same id."""
    delivery_id = _delivery(harness)
    recipient = Recipient()
    with harness.crashing("before", "deliveries.delivered"):
        _deliver(harness, recipient, delivery_id)
    assert due(harness.database, 10, 5) == []
    harness.move(ATTEMPT_S)
    assert due(harness.database, 10, 5) == [delivery_id]
    assert _deliver(harness, recipient, delivery_id) == Delivered()
    assert [body["delivery_id"] for _, body in recipient.arrived] == [str(delivery_id)] * 2


@pytest.mark.parametrize("error", [DeliveryFailed("timed out"), NotAsked("the breaker is open", 60)])
def test_an_attempt_that_fails_late_repeats_nothing(harness: Harness, error: Exception) -> None:
    """Another attempt has delivered the reply meanwhile, so it is not due again."""
    delivery_id = _delivery(harness)

    class Late:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            harness.move(ATTEMPT_S + 1)
            assert _deliver(harness, Recipient(), delivery_id) == Delivered()
            raise error

    deliver(harness.database, {"url": Late()}, delivery_id)
    harness.move(LONGEST_RETRY_S)
    assert due(harness.database, 10, 5) == []
    assert (_row(harness, delivery_id).status, _row(harness, delivery_id).last_error) == ("delivered", None)


def test_an_attempt_that_another_one_overtakes_has_no_outcome(harness: Harness) -> None:
    """It sends no further message of the delivery. The other attempt's outcome stays."""
    delivery_id = _delivery(harness)

    class Next:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            note_sent(harness.database, delivery_id, [], ["the first message"])
            raise DeliveryFailed("the second one timed out")

    class Slow:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            harness.move(ATTEMPT_S + 1)
            assert deliver(harness.database, {"url": Next()}, delivery_id) == DeliveryPostponed(retry_after(2))
            note_sent(harness.database, delivery_id, [], ["the first message"])

    assert deliver(harness.database, {"url": Slow()}, delivery_id) == DeliveryNotDue()
    row = _row(harness, delivery_id)
    assert (row.status, row.attempts, row.last_error) == ("pending", 2, "the second one timed out")


def test_nothing_is_held_while_a_receiver_is_slow(harness: Harness) -> None:
    """During the network call, no database connection is checked out and no row is locked."""
    delivery_id = _delivery(harness)
    sending, go_on = threading.Event(), threading.Event()

    class Slow(Recipient):
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            sending.set()
            assert go_on.wait(PATIENCE_S)

    sender = threading.Thread(target=_deliver, args=(harness, Slow(), delivery_id), daemon=True)
    sender.start()
    assert sending.wait(PATIENCE_S)
    assert harness.database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    harness.sql("SELECT 1 FROM deliveries FOR UPDATE NOWAIT")
    go_on.set()
    sender.join(PATIENCE_S)
    assert _row(harness, delivery_id).status == "delivered"


@pytest.mark.parametrize("reason", ["x" * 5_000, "näh\n"])
def test_any_error_text_can_be_stored(harness: Harness, reason: str) -> None:
    """A delivery's error is cut to 1,000 characters. Non-ASCII characters and newlines are stored."""
    delivery_id = _delivery(harness)

    class Refusing(Recipient):
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            raise DeliveryFailed(reason)

    assert isinstance(_deliver(harness, Refusing(), delivery_id), DeliveryPostponed)
    assert _row(harness, delivery_id).last_error == reason[:1_000]


def test_an_unknown_delivery_is_not_due(harness: Harness) -> None:
    """A wake-up for an erased delivery has no effect."""
    assert _deliver(harness, Recipient(), uuid4()) == DeliveryNotDue()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("retry_s", "first_s"), [(60, 60), (0, FIRST_RETRY_S)])
def test_an_open_breaker_costs_no_attempt(harness: Harness, retry_s: float, first_s: float, *, alone: bool) -> None:
    """While the receiver's circuit breaker is open, the pauses grow and no attempt is counted."""
    delivery_id = _delivery(harness)
    unavailable = BreakerOpen(retry_s, alone=alone)
    pauses = []
    for _ in range(30):
        outcome = deliver(harness.database, {"url": unavailable}, delivery_id)
        assert isinstance(outcome, DeliveryPostponed)
        assert outcome.retry_s is not None
        pauses.append(outcome.retry_s)
        harness.move(outcome.retry_s)
    assert _row(harness, delivery_id).attempts == 0
    assert pauses[0] == first_s
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_RETRY_S
    assert _deliver(harness, Recipient(), delivery_id) == Delivered()


def test_a_delivery_whose_breaker_never_closes_fails(harness: Harness) -> None:
    """After a day, a refusal by the circuit breaker counts as an attempt, so that the delivery fails in the end."""
    delivery_id = _delivery(harness)
    harness.move(DAY_S + 1)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        outcome = deliver(harness.database, {"url": BreakerOpen(retry_s=60)}, delivery_id)
        assert outcome == DeliveryPostponed(retry_after(attempt))
        harness.move(LONGEST_RETRY_S)
    assert _row(harness, delivery_id).status == "failed"


class BreakerOpen:
    """A carrier that makes no attempt, because the receiver's circuit breaker is open."""

    def __init__(self, retry_s: float, *, alone: bool = False) -> None:
        self._retry_s = retry_s
        self._alone = alone

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        raise NotAsked("the breaker of a.example is open", self._retry_s, alone=self._alone)
