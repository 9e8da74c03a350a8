"""Tests of requests to end a session: over each interface, and while a turn runs, waits for approval or is parked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from uuid import UUID

import pytest
from celery import Celery
from starlette.testclient import TestClient

from perdure import tool
from perdure.channels.cli import Speaker, TerminalConversation
from perdure.channels.http.app import create_app
from perdure.cli import connecting
from perdure.cli.inspect.sessions import end as end_command
from perdure.errors import CircuitBreakerOpen, Conflict
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.sessions.ending import request_end
from perdure.tasks.process import Process
from perdure.tasks.sessions import end as end_task
from perdure.turns.calls.approvals import ENDED, decide, parse_decision
from perdure.turns.cancel import cancel
from perdure.turns.run import loop
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from perdure.workers.celery_application import load_tasks
from tests.sessions.conftest import End
from tests.turns.harness import PATIENCE_S, Harness, side_by_side
from tests.turns.scripted import Line, calls

Way = Callable[[Harness, UUID, pytest.MonkeyPatch], object]

_paid: list[int] = []


@tool(requires_approval=True)
def pay(amount: int) -> str:
    """Pay an amount."""
    _paid.append(amount)
    return f"paid {amount}"


@pytest.fixture(autouse=True)
def equipped(harness: Harness) -> None:
    """Give the agent the tool `pay`, which needs approval, and empty `_paid`."""
    _paid.clear()
    harness.equip(pay)


@contextmanager
def _conversation(harness: Harness) -> Iterator[TerminalConversation]:
    talk = TerminalConversation(harness.runtime, Speaker("ana"), None, lambda _: None)
    talk.resume()
    assert talk.session_id is not None
    yield talk
    talk.close()


def _over_http(harness: Harness, session_id: UUID, _: pytest.MonkeyPatch) -> None:
    with TestClient(create_app(harness.runtime, lambda: True), base_url="http://127.0.0.1:8080") as client:
        assert client.post(f"/v1/sessions/{session_id}/end").status_code == 202


def _in_a_chat(harness: Harness, _: UUID, __: pytest.MonkeyPatch) -> None:
    with _conversation(harness) as talk:
        assert talk.end()


def _leaving_the_chat(harness: Harness, _: UUID, __: pytest.MonkeyPatch) -> None:
    with _conversation(harness) as talk:
        assert talk.leave()


def _by_command(harness: Harness, session_id: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "runtime", lambda: nullcontext(harness.runtime))
    end_command(session_id=str(session_id), reason="enough")


def _by_task(harness: Harness, session_id: UUID, _: pytest.MonkeyPatch) -> None:
    process = Process(harness.runtime, Runner(harness.runtime, "tests"), {}, lambda _: None)
    with Celery("tests", broker="memory://", set_as_current=False) as app:
        app.perdure = lambda: process
        load_tasks(app)
        app.tasks[end_task.name].apply(kwargs={"session_id": str(session_id), "reason": "enough"}, throw=True)


WAYS: list[Way] = [_over_http, _in_a_chat, _leaving_the_chat, _by_command, _by_task]


def _waiting(harness: Harness, *amounts: int, then: tuple[Line, ...] = ()) -> tuple[UUID, UUID]:
    """Run a turn until it waits for approval of its calls. Returns the ids of the session and of the turn."""
    harness.script(calls(*(("pay", {"amount": amount}) for amount in amounts or (5,))), *then)
    sent = harness.send(channel="cli", priority=7)
    harness.run(sent.session_id)
    assert harness.session(sent.session_id).state == "waiting_approval"
    harness.waker.sessions.clear()
    return sent.session_id, sent.turn_id


def _follow(harness: Harness, end: End) -> None:
    """Handle published wake-ups until none are left. No sweep runs."""
    while harness.waker.sessions or harness.waker.endings:
        sessions, harness.waker.sessions[:] = list(harness.waker.sessions), []
        endings, harness.waker.endings[:] = list(harness.waker.endings), []
        for session_id in sessions:
            harness.run(session_id)
        for session_id in endings:
            end(session_id)


def _request_end(harness: Harness, session_id: UUID) -> None:
    request_end(harness.database, session_id, "enough").wake(harness.waker)


def _results(harness: Harness, session_id: UUID) -> list[str]:
    return [text for role, text in harness.lines(session_id) if role == "tool"]


@pytest.mark.parametrize("end_by", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_turn_that_waits_for_approval_continues_at_once(
    harness: Harness, end: End, end_by: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to end the session denies the waiting call. All accepted turns are answered, and then the session ends.

    A message that arrives after the request opens another session.
    """
    session_id, turn_id = _waiting(harness)
    behind = harness.send("behind", channel="cli")
    harness.waker.sessions.clear()
    end_by(harness, session_id, monkeypatch)
    assert (harness.waker.sessions, harness.waker.endings) == ([session_id], [])
    later = harness.send("later", channel="cli")
    assert later.session_id != session_id
    harness.waker.sessions.remove(later.session_id)

    _follow(harness, end)
    assert _results(harness, session_id) == [ENDED]
    assert [harness.turn(each)["status"] for each in (turn_id, behind.turn_id)] == ["done", "done"]
    assert harness.session(session_id).state == "ended"
    assert (_paid, harness.turn(later.turn_id)["status"]) == ([], "accepted")


@pytest.mark.parametrize("end_by", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_in_the_middle_of_a_turn_no_other_worker_is_woken(
    harness: Harness, end: End, end_by: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a request to end the session arrives during a model call, the request publishes no wake-up.

    The turn continues, but its call that needs approval is denied. The same runner runs the queued turns. Then the
    runner publishes the wake-up for the session's end. A busy machine starts a gateway in more than a time slice.
    """
    monkeypatch.setattr(loop, "_SLICE_S", PATIENCE_S)
    behind: list[UUID] = []

    def end_during_the_call(_: ModelRequest, __: ModelCall) -> ModelReply:
        behind.append(harness.send("behind", channel="cli").turn_id)
        harness.waker.sessions.clear()
        end_by(harness, sent.session_id, monkeypatch)
        assert (harness.waker.sessions, harness.waker.endings) == ([], [])
        return calls(("pay", {"amount": 5}))

    harness.script(end_during_the_call)
    sent = harness.send(channel="cli")
    harness.run(sent.session_id)
    assert harness.waker.endings == [sent.session_id]
    assert _results(harness, sent.session_id) == [ENDED]
    assert [harness.turn(each)["status"] for each in (sent.turn_id, *behind)] == ["done", "done"]
    _follow(harness, end)
    assert (harness.session(sent.session_id).state, _paid) == ("ended", [])


def test_a_call_approved_before_the_end_runs(harness: Harness, end: End) -> None:
    """Of two calls, the approved one runs. The call without a decision is denied."""
    session_id, turn_id = _waiting(harness, 1, 2)
    decide(harness.runtime, turn_id, parse_decision({"call_id": "call_0", "decision": "approve"}))
    _request_end(harness, session_id)
    _follow(harness, end)
    assert (_paid, _results(harness, session_id)) == ([1], ["paid 1", ENDED])
    assert harness.session(session_id).state == "ended"


def test_an_end_after_the_last_decision_denies_nothing(harness: Harness, end: End) -> None:
    """The decision has already woken the turn, so the request to end the session publishes no wake-up."""
    session_id, turn_id = _waiting(harness)
    decide(harness.runtime, turn_id, parse_decision({"call_id": "call_0", "decision": "approve"}))
    requested = request_end(harness.database, session_id, "enough")
    assert (requested.may_end, requested.freed) == (False, None)
    _follow(harness, end)
    assert (_paid, harness.session(session_id).state) == ([5], "ended")


@pytest.mark.long
def test_one_of_a_concurrent_decision_and_end_applies(harness: Harness, end: End) -> None:
    """An approval races with a request to end the session. The first to commit decides whether the call runs."""
    for number in range(6):
        session_id, turn_id = _waiting(harness, number)
        harness.waker.endings.clear()
        approved = parse_decision({"call_id": "call_0", "decision": "approve"})
        found = side_by_side(
            partial(decide, harness.runtime, turn_id, approved),
            partial(_request_end, harness, session_id),
        )
        refused = isinstance(found[0], Conflict)
        assert found[1] is None
        assert harness.waker.sessions == [session_id]
        _follow(harness, end)
        assert _results(harness, session_id) == ([ENDED] if refused else [f"paid {number}"])
        assert (_paid == [number]) is not refused
        assert harness.session(session_id).state == "ended"
        _paid.clear()


def test_a_repeated_request_frees_no_turn_twice(harness: Harness, end: End) -> None:
    """The first request's reason is kept. The second request wakes no turn."""
    session_id, _ = _waiting(harness)
    first, again = (request_end(harness.database, session_id, reason) for reason in ("first", "again"))
    assert (first.may_end, first.freed) == (False, 7)
    assert (again.may_end, again.freed) == (False, None)
    first.wake(harness.waker)
    _follow(harness, end)
    row = harness.session(session_id)
    assert (row.state, row.end_reason) == ("ended", "first")


def test_a_freed_turn_may_still_be_cancelled(harness: Harness, end: End) -> None:
    """A requested end stops a turn's wait for approval. If the turn is then cancelled, the session still ends."""
    session_id, turn_id = _waiting(harness)
    request_end(harness.database, session_id, "enough")
    cancel(harness.runtime, turn_id)
    assert harness.turn(turn_id)["status"] == "cancelled"
    assert harness.waker.endings == [session_id]
    _follow(harness, end)
    assert harness.session(session_id).state == "ended"


def test_a_freed_turn_whose_wake_up_was_lost_is_swept(harness: Harness, end: End) -> None:
    """If the broker is unavailable, the wake-up for the turn is lost. The sweeper then wakes the turn."""
    session_id, _ = _waiting(harness)
    harness.waker.away = True
    _request_end(harness, session_id)
    harness.waker.away = False
    harness.waker.sessions.clear()
    sweep(harness.runtime)
    assert harness.waker.sessions == [session_id]
    _follow(harness, end)
    assert harness.session(session_id).state == "ended"


def test_a_turn_that_is_parked_for_a_model_keeps_waiting_for_it(harness: Harness, end: End) -> None:
    """A requested end does not shorten the wait for a model. The turn is answered, and then the session ends."""
    harness.set(on_unavailable="park")
    harness.script(CircuitBreakerOpen())
    sent = harness.send(channel="cli")
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "parked"
    harness.waker.sessions.clear()
    _request_end(harness, sent.session_id)
    assert (harness.waker.sessions, harness.waker.endings) == ([], [])
    harness.move(harness.settings.breaker.cooldown_s * 2)
    sweep(harness.runtime)
    _follow(harness, end)
    assert (harness.turn(sent.turn_id)["status"], harness.session(sent.session_id).state) == ("done", "ended")
