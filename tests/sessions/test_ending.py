"""The end of a session: request, summary, cleaning and end happen once, despite crashes at any step."""

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
from tests.turns.harness import Crash, Harness, side_by_side
from tests.turns.scripted import Scripted, says

IDLE_S = 1_800.0
LEASE_S = 31.0
DAY_S = 86_400.0
SUMMARY = says('```json\n{"summary": "They greeted.", "key_topics": ["greeting", "weather"]}\n```')


def _ending(harness: Harness) -> UUID:
    """A session with one turn, whose end was requested."""
    sent = harness.send("hello there")
    harness.run(sent.session_id)
    assert request_end(harness.database, sent.session_id, "enough").may_end
    return sent.session_id


def test_a_session_ends_with_its_summary(harness: Harness, end: End, cleaned: list[UUID]) -> None:
    """The summary is stored and external data is removed. During the model call the state is `summarizing`."""
    session_id = _ending(harness)
    seen: list[str] = []

    def watching(request: ModelRequest, call: ModelCall) -> ModelReply:
        seen.append(harness.session(session_id).state)
        assert "hello there" in request.messages[-1].content
        return SUMMARY

    harness.script(watching)
    assert end(session_id) == Ended()
    row = harness.session(session_id)
    assert (row.state, row.summary, row.key_topics) == ("ended", "They greeted.", ["greeting", "weather"])
    assert (row.summary_extractive, row.end_reason, row.lease_until) == (False, "enough", None)
    assert row.ended_at is not None
    assert (seen, cleaned) == (["summarizing"], [session_id])
    assert end(session_id) == NotDue()


def test_a_session_without_a_requested_end_does_not_end(harness: Harness, end: End) -> None:
    """A wake-up is only a hint. The session ends only if its row has a requested end."""
    sent = harness.send()
    harness.run(sent.session_id)
    assert end(sent.session_id) == NotDue()
    assert end(uuid4()) == NotDue()


def test_queued_turns_are_answered_before_the_end(harness: Harness, end: End) -> None:
    """After an end is requested, accepted turns still run. The last one's end wakes `sessions.end`."""
    first, second = harness.send("one"), harness.send("two")
    assert not request_end(harness.database, first.session_id, "enough").may_end
    assert end(first.session_id) == NotDue()
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
        assert end(sent.session_id) == NotDue()
        return says("done")

    harness.script(request_the_end, SUMMARY)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"
    assert harness.waker.endings == [sent.session_id]
    assert end(sent.session_id) == Ended()


def test_cancelling_the_last_turn_lets_the_session_end(harness: Harness) -> None:
    """The cancellation of the last turn wakes the ending."""
    sent = harness.send()
    request_end(harness.database, sent.session_id, "enough")
    cancel(harness.runtime, sent.turn_id)
    assert harness.waker.endings == [sent.session_id]


def test_a_repeated_request_changes_nothing_until_the_end(harness: Harness, end: End) -> None:
    """A repeated request has no effect before the end. After the end it is a conflict."""
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
    """One of four concurrent workers gets the lease and writes the summary."""
    session_id = _ending(harness)
    harness.script(SUMMARY)
    found = side_by_side(*[lambda: end(session_id)] * 4)
    assert found.count(Ended()) == 1
    assert found.count(NotDue()) == 3
    assert cleaned == [session_id]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("commit", ["sessions.claim_ending", "sessions.save_summary", "sessions.finish_ending"])
def test_an_ending_resumes_after_a_crash_at_each_commit(harness: Harness, end: End, moment: str, commit: str) -> None:
    """The sweeper wakes the interrupted ending, and the session ends with one summary."""
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
    """A process paused in the model call writes nothing if another process has ended the session during the pause."""
    session_id = _ending(harness)

    def overtaken(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(LEASE_S)
        harness.script(SUMMARY)
        assert end(session_id) == Ended()
        return says('{"summary": "stale"}')

    harness.script(overtaken)
    assert end(session_id) == NotDue()
    assert harness.session(session_id).summary == "They greeted."


def test_a_model_that_is_down_leaves_an_extract(harness: Harness, end: End) -> None:
    """After the last attempt the session ends. Its summary is an extract of its messages, and is marked as such."""
    session_id = _ending(harness)
    harness.script(*[ProviderError("it is down")] * MAX_ATTEMPTS)
    for _ in range(MAX_ATTEMPTS - 1):
        assert end(session_id) == Postponed()
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
    assert list_sessions(harness.database, "ana")[0]["summary_kind"] == "extractive"
    for earlier in range(2):  # in the prompt of the next session, and of the one after it
        harness.model.requests.clear()
        following = harness.send(f"next {earlier}", on_busy="enqueue").session_id
        harness.run(following)
        prompt = "\n".join(each.content for each in harness.model.requests[0].messages if each.role is Role.SYSTEM)
        assert "Extract, no summary could be made: hello there" in prompt
        request_end(harness.database, following, "enough")
        harness.script(SUMMARY)
        assert end(following) == Ended()
    assert list_sessions(harness.database, "ana")[0]["summary_kind"] == "model"


def test_a_summary_that_kills_its_process_is_abandoned(harness: Harness, end: End) -> None:
    """Attempts that end with a crash count, too, so the session ends with an extract."""
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
    """The model call is aborted at once, no attempt is counted, and the next sweep wakes the ending."""
    session_id = _ending(harness)

    def interrupted(request: ModelRequest, call: ModelCall) -> ModelReply:
        keeper.drain()
        call.check()
        raise AssertionError("the call was not aborted")

    harness.script(interrupted)
    assert end(session_id) == Released()
    row = harness.session(session_id)
    assert (row.state, row.end_attempts, row.lease_until) == ("summarizing", 0, None)
    assert endings_due(harness.database, 10, 5, 30) == [session_id]


@pytest.mark.parametrize("state", ["summarizing", "ending"])
def test_an_ending_resumes_after_a_clock_that_was_a_day_ahead(harness: Harness, end: End, state: str) -> None:
    """A lease and a wake-up with future times do not block the ending."""
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
    """If the clock jumps ahead, the lease seems expired and another worker takes over. Only one summary is written."""
    session_id = _ending(harness)
    outcomes: list[EndOutcome] = []

    def jumping(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(days * DAY_S)
        harness.script(SUMMARY)
        outcomes.append(end(session_id))
        return SUMMARY

    harness.script(jumping)
    outcomes.append(end(session_id))
    assert sorted(map(str, outcomes)) == sorted(map(str, [Ended(), NotDue()]))
    assert harness.session(session_id).summary == "They greeted."


def test_a_turn_cancelled_before_a_crash_does_not_block_the_end(harness: Harness, end: End) -> None:
    """If a runner finds the next turn cancelled and dies before it releases the session, the session still ends."""
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
    """A malformed reply is still used as the summary. The topics are then words of the user."""
    session_id = _ending(harness)
    harness.script(says(reply))
    assert end(session_id) == Ended()
    row = harness.session(session_id)
    assert (row.summary, row.key_topics, row.summary_extractive) == (summary, ["hello", "there"], False)


@pytest.mark.parametrize("reply", ["", "``````", '{"summary": 5}', '{"summary": " "}', "{}"])
def test_an_empty_summary_is_a_failure(harness: Harness, end: End, reply: str) -> None:
    """An empty summary is refused, because with it the next session would know nothing of the conversation."""
    session_id = _ending(harness)
    harness.script(says(reply))
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
def test_a_summary_of_ten_megabytes_is_cut(harness: Harness, end: End, reply: str) -> None:
    """A huge reply is cut quickly, and neither the summary nor a topic exceeds its limit."""
    session_id = _ending(harness)
    harness.script(says(reply))
    assert end(session_id) == Ended()
    row = harness.session(session_id)
    assert 0 < len(row.summary) <= 4_000
    assert all(len(topic) <= 80 for topic in row.key_topics)


def test_the_prompt_for_a_summary_is_bounded() -> None:
    """The prompt has the newest messages, each cut, since the model would reject a longer prompt at every attempt."""
    model = Scripted(says('{"summary": "Long."}'))
    messages = [Message(Role.USER, f"{number} " + "x" * 9_000) for number in range(400)]
    summarise(model, ModelCall(MovedClock(), 5), messages)
    shown = model.requests[0].messages[-1].content
    assert len(shown) <= MAX_PROMPT_CHARS
    assert "user: 399 x" in shown
    assert "user: 0 x" not in shown


def test_a_session_without_messages_ends_without_the_model(harness: Harness, end: End) -> None:
    """A session without messages needs no summary."""
    sent = harness.send()
    cancel(harness.runtime, sent.turn_id)
    request_end(harness.database, sent.session_id, "enough")
    assert end(sent.session_id) == Ended()
    assert harness.model.requests == []
    assert harness.session(sent.session_id).summary == ""


def test_idle_sessions_get_a_requested_end(harness: Harness) -> None:
    """A recently used session is not idle, nor is a session with an unanswered message."""
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
    """A session last used at a future time becomes idle after the usual time, counted from the corrected clock."""
    harness.move(DAY_S)
    old = harness.send()
    harness.run(old.session_id)
    harness.move(-DAY_S)
    live = partial(find_live, harness.database, "ana", "", IDLE_S)
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
    """The clock is set back, then a message arrives.

    The idle time counts from that message, even before the task for idle sessions has run.
    """
    harness.move(DAY_S)
    old = harness.send()
    harness.run(old.session_id)
    harness.move(-DAY_S)
    assert harness.ask("again")["session_id"] == str(old.session_id)
    harness.move(IDLE_S + 1)
    assert harness.send("and again").session_id != old.session_id


def test_leaving_after_the_clock_was_set_back_keeps_no_session_alive(harness: Harness) -> None:
    """The last use on another channel has a future time, so the session stays live.

    It becomes idle after the usual time.
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
    """A session opened during the jump stays live when the clock is corrected. The idle session still ends."""
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
    """A session with a running or a waiting turn does not become idle."""
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
    """If the broker refuses the ending's wake-up, the row shows that the ending is due, and the sweeper wakes it."""
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
