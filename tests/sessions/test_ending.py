"""Ending: requested, summarised, cleaned up, ended; once, whatever dies on the way."""

from __future__ import annotations

from functools import partial
from uuid import UUID, uuid4

import pytest

from perdure.clock import MovedClock
from perdure.database.engine import Moment
from perdure.errors import Conflict, NotFound, ProviderError
from perdure.models.protocol import Message, ModelCall, ModelReply, ModelRequest, Role
from perdure.sessions.ending import (
    MAX_ATTEMPTS,
    Ended,
    EndOutcome,
    NotDue,
    Postponed,
    Released,
    endings_due,
    expire_idle,
    leave,
    request_end,
)
from perdure.sessions.reading import find_live, list_sessions, read_session
from perdure.sessions.summary import MAX_PROMPT_CHARS, extract, summarise
from perdure.turns.cancel import cancel
from perdure.turns.lease.keeper import Keeper
from perdure.turns.run.runner import Ran
from perdure.turns.sweep import sweep
from tests.sessions.conftest import End
from tests.turns.scripted import Scripted, says
from tests.turns.stage import Crash, Stage, side_by_side

IDLE_S = 1_800.0
LEASE_S = 31.0
DAY_S = 86_400.0
SUMMARY = says('```json\n{"summary": "They greeted.", "key_topics": ["greeting", "weather"]}\n```')


def _over(stage: Stage) -> UUID:
    """A session with one turn, which was asked to end."""
    sent = stage.send("hello there")
    stage.run(sent.session_id)
    assert request_end(stage.database, sent.session_id, "enough").may_end
    return sent.session_id


def test_a_session_ends_with_its_summary(stage: Stage, end: End, cleaned: list[UUID]) -> None:
    """What the model says is kept, what is outside the database is cleaned, the state is visible on the way."""
    session_id = _over(stage)
    seen: list[str] = []

    def watching(request: ModelRequest, call: ModelCall) -> ModelReply:
        seen.append(stage.session(session_id).state)
        assert "hello there" in request.messages[-1].content
        return SUMMARY

    stage.script(watching)
    assert end(session_id) == Ended()
    row = stage.session(session_id)
    assert (row.state, row.summary, row.key_topics) == ("ended", "They greeted.", ["greeting", "weather"])
    assert (row.summary_extractive, row.end_reason, row.lease_until) == (False, "enough", None)
    assert row.ended_at is not None
    assert (seen, cleaned) == (["summarizing"], [session_id])
    assert end(session_id) == NotDue()


def test_a_session_that_nobody_asked_to_end_does_not(stage: Stage, end: End) -> None:
    """A wake-up is a hint: what it says must be true in the row."""
    sent = stage.send()
    stage.run(sent.session_id)
    assert end(sent.session_id) == NotDue()
    assert end(uuid4()) == NotDue()


def test_what_is_queued_is_answered_before_the_end(stage: Stage, end: End) -> None:
    """An explicit end is a request: accepted turns run, and the last of them wakes the ending."""
    first, second = stage.send("one"), stage.send("two")
    assert not request_end(stage.database, first.session_id, "enough").may_end
    assert end(first.session_id) == NotDue()
    assert stage.run(first.session_id) == Ran(2)
    assert stage.turn(second.turn_id)["status"] == "done"
    assert stage.waker.endings == [first.session_id]
    stage.script(SUMMARY)
    assert end(first.session_id) == Ended()


def test_an_end_in_the_middle_of_a_turn_waits_for_its_reply(stage: Stage, end: End) -> None:
    """The turn is not cut off."""
    sent = stage.send()

    def asked_meanwhile(request: ModelRequest, call: ModelCall) -> ModelReply:
        assert not request_end(stage.database, sent.session_id, "enough").may_end
        assert end(sent.session_id) == NotDue()
        return says("done")

    stage.script(asked_meanwhile, SUMMARY)
    stage.run(sent.session_id)
    assert stage.turn(sent.turn_id)["reply"]["text"] == "done"
    assert stage.waker.endings == [sent.session_id]
    assert end(sent.session_id) == Ended()


def test_cancelling_the_last_turn_lets_the_session_end(stage: Stage) -> None:
    """The cancellation of the last turn wakes the ending."""
    sent = stage.send()
    request_end(stage.database, sent.session_id, "enough")
    cancel(stage.runtime, sent.turn_id)
    assert stage.waker.endings == [sent.session_id]


def test_asking_again_changes_nothing_and_after_the_end_is_refused(stage: Stage, end: End) -> None:
    """A request is safe to repeat; after the end it is a conflict."""
    session_id = _over(stage)
    assert request_end(stage.database, session_id, "again").may_end
    stage.script(SUMMARY)
    assert end(session_id) == Ended()
    before = stage.session(session_id)
    assert before.end_reason == "enough"
    with pytest.raises(Conflict, match="ended"):
        request_end(stage.database, session_id, "once more")
    assert stage.session(session_id) == before
    with pytest.raises(NotFound):
        request_end(stage.database, uuid4(), "unknown")


def test_of_several_workers_one_ends_it(stage: Stage, end: End, cleaned: list[UUID]) -> None:
    """One lease, one summary."""
    session_id = _over(stage)
    stage.script(SUMMARY)
    found = side_by_side(*[lambda: end(session_id)] * 4)
    assert found.count(Ended()) == 1
    assert found.count(NotDue()) == 3
    assert cleaned == [session_id]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("commit", ["sessions.claim_ending", "sessions.save_summary", "sessions.finish_ending"])
def test_a_crash_at_each_commit_is_gone_on_from(stage: Stage, end: End, moment: str, commit: str) -> None:
    """The sweeper finds sessions without a worker; each ends with one summary."""
    session_id = _over(stage)
    stage.script(SUMMARY)
    with stage.crashing("before" if moment == "before" else "after", commit):
        end(session_id)
    stage.move(LEASE_S)
    stage.waker.endings.clear()
    sweep(stage.runtime)
    if (moment, commit) != ("after", "sessions.finish_ending"):
        assert stage.waker.endings == [session_id]
        stage.script(SUMMARY)
        assert end(session_id) == Ended()
    assert stage.waker.endings in ([], [session_id])
    row = stage.session(session_id)
    assert (row.state, row.summary) == ("ended", "They greeted.")


def test_a_stale_ender_writes_nothing(stage: Stage, end: End) -> None:
    """A process that was paused in the model call resumes after another has ended the session."""
    session_id = _over(stage)

    def overtaken(request: ModelRequest, call: ModelCall) -> ModelReply:
        stage.move(LEASE_S)
        stage.script(SUMMARY)
        assert end(session_id) == Ended()
        return says('{"summary": "stale"}')

    stage.script(overtaken)
    assert end(session_id) == NotDue()
    assert stage.session(session_id).summary == "They greeted."


def test_a_model_that_is_down_leaves_an_extract(stage: Stage, end: End) -> None:
    """Nothing waits for ever: after its attempts the session ends with its own lines, marked as such."""
    session_id = _over(stage)
    stage.script(*[ProviderError("it is down")] * MAX_ATTEMPTS)
    for _ in range(MAX_ATTEMPTS - 1):
        assert end(session_id) == Postponed()
        assert endings_due(stage.database, 10, 5, 30) == []
        stage.move(60)
        assert endings_due(stage.database, 10, 5, 30) == [session_id]
    assert end(session_id) == Ended()
    row = stage.session(session_id)
    assert (row.state, row.summary_extractive) == ("ended", True)
    assert "hello there" in row.summary
    assert "hello" in row.key_topics
    shown = read_session(stage.database, session_id)
    assert (shown["summary_kind"], shown["consolidation"]["status"]) == ("extractive", "waiting")
    assert list_sessions(stage.database, "ana")[0]["summary_kind"] == "extractive"
    for earlier in range(2):  # as the session before, and as one of the archive
        stage.model.requests.clear()
        following = stage.send(f"next {earlier}", on_busy="enqueue").session_id
        stage.run(following)
        prompt = "\n".join(each.content for each in stage.model.requests[0].messages if each.role is Role.SYSTEM)
        assert "Extract, no summary could be made: hello there" in prompt
        request_end(stage.database, following, "enough")
        stage.script(SUMMARY)
        assert end(following) == Ended()
    assert list_sessions(stage.database, "ana")[0]["summary_kind"] == "model"


def test_a_summary_that_kills_its_process_is_given_up(stage: Stage, end: End) -> None:
    """Attempts that left nothing behind count, too."""
    session_id = _over(stage)
    for _ in range(MAX_ATTEMPTS):
        with stage.crashing("before", "sessions.save_summary"):
            end(session_id)
        stage.move(LEASE_S)
    asked = len(stage.model.requests)
    assert end(session_id) == Ended()
    assert len(stage.model.requests) == asked
    assert stage.session(session_id).summary_extractive


def test_a_worker_that_shuts_down_hands_the_ending_on(stage: Stage, keeper: Keeper, end: End) -> None:
    """The model call is aborted at once, no attempt is counted, and the next sweep finds it."""
    session_id = _over(stage)

    def interrupted(request: ModelRequest, call: ModelCall) -> ModelReply:
        keeper.drain()
        call.check()
        raise AssertionError("the call was not ended")

    stage.script(interrupted)
    assert end(session_id) == Released()
    row = stage.session(session_id)
    assert (row.state, row.end_attempts, row.lease_until) == ("summarizing", 0, None)
    assert endings_due(stage.database, 10, 5, 30) == [session_id]


@pytest.mark.parametrize("state", ["summarizing", "ending"])
def test_what_a_clock_that_was_a_day_ahead_left_is_gone_on_from(stage: Stage, end: End, state: str) -> None:
    """A lease and a wake-up dated tomorrow do not block the ending today."""
    session_id = _over(stage)
    stage.move(DAY_S)
    stage.script(SUMMARY)
    with stage.crashing("before", {"summarizing": "sessions.save_summary", "ending": "sessions.finish_ending"}[state]):
        end(session_id)
    assert stage.session(session_id).state == state
    stage.move(1 - DAY_S)
    assert endings_due(stage.database, 10, 5, 30) == [session_id]
    stage.script(SUMMARY)
    assert end(session_id) == Ended()
    assert stage.session(session_id).summary == "They greeted."


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_jumps_while_a_session_ends_makes_no_second_summary(stage: Stage, end: End, days: int) -> None:
    """Ahead, the lease seems to have run out, and another worker may take over; one of them writes."""
    session_id = _over(stage)
    outcomes: list[EndOutcome] = []

    def jumping(request: ModelRequest, call: ModelCall) -> ModelReply:
        stage.move(days * DAY_S)
        stage.script(SUMMARY)
        outcomes.append(end(session_id))
        return SUMMARY

    stage.script(jumping)
    outcomes.append(end(session_id))
    assert sorted(map(str, outcomes)) == sorted(map(str, [Ended(), NotDue()]))
    assert stage.session(session_id).summary == "They greeted."


def test_a_turn_that_was_cancelled_under_its_runner_keeps_no_session_from_ending(stage: Stage, end: End) -> None:
    """The runner went on to the next turn, found it cancelled, and died before it gave the session back."""
    first, second = stage.send("one"), stage.send("two")
    request_end(stage.database, first.session_id, "enough")

    def happen(moment: Moment, name: str) -> None:
        if (moment, name) == ("after", "turns.settle"):
            cancel(stage.runtime, second.turn_id)
        if (moment, name) == ("before", "turns.release"):
            raise Crash

    with stage.hooked(happen), pytest.raises(Crash):
        stage.run(first.session_id)
    row = stage.session(first.session_id)
    assert (row.state, row.unsettled) == ("active", 0)
    stage.move(LEASE_S)
    assert endings_due(stage.database, 10, 5, 30) == [first.session_id]
    stage.script(SUMMARY)
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
def test_nonsense_of_the_model_is_kept_as_it_can_be(stage: Stage, end: End, reply: str, summary: str) -> None:
    """What it says is better than nothing; the topics are then the user's own words."""
    session_id = _over(stage)
    stage.script(says(reply))
    assert end(session_id) == Ended()
    row = stage.session(session_id)
    assert (row.summary, row.key_topics, row.summary_extractive) == (summary, ["hello", "there"], False)


@pytest.mark.parametrize("reply", ["", "``````", '{"summary": 5}', '{"summary": " "}', "{}"])
def test_a_model_that_says_nothing_has_failed(stage: Stage, end: End, reply: str) -> None:
    """An empty summary would make the next conversation begin from nothing."""
    session_id = _over(stage)
    stage.script(says(reply))
    assert end(session_id) == Postponed()


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
def test_ten_megabytes_are_no_burden(stage: Stage, end: End, reply: str) -> None:
    """They are cut in a moment, and neither the row nor the next prompt is as long."""
    session_id = _over(stage)
    stage.script(says(reply))
    assert end(session_id) == Ended()
    row = stage.session(session_id)
    assert 0 < len(row.summary) <= 4_000
    assert all(len(topic) <= 80 for topic in row.key_topics)


def test_a_long_conversation_is_shown_as_far_as_a_model_reads() -> None:
    """The newest messages, each to a bound: a prompt that is refused as too long would be refused each time."""
    model = Scripted(says('{"summary": "Long."}'))
    said = [Message(Role.USER, f"{number} " + "x" * 9_000) for number in range(400)]
    summarise(model, ModelCall(MovedClock(), 5), said)
    shown = model.requests[0].messages[-1].content
    assert len(shown) <= MAX_PROMPT_CHARS
    assert "user: 399 x" in shown
    assert "user: 0 x" not in shown


def test_a_session_without_a_word_ends_without_the_model(stage: Stage, end: End) -> None:
    """There is nothing to summarise."""
    sent = stage.send()
    cancel(stage.runtime, sent.turn_id)
    request_end(stage.database, sent.session_id, "enough")
    assert end(sent.session_id) == Ended()
    assert stage.model.requests == []
    assert stage.session(sent.session_id).summary == ""


def test_idle_sessions_are_asked_to_end(stage: Stage) -> None:
    """Only those that are idle: not the one in use, not the one that still has to answer."""
    old, waiting, fresh = stage.send(user_id="a"), stage.send(user_id="b"), stage.send(user_id="c")
    stage.run(old.session_id)
    stage.move(IDLE_S)
    stage.run(fresh.session_id)
    assert expire_idle(stage.database, IDLE_S) == [old.session_id]
    assert expire_idle(stage.database, IDLE_S) == []
    assert stage.session(old.session_id).end_reason == "idle"
    assert stage.session(waiting.session_id).end_requested_at is None


@pytest.mark.parametrize("noticed_by", ["beat", "a message"])
def test_a_clock_that_was_a_day_ahead_keeps_no_session_alive(stage: Stage, end: End, noticed_by: str) -> None:
    """What was used tomorrow is idle from the moment on that the clock is right again, like any other."""
    stage.move(DAY_S)
    old = stage.send()
    stage.run(old.session_id)
    stage.move(-DAY_S)
    live = partial(find_live, stage.database, "ana", "", IDLE_S)
    assert live() == (old.session_id, 2)
    assert expire_idle(stage.database, IDLE_S) == []
    stage.move(IDLE_S - 1)
    assert live() == (old.session_id, 2)
    stage.move(2)
    assert live() is None
    if noticed_by == "beat":
        assert expire_idle(stage.database, IDLE_S) == [old.session_id]
    else:
        assert stage.send("again").session_id != old.session_id
    assert stage.session(old.session_id).end_reason == "idle"
    stage.script(SUMMARY)
    assert end(old.session_id) == Ended()


def test_a_message_after_the_clock_was_set_back_goes_where_the_last_one_went(stage: Stage) -> None:
    """No beat has come yet; from that message on the time counts, whatever the row said before."""
    stage.move(DAY_S)
    old = stage.send()
    stage.run(old.session_id)
    stage.move(-DAY_S)
    assert stage.ask("again")["session_id"] == str(old.session_id)
    stage.move(IDLE_S + 1)
    assert stage.send("and again").session_id != old.session_id


def test_who_leaves_after_the_clock_was_set_back_keeps_no_session_alive(stage: Stage) -> None:
    """Another channel was used tomorrow, so perhaps just now: the session stays, and falls idle like any other."""
    stage.move(DAY_S)
    sent = stage.send(channel="http")
    stage.run(sent.session_id)
    stage.move(-DAY_S)
    stage.ask("hello", channel="cli")
    assert leave(stage.database, sent.session_id, "cli", IDLE_S) is None
    stage.move(IDLE_S + 1)
    assert expire_idle(stage.database, IDLE_S) == [sent.session_id]


def test_a_clock_that_jumps_ahead_ends_what_it_makes_idle_and_nothing_else(stage: Stage, end: End) -> None:
    """The next session begins behind it, stays when the clock is set right, and the one before ends all the same."""
    old = stage.send()
    stage.run(old.session_id)
    stage.move(DAY_S)
    assert expire_idle(stage.database, IDLE_S) == [old.session_id]
    new = stage.send("what day is it?")
    stage.run(new.session_id)
    assert stage.session(new.session_id).previous_session_id == old.session_id
    stage.move(-DAY_S)
    assert expire_idle(stage.database, IDLE_S) == []
    assert stage.send("and now?").session_id == new.session_id
    assert endings_due(stage.database, 10, 5, 30) == [old.session_id]
    stage.script(SUMMARY)
    assert end(old.session_id) == Ended()
    stage.run(new.session_id)


def test_a_session_in_the_middle_of_a_turn_is_not_idle_however_the_clock_jumps(stage: Stage) -> None:
    """Nor one that waits for its turn."""
    sent = stage.send()

    def jumping(_: ModelRequest, __: ModelCall) -> ModelReply:
        for days in (1, -2, 1):
            stage.move(days * DAY_S)
            assert expire_idle(stage.database, IDLE_S) == []
            assert stage.send("and", channel="cli").session_id == sent.session_id
        return says("done")

    stage.script(jumping)
    assert stage.run(sent.session_id) == Ran(4)


def test_an_ending_that_the_broker_did_not_take_is_swept_again(stage: Stage) -> None:
    """The wake-up may be lost at every place; the row says that it is due."""
    session_id = _over(stage)
    stage.waker.away = True
    swept = sweep(stage.runtime)
    assert swept is not None
    assert (swept.endings, swept.refused) == (0, 1)
    stage.waker.away = False
    stage.move(stage.settings.turn.sweep_s + 0.1)
    swept = sweep(stage.runtime)
    assert swept is not None
    assert stage.waker.endings == [session_id]


def test_an_extract_is_bounded() -> None:
    """However long the conversation was."""
    conversation = [Message(Role.USER if n % 2 == 0 else Role.ASSISTANT, f"line {n} " * 400) for n in range(300)]
    summary = extract(conversation)
    assert summary.extractive
    assert len(summary.text) <= 4_000
    assert "line 0" in summary.text
    assert "line 299" in summary.text
