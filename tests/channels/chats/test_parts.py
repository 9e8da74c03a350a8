"""The parts of a long reply: each is sent once, whichever worker sends it, and whatever interrupts the delivery."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any
from uuid import UUID

import pytest

from perdure.channels.services.protocol import Place
from perdure.turns import outbox_queries as queries
from perdure.turns.outbox import (
    Delivered,
    DeliveryNotDue,
    DeliveryOutcome,
    DeliveryPostponed,
    NotAsked,
    deliver,
    resend,
)
from tests.channels.chats.installation import AllServers, Installation
from tests.channels.chats.updates import said
from tests.turns.harness import PATIENCE_S
from tests.turns.scripted import Scripted, says
from tests.turns.test_cost import counted

WORDS = " ".join(str(number) for number in range(2_500))
NAMES = ("discord", "slack", "telegram")


class Died(BaseException):
    """The worker was killed."""


class Chat:
    """A chat of the service `name`, and a reply that waits for delivery there."""

    def __init__(self, three: Installation, every: AllServers, name: str, text: str = WORDS) -> None:
        self.name, self._installation, self._every = name, three, every
        self.send = three.channels[name].send
        three.use(Scripted(says(text)))
        three.ingress("discord").take(said("hello", len(text)))
        three.run_sessions()
        target = {"channel": name, "place": {"chat": "D1" if name == "slack" else "21"}}
        [row] = three.sql(
            "UPDATE deliveries SET target = CAST(:target AS jsonb) RETURNING delivery_id", target=json.dumps(target)
        )
        self.delivery_id: UUID = row.delivery_id

    @property
    def texts(self) -> list[str]:
        """The messages that the chat shows, and the one that the service received again."""
        return self._every.texts()

    def deliver(self) -> DeliveryOutcome:
        """Attempt the delivery as a worker that has just started, at a time when the delivery is due."""
        self._installation.sql("UPDATE deliveries SET due_at = perdure.perdure_now() RETURNING 1")
        carriers = {"channel": self._installation.carrier()}
        return deliver(self._installation.runtime.database, carriers, self.delivery_id)

    def interrupt(self, error: BaseException, at: int) -> None:
        """Raise `error` in place of the message number `at`, the first being 1."""
        numbers = itertools.count(1)

        def send(place: Place, *given: Any, **more: Any) -> None:
            if next(numbers) == at:
                raise error
            self.send(place, *given, **more)

        self._installation.channels[self.name].send = send  # type: ignore[method-assign]


@pytest.fixture(params=NAMES)
def chat(request: pytest.FixtureRequest, three: Installation, every: AllServers) -> Chat:
    """A reply of several parts for a chat of each service."""
    return Chat(three, every, request.param)


@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize("error", [NotAsked("slow down", 7), Died()], ids=["pause", "crash"])
def test_another_worker_goes_on_with_the_first_part_that_was_not_sent(
    chat: Chat, error: BaseException, at: int
) -> None:
    chat.interrupt(error, at)
    if isinstance(error, NotAsked):
        assert isinstance(chat.deliver(), DeliveryPostponed)
    else:
        with pytest.raises(Died):
            chat.deliver()
    assert len(chat.texts) == at - 1
    assert chat.deliver() == Delivered()
    assert len(chat.texts) > 2
    assert " ".join(chat.texts) == WORDS


def test_an_attempt_that_takes_too_long_stops_where_another_goes_on(three: Installation, chat: Chat) -> None:
    """The first attempt sends a part for so long that another worker takes the delivery and finishes it."""
    gate, entered = threading.Event(), threading.Event()
    outcomes: list[DeliveryOutcome] = []
    channel = three.channels[chat.name]

    def send(*given: Any, **more: Any) -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)
        chat.send(*given, **more)

    channel.send = send  # type: ignore[method-assign]
    slow = threading.Thread(target=lambda: outcomes.append(chat.deliver()))
    slow.start()
    assert entered.wait(PATIENCE_S)
    channel.send = chat.send  # type: ignore[method-assign]
    assert chat.deliver() == Delivered()
    whole = chat.texts
    gate.set()
    slow.join(PATIENCE_S)
    assert outcomes == [DeliveryNotDue()]
    assert set(chat.texts) == set(whole)
    assert len(chat.texts) <= len(whole) + 1  # the part of which nobody knows whether it was sent


def test_a_reply_that_was_delivered_is_sent_again_as_a_whole(chat: Chat, three: Installation) -> None:
    """A person asked for it; of one that failed, the rest is sent."""
    assert chat.deliver() == Delivered()
    whole = chat.texts
    resend(three.runtime.database, chat.delivery_id)
    assert chat.deliver() == Delivered()
    again = chat.texts
    # Discord drops messages that it has seen a moment ago.
    assert again == (whole if chat.name == "discord" else [*whole, *whole])
    [row] = three.sql("SELECT target FROM deliveries")
    assert len(row.target["sent"]) == len(whole) - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_of_one_part_costs_no_statement_more(three: Installation, every: AllServers, name: str) -> None:
    """The outcome of the delivery says that its last part was sent."""
    counts = {}
    for text in ("short", WORDS):
        chat = Chat(three, every, name, text)
        with counted(three.runtime.database) as (statements, commits):
            assert chat.deliver() == Delivered()
        counts[text] = commits.count(queries.NOTE_SENT.name), len(commits), len(statements)
        three.sql("DELETE FROM deliveries RETURNING 1")
    notes, commits_of_long, _ = counts[WORDS]
    assert counts["short"][:2] == (0, 2)
    assert (notes, commits_of_long) == (len(every.texts()) - 2, len(every.texts()))
