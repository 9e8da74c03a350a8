"""A session's life under random triggers and crashes: only what the table holds is ever seen, and it ends.

A state machine that plays users, workers that die between any two commits, others that take over,
clocks that jump, and everything that may happen while a model is thinking. What is seen is written
down by the database (`chronicle`), so that no commit escapes, whoever made it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from perdure import tool
from perdure.database.engine import Moment
from perdure.errors import Conflict, NotFound, ProviderError
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.sessions.ending import expire_idle, leave, request_end
from perdure.settings import OnBusy
from perdure.turns.cancelling import cancel
from perdure.turns.lease import Keeper
from perdure.turns.runner import Runner
from perdure.turns.sweep import sweep
from tests.sessions.chronicle import Chronicle
from tests.sessions.conftest import ender
from tests.turns.scripted import calls, says
from tests.turns.stage import Crash, Stage

IDLE_S = 1_800.0
LEASE_S = 31.0
DAY_S = 86_400.0
ROUNDS = 40

MEANWHILE = ("cancel", "drain", "end", "idle", "lapse", "message", "nothing", "overtaken")
"""What may happen while a model is thinking."""

CRASHES = st.none() | st.integers(1, 12)
"""At which commit boundary the process dies, if at any."""


@tool(effect="pure")
def double(number: int) -> int:
    """Double it."""
    return number * 2


class Life(RuleBasedStateMachine):
    """One user's sessions."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
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
    def cancel(self, which: int = -1) -> None:
        """One of the last messages is taken back."""
        cancel(self.stage.runtime, self.turns[-1 - which % len(self.turns)])

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 50))
    def request_end(self, which: int = -1) -> None:
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

    # --- what workers do -----------------------------------------------------------------

    @precondition(lambda self: self.sessions)
    @rule(
        asks=st.booleans(),
        meanwhile=st.lists(st.sampled_from(MEANWHILE), min_size=2, max_size=2),
        fails=st.booleans(),
        crash=CRASHES,
    )
    def run(
        self, asks: bool = False, meanwhile: list[str] | None = None, fails: bool = False, crash: int | None = None
    ) -> None:
        """A worker runs the newest session, or dies of it."""
        runner = Runner(self.stage.runtime, "a worker")
        answer = ProviderError("it is down") if fails else says("done")
        first, second = meanwhile or ["nothing", "nothing"]
        asking = [self._line(first, runner.keeper, calls(("double", {"number": 2})))] if asks else []
        self.stage.script(*asking, self._line(second, runner.keeper, answer))
        self._dying(crash, lambda: runner.run(self.sessions[-1]))

    @precondition(lambda self: self.sessions)
    @rule(which=st.integers(0, 50), meanwhile=st.sampled_from(MEANWHILE), fails=st.booleans(), crash=CRASHES)
    def end(self, which: int = -1, meanwhile: str = "nothing", fails: bool = False, crash: int | None = None) -> None:
        """A worker ends a session, or dies of it."""
        session_id = self.sessions[-1 - which % len(self.sessions)]
        keeper = Keeper(self.stage.database, self.stage.clock, self.stage.settings.turn)
        answer = ProviderError("it is down") if fails else says('{"summary": "They met."}')
        self.stage.script(self._line(meanwhile, keeper, answer))
        self._dying(crash, lambda: ender(self.stage, keeper, lambda _: None).end(session_id))

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
        """By whoever reads, at any commit."""
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
            for session_id in list(self.stage.waker.sessions):
                self.stage.script()
                Runner(self.stage.runtime, "the last worker").run(session_id, alone=True)
            for session_id in list(self.stage.waker.endings):
                self.stage.script(says('{"summary": "They met."}'))
                keeper = Keeper(self.stage.database, self.stage.clock, self.stage.settings.turn)
                ender(self.stage, keeper, lambda _: None).end(session_id)
            if all(self.stage.session(session_id).state == "ended" for session_id in self.sessions):
                break
        self.chronicle.check_arrows()
        for session_id in self.sessions:
            row = self.stage.session(session_id)
            assert (row.state, row.unsettled, row.lease_until) == ("ended", 0, None)
            self.chronicle.check_ended(session_id)

    # --- means ---------------------------------------------------------------------------

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
def test_whatever_happens_every_session_ends_by_the_table(stage: Stage) -> None:
    """Random triggers, interleaved crashes: no state outside the table is ever observable."""
    stage.equip(double)
    stage.set(tool_timeout_s=0.1)  # what a clock that was set back leaves undecided is waited for by real time
    Chronicle(stage.sql).begin()

    class OnThisStage(Life):
        def __init__(self) -> None:
            super().__init__(stage)

    run_state_machine_as_test(
        OnThisStage,
        settings=settings(
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_refusal_of_an_unknown_session_changes_nothing(stage: Stage) -> None:
    """There is nothing to end."""
    stage.send()
    before = stage.counts()
    with pytest.raises(NotFound):
        request_end(stage.database, uuid4(), "enough")
    assert stage.counts() == before
