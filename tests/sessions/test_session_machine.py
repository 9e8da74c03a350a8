"""Under random triggers and crashes, every change of state is in the table of transitions, and every session ends.

The state machine simulates users, workers that die between any two commits, and workers that take over a session. It
also simulates jumps of the clock, and events during a model call. A database trigger logs the changes of each commit
(see `session_log`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from perdure import tool
from perdure.database.engine import Moment
from perdure.errors import CircuitBreakerOpen, Conflict, NotFound, ProviderError
from perdure.memory.redis.memory import RedisMemory
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.resilience.circuit import CircuitState as Breaker
from perdure.resilience.shared import Transition
from perdure.sessions.ending import Ender, expire_idle, leave, request_end
from perdure.settings import OnBusy
from perdure.tasks.process import Process
from perdure.tasks.sessions import ender
from perdure.turns.calls.approvals import Decision, decide
from perdure.turns.cancel import cancel
from perdure.turns.lease.keeper import Keeper
from perdure.turns.lease.wait_for_model import recall
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from tests.memory.conftest import Remembered, redis_memory, remembered, unreachable
from tests.sessions.session_log import ARROWS, SessionLog
from tests.turns.harness import Crash, Harness
from tests.turns.scripted import calls, says

__all__ = ["redis_memory", "remembered", "unreachable"]

IDLE_S = 1_800.0
LEASE_S = 31.0
DAY_S = 86_400.0
ROUNDS = 40

MEANWHILE = ("cancel", "drain", "end", "idle", "lapse", "message", "nothing", "overtaken")
"""Events that may happen during a model call."""

ASKS: dict[str, list[ModelReply]] = {
    "nothing": [],
    "double": [calls(("double", {"number": 2}))],
    "pay": [calls(("pay", {"number": 2}))],
    "both": [calls(("double", {"number": 2}), ("pay", {"number": 2}))],
}
"""The replies with tool calls that the model gives before its answer."""

FAULTS: dict[str, Exception | None] = {
    "none": None,
    "broken": ProviderError("it is broken", transient=False),
    "open": CircuitBreakerOpen(retry_after_s=LEASE_S),
}
"""The error that the model raises instead of answering, by name; `None`: no error. `open` parks the turn."""

CRASHES = st.none() | st.integers(1, 12)
"""The number of the commit boundary at which the process dies, counted from 1; `None`: no crash."""


@tool(effect="pure")
def double(number: int) -> int:
    """Double the number."""
    return number * 2


@tool(effect="pure", requires_approval=True)
def pay(number: int) -> int:
    """Pay this amount, if a person approves."""
    return number


@dataclass(frozen=True)
class Environment:
    """What the machine works with.

    Attributes:
        harness: The harness whose sessions the machine changes.
        redis_memory: Memory in an available Redis.
        unreachable: Memory in a Redis that does not exist.
        remembered: A function that makes turns for `redis_memory`.
    """

    harness: Harness
    redis_memory: RedisMemory
    unreachable: RedisMemory
    remembered: Remembered

    def ender(self, *, redis_available: bool = True) -> tuple[Ender, Keeper]:
        """Make an ender as the task `sessions.end` does. Returns the ender and the keeper of its leases."""
        runtime = replace(self.harness.runtime, redis_memory=self.redis_memory if redis_available else self.unreachable)
        process = Process(runtime, Runner(runtime, "an ender"), {}, lambda _: None)
        return ender(process), process.runner.keeper


@pytest.fixture
def environment(
    harness: Harness, redis_memory: RedisMemory, unreachable: RedisMemory, remembered: Remembered
) -> Environment:
    """An environment whose agent has two tools.

    Turns are parked while no model is available. A log records the changes of sessions.
    """
    harness.equip(double, pay)
    # After the clock is set back, a runner waits in real time for calls in doubt. A short tool timeout limits the wait.
    harness.set(tool_timeout_s=0.1, on_unavailable="park")
    harness.redis_memory = redis_memory
    SessionLog(harness.sql).begin()
    return Environment(harness, redis_memory, unreachable, remembered)


class SessionMachine(RuleBasedStateMachine):
    """Actions on the sessions of one user, and the invariants of the sessions."""

    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self.environment = environment
        self.harness = harness = environment.harness
        self.session_log = SessionLog(harness.sql)
        self.user = str(uuid4())
        self.sessions: list[UUID] = []
        self.turns: list[UUID] = []

    # --- what users do -------------------------------------------------------------------

    @rule(on_busy=st.sampled_from(OnBusy), channel=st.sampled_from(["cli", "http"]))
    def say(self, on_busy: OnBusy = OnBusy.ENQUEUE, channel: str = "cli") -> None:
        """Send a message."""
        try:
            sent = self.harness.send("hello", user_id=self.user, on_busy=on_busy, channel=channel)
        except Conflict:
            assert on_busy is OnBusy.REJECT
            return
        self.turns.append(sent.turn_id)
        if sent.session_id not in self.sessions:
            self.sessions.append(sent.session_id)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 50))
    def cancel(self, which: int = 0) -> None:
        """Cancel one of the last turns."""
        cancel(self.harness.runtime, self.turns[-1 - which % len(self.turns)])

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 50))
    def request_end(self, which: int = 0) -> None:
        """Request the end of one of the sessions. For an ended session the request is refused and changes nothing."""
        session_id = self.sessions[-1 - which % len(self.sessions)]
        before = self.harness.session(session_id)
        try:
            request_end(self.harness.database, session_id, "enough")
        except Conflict:
            assert before.state == "ended"
            assert self.harness.session(session_id) == before

    @precondition(lambda self: self.sessions)
    @rule()
    def leave(self) -> None:
        """Let the user leave the channel `cli` of the newest session."""
        leave(self.harness.database, self.sessions[-1], "cli", IDLE_S)

    @precondition(lambda self: self.turns)
    @rule(approve=st.booleans())
    def decide(self, *, approve: bool = True) -> None:
        """For each of the last three turns, approve or deny the first call that waits for approval."""
        for turn_id in self.turns[-3:]:
            for pending in self.harness.turn(turn_id)["pending_approvals"][:1]:
                decision = Decision(call_id=pending["call_id"], decision="approve" if approve else "deny")
                decide(self.harness.runtime, turn_id, decision)

    # --- what workers do -----------------------------------------------------------------

    @precondition(lambda self: self.sessions)
    @rule(
        asks=st.sampled_from(sorted(ASKS)),
        meanwhile=st.lists(st.sampled_from(MEANWHILE), min_size=2, max_size=2),
        fault=st.sampled_from(sorted(FAULTS)),
        crash=CRASHES,
    )
    def run(
        self, asks: str = "nothing", meanwhile: Sequence[str] = (), fault: str = "none", crash: int | None = None
    ) -> None:
        """Run the newest session with a worker, which may crash."""
        runner = Runner(self.harness.runtime, "a worker")
        first, second = meanwhile or ("nothing", "nothing")
        lines = [self._line(first, runner.keeper, reply) for reply in ASKS[asks]]
        self.harness.script(*lines, self._line(second, runner.keeper, FAULTS[fault] or says("done")))
        self._dying(crash, lambda: runner.run(self.sessions[-1]))

    @precondition(lambda self: self.sessions)
    @rule(
        which=st.integers(0, 50),
        meanwhile=st.sampled_from(MEANWHILE),
        fault=st.sampled_from(sorted(FAULTS)),
        redis_available=st.booleans(),
        crash=CRASHES,
    )
    def end(
        self,
        which: int = 0,
        meanwhile: str = "nothing",
        fault: str = "none",
        *,
        redis_available: bool = True,
        crash: int | None = None,
    ) -> None:
        """Let a worker end a session. The worker may crash, or Redis may be unavailable."""
        session_id = self.sessions[-1 - which % len(self.sessions)]
        session_ender, keeper = self.environment.ender(redis_available=redis_available)
        self.harness.script(self._line(meanwhile, keeper, FAULTS[fault] or says('{"summary": "They met."}')))
        self._dying(crash, lambda: session_ender.end(session_id))

    @precondition(lambda self: self.sessions and self.harness.session(self.sessions[-1]).state != "ended")
    @rule()
    def lose_a_turn(self) -> None:
        """Put into Redis a turn that PostgreSQL has lost, as after a failover."""
        session_id = self.sessions[-1]
        token = self.harness.session(session_id).token
        self.environment.redis_memory.working.remember_turn(session_id, self.environment.remembered(token))

    @rule()
    def recall(self) -> None:
        """Report that the model's breaker has closed, so that parked turns are due."""
        recall(self.harness.database, Transition("llm:scripted", Breaker.HALF_OPEN, Breaker.CLOSED, 0, fleet=True))

    @rule()
    def sweep(self) -> None:
        """Run a sweep whose wake-ups are lost."""
        sweep(self.harness.runtime)

    @rule()
    def expire_idle(self) -> None:
        """Request the end of idle sessions, as a scheduled task does each minute."""
        expire_idle(self.harness.database, IDLE_S)

    @rule(seconds=st.sampled_from([1.0, LEASE_S, IDLE_S + 1, DAY_S, -DAY_S]))
    def pass_time(self, seconds: float) -> None:
        """Advance the clock, or set it back."""
        self.harness.move(seconds)

    # --- what must hold ------------------------------------------------------------------

    @invariant()
    def changes_of_state_are_in_the_table(self) -> None:
        """Check that all changes of state so far are in the table of transitions."""
        self.session_log.check_arrows()

    def teardown(self) -> None:
        """Request the end of every session, and check that sweeps and their wake-ups end all sessions."""
        for session_id in self.sessions:
            if self.harness.session(session_id).state != "ended":
                request_end(self.harness.database, session_id, "enough")
        for _ in range(ROUNDS):
            self.harness.waker.sessions.clear()
            self.harness.waker.endings.clear()
            self.harness.move(400)
            sweep(self.harness.runtime)
            self._follow()
            if all(self.harness.session(session_id).state == "ended" for session_id in self.sessions):
                break
        self.session_log.check_arrows()
        for session_id in self.sessions:
            row = self.harness.session(session_id)
            assert (row.state, row.unsettled, row.lease_until) == ("ended", 0, None)
            self.session_log.check_ended(session_id)
            assert self.environment.redis_memory.working.read(session_id) == ()
            kept = "SELECT count(*) FROM snapshots WHERE session_id = %(id)s"
            assert self.harness.sql(kept, id=session_id)[0][0] == 0

    # --- helpers -------------------------------------------------------------------------

    def _follow(self) -> None:
        """Handle the published wake-ups."""
        for session_id in list(self.harness.waker.sessions):
            self.harness.script()
            Runner(self.harness.runtime, "the last worker").run(session_id, alone=True)
        for session_id in list(self.harness.waker.endings):
            self.harness.script(says('{"summary": "They met."}'))
            self.environment.ender()[0].end(session_id)

    def _line(
        self, meanwhile: str, keeper: Keeper, answer: ModelReply | Exception
    ) -> Callable[[ModelRequest, ModelCall], ModelReply]:
        """A scripted model call: the event `meanwhile` happens, and then the call returns or raises `answer`."""

        def think(request: ModelRequest, call: ModelCall) -> ModelReply:
            observe, self.harness.database.observe = (
                self.harness.database.observe,
                None,
            )  # the planned crash does not apply to other workers
            try:
                self._happen(meanwhile, keeper)
            finally:
                self.harness.database.observe = observe
            call.check()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return think

    def _happen(self, what: str, keeper: Keeper) -> None:
        match what:
            case "cancel":
                self.cancel()
            case "drain":
                keeper.begin_shutdown()
            case "end":
                self.request_end()
            case "idle":
                self.harness.move(IDLE_S + 1)
                self.expire_idle()
            case "lapse":
                self.harness.move(LEASE_S)
            case "message":
                self.say()
            case "overtaken":
                self.harness.move(LEASE_S)
                self.run()
                self.end()
            case _:
                assert what == "nothing"

    def _dying(self, at: int | None, work: Callable[[], object]) -> None:
        """Call `work`. The process dies at the `at`-th commit boundary (before or after a commit)."""
        passed = itertools.count(1)

        def observe(moment: Moment, name: str) -> None:
            if next(passed) == at:
                raise Crash(f"{moment} {name}")

        self.harness.database.observe = observe
        try:
            work()
        except Crash:
            return
        finally:
            self.harness.database.observe = None


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_random_sequences_keep_to_the_table(environment: Environment) -> None:
    """Random triggers and crashes cause only changes of state in the table of transitions, and each session ends."""

    class InThisEnvironment(SessionMachine):
        def __init__(self) -> None:
            super().__init__(environment)

    run_state_machine_as_test(
        InThisEnvironment,
        settings=settings(
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_machine_can_make_every_transition(environment: Environment) -> None:
    """A fixed sequence of the machine's rules makes every transition of the table. Random sequences can do the same."""
    machine = SessionMachine(environment)
    for asks in ("double", "pay", "both"):
        machine.say()
        machine.run(asks)
        machine.decide()
        machine.run()
    machine.say()
    machine.run(fault="open")
    row = machine.harness.session(machine.sessions[-1])
    assert (row.state, row.not_before > machine.harness.clock.now()) == ("active", True)
    machine.recall()
    machine.run("pay")
    machine.cancel()  # the turn waits for approval
    machine.say()
    machine.run("double", crash=4)  # after the commit with the tool call
    assert machine.harness.session(machine.sessions[-1]).state == "tool_executing"
    machine.cancel()
    machine.pass_time(LEASE_S)
    machine.run()  # another runner continues after the crash, and cancels the turn
    machine.lose_a_turn()
    machine.request_end()
    machine.end(redis_available=False)
    assert machine.harness.session(machine.sessions[-1]).state == "ending"
    machine.teardown()
    moved = machine.harness.sql("SELECT DISTINCT before, after FROM session_log WHERE what = 'moved'")
    assert {(row.before, row.after) for row in moved} == ARROWS
    assert "question 1" in [content for _, content in machine.harness.lines(machine.sessions[-1])]


def test_the_refusal_of_an_unknown_session_changes_nothing(harness: Harness) -> None:
    """Requesting the end of an unknown session raises `NotFound` and writes nothing."""
    harness.send()
    before = harness.counts()
    with pytest.raises(NotFound):
        request_end(harness.database, uuid4(), "enough")
    assert harness.counts() == before
