"""A session's life under random triggers and crashes: only what the table holds is ever seen, and it ends.

A state machine that plays users, workers that die between any two commits, others that take over,
clocks that jump, and everything that may happen while a model is thinking. What is seen is written
down by the database (`chronicle`), so that no commit escapes, whoever made it.
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
from perdure.resilience.circuit import State as Breaker
from perdure.resilience.shared import Transition
from perdure.sessions.ending import Ender, expire_idle, leave, request_end
from perdure.settings import OnBusy
from perdure.tasks.process import Process
from perdure.tasks.sessions import ender
from perdure.turns.calls.approvals import Decision, decide
from perdure.turns.cancel import cancel
from perdure.turns.lease.keeper import Keeper
from perdure.turns.lease.parking import recall
from perdure.turns.run.runner import Runner
from perdure.turns.sweep import sweep
from tests.memory.conftest import Remembered, redis_memory, remembered, unreachable
from tests.sessions.chronicle import ARROWS, Chronicle
from tests.turns.scripted import calls, says
from tests.turns.stage import Crash, Stage

__all__ = ["redis_memory", "remembered", "unreachable"]

IDLE_S = 1_800.0
LEASE_S = 31.0
DAY_S = 86_400.0
ROUNDS = 40

MEANWHILE = ("cancel", "drain", "end", "idle", "lapse", "message", "nothing", "overtaken")
"""What may happen while a model is thinking."""

ASKS: dict[str, list[ModelReply]] = {
    "nothing": [],
    "double": [calls(("double", {"number": 2}))],
    "pay": [calls(("pay", {"number": 2}))],
    "both": [calls(("double", {"number": 2}), ("pay", {"number": 2}))],
}
"""What a turn's model asks for before it answers."""

FAULTS: dict[str, Exception | None] = {
    "none": None,
    "broken": ProviderError("it is broken", transient=False),
    "open": CircuitBreakerOpen(retry_after_s=LEASE_S),
}
"""Why it does not answer; behind an open breaker a turn is parked."""

CRASHES = st.none() | st.integers(1, 12)
"""At which commit boundary the process dies, if at any."""


@tool(effect="pure")
def double(number: int) -> int:
    """Double it."""
    return number * 2


@tool(effect="pure", requires_approval=True)
def pay(number: int) -> int:
    """Pay it, if a person approves."""
    return number


@dataclass(frozen=True)
class World:
    """The parts of a process, a Redis that may be unavailable, and the record of the sessions."""

    stage: Stage
    redis_memory: RedisMemory
    unreachable: RedisMemory
    remembered: Remembered

    def ender(self, *, redis_is_there: bool = True) -> tuple[Ender, Keeper]:
        """Ends sessions as the task does, cleaning included; and who keeps its leases."""
        runtime = replace(self.stage.runtime, redis_memory=self.redis_memory if redis_is_there else self.unreachable)
        process = Process(runtime, Runner(runtime, "an ender"), {}, lambda _: True)
        return ender(process), process.runner.keeper


@pytest.fixture
def world(stage: Stage, redis_memory: RedisMemory, unreachable: RedisMemory, remembered: Remembered) -> World:
    """With tools, one of which needs a person; turns wait for their model; whatever becomes of sessions is noted."""
    stage.equip(double, pay)
    # What a clock that was set back leaves undecided is waited for by real time.
    stage.set(tool_timeout_s=0.1, on_unavailable="park")
    stage.redis_memory = redis_memory
    Chronicle(stage.sql).begin()
    return World(stage, redis_memory, unreachable, remembered)


class Life(RuleBasedStateMachine):
    """One user's sessions."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.stage = stage = world.stage
        self.chronicle = Chronicle(stage.sql)
        self.user = str(uuid4())
        self.sessions: list[UUID] = []
        self.turns: list[UUID] = []

    # --- what users do -------------------------------------------------------------------

    @rule(on_busy=st.sampled_from(OnBusy), channel=st.sampled_from(["cli", "http"]))
    def say(self, on_busy: OnBusy = OnBusy.ENQUEUE, channel: str = "cli") -> None:
        """A message comes."""
        try:
            sent = self.stage.send("hello", user_id=self.user, on_busy=on_busy, channel=channel)
        except Conflict:
            assert on_busy is OnBusy.REJECT
            return
        self.turns.append(sent.turn_id)
        if sent.session_id not in self.sessions:
            self.sessions.append(sent.session_id)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 50))
    def cancel(self, which: int = 0) -> None:
        """One of the last messages is taken back."""
        cancel(self.stage.runtime, self.turns[-1 - which % len(self.turns)])

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 50))
    def request_end(self, which: int = 0) -> None:
        """An end is asked for; of what has ended it is refused, and nothing changes."""
        session_id = self.sessions[-1 - which % len(self.sessions)]
        before = self.stage.session(session_id)
        try:
            request_end(self.stage.database, session_id, "enough")
        except Conflict:
            assert before.state == "ended"
            assert self.stage.session(session_id) == before

    @precondition(lambda self: self.sessions)
    @rule()
    def leave(self) -> None:
        """The person at the terminal goes."""
        leave(self.stage.database, self.sessions[-1], "cli", IDLE_S)

    @precondition(lambda self: self.turns)
    @rule(approve=st.booleans())
    def decide(self, *, approve: bool = True) -> None:
        """A person decides about the next call that waits."""
        for turn_id in self.turns[-3:]:
            for pending in self.stage.turn(turn_id)["pending_approvals"][:1]:
                decision = Decision(call_id=pending["call_id"], decision="approve" if approve else "deny")
                decide(self.stage.runtime, turn_id, decision)

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
        """A worker runs the newest session, or dies of it."""
        runner = Runner(self.stage.runtime, "a worker")
        first, second = meanwhile or ("nothing", "nothing")
        lines = [self._line(first, runner.keeper, reply) for reply in ASKS[asks]]
        self.stage.script(*lines, self._line(second, runner.keeper, FAULTS[fault] or says("done")))
        self._dying(crash, lambda: runner.run(self.sessions[-1]))

    @precondition(lambda self: self.sessions)
    @rule(
        which=st.integers(0, 50),
        meanwhile=st.sampled_from(MEANWHILE),
        fault=st.sampled_from(sorted(FAULTS)),
        redis_is_there=st.booleans(),
        crash=CRASHES,
    )
    def end(
        self,
        which: int = 0,
        meanwhile: str = "nothing",
        fault: str = "none",
        *,
        redis_is_there: bool = True,
        crash: int | None = None,
    ) -> None:
        """A worker ends a session, or dies, or finds Redis unavailable."""
        session_id = self.sessions[-1 - which % len(self.sessions)]
        hands, keeper = self.world.ender(redis_is_there=redis_is_there)
        self.stage.script(self._line(meanwhile, keeper, FAULTS[fault] or says('{"summary": "They met."}')))
        self._dying(crash, lambda: hands.end(session_id))

    @precondition(lambda self: self.sessions and self.stage.session(self.sessions[-1]).state != "ended")
    @rule()
    def lose_a_turn(self) -> None:
        """A failover loses a commit that Redis remembers the turn of; after an end it would lose that first."""
        session_id = self.sessions[-1]
        token = self.stage.session(session_id).token
        self.world.redis_memory.working.remember_turn(session_id, self.world.remembered(token))

    @rule()
    def recall(self) -> None:
        """A breaker closes: what is parked need not wait."""
        recall(self.stage.database, Transition("llm:scripted", Breaker.HALF_OPEN, Breaker.CLOSED, 0, fleet=True))

    @rule()
    def sweep(self) -> None:
        """What is due is woken; the wake-ups are lost."""
        sweep(self.stage.runtime)

    @rule()
    def expire_idle(self) -> None:
        """Beat's minute has come."""
        expire_idle(self.stage.database, IDLE_S)

    @rule(seconds=st.sampled_from([1.0, LEASE_S, IDLE_S + 1, DAY_S, -DAY_S]))
    def pass_time(self, seconds: float) -> None:
        """Time passes, or the server's clock is set; that is set ahead at most as far as it was set back."""
        self.stage.move(seconds)

    # --- what must hold ------------------------------------------------------------------

    @invariant()
    def only_what_the_table_holds_is_seen(self) -> None:
        """Checked after every commit."""
        self.chronicle.check_arrows()

    def teardown(self) -> None:
        """Whatever happened: asked to end, every session ends, by sweeps and wake-ups alone."""
        for session_id in self.sessions:
            if self.stage.session(session_id).state != "ended":
                request_end(self.stage.database, session_id, "enough")
        for _ in range(ROUNDS):
            self.stage.waker.sessions.clear()
            self.stage.waker.endings.clear()
            self.stage.move(400)
            sweep(self.stage.runtime)
            self._follow()
            if all(self.stage.session(session_id).state == "ended" for session_id in self.sessions):
                break
        self.chronicle.check_arrows()
        for session_id in self.sessions:
            row = self.stage.session(session_id)
            assert (row.state, row.unsettled, row.lease_until) == ("ended", 0, None)
            self.chronicle.check_ended(session_id)
            assert self.world.redis_memory.working.read(session_id) == ()
            kept = "SELECT count(*) FROM snapshots WHERE session_id = %(id)s"
            assert self.stage.sql(kept, id=session_id)[0][0] == 0

    # --- means ---------------------------------------------------------------------------

    def _follow(self) -> None:
        """Do what was woken."""
        for session_id in list(self.stage.waker.sessions):
            self.stage.script()
            Runner(self.stage.runtime, "the last worker").run(session_id, alone=True)
        for session_id in list(self.stage.waker.endings):
            self.stage.script(says('{"summary": "They met."}'))
            self.world.ender()[0].end(session_id)

    def _line(
        self, meanwhile: str, keeper: Keeper, answer: ModelReply | Exception
    ) -> Callable[[ModelRequest, ModelCall], ModelReply]:
        """The model's answer, after what happens while it thinks."""

        def think(request: ModelRequest, call: ModelCall) -> ModelReply:
            observe, self.stage.database.observe = self.stage.database.observe, None  # others do not die of our crash
            try:
                self._happen(meanwhile, keeper)
            finally:
                self.stage.database.observe = observe
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
                keeper.drain()
            case "end":
                self.request_end()
            case "idle":
                self.stage.move(IDLE_S + 1)
                self.expire_idle()
            case "lapse":
                self.stage.move(LEASE_S)
            case "message":
                self.say()
            case "overtaken":
                self.stage.move(LEASE_S)
                self.run()
                self.end()
            case _:
                assert what == "nothing"

    def _dying(self, at: int | None, work: Callable[[], object]) -> None:
        """Do it, up to the `at`-th boundary of a commit, where the process dies."""
        passed = itertools.count(1)

        def observe(moment: Moment, name: str) -> None:
            if next(passed) == at:
                raise Crash(f"{moment} {name}")

        self.stage.database.observe = observe
        try:
            work()
        except Crash:
            return
        finally:
            self.stage.database.observe = None


@pytest.mark.timeout(300)
def test_whatever_happens_every_session_ends_by_the_table(world: World) -> None:
    """Random triggers, interleaved crashes: no state outside the table is ever observable."""

    class InThisWorld(Life):
        def __init__(self) -> None:
            super().__init__(world)

    run_state_machine_as_test(
        InThisWorld,
        settings=settings(
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_such_a_life_may_lead_anywhere(world: World) -> None:
    """By the same hands every arrow of the table is gone: what the random ones may find, they are able to."""
    life = Life(world)
    for asks in ("double", "pay", "both"):
        life.say()
        life.run(asks)
        life.decide()
        life.run()
    life.say()
    life.run(fault="open")
    row = life.stage.session(life.sessions[-1])
    assert (row.state, row.not_before > life.stage.clock.now()) == ("active", True)
    life.recall()
    life.run("pay")
    life.cancel()  # it waits for a person
    life.say()
    life.run("double", crash=4)  # behind the commit that asks for the tool
    assert life.stage.session(life.sessions[-1]).state == "tool_executing"
    life.cancel()
    life.pass_time(LEASE_S)
    life.run()  # taken over in the middle of a tool, and cancelled
    life.lose_a_turn()
    life.request_end()
    life.end(redis_is_there=False)
    assert life.stage.session(life.sessions[-1]).state == "ending"
    life.teardown()
    moved = life.stage.sql("SELECT DISTINCT before, after FROM chronicle WHERE what = 'moved'")
    assert {(row.before, row.after) for row in moved} == ARROWS
    assert "question 1" in [content for _, content in life.stage.lines(life.sessions[-1])]


def test_the_refusal_of_an_unknown_session_changes_nothing(stage: Stage) -> None:
    """There is nothing to end."""
    stage.send()
    before = stage.counts()
    with pytest.raises(NotFound):
        request_end(stage.database, uuid4(), "enough")
    assert stage.counts() == before
