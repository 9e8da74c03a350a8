"""Each slot (due time) of a user's schedule becomes one ordinary turn in the schedule's conversation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest

from perdure import Agent, agent_tool, tool
from perdure.access.tenants import UserKey, user_key
from perdure.agents import Agents
from perdure.errors import Conflict, InvalidRequest, NotFound
from perdure.sessions.ending import request_end
from perdure.sessions.forking import fork
from perdure.settings import GuardSettings, ScheduleSettings
from perdure.timetable import reminders
from perdure.tools.reminders import remind_me, schedules, unschedule
from perdure.turns import pauses
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.cancel import cancel
from perdure.turns.inbox import fire_schedules
from perdure.turns.inbox.fire_schedules import fire_due
from perdure.turns.lease.claim import Ran
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, OpenAIServer
from tests.turns.broker import Broker
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

DAY_S = 86_400.0


def add(harness: Harness, *, user: str = "ana", text: str = "Water the plants.", **more: Any) -> dict[str, Any]:
    """Add a schedule, as the HTTP API does."""
    given = {name: more.pop(name, None) for name in ("at", "cron", "timezone")}
    moment = reminders.parse_moment(harness.settings, harness.clock.now(), **given)
    new = reminders.NewReminder(uuid4(), UserKey(user), text, moment, "http", **more)
    return reminders.add(harness.database, harness.settings, new)


def soon(harness: Harness, seconds: float) -> str:
    """The time `seconds` from now, in ISO format."""
    return (harness.clock.now() + timedelta(seconds=seconds)).isoformat()


def fired(harness: Harness) -> list[str]:
    """The message ids of the fired slots."""
    return [row.message_id for row in harness.sql("SELECT message_id FROM inbox ORDER BY accepted_at, message_id")]


def test_a_single_time_fires_once(harness: Harness) -> None:
    """A schedule with a single time fires once, at or after that time. The schedule is then removed."""
    made = add(harness, at=soon(harness, 60), conversation="garden")
    assert fire_due(harness.runtime) == 0
    harness.move(61)
    assert fire_due(harness.runtime) == 1
    assert fire_due(harness.runtime) == 0
    moment = datetime.fromisoformat(made["next_due"]).astimezone(UTC).isoformat()
    assert fired(harness) == [f"schedule:{made['schedule_id']}:{moment}"]
    assert reminders.list_reminders(harness.database, UserKey("ana")) == []
    [row] = harness.sql(
        "SELECT t.session_id, s.scope, i.text FROM turns AS t JOIN sessions AS s USING (session_id) "
        "JOIN inbox AS i USING (turn_id)"
    )
    assert row.scope == "/garden"
    assert row.text.startswith("[Due now, as the user scheduled it on ")
    assert row.text.endswith("] Water the plants.")
    harness.run(row.session_id)


def test_the_next_runs_of_a_schedule(harness: Harness) -> None:
    """Runs in the quiet hours are one run at their end, as they fire. A paused schedule has no runs."""
    harness.settings = harness.settings.model_copy(update={"schedule": ScheduleSettings(quiet_hours="22:00-07:00")})
    made = add(harness, cron="0 */6 * * *", timezone="Europe/Paris")
    now = harness.clock.now()
    runs = reminders.runs_of(harness.settings, made, now, 4)
    assert runs[0] == datetime.fromisoformat(made["next_due"])
    assert sorted({run.hour for run in runs}) == [7, 12, 18]
    assert runs == sorted(set(runs))
    once = add(harness, at=soon(harness, 60))
    assert reminders.runs_of(harness.settings, once, now, 4) == [datetime.fromisoformat(once["next_due"])]
    paused = reminders.pause(harness.database, harness.clock, harness.settings, UUID(made["schedule_id"]), paused=True)
    assert reminders.runs_of(harness.settings, paused, now, 4) == []


def test_a_cron_schedule_fires_each_slot_once(harness: Harness) -> None:
    """Of the slots missed while no worker ran, only the newest fires."""
    made = add(harness, cron="*/10 * * * *")
    for missed in (0, 0, 5):
        harness.move(601 + 600 * missed)
        assert fire_due(harness.runtime) == 1
        assert fire_due(harness.runtime) == 0
        harness.run(_places(harness)[-1])
    assert len(fired(harness)) == 3
    [shown] = reminders.list_reminders(harness.database, UserKey("ana"))
    now = harness.clock.now()
    assert now - timedelta(minutes=10) < datetime.fromisoformat(shown["last_slot"]) <= now
    assert now < datetime.fromisoformat(shown["next_due"]) <= now + timedelta(minutes=10)
    turn = harness.turn(UUID(shown["last_turn_id"]))
    assert turn["status"] == "done"
    reminders.remove(harness.database, UUID(made["schedule_id"]), UserKey("ana"))
    harness.move(3_600)
    assert fire_due(harness.runtime) == 0


def test_a_queued_message_stands_for_the_slots_that_pass(harness: Harness) -> None:
    """While a user is paused, or the conversation is busy, a schedule's messages do not pile up."""
    add(harness, cron="*/10 * * * *")
    add(harness, user="bob", at=soon(harness, 5))
    pauses.pause(harness.database, tenant=None, user=UserKey("ana"), agent=None)
    harness.move(601)
    assert fire_due(harness.runtime) == 2
    for _ in range(3):
        harness.move(600)
        assert fire_due(harness.runtime) == 1
        assert fire_due(harness.runtime) == 0
    assert len(fired(harness)) == 2
    pauses.resume(harness.database, tenant=None, user=UserKey("ana"), agent=None)
    [paused] = harness.sql("SELECT session_id FROM sessions WHERE user_id = 'ana'")
    assert harness.run(paused.session_id) == Ran(1)
    harness.move(600)
    fire_due(harness.runtime)
    assert len(fired(harness)) == 3


def test_a_slot_waits_for_the_turn_of_an_earlier_one(harness: Harness) -> None:
    """If a schedule's turn waits beyond the next slots, the newest slot fires once the turn is settled."""

    @tool(requires_approval=True)
    def water() -> str:
        """Water the plants."""
        return "watered"

    harness.equip(water)
    harness.script(calls(("water", {})), says("It is done."))
    add(harness, cron="*/10 * * * *")
    harness.move(601)
    fire_due(harness.runtime)
    [session_id] = _places(harness)
    harness.run(session_id)
    for _ in range(2):
        harness.move(600)
        assert fire_due(harness.runtime) == 1
        assert fire_due(harness.runtime) == 0
    assert len(fired(harness)) == 1
    [turn] = harness.sql("SELECT turn_id FROM turns")
    cancel(harness.runtime, turn.turn_id)
    harness.move(301)
    assert fire_due(harness.runtime) == 1
    assert len(fired(harness)) == 2
    [shown] = reminders.list_reminders(harness.database, UserKey("ana"))
    assert harness.clock.now() - datetime.fromisoformat(shown["last_slot"]) < timedelta(minutes=10)


def test_pause_and_resume(harness: Harness) -> None:
    """Slots during a pause are skipped. A schedule whose only time passed during the pause cannot be resumed."""
    often = UUID(add(harness, cron="*/10 * * * *")["schedule_id"])
    once = UUID(add(harness, at=soon(harness, 300))["schedule_id"])
    later = UUID(add(harness, at=soon(harness, 30_000))["schedule_id"])

    def pause(schedule_id: UUID, *, paused: bool) -> dict[str, Any]:
        return reminders.pause(harness.database, harness.clock, harness.settings, schedule_id, paused=paused)

    for each in (often, once, later):
        assert pause(each, paused=True)["next_due"] is None
        assert pause(each, paused=True)["paused"] is True
    harness.move(3_600)
    assert fire_due(harness.runtime) == 0
    resumed = pause(often, paused=False)
    assert datetime.fromisoformat(resumed["next_due"]) > harness.clock.now()
    assert pause(later, paused=False)["next_due"] is not None
    with pytest.raises(Conflict, match="passed while it was paused"):
        pause(once, paused=False)
    harness.move(601)
    assert fire_due(harness.runtime) == 1


def test_slots_within_quiet_hours_become_one_message(harness: Harness) -> None:
    """No slot fires in quiet hours. When the quiet hours end, one message replaces all slots within them."""
    now = harness.clock.now()
    begin, end = now + timedelta(hours=1), now + timedelta(hours=4)
    quiet = f"{begin:%H:%M}-{end:%H:%M}"
    harness.settings = harness.settings.model_copy(update={"schedule": ScheduleSettings(quiet_hours=quiet)})
    add(harness, cron="*/30 * * * *")
    harness.move(3_600 + 1_800)
    assert fire_due(harness.runtime) == 1  # taken, but postponed to the end of the quiet hours
    assert fired(harness) == []
    harness.move(3_600)
    assert fire_due(harness.runtime) == 0
    harness.move(2 * 3_600)
    assert fire_due(harness.runtime) == 1
    assert len(fired(harness)) == 1
    postponed = add(harness, user="bob", at=(begin + timedelta(days=1, minutes=5)).isoformat())
    assert datetime.fromisoformat(postponed["next_due"]).strftime("%H:%M") == f"{end:%H:%M}"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "either at or cron"),
        ({"at": "2099-01-01T10:00", "cron": "* * * * *"}, "either at or cron"),
        ({"at": "2020-01-01T10:00"}, "is in the past"),
        ({"at": "tomorrow"}, "at: must be a time"),
        ({"at": "9999-12-31T23:59:59-23:00"}, "at: must be a time"),
        ({"at": "9999-12-31T23:30"}, "more than a hundred years"),
        ({"cron": "* * * * *", "conversation": " "}, "conversation: is empty"),
        ({"cron": "0 0 30 2 *"}, "cron: bad day-of-month"),
        ({"cron": "* * * * *", "timezone": "Mars/Olympus"}, "timezone: must be"),
        ({"cron": "* * * * *", "timezone": "../../etc/passwd"}, "timezone: must be"),
        ({"cron": "* * * * *", "text": " "}, "text: must have"),
        ({"cron": "* * * * *", "text": "x" * 10_001}, "text: must have"),
    ],
)
def test_an_invalid_schedule_is_refused(harness: Harness, given: dict[str, Any], why: str) -> None:
    """An invalid schedule is not stored. The error message says what is accepted."""
    with pytest.raises(InvalidRequest, match=why):
        add(harness, **given)
    assert reminders.list_reminders(harness.database) == []


def test_a_local_time_that_does_not_exist(harness: Harness) -> None:
    """A local time that the clocks skip becomes the first instant after the gap."""
    made = add(harness, at="2099-03-29T02:30", timezone="Europe/Paris")
    assert made["next_due"] == "2099-03-29T01:00:00+00:00"


def test_the_limit_of_a_user_holds_under_concurrency(harness: Harness) -> None:
    """With a limit of three, three of ten concurrent additions succeed. The limit applies per user."""
    harness.settings = harness.settings.model_copy(update={"schedule": ScheduleSettings(user_limit=3)})
    refused: list[Conflict] = []

    def try_one() -> None:
        try:
            add(harness, cron="0 7 * * *")
        except Conflict as error:
            refused.append(error)

    threads = [Thread(target=try_one) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(reminders.list_reminders(harness.database, UserKey("ana"))) == 3
    assert len(refused) == 7
    assert "PERDURE_SCHEDULE__USER_LIMIT" in refused[0].message
    add(harness, user="bob", cron="0 7 * * *")


@pytest.mark.long
def test_many_workers_fire_each_slot_once(harness: Harness) -> None:
    """Eight concurrent workers fire each of forty schedules once."""
    made = [add(harness, user=f"user {n % 5}", at=soon(harness, 5)) for n in range(40)]
    harness.move(6)
    workers = [Thread(target=fire_due, args=(harness.runtime, 7)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(fired(harness)) == len(made)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "often"), [("reminders.take_due", True), ("turns.accept", True), ("turns.accept", False)]
)
def test_a_crash_while_firing(harness: Harness, name: str, moment: Any, *, often: bool) -> None:
    """After a crash at any commit, another worker continues when the lease has expired. The slot becomes one turn."""
    in_five_minutes = harness.clock.now() + timedelta(minutes=5)  # so that only one slot is due after 601 s
    add(harness, **({"cron": f"{in_five_minutes.minute} * * * *"} if often else {"at": soon(harness, 5)}))
    harness.move(601)
    with harness.crashing(moment, name):
        fire_due(harness.runtime)
    harness.move(harness.settings.turn.lease_s + 1)
    fire_due(harness.runtime)
    assert len(fired(harness)) == 1
    assert fire_due(harness.runtime) == 0


@pytest.mark.parametrize("given", [{"cron": "*/10 * * * *"}, {}])
@pytest.mark.parametrize("change", ["erased", "removed", "paused"])
def test_a_schedule_changed_while_it_fires_sends_nothing(harness: Harness, given: dict[str, Any], change: str) -> None:
    """A worker may take a schedule just before the schedule is erased, removed or paused. No message is then sent."""
    schedule_id = UUID(add(harness, **(given or {"at": soon(harness, 5)}))["schedule_id"])
    harness.move(601)

    def apply_change(moment: str, name: str) -> None:
        if (moment, name) != ("after", "reminders.take_due"):
            return
        match change:
            case "erased":
                harness.runtime.eraser.erase(UserKey("ana"))
            case "removed":
                reminders.remove(harness.database, schedule_id, UserKey("ana"))
            case _:
                reminders.pause(harness.database, harness.clock, harness.settings, schedule_id, paused=True)

    with harness.hooked(apply_change):
        assert fire_due(harness.runtime) == 1
    assert fired(harness) == []
    assert harness.sql("SELECT FROM users") == []


def test_the_longest_text_and_user_id_can_fire(harness: Harness) -> None:
    """The limit on a schedule's text leaves room for `DUE_NOW`. The limit on a user id leaves room for a tenant."""
    longest = harness.settings.guard.max_chars - len(reminders.DUE_NOW.format(date="2026-01-01"))
    with pytest.raises(InvalidRequest, match=f"1 to {longest} characters"):
        add(harness, cron="*/10 * * * *", text="x" * (longest + 1))
    add(harness, cron="*/10 * * * *", text="x" * longest, user=user_key("acme", "u" * 200))
    harness.move(601)
    assert fire_due(harness.runtime) == 1
    assert len(fired(harness)) == 1


def test_an_unexpected_error_delays_no_other_schedule(harness: Harness) -> None:
    """If a schedule's time zone is unknown on this machine, that schedule shows an error. Other schedules fire."""
    add(harness, at=soon(harness, 5))
    broken = add(harness, user="bob", at=soon(harness, 5))
    harness.sql("UPDATE reminders SET timezone = 'Mars/Olympus' WHERE schedule_id = %(id)s", id=broken["schedule_id"])
    harness.move(10)
    assert fire_due(harness.runtime) == 2
    assert len(fired(harness)) == 1
    [shown] = reminders.list_reminders(harness.database, UserKey("bob"))
    assert "Internal error" in shown["error"]
    harness.sql("UPDATE reminders SET timezone = 'UTC'")
    harness.move(301)
    assert fire_due(harness.runtime) == 1
    assert len(fired(harness)) == 2


def test_more_than_a_batch_fires_in_one_round(harness: Harness) -> None:
    """If more schedules are due than one batch takes, `fire_due` takes further batches."""
    for number in range(7):
        add(harness, user=f"user {number}", at=soon(harness, 5))
    harness.move(10)
    assert fire_due(harness.runtime, most=3) == 7


def test_a_refusal_is_shown_and_the_next_slot_is_tried(harness: Harness) -> None:
    """A schedule whose agent no worker knows shows the error; its next slot is tried. A rate limit delays a slot."""
    harness.set(unknown_agent_s=700)
    made = add(harness, cron="*/10 * * * *", agent="nobody")
    harness.move(601)
    assert fire_due(harness.runtime) == 1
    assert reminders.list_reminders(harness.database, UserKey("ana"))[0]["error"] is None, (
        "another worker may know the agent"
    )
    harness.move(800)
    assert fire_due(harness.runtime) == 1
    [shown] = reminders.list_reminders(harness.database, UserKey("ana"))
    assert "nobody" in shown["error"]
    assert shown["next_due"] > made["next_due"]
    add(harness, user="bob", at=soon(harness, 5))
    harness.settings = harness.settings.model_copy(update={"guard": GuardSettings(per_minute=1)})
    harness.send("hello", user_id="bob")
    harness.move(6)
    fire_due(harness.runtime)
    assert len(fired(harness)) == 1
    harness.move(61)
    fire_due(harness.runtime)
    assert len(fired(harness)) == 2


def test_the_tools_of_the_agent(harness: Harness) -> None:
    """A reminder fires in the conversation in which it was created. The tools access only the user's own schedules."""
    foreign = add(harness, user="bob", cron="0 7 * * *")
    harness.equip(remind_me, schedules, unschedule)
    moment = soon(harness, 900)
    harness.script(
        calls(("remind_me", {"text": "Call the plumber.", "at": moment})),
        calls(("schedules", {})),
        calls(("unschedule", {"schedule_id": foreign["schedule_id"]})),
        says("I will."),
    )
    turn = harness.ask("remind me", reply_to={"url": "https://a.example"}, conversation="house", channel="telegram")
    lines = [content for role, content in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert "is set; it fires at" in lines[0]
    assert "Call the plumber." in lines[1]
    assert foreign["schedule_id"] not in lines[1]
    assert lines[2] == "There is no such schedule; it may have been removed."
    harness.move(901)  # the session is not idle for too long
    assert fire_due(harness.runtime) == 1
    [row] = harness.sql("SELECT channel, reply_to, session_id FROM turns ORDER BY seq DESC LIMIT 1")
    assert (row.channel, row.reply_to, str(row.session_id)) == (
        "telegram",
        {"url": "https://a.example"},
        turn["session_id"],
    )
    harness.script(says("Call the plumber!"))
    harness.run(row.session_id)
    with pytest.raises(NotFound):
        reminders.owner(harness.database, uuid4())


def _reminded(harness: Harness, in_minutes: int = 10, **given: Any) -> dict[str, Any]:
    """The turn whose agent sets a reminder."""
    harness.script(calls(("remind_me", {"text": "Tea.", "in_minutes": in_minutes})), says("It is set."))
    return harness.ask("remind me", **given)


def _places(harness: Harness) -> list[UUID]:
    """The sessions in which schedules have fired."""
    fired = "SELECT session_id FROM turns JOIN inbox USING (turn_id) WHERE message_id LIKE 'schedule:%%'"
    return [row.session_id for row in harness.sql(f"{fired} ORDER BY turns.accepted_at")]


@pytest.mark.parametrize("conversation", ["house", None])
def test_a_reminder_fires_in_the_fork_in_which_it_was_set(harness: Harness, conversation: str | None) -> None:
    """One that was set before the fork fires once, in the source: the call of the copied turn has happened once."""
    harness.equip(remind_me)
    source = UUID(_reminded(harness, conversation=conversation)["session_id"])
    copy = fork(harness.database, harness.clock, source)
    harness.move(601)
    assert fire_due(harness.runtime) == 1
    assert _places(harness) == [source]
    harness.run(source)
    made = _reminded(harness, session_id=copy)
    harness.move(601)
    assert fire_due(harness.runtime) == 1
    assert _places(harness) == [source, copy]
    harness.run(copy)
    assert harness.turn(UUID(made["turn_id"]))["status"] == "done"
    harness.check()


def test_a_reminder_of_an_agent_that_was_asked_in_a_fork(harness: Harness) -> None:
    """The agent's session is its own; the reminder fires in the fork, whose turn asked it."""
    helper = Agent("helper", "You remind.", [remind_me])
    harness.agents = Agents([Agent("assistant", "You help.", [agent_tool(helper, name="delegate")]), helper])
    harness.calls = Broker()
    copy = fork(harness.database, harness.clock, UUID(harness.ask()["session_id"]))
    harness.script(calls(("delegate", {"task": "remind me"})))
    child = harness.ask("remind me", session_id=copy)["children"][0]["turn_id"]
    harness.script(calls(("remind_me", {"text": "Tea.", "in_minutes": 10})), says("It is set."))
    harness.run(UUID(child))
    harness.move(601)
    assert fire_due(harness.runtime) == 1
    assert _places(harness) == [copy]


@pytest.mark.parametrize("ends", ["before", "while it fires"])
def test_a_reminder_of_an_ended_fork_fires_in_the_conversation(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A fork accepts no message after its end, and the user is reminded nevertheless."""
    harness.equip(remind_me)
    source = UUID(harness.ask(conversation="house")["session_id"])
    copy = fork(harness.database, harness.clock, source)
    _reminded(harness, session_id=copy)
    harness.move(601)

    def end() -> None:
        assert request_end(harness.database, copy, "of the test") is not None

    if ends == "before":
        end()
    else:
        made = fire_schedules._message

        def late(row: Any, slot: datetime) -> Any:
            assert row.session_id == copy
            end()
            return made(row, slot)

        monkeypatch.setattr(fire_schedules, "_message", late)
    assert fire_due(harness.runtime) == 1
    assert _places(harness) == [source]
    assert reminders.list_reminders(harness.database, UserKey("ana")) == []


def test_a_repeated_call_adds_one_schedule(harness: Harness) -> None:
    """A schedule's id is its tool call's `effect_id`, so a call repeated after a crash adds no second schedule."""
    harness.equip(remind_me)
    accepted = harness.send("remind me")
    harness.script(calls(("remind_me", {"text": "Tea.", "cron": "0 17 * * *"})))
    with harness.crashing("before", "turns.step", 2):
        harness.run(accepted.session_id)
    assert len(reminders.list_reminders(harness.database, UserKey("ana"))) == 1
    harness.move(harness.settings.turn.lease_s + harness.settings.turn.tool_timeout_s + 1)
    harness.script(says("It is set."))
    harness.run(accepted.session_id)
    assert harness.turn(accepted.turn_id)["status"] == "done"
    assert len(reminders.list_reminders(harness.database, UserKey("ana"))) == 1


@pytest.mark.parametrize("fires", [True, False])
@pytest.mark.parametrize("given", [{"in_minutes": 1}, {"at": 50}, {"at": 50, "quiet": True}])
def test_a_repeated_call_reminds_once(harness: Harness, given: dict[str, Any], *, fires: bool) -> None:
    """A reminder may fire, and be deleted, before its call is repeated after a crash."""
    if given.get("quiet"):
        begin = harness.clock.now()
        quiet = f"{begin:%H:%M}-{begin + timedelta(minutes=2):%H:%M}"
        harness.settings = harness.settings.model_copy(update={"schedule": ScheduleSettings(quiet_hours=quiet)})
    at = {"at": soon(harness, given["at"])} if "at" in given else {"in_minutes": given["in_minutes"]}
    harness.equip(remind_me)
    harness.script(calls(("remind_me", {"text": "Tea.", **at})), says("It is set."), says("Tea!"), says("Tea!"))
    sent = harness.send("remind me")
    with harness.crashing("before" if fires else "after", "turns.step", 2 if fires else 1):
        harness.run(sent.session_id)
    harness.move(300)
    assert fire_due(harness.runtime) == fires
    harness.run(sent.session_id)
    [told] = [text for role, text in harness.lines(sent.session_id) if role == "tool"]
    assert ("has fired" if fires else "is set; it fires at") in told
    harness.move(300)
    fire_due(harness.runtime)
    assert len(_places(harness)) == 1
    assert reminders.list_reminders(harness.database) == []


def test_minutes_count_from_the_approval_of_the_call(harness: Harness) -> None:
    """A person may approve a reminder of ten minutes an hour after the model has asked for it."""
    harness.agents = Agents([Agent("assistant", "You help.", [replace(remind_me, requires_approval=True)])])
    turn = _reminded(harness)
    [pending] = turn["pending_approvals"]
    harness.move(3_000)
    approved = parse_decision({"call_id": pending["call_id"], "decision": "approve"})
    decide(harness.runtime, UUID(turn["turn_id"]), approved)
    harness.run(UUID(turn["session_id"]))
    [found] = reminders.list_reminders(harness.database, UserKey("ana"))
    due_s = (datetime.fromisoformat(found["next_due"]) - harness.clock.now()).total_seconds()
    assert 500 < due_s <= 600


def test_a_reminder_of_what_may_not_be_remembered(harness: Harness) -> None:
    """Its message and reply are not remembered, nor are those of the reminder that it sets in its turn."""
    helper = Agent("helper", "You remind.", [remind_me])
    harness.agents = Agents([Agent("assistant", "You help.", [remind_me, agent_tool(helper, name="delegate")]), helper])
    harness.calls = Broker()
    first = _reminded(harness, remember=False)
    harness.script(calls(("delegate", {"task": "remind me"})))
    child = harness.ask("remind me", user_id="bob", remember=False)["children"][0]["turn_id"]
    harness.script(calls(("remind_me", {"text": "Tea.", "in_minutes": 10})), says("It is set."))
    harness.run(UUID(child))
    _reminded(harness, user_id="cy")
    harness.move(601)
    assert fire_due(harness.runtime) == 3
    harness.script(calls(("remind_me", {"text": "More tea.", "cron": "*/10 * * * *"})), says("Tea!"))
    harness.run(UUID(first["session_id"]))
    harness.move(601)
    assert fire_due(harness.runtime) == 1
    rows = harness.sql(
        "SELECT t.user_id, t.additions FROM turns AS t JOIN inbox USING (turn_id) "
        "WHERE message_id LIKE 'schedule:%%' ORDER BY t.user_id, t.seq"
    )
    left_out = {"remember": False}
    assert [tuple(row) for row in rows] == [("ana", left_out), ("ana", left_out), ("bob", left_out), ("cy", None)]


def test_remind_me_tomorrow_at_nine(harness: Harness) -> None:
    """Over the real wire: without a tool for the time, the model reads the date and the user's zone.

    A time without a zone is in the user's zone, and so is the date in the prompt of the turn that the schedule begins.
    """
    zone = ZoneInfo("Asia/Tokyo")
    today = harness.clock.now().astimezone(zone).date()
    with OpenAIServer() as server:
        harness.any_model = model = model_of(server)
        harness.agents = Agents([Agent("assistant", "You help.", [remind_me])])
        at = f"{today + timedelta(days=1)}T09:00"
        server.script(Answer(calls=[Call("remind_me", json.dumps({"text": "Call Bo.", "at": at}))]), Answer("I will."))
        turn = harness.ask("Remind me tomorrow at 9 to call Bo.", metadata={"timezone": zone.key})
        asked, told = server.requests
        assert [each["function"]["name"] for each in asked["tools"]] == ["remind_me"]
        dated = rf"Today is {today:%A}, {today.day} {today:%B %Y}, \d\d:\d\d in the user's time zone Asia/Tokyo\."
        assert re.search(dated, json.dumps(asked["messages"][:-1]))
        assert f"it fires at {at}:00+09:00 (Asia/Tokyo)" in told["messages"][-1]["content"]
        [made] = reminders.list_reminders(harness.database, UserKey("ana"))
        assert datetime.fromisoformat(made["next_due"]).astimezone(zone).strftime("%Y-%m-%dT%H:%M") == at
        harness.move((datetime.fromisoformat(made["next_due"]) - harness.clock.now()).total_seconds() + 1)
        assert fire_due(harness.runtime) == 1
        server.script(Answer("Call Bo!"))
        [row] = harness.sql("SELECT session_id FROM turns ORDER BY accepted_at DESC LIMIT 1")
        harness.run(row.session_id)
        tomorrow = today + timedelta(days=1)
        dated = (
            rf"Today is {tomorrow:%A}, {tomorrow.day} {tomorrow:%B %Y}, \d\d:\d\d in the user's time zone Asia/Tokyo\."
        )
        assert re.search(dated, json.dumps(server.requests[-1]["messages"]))
        model.close()
    assert turn["status"] == "done"


def test_a_reminder_in_some_minutes(harness: Harness) -> None:
    """The model needs no clock for "in ten minutes". Two kinds of time at once are refused."""
    harness.equip(remind_me)
    harness.script(
        calls(("remind_me", {"text": "Tea.", "in_minutes": 10, "cron": "0 9 * * *"})),
        calls(("remind_me", {"text": "Tea.", "in_minutes": 10})),
        says("I will."),
    )
    turn = harness.ask("Remind me of the tea in ten minutes.")
    refused, made = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert "Give one of at, in_minutes and cron." in refused
    assert "is set; it fires at" in made
    [found] = reminders.list_reminders(harness.database, UserKey("ana"))
    due_s = (datetime.fromisoformat(found["next_due"]) - harness.clock.now()).total_seconds()
    assert 500 < due_s <= 600


def test_a_schedule_that_fired_while_the_clock_was_ahead(harness: Harness) -> None:
    """Once the clock is set back, it has its next slots again. A slot that has fired does not fire again."""
    made = add(harness, cron="0 9 * * *", timezone="UTC")
    for days, ahead in ((1, 30), (1, 0), (1, 0)):
        before = len(fired(harness))
        harness.move(days * DAY_S)
        fire_due(harness.runtime)
        harness.run(_places(harness)[-1])
        harness.move(ahead * DAY_S)
        fire_due(harness.runtime)
        harness.run(_places(harness)[-1])
        harness.move(-ahead * DAY_S)
        assert fire_due(harness.runtime) == (1 if ahead else 0)
        assert len(fired(harness)) == before + (2 if ahead else 1)
        shown = reminders.find(harness.database, UUID(made["schedule_id"]))
        assert shown is not None
        assert datetime.fromisoformat(shown["next_due"]) - harness.clock.now() <= timedelta(days=1)
