"""A session whose end is requested ends once, with one summary, despite crashes and clock changes."""

from __future__ import annotations

from functools import partial
from uuid import UUID, uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Moment
from perdure.errors import Conflict, ContentFiltered, NotFound, ProviderError
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role
from perdure.sessions.ending import (
    MAX_ATTEMPTS,
    Ended,
    EndNotDue,
    EndOutcome,
    EndPostponed,
    Released,
    endings_due,
    expire_idle,
    leave,
    request_end,
)
from perdure.sessions.reading import find_live, list_sessions, read_session
from perdure.sessions.summary import MAX_PROMPT_CHARS, extract, summarise
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import Ran
from perdure.turns.lease.keeper import Keeper
from perdure.turns.sweep import sweep
from tests.sessions.conftest import End
from tests.turns.harness import Crash, Harness, side_by_side
from tests.turns.scripted import Scripted, says

IDLE_S = 1_800.0
LEASE_S = 31.0
DAY_S = 86_400.0
SUMMARY = says('```json\n{"summary": "They greeted.", "key_topics": ["greeting", "weather"]}\n```')


def _ending(harness: Harness) -> UUID:
    """A session with one settled turn and a requested end."""
    sent = harness.send("hello there")
    harness.run(sent.session_id)
    assert request_end(harness.database, sent.session_id, "enough").may_end
    return sent.session_id


def test_a_session_ends_with_its_summary(harness: Harness, end: End, cleaned: list[UUID]) -> None:
    """A worker stores the session's summary and removes the session's data outside PostgreSQL.

    During the model call, the session's state is `summarizing`.
    """
    session_id = _ending(harness)
    seen: list[str] = []

    def watching(request: ModelRequest, call: ModelCall) -> ModelReply:
        seen.append(harness.session(session_id).state)
        assert "hello there" in request.messages[-1].content
        assert end(session_id) == EndNotDue(), "another worker does not end it, too"
        return SUMMARY

    harness.script(watching)
    assert end(session_id) == Ended()
    row = harness.session(session_id)
    assert (row.state, row.summary, row.key_topics) == ("ended", "They greeted.", ["greeting", "weather"])
    assert (row.summary_extractive, row.end_reason, row.lease_until) == (False, "enough", None)
    assert row.ended_at is not None
    assert (seen, cleaned) == (["summarizing"], [session_id])
    assert end(session_id) == EndNotDue()


def test_a_session_without_a_requested_end_does_not_end(harness: Harness, end: End) -> None:
    """A worker that is woken to end a session does nothing if no end was requested."""
    sent = harness.send()
    harness.run(sent.session_id)
    assert end(sent.session_id) == EndNotDue()
    assert end(uuid4()) == EndNotDue()


def test_queued_turns_are_answered_before_the_end(harness: Harness, end: End) -> None:
    """Turns that were accepted before the request still run. After the last turn, the runner wakes `sessions.end`."""
    first, second = harness.send("one"), harness.send("two")
    assert not request_end(harness.database, first.session_id, "enough").may_end
    assert end(first.session_id) == EndNotDue()
    assert harness.run(first.session_id) == Ran(2)
    assert harness.turn(second.turn_id)["status"] == "done"
    assert harness.waker.endings == [first.session_id]
    harness.script(SUMMARY)
    assert end(first.session_id) == Ended()


def test_an_end_in_the_middle_of_a_turn_waits_for_its_reply(harness: Harness, end: End) -> None:
    """An end that is requested during a turn does not interrupt the turn."""
    sent = harness.send()

    def request_the_end(request: ModelRequest, call: ModelCall) -> ModelReply:
        assert not request_end(harness.database, sent.session_id, "enough").may_end
        assert end(sent.session_id) == EndNotDue()
        return says("done")

    harness.script(request_the_end, SUMMARY)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"
    assert harness.waker.endings == [sent.session_id]
    assert end(sent.session_id) == Ended()


def test_cancelling_the_last_turn_lets_the_session_end(harness: Harness) -> None:
    """If an end is requested, the cancellation of the last unsettled turn wakes `sessions.end`."""
    sent = harness.send()
    request_end(harness.database, sent.session_id, "enough")
    cancel(harness.runtime, sent.turn_id)
    assert harness.waker.endings == [sent.session_id]


def test_a_repeated_request_changes_nothing_until_the_end(harness: Harness, end: End) -> None:
    """Before the end, a repeated request has no effect. After the end, a request raises `Conflict`."""
    session_id = _ending(harness)
    assert request_end(harness.database, session_id, "again").may_end
    harness.script(SUMMARY)
    assert end(session_id) == Ended()
    before = harness.session(session_id)
    assert before.end_reason == "enough"
    with pytest.raises(Conflict, match="ended"):
        request_end(harness.database, session_id, "once more")
    assert harness.session(session_id) == before
    with pytest.raises(NotFound):
        request_end(harness.database, uuid4(), "unknown")


def test_one_of_several_workers_ends_the_session(harness: Harness, end: End, cleaned: list[UUID]) -> None:
    """Exactly one of four concurrent workers ends the session."""
    session_id = _ending(harness)
    harness.script(SUMMARY)
    found = side_by_side(*[lambda: end(session_id)] * 4)
    assert found.count(Ended()) == 1
    assert found.count(EndNotDue()) == 3
    assert cleaned == [session_id]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("commit", ["sessions.claim_ending", "sessions.save_summary", "sessions.finish_ending"])
def test_an_ending_resumes_after_a_crash_at_each_commit(harness: Harness, end: End, moment: str, commit: str) -> None:
    """After a crash at any commit, the sweeper wakes `sessions.end`, and the session ends with one summary."""
    session_id = _ending(harness)
    harness.script(SUMMARY)
    with harness.crashing("before" if moment == "before" else "after", commit):
        end(session_id)
    harness.move(LEASE_S)
    harness.waker.endings.clear()
    sweep(harness.runtime)
    if (moment, commit) != ("after", "sessions.finish_ending"):
        assert harness.waker.endings == [session_id]
        harness.script(SUMMARY)
        assert end(session_id) == Ended()
    assert harness.waker.endings in ([], [session_id])
    row = harness.session(session_id)
    assert (row.state, row.summary) == ("ended", "They greeted.")


def test_a_stale_ender_writes_nothing(harness: Harness, end: End) -> None:
    """If another process ends the session during a worker's model call, the worker writes nothing."""
    session_id = _ending(harness)

    def overtaken(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(LEASE_S)
        harness.script(SUMMARY)
        assert end(session_id) == Ended()
        return says('{"summary": "stale"}')

    harness.script(overtaken)
    assert end(session_id) == EndNotDue()
    assert harness.session(session_id).summary == "They greeted."


def test_a_model_that_is_down_leaves_an_extract(harness: Harness, end: End) -> None:
    """If the model fails at every attempt, the session ends. Its summary is an extract, and is marked `extractive`."""
    session_id = _ending(harness)
    harness.script(*[ProviderError("it is down")] * MAX_ATTEMPTS)
    for _ in range(MAX_ATTEMPTS - 1):
        assert end(session_id) == EndPostponed()
        assert endings_due(harness.database, 10, 5, 30) == []
        harness.move(60)
        assert endings_due(harness.database, 10, 5, 30) == [session_id]
    assert end(session_id) == Ended()
    row = harness.session(session_id)
    assert (row.state, row.summary_extractive) == ("ended", True)
    assert "hello there" in row.summary
    assert "hello" in row.key_topics
    shown = read_session(harness.database, session_id)
    assert (shown["summary_kind"], shown["consolidation"]["status"]) == ("extractive", "waiting")
    assert list_sessions(harness.database, UserKey("ana"))[0]["summary_kind"] == "extractive"
    for earlier in range(2):  # the extract is in the prompts of the next two sessions
        harness.model.requests.clear()
        following = harness.send(f"next {earlier}", on_busy="enqueue").session_id
        harness.run(following)
        prompt = "\n".join(each.content for each in harness.model.requests[0].messages if each.role is Role.SYSTEM)
        assert "Extract, no summary could be made: hello there" in prompt
        request_end(harness.database, following, "enough")
        harness.script(SUMMARY)
        assert end(following) == Ended()
    assert list_sessions(harness.database, UserKey("ana"))[0]["summary_kind"] == "model"


def test_a_conversation_that_a_filter_refuses_is_extracted_at_once(harness: Harness, end: End) -> None:
    """The same conversation is refused again, so further attempts are useless."""
    session_id = _ending(harness)
    harness.model.requests.clear()
    harness.script(ContentFiltered("no"))
    assert end(session_id) == Ended()
    assert len(harness.model.requests) == 1
    assert harness.session(session_id).summary_extractive


def test_a_summary_that_kills_its_process_is_abandoned(harness: Harness, end: End) -> None:
    """Crashes count as attempts. After `MAX_ATTEMPTS` crashes, the session ends with an extract."""
    session_id = _ending(harness)
    for _ in range(MAX_ATTEMPTS):
        with harness.crashing("before", "sessions.save_summary"):
            end(session_id)
        harness.move(LEASE_S)
    requests_before = len(harness.model.requests)
    assert end(session_id) == Ended()
    assert len(harness.model.requests) == requests_before
    assert harness.session(session_id).summary_extractive


def test_a_shutdown_releases_the_ending(harness: Harness, keeper: Keeper, end: End) -> None:
    """A shutdown aborts the model call. The attempt does not count, and the next sweep wakes `sessions.end`."""
    session_id = _ending(harness)

    def interrupted(request: ModelRequest, call: ModelCall) -> ModelReply:
        keeper.begin_shutdown()
        call.check()
        raise AssertionError("the call was not aborted")

    harness.script(interrupted)
    assert end(session_id) == Released()
    row = harness.session(session_id)
    assert (row.state, row.end_attempts, row.lease_until) == ("summarizing", 0, None)
    assert endings_due(harness.database, 10, 5, 30) == [session_id]


@pytest.mark.parametrize("state", ["summarizing", "ending"])
def test_an_ending_resumes_after_a_clock_that_was_a_day_ahead(harness: Harness, end: End, state: str) -> None:
    """A lease and a wake-up that were stored while the clock was ahead do not delay the session's end."""
    session_id = _ending(harness)
    harness.move(DAY_S)
    harness.script(SUMMARY)
    with harness.crashing(
        "before", {"summarizing": "sessions.save_summary", "ending": "sessions.finish_ending"}[state]
    ):
        end(session_id)
    assert harness.session(session_id).state == state
    harness.move(1 - DAY_S)
    assert endings_due(harness.database, 10, 5, 30) == [session_id]
    harness.script(SUMMARY)
    assert end(session_id) == Ended()
    assert harness.session(session_id).summary == "They greeted."


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_jumps_during_an_ending_makes_no_second_summary(harness: Harness, end: End, days: int) -> None:
    """If the clock jumps during the model call, only one of two workers writes the summary and ends the session."""
    session_id = _ending(harness)
    outcomes: list[EndOutcome] = []

    def jumping(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(days * DAY_S)
        harness.script(SUMMARY)
        outcomes.append(end(session_id))
        return SUMMARY

    harness.script(jumping)
    outcomes.append(end(session_id))
    assert sorted(map(str, outcomes)) == sorted(map(str, [Ended(), EndNotDue()]))
    assert harness.session(session_id).summary == "They greeted."


def test_a_turn_cancelled_before_a_crash_does_not_block_the_end(harness: Harness, end: End) -> None:
    """If the last turn is cancelled and the runner then dies before it releases the session, the session still ends."""
    first, second = harness.send("one"), harness.send("two")
    request_end(harness.database, first.session_id, "enough")

    def happen(moment: Moment, name: str) -> None:
        if (moment, name) == ("after", "turns.settle"):
            cancel(harness.runtime, second.turn_id)
        if (moment, name) == ("before", "turns.release"):
            raise Crash

    with harness.hooked(happen), pytest.raises(Crash):
        harness.run(first.session_id)
    row = harness.session(first.session_id)
    assert (row.state, row.unsettled) == ("active", 0)
    harness.move(LEASE_S)
    assert endings_due(harness.database, 10, 5, 30) == [first.session_id]
    harness.script(SUMMARY)
    assert end(first.session_id) == Ended()


@pytest.mark.parametrize(
    ("reply", "summary"),
    [
        ("I would rather not.", "I would rather not."),
        ("[1, 2]", "[1, 2]"),
        ('{"summary": "Fine.", "key_topics": "none"}', "Fine."),
        ('{"summary": "Fine.", "key_topics": [1, null, "", "  "]}', "Fine."),
        ('```json\n{"summary": "Fine."}\n```', "Fine."),
        ("Well ```\x00", "Well ```\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_malformed_summary_is_kept_as_far_as_possible(harness: Harness, end: End, reply: str, summary: str) -> None:
    """The text of a malformed reply becomes the summary. Words of the user replace missing or invalid topics."""
    session_id = _ending(harness)
    harness.script(says(reply))
    assert end(session_id) == Ended()
    row = harness.session(session_id)
    assert (row.summary, row.key_topics, row.summary_extractive) == (summary, ["hello", "there"], False)


@pytest.mark.parametrize("reply", ["", "``````", '{"summary": 5}', '{"summary": " "}', "{}"])
def test_an_empty_summary_is_asked_for_once_again(harness: Harness, end: End, reply: str) -> None:
    """Then an extract takes its place, because the next session needs a summary."""
    session_id = _ending(harness)
    harness.script(says(reply), says(reply))
    assert end(session_id) == Ended()
    assert harness.session(session_id).summary_extractive
    assert len(harness.model.requests) == 3  # the turn, and two for its summary


MEGABYTES = 10_000_000


@pytest.mark.long
@pytest.mark.parametrize(
    "reply",
    [
        "x" * MEGABYTES,
        "```" + " " * MEGABYTES,
        "```json" + "\n" * MEGABYTES + "x```",
        '{"summary": "' + "x" * MEGABYTES + '"}',
        '{"summary": "x", "key_topics": ["' + "y" * MEGABYTES + '"]}',
        "[" * MEGABYTES,
    ],
    ids=["words", "an open fence", "a fence", "a summary", "a topic", "brackets"],
)
@pytest.mark.timeout(60)
def test_a_summary_of_ten_megabytes_is_cut(harness: Harness, end: End, reply: str) -> None:
    """A huge reply is cut quickly, and neither the summary nor a topic exceeds its limit."""
    session_id = _ending(harness)
    harness.script(says(reply))
    assert end(session_id) == Ended()
    row = harness.session(session_id)
    assert 0 < len(row.summary) <= 4_000
    assert all(len(topic) <= 80 for topic in row.key_topics)


def test_the_prompt_for_a_summary_is_bounded() -> None:
    """The prompt has only the newest messages, each shortened, because a model rejects a prompt that is too long."""
    model = Scripted(says('{"summary": "Long."}'))
    messages = [Message(Role.USER, f"{number} " + "x" * 9_000) for number in range(400)]
    summarise(model, ModelCall(MovedClock(), 5), messages)
    shown = model.requests[0].messages[-1].content
    assert len(shown) <= MAX_PROMPT_CHARS
    assert "user: 399 x" in shown
    assert "user: 0 x" not in shown


def test_a_session_without_messages_ends_without_the_model(harness: Harness, end: End) -> None:
    """A session without messages ends with an empty summary and without a model call."""
    sent = harness.send()
    cancel(harness.runtime, sent.turn_id)
    request_end(harness.database, sent.session_id, "enough")
    assert end(sent.session_id) == Ended()
    assert harness.model.requests == []
    assert harness.session(sent.session_id).summary == ""


def test_idle_sessions_get_a_requested_end(harness: Harness) -> None:
    """`expire_idle` requests the end of idle sessions only. A session with an unanswered message is not idle."""
    old, waiting, fresh = harness.send(user_id="a"), harness.send(user_id="b"), harness.send(user_id="c")
    harness.run(old.session_id)
    harness.move(IDLE_S)
    harness.run(fresh.session_id)
    assert expire_idle(harness.database, IDLE_S) == [old.session_id]
    assert expire_idle(harness.database, IDLE_S) == []
    assert harness.session(old.session_id).end_reason == "idle"
    assert harness.session(waiting.session_id).end_requested_at is None


@pytest.mark.parametrize("noticed_by", ["beat", "a message"])
def test_a_clock_that_was_a_day_ahead_keeps_no_session_alive(harness: Harness, end: End, noticed_by: str) -> None:
    """If the clock was ahead at a session's last use, the idle time begins when the clock is corrected."""
    harness.move(DAY_S)
    old = harness.send()
    harness.run(old.session_id)
    harness.move(-DAY_S)
    live = partial(find_live, harness.database, UserKey("ana"), "", IDLE_S)
    assert live() == (old.session_id, 2)
    assert expire_idle(harness.database, IDLE_S) == []
    harness.move(IDLE_S - 1)
    assert live() == (old.session_id, 2)
    harness.move(2)
    assert live() is None
    if noticed_by == "beat":
        assert expire_idle(harness.database, IDLE_S) == [old.session_id]
    else:
        assert harness.send("again").session_id != old.session_id
    assert harness.session(old.session_id).end_reason == "idle"
    harness.script(SUMMARY)
    assert end(old.session_id) == Ended()


def test_a_message_after_the_clock_was_set_back_continues_the_session(harness: Harness) -> None:
    """After the clock is set back, the idle time counts from the session's next message.

    This holds even if the task `sessions.expire_idle` has not run since the clock was set back.
    """
    harness.move(DAY_S)
    old = harness.send()
    harness.run(old.session_id)
    harness.move(-DAY_S)
    assert harness.ask("again")["session_id"] == str(old.session_id)
    harness.move(IDLE_S + 1)
    assert harness.send("and again").session_id != old.session_id


def test_leaving_after_the_clock_was_set_back_keeps_no_session_alive(harness: Harness) -> None:
    """A session with a turn that was settled at a future time does not end when the user leaves another channel.

    The session still becomes idle after the usual time.
    """
    harness.move(DAY_S)
    sent = harness.send(channel="http")
    harness.run(sent.session_id)
    harness.move(-DAY_S)
    harness.ask("hello", channel="cli")
    assert leave(harness.database, sent.session_id, "cli", IDLE_S) is None
    harness.move(IDLE_S + 1)
    assert expire_idle(harness.database, IDLE_S) == [sent.session_id]


def test_a_clock_that_jumps_ahead_ends_only_idle_sessions(harness: Harness, end: End) -> None:
    """A session that opens while the clock is ahead stays live after the correction. The earlier, idle session ends."""
    old = harness.send()
    harness.run(old.session_id)
    harness.move(DAY_S)
    assert expire_idle(harness.database, IDLE_S) == [old.session_id]
    new = harness.send("what day is it?")
    harness.run(new.session_id)
    assert harness.session(new.session_id).previous_session_id == old.session_id
    harness.move(-DAY_S)
    assert expire_idle(harness.database, IDLE_S) == []
    assert harness.send("and now?").session_id == new.session_id
    assert endings_due(harness.database, 10, 5, 30) == [old.session_id]
    harness.script(SUMMARY)
    assert end(old.session_id) == Ended()
    harness.run(new.session_id)


def test_a_session_in_the_middle_of_a_turn_is_not_idle_however_the_clock_jumps(harness: Harness) -> None:
    """A session with a running or queued turn does not become idle."""
    sent = harness.send()

    def jumping(_: ModelRequest, __: ModelCall) -> ModelReply:
        for days in (1, -2, 1):
            harness.move(days * DAY_S)
            assert expire_idle(harness.database, IDLE_S) == []
            assert harness.send("and", channel="cli").session_id == sent.session_id
        return says("done")

    harness.script(jumping)
    assert harness.run(sent.session_id) == Ran(4)


def test_an_ending_whose_wake_up_was_refused_is_woken_again(harness: Harness) -> None:
    """If the broker refuses the wake-up of `sessions.end`, a later sweep wakes the task again."""
    session_id = _ending(harness)
    harness.waker.away = True
    swept = sweep(harness.runtime)
    assert swept is not None
    assert (swept.endings, swept.refused) == (0, 1)
    harness.waker.away = False
    harness.move(harness.settings.turn.sweep_s + 0.1)
    swept = sweep(harness.runtime)
    assert swept is not None
    assert harness.waker.endings == [session_id]


def test_an_extract_is_bounded() -> None:
    """An extract has at most 4,000 characters, from the beginning and the end of the conversation."""
    conversation = [Message(Role.USER if n % 2 == 0 else Role.ASSISTANT, f"line {n} " * 400) for n in range(300)]
    summary = extract(conversation)
    assert summary.extractive
    assert len(summary.text) <= 4_000
    assert "line 0" in summary.text
    assert "line 299" in summary.text
