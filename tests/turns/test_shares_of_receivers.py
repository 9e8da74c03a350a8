"""Deliveries to one service (a host, a channel or the queue of a task) delay those to another service only shortly."""

from __future__ import annotations

import json
import logging
import secrets
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure.database.engine import as_json
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings
from perdure.tasks.deliveries import send
from perdure.tasks.process import DELIVERIES, Process
from perdure.turns import sweep as sweeping
from perdure.turns.outbox import (
    ATTEMPT_S,
    Delivered,
    DeliveryFailed,
    DeliveryNotDue,
    DeliveryPostponed,
    NotAsked,
    deliver,
    due,
    sharers_of,
)
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from tests.turns.harness import Harness
from tests.turns.test_outbox import Recipient

MOST = 6
MANY = 40

DEAD_AND_OTHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"url": "http://dead.example/1"}, {"url": "http://other.example/1"}),
    ({"url": "https://ana:secret@Dead.example:8443/a?b#c"}, {"url": "https://dead.example/a"}),
    ({"task": "shop.answered", "queue": "dead"}, {"task": "shop.answered", "queue": "other"}),
    ({"task": "shop.answered"}, {"task": "other.answered"}),
    (
        {"channel": "slack", "place": {"chat": "C1"}},
        {"channel": "telegram", "place": {"chat": "C1"}},
    ),
    ({"channel": "slack", "place": {"chat": "C1"}}, {"url": "https://slack/"}),
]
_IDS = ["host", "port", "queue", "task", "channel", "kind"]


class Closed:
    """A carrier whose breaker is open. `asked` counts the calls."""

    def __init__(self, *, alone: bool = False) -> None:
        self.asked = 0
        self._alone = alone

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        self.asked += 1
        raise NotAsked("the breaker is open", 60, alone=self._alone)


def _owe(harness: Harness, target: dict[str, Any], number: int = 1, user: str = "ana") -> list[UUID]:
    """Insert `number` due deliveries of `user` to `target`, each of a conversation of its own."""
    turn_id = harness.send(user_id=f"user {uuid4()}").turn_id
    made = [uuid4() for _ in range(number)]
    for seq, each in enumerate(made):
        harness.sql(
            """
            INSERT INTO deliveries (delivery_id, turn_id, user_id, asking_seq, target, status, due_at, created_at)
            VALUES (%(id)s, %(turn_id)s, %(user)s, %(seq)s, %(target)s, 'pending', perdure_now(), perdure_now())
            """,
            id=each, turn_id=turn_id, user=user, seq=seq, target=as_json(target),
        )  # fmt: skip
    return made


def _service(harness: Harness, delivery_id: UUID) -> str:
    sharers = sharers_of(harness.database, delivery_id)
    assert sharers is not None
    return sharers.service


def _round(harness: Harness) -> list[UUID]:
    """Run the sweeper once; returns the deliveries that it woke."""
    harness.waker.deliveries.clear()
    harness.move(5.1)
    assert sweep(harness.runtime) is not None
    return list(harness.waker.deliveries)


@pytest.mark.parametrize(("dead", "other"), DEAD_AND_OTHER, ids=_IDS)
def test_the_first_round_wakes_a_delivery_behind_many_to_another_service(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, dead: dict[str, Any], other: dict[str, Any]
) -> None:
    """Each service has a share of a round, however many older deliveries wait for another service."""
    monkeypatch.setattr(sweeping, "MOST_A_ROUND", MOST)
    old = _owe(harness, dead, MANY)
    harness.move(60)
    (new,) = _owe(harness, other)
    woken = _round(harness)
    assert new in woken[:2], "the services take turns"
    assert len(woken) > 1
    assert set(woken) <= {*old, new}


def test_one_service_may_take_the_whole_round(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a service is as large as the other services leave it."""
    monkeypatch.setattr(sweeping, "MOST_A_ROUND", MOST)
    _owe(harness, {"url": "https://a.example/"}, MANY)
    assert len(_round(harness)) == MOST


def test_the_first_round_wakes_a_delivery_behind_many_of_another_user(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users share a service's part of a round, however many older deliveries one of them has."""
    monkeypatch.setattr(sweeping, "MOST_A_ROUND", MOST)
    old = _owe(harness, {"url": "https://a.example/"}, MANY)
    harness.move(60)
    (new,) = _owe(harness, {"url": "https://a.example/"}, user="bob")
    woken = _round(harness)
    assert new in woken[:2], "the users take turns"
    assert len(woken) == len(set(woken)) == MOST, "the rest of the round is the other user's"
    assert set(woken) <= {*old, new}


def test_each_user_is_visited_by_some_rounds(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a round cannot visit all users of a service, rounds that begin at another user visit the others."""
    _owe(harness, {"url": "https://a.example/"}, 2 * MANY)
    harness.move(60)
    new = {_owe(harness, {"url": "https://a.example/"}, user=f"user {number}")[0] for number in range(10)}
    starts = iter(f"{number:x}" for number in range(16))
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(starts))
    found = [set(due(harness.database, 4, 60.0)) for _ in range(16)]
    assert {len(each) for each in found} == {4}
    assert new <= set().union(*found)


def test_a_service_with_many_users_takes_no_larger_share(harness: Harness) -> None:
    """Services share a round equally; only then do the users of each service share its part."""
    for number in range(20):
        _owe(harness, {"url": "https://many.example/"}, 2, user=f"user {number}")
    harness.move(60)
    few = _owe(harness, {"url": "https://few.example/"}, MANY)
    found = due(harness.database, 10, 5.0)
    assert len(found) == 10
    assert len(set(found) & set(few)) == 5


def test_one_user_takes_at_most_half_of_a_process(harness: Harness) -> None:
    """A user whose many hosts all hang leaves slots for another user. The sweeper wakes the user's other deliveries."""
    hanging = _owe(harness, {"url": "https://0.example/"}, DELIVERIES)
    harness.sql(
        "UPDATE deliveries SET user_id = 'ana',"
        " target = jsonb_build_object('url', 'https://' || asking_seq || '.example/')"
    )
    (other,) = _owe(harness, {"url": "https://other.example/"})
    harness.sql("UPDATE deliveries SET user_id = 'bob' WHERE delivery_id = %(id)s", id=other)
    waiting = [*hanging, other]
    began: list[UUID] = []

    class Hanging:
        """A carrier that occupies its slot until the tasks of all other deliveries have ended."""

        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            began.append(UUID(json.loads(body)["delivery_id"]))
            start()

    def start() -> None:
        while waiting:
            send.function(SimpleNamespace(process=process), str(waiting.pop(0)))

    process = Process(harness.runtime, Runner(harness.runtime, "tests"), {"url": Hanging()}, lambda _: None)
    start()
    assert began == [*hanging[: DELIVERIES // 2], other]


def test_more_services_than_a_round_visits_take_turns(harness: Harness) -> None:
    """If a round cannot visit all services, the next rounds visit the others."""
    for number in range(10):
        _owe(harness, {"url": f"https://{number}.example/"}, 3)
    found = [due(harness.database, 4, 5.0) for _ in range(3)]
    services = [{_service(harness, each) for each in one} for one in found]
    assert [len(each) for each in services] == [4, 4, 4]
    assert len(set[Any]().union(*services)) == 10


@pytest.mark.parametrize(("dead", "other"), DEAD_AND_OTHER, ids=_IDS)
def test_an_open_breaker_postpones_all_deliveries_to_its_service(
    harness: Harness, caplog: pytest.LogCaptureFixture, dead: dict[str, Any], other: dict[str, Any]
) -> None:
    """One statement postpones them and one line says so. Deliveries to other services stay due."""
    caplog.set_level(logging.INFO, "perdure.turns.outbox")
    first, *others = _owe(harness, dead, MANY)
    (free,) = _owe(harness, other)
    closed = Closed()
    carriers = {"url": closed, "task": closed, "channel": closed}
    ran: list[str] = []
    with harness.hooked(lambda moment, name: ran.append(name) if moment == "after" else None):
        assert deliver(harness.database, carriers, first) == DeliveryPostponed(60)
    assert ran == ["deliveries.take", "deliveries.postpone_service"]
    assert {deliver(harness.database, carriers, each) for each in others} == {DeliveryNotDue()}
    assert closed.asked == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{MANY} deliveries wait: the breaker is open; next attempt in 60 s or later"
    ]
    rows = harness.sql("SELECT delivery_id, attempts, last_error FROM deliveries WHERE due_at > perdure_now()")
    assert {row.delivery_id for row in rows} == {first, *others}
    assert {(row.attempts, row.last_error) for row in rows} == {(0, "the breaker is open")}
    assert _round(harness) == [free]


def test_later_deliveries_to_a_closed_service_log_no_further_line(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """While deliveries already wait for a breaker, a new one joins them without a line of its own in the log."""
    caplog.set_level(logging.INFO, "perdure.turns.outbox")
    for _ in range(3):
        harness.move(1)
        (delivery_id,) = _owe(harness, {"url": "https://a.example/"})
        assert deliver(harness.database, {"url": Closed()}, delivery_id) == DeliveryPostponed(60)
    assert len(caplog.records) == 1


def test_a_pause_in_one_chat_postpones_no_other(harness: Harness) -> None:
    """A service that asks for a pause may mean one chat. The other deliveries to the service stay due."""
    first, *others = _owe(harness, {"channel": "slack", "place": {"chat": "C1"}}, 3)
    assert deliver(harness.database, {"channel": Closed(alone=True)}, first) == DeliveryPostponed(60)
    assert sorted(due(harness.database, 10, 5)) == sorted(others)


@pytest.mark.parametrize("seconds", [0, ATTEMPT_S - 5])
def test_an_attempt_that_runs_is_not_postponed(harness: Harness, seconds: float) -> None:
    """A delivery that a worker attempts keeps its time, so that it is not attempted twice."""
    running, refused = _owe(harness, {"url": "https://a.example/"}, 2)

    class Meanwhile(Recipient):
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            harness.move(seconds)
            assert deliver(harness.database, {"url": Closed()}, refused) == DeliveryPostponed(60)
            (row,) = harness.sql(
                "SELECT extract(epoch FROM due_at - perdure_now()) AS left_s, attempts FROM deliveries"
                " WHERE delivery_id = %(id)s", id=running,
            )  # fmt: skip
            assert -5 < row.left_s + seconds - ATTEMPT_S <= 0
            assert row.attempts == 1

    assert deliver(harness.database, {"url": Meanwhile()}, running) == Delivered()


def test_a_delivery_of_yesterday_is_not_postponed_with_the_others(harness: Harness) -> None:
    """The attempts of an old delivery count, so that it fails in the end: it is attempted by itself."""
    (old,) = _owe(harness, {"url": "https://a.example/"})
    harness.move(86_401)
    (new,) = _owe(harness, {"url": "https://a.example/"})
    assert deliver(harness.database, {"url": Closed()}, new) == DeliveryPostponed(60)
    assert due(harness.database, 10, 5) == [old]


def test_a_real_breaker_holds_back_a_dead_host(harness: Harness) -> None:
    """After the failures that open the breaker, the other deliveries to the host cost one refusal, not one each."""
    breakers = Breakers(BreakerSettings(failure_threshold=3, cooldown_s=60), harness.clock)
    tried: list[str] = []

    class Guarded:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            tried.append(json.loads(body)["delivery_id"])
            try:
                breakers.get("webhook:dead.example").execute(self._fail, 10)
            except Exception as error:
                if isinstance(error, DeliveryFailed):
                    raise
                raise NotAsked("the breaker of dead.example is open", 60) from None

        def _fail(self) -> None:
            raise DeliveryFailed("connection refused")

    for each in _owe(harness, {"url": "http://dead.example/"}, MANY):
        deliver(harness.database, {"url": Guarded()}, each)
    assert len(tried) == 4


@pytest.mark.parametrize("seconds", [0, ATTEMPT_S + 1])
def test_a_delivered_one_is_followed_by_the_next_to_its_service(harness: Harness, seconds: float) -> None:
    """A service gets its backlog as fast as it takes it. Each delivery is followed once, and by none elsewhere.

    None that is not due follows, nor one that is delivered, even if the service takes longer than an attempt may last.
    """
    _owe(harness, {"url": "https://b.example/"})
    backlog = _owe(harness, {"url": "https://a.example/"}, 4)
    (later,) = _owe(harness, {"url": "https://a.example/"})
    harness.sql("UPDATE deliveries SET due_at = perdure_now() + interval '1 day' WHERE delivery_id = %(id)s", id=later)

    class Slow:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            harness.move(seconds)

    following: UUID | None = backlog[0]
    delivered: list[UUID] = []
    while following is not None:
        outcome = deliver(harness.database, {"url": Slow()}, following)
        assert isinstance(outcome, Delivered)
        delivered.append(following)
        following = outcome.following_id
    assert sorted(delivered) == sorted(backlog)


@pytest.mark.long
def test_users_whose_deliveries_are_not_due_take_no_part(harness: Harness) -> None:
    """Otherwise, after a service's outage, its postponed deliveries hide a user behind many of another one."""
    for number in range(100):
        _owe(harness, {"url": "https://a.example/"}, user=f"later {number}")
    harness.sql("UPDATE deliveries SET due_at = perdure_now() + interval '10 minutes'")
    _owe(harness, {"url": "https://a.example/"}, 10 * MANY)
    harness.move(60)
    (new,) = _owe(harness, {"url": "https://a.example/"}, user="bob")
    assert new in [each for _ in range(4) for each in due(harness.database, 20, 5.0)]
