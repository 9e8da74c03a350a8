"""A worker that lacks a turn's agent or tool leaves the turn to another worker, as in a rolling deploy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure import Agent, McpServer, sleep_until, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents, OwnTool
from perdure.clock import MovedClock
from perdure.database.engine import Database, as_json
from perdure.errors import InvalidRequest, ProviderError
from perdure.settings import Settings
from perdure.tasks.turns import run as run_task
from perdure.tools.awaited.task import celery_tool
from perdure.turns import pauses
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.cancel import cancel
from perdure.turns.inbox.route_unrouted import route_due
from perdure.turns.lease.claim import CHILD_S, NotNeeded, Queued, Ran, Unequipped
from perdure.turns.lease.queries import ISOLATE_FROM_CLAIM
from perdure.turns.run.child_watch import ChildEnd
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from tests.conftest import RecordingWaker
from tests.turns.awaiting import end_task, moment_after
from tests.turns.broker import Broker
from tests.turns.harness import Crash, Harness
from tests.turns.scripted import calls, says

LEASE_S = 30


@tool(requires_approval=True)
def refund(amount: int) -> str:
    """Refund."""
    return f"refunded {amount}"


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


def _agents(*tools: OwnTool, billing: bool = True) -> Agents:
    made = [Agent("assistant", "You help.")]
    return Agents([*made, Agent("billing", "You bill.", tools)] if billing else made)


class Fleet:
    """Two workers with one database: one of the previous deploy, and one of the next."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.waker = harness.waker
        self.set_tools((), ())

    def set_tools(self, old: Sequence[OwnTool], new: Sequence[OwnTool], *, billing: bool = False) -> None:
        """Give the old worker the agent `billing` with the tools `old` if `billing` is set; the new one has `new`."""
        self.harness.agents = _agents(*old, billing=billing)
        self.old = Runner(self.harness.runtime, "old")
        self.harness.agents = _agents(*new)
        self.new = Runner(self.harness.runtime, "new")


@pytest.fixture
def fleet(settings: Settings, clock: MovedClock, database: Database, waker: RecordingWaker) -> Iterator[Fleet]:
    """Two workers. The old worker lacks the agent `billing`."""
    harness = Harness(settings, clock, database, waker)
    yield Fleet(harness)
    harness.check()


def test_a_turn_of_an_unknown_agent_is_left_to_others(fleet: Fleet) -> None:
    """The old worker passes the wake-up on once, drops it if it returns, and charges nothing. The new one answers."""
    sent = fleet.harness.send(agent="billing")
    fleet.waker.sessions.clear()
    found = fleet.old.run(sent.session_id)
    assert isinstance(found, Unequipped)
    assert "billing" in found.lacks
    assert fleet.old.run(sent.session_id) == fleet.old.run(sent.session_id) == NotNeeded()
    assert fleet.waker.sessions == [sent.session_id], "passed on once, so that one worker does not spin on it"
    row, turn = fleet.harness.session(sent.session_id), fleet.harness.turn(sent.turn_id)
    assert (row.strikes, row.claims, row.lease_until, turn["status"], turn["attempts"]) == (0, 0, None, "accepted", 0)
    assert fleet.new.run(sent.session_id) == Ran(1)
    assert fleet.harness.turn(sent.turn_id)["status"] == "done"
    assert fleet.harness.session(sent.session_id).unequipped_since is None


def test_a_drain_passes_the_wake_up_on_and_goes_on(fleet: Fleet) -> None:
    """No drain takes the session any more: without a wake-up of its own, it would wait for the sweeper."""
    sent = fleet.harness.send(agent="billing")
    fleet.harness.send(user_id="bob", agent="assistant")
    fleet.waker.sessions.clear()
    assert fleet.old.drain(uuid4()).outcomes == ("done",)
    assert sent.session_id in fleet.waker.sessions
    assert fleet.new.run(sent.session_id) == Ran(1)


def test_the_pace_of_wake_ups_does_not_slow_down(fleet: Fleet) -> None:
    """However long old workers have left the session, the sweeper soon wakes it again, for a new worker."""
    sent = fleet.harness.send(agent="billing")
    for _ in range(20):
        assert isinstance(fleet.old.run(sent.session_id), Unequipped)
        fleet.harness.move(11)
        swept = sweep(fleet.harness.runtime)
        assert swept is not None
        assert swept.sessions == 1


def test_a_later_message_reaches_the_old_worker_at_once(fleet: Fleet) -> None:
    """Once another worker has answered, the old worker takes the session's next turn of an agent that it knows."""
    sent = fleet.harness.send(agent="billing")
    fleet.old.run(sent.session_id)
    fleet.new.run(sent.session_id)
    fleet.harness.send(agent="assistant")
    assert fleet.old.run(sent.session_id) == Ran(1)


def test_only_after_the_settings_time_is_it_a_failure(fleet: Fleet) -> None:
    """If no worker has the agent for `PERDURE_TURN__UNKNOWN_AGENT_S`, the turn fails with a message that names it."""
    sent = fleet.harness.send(agent="billing")
    fleet.old.run(sent.session_id)
    fleet.harness.move(fleet.harness.settings.turn.unknown_agent_s - 1)
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    fleet.harness.move(fleet.harness.settings.turn.sweep_s + 1)
    assert fleet.old.run(sent.session_id) == Ran(1)
    turn = fleet.harness.turn(sent.turn_id)
    assert turn["status"] == "failed"
    assert "billing" in turn["error"]["message"]


def test_a_wait_for_a_model_is_no_wait_for_a_worker(fleet: Fleet) -> None:
    """The time in which the turn waits for a model, after a worker had its agent, does not make its agent unknown."""
    fleet.harness.set(on_unavailable="park")
    fleet.set_tools((), ())
    sent = fleet.harness.send(agent="billing")
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    fleet.harness.script(ProviderError("The provider is down.", transient=True))
    fleet.new.run(sent.session_id)
    assert fleet.harness.turn(sent.turn_id)["status"] == "parked"
    fleet.harness.move(fleet.harness.settings.turn.unknown_agent_s + 1)
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    assert fleet.new.run(sent.session_id) == Ran(1)
    assert fleet.harness.turn(sent.turn_id)["status"] == "done"


def test_a_wait_for_calls_is_no_wait_for_a_worker(fleet: Fleet) -> None:
    """The first of two times has come while an old worker looked, so the second wait begins without a step."""
    fleet.set_tools((), (sleep_until,))
    wait_s = fleet.harness.settings.turn.unknown_agent_s + 1
    times = [moment_after(fleet.harness, seconds) for seconds in (1, wait_s + 1)]
    fleet.harness.script(calls(*(("sleep_until", {"moment": each}) for each in times)))
    sent = fleet.harness.send(agent="billing")
    fleet.new.run(sent.session_id)
    for moved_s, status in ((2, "parked"), (wait_s, "done")):
        fleet.harness.move(moved_s)
        assert isinstance(fleet.old.run(sent.session_id), Unequipped)
        fleet.new.run(sent.session_id)
        assert fleet.harness.turn(sent.turn_id)["status"] == status


def test_a_wait_for_a_person_is_no_wait_for_a_worker(fleet: Fleet) -> None:
    """The worker that could have begun the calls was killed once, and another one let the turn wait."""
    fleet.set_tools((), (refund,))
    fleet.harness.script(calls(("refund", {"amount": 5})))
    sent = fleet.harness.send(agent="billing")
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    with fleet.harness.crashing("after", "turns.step"):
        fleet.new.run(sent.session_id)
    fleet.harness.move(LEASE_S + 10)
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    fleet.new.run(sent.session_id)
    [call] = fleet.harness.turn(sent.turn_id)["pending_approvals"]
    fleet.harness.move(fleet.harness.settings.turn.unknown_agent_s + 1)
    decide(fleet.harness.runtime, sent.turn_id, parse_decision({"call_id": call["call_id"], "decision": "approve"}))
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    fleet.new.run(sent.session_id)
    assert fleet.harness.turn(sent.turn_id)["status"] == "done"


@pytest.mark.parametrize("why", ["places", "pause"])
def test_a_wait_for_a_place_is_no_wait_for_a_worker(fleet: Fleet, why: str) -> None:
    """An old worker looked before a worker with the agent found that the user has no place, or is paused."""
    harness, whom = fleet.harness, {"tenant": None, "user": UserKey("ana"), "agent": None}
    harness.set(user_concurrency=1)
    fleet.set_tools((), ())
    sent = harness.send(agent="billing", conversation="b")
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    if why == "pause":
        pauses.pause(harness.database, **whom)
    else:
        busy = harness.send(agent="assistant", conversation="a")
        harness.claimed(busy.session_id)
    assert fleet.new.run(sent.session_id) == Queued()
    harness.move(harness.settings.turn.unknown_agent_s + 1)
    if why == "pause":
        pauses.resume(harness.database, **whom)
    else:
        assert fleet.old.run(busy.session_id) == Ran(1)
    sweep(harness.runtime)
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    assert fleet.new.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_a_clock_set_back_does_not_prolong_the_time(fleet: Fleet) -> None:
    """The wait then counts from the next refusal, and the turn does not wait a day longer than the setting says."""
    fleet.harness.move(86_400)
    sent = fleet.harness.send(agent="billing")
    fleet.old.run(sent.session_id)
    fleet.harness.move(-86_400)
    fleet.set_tools((), ())
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    fleet.harness.move(fleet.harness.settings.turn.unknown_agent_s + 1)
    assert fleet.old.run(sent.session_id) == Ran(1)
    assert fleet.harness.turn(sent.turn_id)["status"] == "failed"


def test_the_next_turn_of_a_held_session_is_left_to_others(fleet: Fleet) -> None:
    """A worker that has answered a session's turn also leaves the session's next turn of an unknown agent."""
    first, second = fleet.harness.send(agent="assistant"), fleet.harness.send(agent="billing")
    assert fleet.old.run(first.session_id) == Ran(1)
    assert fleet.harness.turn(second.turn_id)["status"] == "parked"
    assert fleet.harness.session(first.session_id).strikes == 0
    assert fleet.new.run(first.session_id) == Ran(1)
    assert fleet.harness.turn(second.turn_id)["attempts"] == 1


def test_a_cancelled_turn_needs_no_agent(fleet: Fleet) -> None:
    """An old worker settles a cancelled turn of an unknown agent as cancelled, even if a new worker began the turn."""
    sent = fleet.harness.send(agent="billing")
    fleet.harness.script(Crash("dead"))
    with pytest.raises(Crash):
        fleet.new.run(sent.session_id)
    fleet.harness.move(LEASE_S + 10)
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    cancel(fleet.harness.runtime, sent.turn_id)
    fleet.old.run(sent.session_id)
    assert fleet.harness.turn(sent.turn_id)["status"] == "cancelled"


def test_a_turn_without_attempts_needs_neither_agent_nor_place(fleet: Fleet) -> None:
    """It does not run, it is only settled as failed: by any worker, in any process, and while its user is paused."""
    sent = fleet.harness.send(agent="billing")
    most = fleet.harness.settings.turn.max_attempts
    fleet.harness.sql("UPDATE sessions SET strikes = %(most)s, claims = %(most)s", most=most)
    pauses.pause(fleet.harness.database, tenant=None, user=UserKey("ana"), agent=None)
    assert fleet.old.run(sent.session_id) == Ran(1)
    assert fleet.harness.turn(sent.turn_id)["error"]["code"] == "BUDGET_EXHAUSTED"


def test_waiting_turns_take_no_place_of_their_user(fleet: Fleet) -> None:
    """Turns that wait for a new worker do not hold back the user's other conversations."""
    fleet.harness.set(user_concurrency=1)
    fleet.set_tools((), ())
    sent = fleet.harness.send(agent="billing", conversation="bills")
    fleet.old.run(sent.session_id)
    fleet.waker.sessions.clear()
    other = fleet.harness.send(agent="assistant", conversation="else")
    assert fleet.waker.sessions == [other.session_id]
    assert fleet.old.run(other.session_id) == Ran(1)
    fleet.new.run(sent.session_id)


def test_a_turn_is_left_to_others_before_its_user_has_a_place(fleet: Fleet) -> None:
    """The old worker does not queue what it lacks the agent for: the new worker decides about the user's places."""
    running = fleet.harness.send(agent="assistant", conversation="else")
    sent = fleet.harness.send(agent="billing", conversation="bills")
    fleet.harness.claimed(running.session_id)
    fleet.harness.set(user_concurrency=1)
    fleet.set_tools((), ())
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    row = fleet.harness.session(sent.session_id)
    assert (row.queued_at, row.unequipped_since is None) == (None, False)
    assert fleet.new.run(sent.session_id) == Queued()


def test_a_missing_tool_at_take_over_leaves_the_turn_to_others(fleet: Fleet) -> None:
    """A worker that takes over a call of a tool that it lacks leaves the turn. A worker with the tool runs the call."""
    fleet.set_tools((), (look,), billing=True)
    sent = fleet.harness.send(agent="billing")
    fleet.harness.script(calls(("look", {})), says("done"))
    with fleet.harness.crashing("before", "turns.step", 2):
        fleet.new.run(sent.session_id)
    fleet.harness.move(LEASE_S * 2)
    for _ in range(2):
        found = fleet.old.run(sent.session_id)
        assert isinstance(found, Unequipped)
        assert "look" in found.lacks
        assert fleet.old.run(sent.session_id) == NotNeeded(), "not at once again"
        fleet.harness.move(fleet.harness.settings.turn.sweep_s)
    before = fleet.harness.session(sent.session_id)
    assert (before.strikes, before.lease_until) == (1, None), "only the death of the new worker is counted"
    assert fleet.harness.turn(sent.turn_id)["attempts"] == 1
    assert fleet.new.run(sent.session_id) == Ran(1)
    assert [text for role, text in fleet.harness.lines(sent.session_id) if role == "tool"] == ["seen"]


def test_a_child_that_lacks_a_tool_is_not_started_again_at_once(fleet: Fleet) -> None:
    """The worker remembers what its child reports, so that it starts no second child for the next wake-up."""
    fleet.set_tools((), (look,), billing=True)
    sent = fleet.harness.send(agent="billing")
    fleet.harness.script(calls(("look", {})), says("done"))
    with fleet.harness.crashing("before", "turns.step", 2):
        fleet.new.run(sent.session_id)
    fleet.harness.move(LEASE_S * 2)
    fleet.harness.sql("UPDATE sessions SET claims = %(claims)s", claims=ISOLATE_FROM_CLAIM)
    started: list[UUID] = []

    def isolate(session_id: UUID) -> ChildEnd:
        started.append(session_id)
        left = child.run(session_id, alone=True)
        assert isinstance(left, Unequipped)
        return ChildEnd(1.0, left=left)

    fleet.harness.agents = _agents(billing=True)
    child = Runner(fleet.harness.runtime, "old alone")
    process = SimpleNamespace(
        runtime=fleet.harness.runtime, runner=fleet.old, isolate=isolate, leaving=threading.Event()
    )
    fleet.waker.sessions.clear()
    for _ in range(2):
        run_task.function(SimpleNamespace(process=process), str(sent.session_id))
    assert started == [sent.session_id]
    assert fleet.waker.sessions == [], "the sweeper wakes the session"
    assert fleet.harness.session(sent.session_id).wakes == 1, "after a pause that is not the shortest"
    fleet.harness.move(CHILD_S - 1)
    run_task.function(SimpleNamespace(process=process), str(sent.session_id))
    assert started == [sent.session_id], "other wake-ups within the time start no child"
    fleet.harness.move(1)
    run_task.function(SimpleNamespace(process=process), str(sent.session_id))
    assert started == [sent.session_id] * 2
    assert fleet.new.run(sent.session_id, alone=True) == Ran(1)


def _approved(fleet: Fleet) -> Any:
    fleet.set_tools((), (refund,), billing=True)
    sent = fleet.harness.send(agent="billing")
    fleet.harness.script(calls(("refund", {"amount": 7})), says("done"))
    fleet.new.run(sent.session_id)
    [asked] = fleet.harness.turn(sent.turn_id)["pending_approvals"]
    decide(fleet.harness.runtime, sent.turn_id, parse_decision({"call_id": asked["call_id"], "decision": "approve"}))
    return sent


def test_a_missing_tool_at_approval_leaves_the_turn_to_others(fleet: Fleet) -> None:
    """A worker without the approved tool does not refuse the call that a person approved."""
    sent = _approved(fleet)
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    assert fleet.new.run(sent.session_id) == Ran(1)
    assert "refunded 7" in str(fleet.harness.lines(sent.session_id))


def test_a_tool_that_no_worker_has_is_refused_in_the_end(fleet: Fleet) -> None:
    """After the setting's time, the model reads that the tool does not exist."""
    sent = _approved(fleet)
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    fleet.harness.move(fleet.harness.settings.turn.unknown_agent_s + 1)
    assert fleet.old.run(sent.session_id) == Ran(1)
    assert "There is no tool 'refund'" in str(fleet.harness.lines(sent.session_id))


def test_an_unconnected_mcp_server_leaves_its_call_to_others(fleet: Fleet) -> None:
    """If only this process is not connected to the MCP server of an approved call, another process runs the call."""
    remote = tool(name="look", effect="idempotent", requires_approval=True)(look.function)
    sent = fleet.harness.send(agent="billing")
    object.__setattr__(remote, "name", "weather:look")
    fleet.set_tools((), (remote,), billing=True)
    fleet.harness.script(calls(("weather:look", {})), says("done"))
    fleet.new.run(sent.session_id)
    [asked] = fleet.harness.turn(sent.turn_id)["pending_approvals"]
    decide(fleet.harness.runtime, sent.turn_id, parse_decision({"call_id": asked["call_id"], "decision": "approve"}))
    fleet.harness.agents = Agents([Agent("billing", "You bill.", [McpServer("weather", url="http://127.0.0.1:9/mcp")])])
    unconnected = Runner(fleet.harness.runtime, "unconnected")
    assert isinstance(unconnected.run(sent.session_id), Unequipped)
    assert fleet.new.run(sent.session_id) == Ran(1)


def test_the_result_of_a_task_arrives_at_the_old_worker(fleet: Fleet) -> None:
    """An old worker records the result of a Celery tool that it does not know. The new worker continues the turn."""
    fleet.harness.calls = broker = Broker()
    fleet.set_tools((), (celery_tool("reports.make", name="report", effect="idempotent"),))
    sent = fleet.harness.send(agent="billing")
    fleet.harness.script(calls(("report", {})), says("done"))
    fleet.new.run(sent.session_id)
    fleet.harness.agents = _agents(billing=False)
    fleet.waker.sessions.clear()
    assert end_task(fleet.harness, broker.sent[0])
    assert fleet.waker.sessions == [sent.session_id]
    assert isinstance(fleet.old.run(sent.session_id), Unequipped)
    assert fleet.new.run(sent.session_id) == Ran(1)
    assert "made" in str(fleet.harness.lines(sent.session_id))


def test_an_applications_message_waits_for_the_new_worker(fleet: Fleet) -> None:
    """An old worker routes a message of `perdure.send` for an agent that only the new worker knows."""
    turn_id = uuid4()
    fleet.harness.sql(
        "INSERT INTO unrouted (turn_id, user_id, message) VALUES (%(id)s, 'ana', %(message)s)",
        id=turn_id,
        message=as_json({"text": "hello", "agent": "billing"}),
    )
    fleet.harness.agents = _agents(billing=False)
    route_due(fleet.harness.runtime)
    session_id = UUID(fleet.harness.turn(turn_id)["session_id"])
    assert isinstance(fleet.old.run(session_id), Unequipped)
    assert fleet.new.run(session_id) == Ran(1)


def test_an_old_gateway_says_that_it_lacks_the_agent_of_a_session(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """The default agent answers: conversations of an agent that was removed go on. A message may name its agent."""
    sent = fleet.harness.send(agent="billing")
    assert fleet.new.run(sent.session_id) == Ran(1)
    fleet.harness.agents = _agents(billing=False)
    with pytest.raises(InvalidRequest, match="There is no agent 'billing'"):
        fleet.harness.send("named", agent="billing")
    fleet.harness.send("for the default agent", agent="assistant")
    assert "lacks" not in caplog.text
    fleet.harness.send("and then?")
    assert f"this process lacks the agent 'billing' of session {sent.session_id}" in caplog.text
    fleet.harness.agents = _agents()
    fleet.harness.send("and now?")
    assert fleet.new.run(sent.session_id) == Ran(3)
    agents = [row.agent for row in fleet.harness.sql("SELECT agent FROM turns ORDER BY seq")]
    assert agents == ["billing", "assistant", "assistant", "billing"]


def _begun(fleet: Fleet, *, pinned: bool) -> UUID:
    """Give the new worker's `billing` one tool more, and let the old worker die in a turn of `billing`."""
    fleet.harness.set(pin_agents=pinned)
    fleet.set_tools((look,), (look, refund), billing=True)
    sent = fleet.harness.send(agent="billing")
    fleet.harness.script(calls(("look", {})), says("done"))
    with fleet.harness.crashing("before", "turns.step", 2):
        fleet.old.run(sent.session_id)
    fleet.harness.move(LEASE_S * 2)
    return sent.session_id


def test_a_pinned_turn_is_left_to_workers_with_the_same_agent(fleet: Fleet) -> None:
    """A worker whose agent has changed since the turn began leaves it. One whose agent has not goes on with it."""
    session_id = _begun(fleet, pinned=True)
    found = fleet.new.run(session_id)
    assert isinstance(found, Unequipped)
    assert "'billing' as it was when the turn began" in found.lacks
    assert fleet.old.run(session_id) == Ran(1)
    fleet.harness.send(agent="billing")
    assert fleet.new.run(session_id) == Ran(1), "what has not begun is anybody's"


def test_a_pinned_turn_goes_on_elsewhere_after_the_settings_time(fleet: Fleet) -> None:
    """If no worker has the agent as it was, the turn goes on with the agent as it is, and is pinned to that one."""
    session_id = _begun(fleet, pinned=True)
    assert isinstance(fleet.new.run(session_id), Unequipped)
    fleet.harness.move(fleet.harness.settings.turn.unknown_agent_s + 1)
    fleet.harness.script(says("nearly done"), says("done"))
    with fleet.harness.crashing("before", "turns.settle", 1):
        fleet.new.run(session_id)
    fleet.harness.move(LEASE_S * 2)
    assert isinstance(fleet.old.run(session_id), Unequipped)
    assert fleet.new.run(session_id) == Ran(1)


def test_a_turn_that_is_not_pinned_goes_on_with_the_changed_agent(fleet: Fleet) -> None:
    """The default: a worker whose agent has changed goes on with the turn at once."""
    session_id = _begun(fleet, pinned=False)
    assert fleet.new.run(session_id) == Ran(1)


def test_the_next_turn_of_a_held_session_is_pinned_to_its_worker(fleet: Fleet) -> None:
    """A worker that answers a session's turns one after the other pins each that it begins."""
    fleet.harness.set(pin_agents=True)
    fleet.set_tools((look,), (look, refund), billing=True)
    first, _second = fleet.harness.send(agent="billing"), fleet.harness.send(agent="billing")
    fleet.harness.script(says("done"), calls(("look", {})))
    with fleet.harness.crashing("before", "turns.step", 1):
        fleet.old.run(first.session_id)
    fleet.harness.move(LEASE_S * 2)
    assert fleet.harness.turn(first.turn_id)["status"] == "done"
    assert isinstance(fleet.new.run(first.session_id), Unequipped)
    fleet.harness.script(calls(("look", {})), says("done"))
    assert fleet.old.run(first.session_id) == Ran(1)


@pytest.mark.parametrize("how", ["cancelled", "interrupted"])
def test_the_next_turn_waits_its_own_time(fleet: Fleet, how: str) -> None:
    """A turn that waited for a worker with its agent was cancelled. The next message has the whole time to wait."""
    harness = fleet.harness
    first = harness.send(agent="billing")
    fleet.old.run(first.session_id)
    harness.move(harness.settings.turn.unknown_agent_s - 1)
    if how == "cancelled":
        cancel(harness.runtime, first.turn_id)
    second = harness.send(agent="billing", on_busy="interrupt")
    assert harness.turn(first.turn_id)["status"] == "cancelled"
    harness.move(harness.settings.turn.unknown_agent_s - 1)
    assert isinstance(fleet.old.run(second.session_id), Unequipped)
    assert fleet.new.run(second.session_id) == Ran(1)
    assert harness.turn(second.turn_id)["status"] == "done"


def test_a_queued_turn_that_is_cancelled_ends_no_wait(fleet: Fleet) -> None:
    """The turn before it still waits, since its first refusal."""
    harness = fleet.harness
    first, second = harness.send(agent="billing"), harness.send(agent="billing")
    fleet.old.run(first.session_id)
    since = harness.session(first.session_id).unequipped_since
    cancel(harness.runtime, second.turn_id)
    assert harness.session(first.session_id).unequipped_since == since is not None
    fleet.new.run(first.session_id)
