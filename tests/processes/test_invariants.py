"""The checks of the chaos find what they are for: a violation of each kind is planted, found and undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any
from uuid import uuid4

import pytest

from perdure.timetable.reminders import Moment
from tests.processes.chaos.planner import Plan
from tests.processes.chaos.senders import Request
from tests.processes.faults import Effect, wait_until
from tests.processes.installation import Installation
from tests.processes.invariants import (
    VERSIONS,
    check_deliveries,
    check_effects,
    check_plans,
    check_read,
    check_sent,
    check_slots,
    check_versions,
)
from tests.processes.receiver import Delivery, Receiver
from tests.processes.streams import Reader
from tests.processes.test_celery_tools import application_of

TEXTS = ("hello", "unsafe: 1", "probed: 2", "charge: 4", "all: 3")

_LAST = "(SELECT max(seq) FROM messages)"
_AGAIN = f"""
    INSERT INTO messages (session_id, seq, turn_id, role, content, token_count, channel, created_at)
    SELECT session_id, seq + 1, turn_id, role, 'again', token_count, channel, created_at
    FROM messages WHERE seq = {_LAST};
    UPDATE sessions SET message_count = message_count + 1
"""  # noqa: S608 (constants)
_NOT_AGAIN = "DELETE FROM messages WHERE content = 'again'; UPDATE sessions SET message_count = message_count - 1"
_MOVE = "UPDATE messages SET turn_id = (SELECT turn_id FROM turns ORDER BY seq {order} LIMIT 1) WHERE seq = " + _LAST  # noqa: S608 (constants)
_SWAP = "UPDATE inbox SET turn_id = (SELECT turn_id FROM turns WHERE seq = {seq}) WHERE text = 'unsafe: 1'"
_RESULT = "role = 'tool' AND turn_id = (SELECT turn_id FROM turns WHERE seq = 2)"
_RESULT_AGAIN = f"""
    INSERT INTO messages (session_id, seq, turn_id, role, content, tool_call_id, token_count, channel, created_at)
    SELECT session_id, {_LAST} + 1, turn_id, role, 'again', tool_call_id, token_count, channel, created_at
    FROM messages WHERE {_RESULT};
    UPDATE sessions SET message_count = message_count + 1
"""  # noqa: S608 (constants)
_OTHER_CALL = "UPDATE messages SET tool_call_id = '{}' WHERE " + _RESULT  # noqa: S608 (constants)

ROWS = {
    "a message is lost": (
        "UPDATE messages SET role = 'assistant' WHERE role = 'user' AND content = 'hello'",
        "UPDATE messages SET role = 'user' WHERE content = 'hello'",
    ),
    "a message has another text": (
        "UPDATE messages SET content = 'unsafe: 9' WHERE content = 'unsafe: 1'",
        "UPDATE messages SET content = 'unsafe: 1' WHERE content = 'unsafe: 9'",
    ),
    "a message is answered twice": (_AGAIN, _NOT_AGAIN),
    "a reply is missing": (_MOVE.format(order=""), _MOVE.format(order="DESC")),
    "a turn is not settled": ("UPDATE sessions SET unsettled = 1", "UPDATE sessions SET unsettled = 0"),
    "a row is missing": (
        "UPDATE sessions SET message_count = message_count + 1",
        "UPDATE sessions SET message_count = message_count - 1",
    ),
    "a call is answered twice": (_RESULT_AGAIN, _NOT_AGAIN),
    "a result is of another call": (_OTHER_CALL.format("call_9"), _OTHER_CALL.format("call_0")),
    "a message is in another's turn": (_SWAP.format(seq=1), _SWAP.format(seq=2)),
}
"""Violations of `Installation.check`: a statement that plants one, and one that undoes it."""


@contextmanager
def _planted(installation: Installation, plant: str, undo: str, **given: Any) -> Iterator[None]:
    with installation.database.engine.connect() as connection:
        connection.exec_driver_sql(plant, given)
        yield
        connection.exec_driver_sql(undo, given)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_each_violation_of_turns_and_effects_is_found(installation: Installation) -> None:
    """Both checks pass before and after."""
    installation.worker()
    application_of(installation)
    installation.settled(*[installation.accept(text).turn_id for text in TEXTS])
    faults = installation.faults
    installation.check()
    check_effects(installation)
    for what, (plant, undo) in ROWS.items():
        with _planted(installation, plant, undo):
            found = False
            try:
                installation.check()
            except AssertionError:
                found = True
            assert found, what
        installation.check()
    done = {effect.tool: effect for effect in faults.effects()}
    journal = faults.directory / "effects"
    before = journal.read_text()

    def planted(*added: Effect) -> None:
        for effect in added:
            faults.act(effect)
        with pytest.raises(AssertionError):
            check_effects(installation)
        journal.write_text(before)
        check_effects(installation)

    planted(done["unsafe"])  # repeated
    planted(done["charge"])  # a task of another application is repeated
    planted(done["probed"])  # repeated although its probe had told
    planted(replace(done["pure"], effect_id="nobody's"))  # without an intent
    status = "UPDATE tool_effects SET status = '{}' WHERE tool = 'charge'"
    endless = _planted(installation, status.format("intended"), status.format("done"))
    with endless, pytest.raises(AssertionError, match="each call has an end"):
        check_effects(installation)
    journal.write_text("")  # reported as done, and never done
    with pytest.raises(AssertionError):
        check_effects(installation)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_each_violation_of_messages_over_http_and_of_streams_is_found(installation: Installation) -> None:
    """A repeated or lost message, and a listener whose text or outcome is not the committed one."""
    installation.worker()
    turn_id = str(installation.accept("hello", message_id="http 0").turn_id)
    [turn] = installation.settled(turn_id)
    sent = Request("http 0", "hello", "/v1/messages", {}, {}, [turn_id, turn_id])
    check_sent(installation, [sent])
    for wrong in (
        [],  # accepted, and not sent
        [sent, replace(sent, key="http 1")],  # lost
        [replace(sent, text="hallo")],
        [replace(sent, turn_ids=[turn_id, str(uuid4())])],  # a repeated message is another turn
        [replace(sent, turn_ids=[str(uuid4())])],
    ):
        with pytest.raises(AssertionError):
            check_sent(installation, wrong)

    reply = turn["reply"]["text"]
    events: list[tuple[str, str, dict[str, Any]]] = [
        ("1-0", "message", {"role": "user", "content": "hello"}),
        ("0-1", "delta", {"text": reply[:4]}),
        ("0-2", "delta", {"text": reply[4:]}),
        ("2-0", "message", {"role": "assistant", "content": reply}),
        ("2-1", "done", turn),
        ("0-3", "rewind", {}),
        ("2-1", "done", {**turn, "status": "failed"}),
    ]

    def read(*numbers: int) -> None:
        reader = Reader("", turn_id, Random(0), 0)  # noqa: S311 (draws nothing)
        for number in numbers:
            reader.apply(*events[number])
        check_read(installation, [reader])

    read(1, 2, 0, 3, 4)
    read(1, 0, 3, 4)  # the last words come with the message
    read(1, 5, 1, 2, 0, 3, 4)
    for order in (
        (2, 0, 3, 4),  # a gap in the text
        (1, 1, 2, 0, 3, 4),  # a repeated piece
        (1, 2, 1, 2, 0, 3, 4),  # the text again, without a rewind
        (1, 2, 3, 4),  # a message is missing
        (1, 2, 0, 0, 3, 4),  # a message is repeated
        (1, 2, 0, 3, 4, 1),  # an event after the end
        (1, 2, 0, 4),  # the reply is missing
        (1, 2, 0, 3),  # no end
        (1, 2, 0, 3, 6),  # another outcome
    ):
        with pytest.raises(AssertionError):
            read(*order)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_each_violation_of_schedules_is_found(installation: Installation) -> None:
    """A slot of a user's schedule without a message or with two, and an entry that runs a slot twice, or stops."""
    minute, now = timedelta(minutes=1), datetime.now(UTC)
    slots = [now.replace(second=0, microsecond=0) + number * minute for number in range(-4, 1)]
    minutely = Plan(uuid4(), Moment("* * * * *", "UTC", slots[0]), now)
    once = Plan(uuid4(), Moment(None, "UTC", now))

    def fire(plan: Plan, slot: datetime) -> str:
        message_id = f"schedule:{plan.schedule_id}:{slot.isoformat()}"
        installation.accept("hello", message_id=message_id)
        settle = """
            UPDATE turns SET settled_at = %(slot)s, status = 'done'
            WHERE turn_id = (SELECT turn_id FROM inbox WHERE message_id = %(message_id)s) RETURNING turn_id
        """
        installation.query(settle, slot=slot, message_id=message_id)
        return message_id

    ids = [fire(minutely, slot) for slot in slots] + [fire(once, now)]
    check = partial(check_plans, installation, [minutely, once])
    check()
    rename = "UPDATE inbox SET message_id = %(b)s WHERE message_id = %(a)s"
    back = "UPDATE inbox SET message_id = %(a)s WHERE message_id = %(b)s"
    again = """
        INSERT INTO inbox (user_id, channel, message_id, turn_id, position, text, accepted_at)
        SELECT user_id, channel, %(b)s, turn_id, 2, text, accepted_at FROM inbox WHERE message_id = %(a)s
    """
    not_again = "DELETE FROM inbox WHERE message_id = %(b)s"
    remains = """
        INSERT INTO reminders (schedule_id, user_id, text, timezone, channel, created_at)
        VALUES (%(a)s::uuid, 'ana', 'hello', 'UTC', 'http', now())
    """
    late = f"schedule:{minutely.schedule_id}:{(slots[1] + minute / 2).isoformat()}"
    for plant, undo, a, b in (
        (rename, back, ids[1], "lost"),
        (rename, back, ids[1], late),
        (rename, back, ids[-1], "lost"),
        (again, not_again, ids[1], late),
        (again, not_again, ids[-1], f"schedule:{once.schedule_id}:{slots[0].isoformat()}"),
        (again, not_again, ids[-1], f"schedule:{uuid4()}:{slots[0].isoformat()}"),
        (remains, "DELETE FROM reminders WHERE schedule_id = %(a)s::uuid", str(once.schedule_id), ""),
    ):
        with _planted(installation, plant, undo, a=a, b=b), pytest.raises(AssertionError):
            check()
        check()

    settle = """
        INSERT INTO schedule_slots (entry, slot, taken_at, done_at)
        VALUES ('expire_idle', %(slot)s, %(slot)s, %(slot)s) RETURNING entry
    """
    for slot in slots:
        installation.query(settle, slot=slot)
    check_slots(installation)
    move = "UPDATE schedule_slots SET {} = %(after)s WHERE slot = %(before)s"
    odd, far = slots[1] + minute / 2, slots[-1] + 6 * minute
    for plant, undo, after in (
        (move.format("slot"), "UPDATE schedule_slots SET slot = %(before)s WHERE slot = %(after)s", odd),
        (move.format("slot"), "UPDATE schedule_slots SET slot = %(before)s WHERE slot = %(after)s", far),
        (move.format("taken_at"), "UPDATE schedule_slots SET taken_at = slot", odd),
    ):
        with _planted(installation, plant, undo, before=slots[1], after=after), pytest.raises(AssertionError):
            check_slots(installation)
        check_slots(installation)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_each_violation_of_versions_and_of_deliveries_is_found(installation: Installation, receiver: Receiver) -> None:
    """A turn that another version goes on with, and a reply that is missing, is another, or came from nowhere."""
    installation.worker()
    turn_id = installation.accept("pure: 1", reply_to={"url": receiver.url}).turn_id
    installation.settled(turn_id)
    assert check_versions(installation) == 1
    requests = installation.model_server.server.requests
    asked = next(each for each in requests if each["messages"][0]["content"].startswith(VERSIONS[0]))
    requests.append({**asked, "messages": [{"role": "system", "content": VERSIONS[1]}, *asked["messages"][1:]]})
    with pytest.raises(AssertionError, match="pinned"):
        check_versions(installation)

    wait_until(lambda: receiver.came, "the reply is delivered")
    wait_until(lambda: installation.query("SELECT FROM deliveries WHERE status = 'delivered'"), "that is recorded")
    check = partial(check_deliveries, installation, receiver, 0)
    check()
    [came] = receiver.came
    receiver.came[:] = [Delivery(came.raw.replace(b"answer", b"ANSWER"), came.headers)]
    with pytest.raises(AssertionError, match="the committed reply"):
        check()
    receiver.came.clear()
    with pytest.raises(AssertionError, match="not within"):
        check()
    receiver.came.append(came)
    to = "UPDATE deliveries SET target = jsonb_set(target, '{{url}}', to_jsonb(%({})s::text))"
    given = {"away": "http://127.0.0.1:1/", "back": receiver.url}
    moved = _planted(installation, to.format("away"), to.format("back"), **given)
    with moved, pytest.raises(AssertionError, match="no receiver"):
        check()
    check()
