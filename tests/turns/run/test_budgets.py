"""Budgets: what a turn, and a user's or a tenant's turns of a day, may cost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import exceptions
from pydantic_ai.capabilities import Hooks
from pydantic_ai.messages import ModelResponse

from perdure import Agent, adapt, agent_tool, effect, tool
from perdure.access.tenants import user_key
from perdure.agents import Agents
from perdure.assembly import check
from perdure.database.engine import Database
from perdure.errors import BudgetExhausted, SettingsError, Unavailable
from perdure.models.prices import cost
from perdure.models.protocol import CallAborted, ModelCall, ModelReply, ModelRequest, ToolCall, Usage
from perdure.observe.status import _reason
from perdure.settings import BudgetSettings, Settings
from perdure.turns.budgets import TurnBudget, spent_today
from perdure.turns.cancel import cancel
from perdure.turns.costs import cost_of
from perdure.turns.inbox.accept import Accepted
from perdure.turns.lease.claim import Ran
from perdure.turns.lease.tenure import LeaseLost
from perdure.turns.reading import OVER_BUDGET
from perdure.turns.run.loop import Runner
from perdure.turns.sweep import sweep
from perdure.users.erase import Eraser
from tests.turns.broker import Broker
from tests.turns.counting import AFTER_LEASE_S
from tests.turns.harness import Crash, Harness, side_by_side, until
from tests.turns.test_cost import counted

MODEL, CHEAP = "openai:gpt-5-mini", "openai:gpt-5-nano"
REPLIED = Decimal("0.0006")
"""What each scripted reply costs: 800 tokens of input, 200 of output, at the prices of `MODEL`."""

MOST = 1_000
"""The most tokens of a reply. They cost 0.002 dollars, and the prompt about 0.0001."""

TOTALS = "SELECT sum(total) AS total FROM turn_spendings"

Stops = Callable[[Harness, Runner, Accepted], None]
"""Stops a turn during its model call."""


@tool(effect="pure")
def look() -> str:
    """Look."""
    return "seen"


def _says(text: str = "yes", model: str = "gpt-5-mini-2025-08-07") -> ModelReply:
    return ModelReply(text, (), Usage(800, 200), model)


def _looks() -> ModelReply:
    return ModelReply("", (ToolCall("c", "look", "{}"),), Usage(800, 200), "gpt-5-mini")


def _own(harness: Harness, **given: Any) -> None:
    given = {"model": MODEL, "settings": {"max_tokens": MOST}, **given}
    harness.agents = Agents([Agent("assistant", "You help.", [look], **given)])


def _adapted(harness: Harness, **given: Any) -> None:
    bare = PydanticAgent(name="assistant", instructions="You help.", model_settings={"max_tokens": MOST})
    bare.tool_plain(metadata=effect("pure"))(look.function)
    harness.agents = Agents([adapt(bare, model=MODEL, **given)])


kinds = pytest.mark.parametrize("make", [_own, _adapted])


def _limit(harness: Harness, **limits: Any) -> None:
    harness.settings = harness.settings.model_copy(update={"budget": BudgetSettings(**limits)})


def _spent(harness: Harness, kind: str = "user") -> list[Decimal]:
    return [
        row.amount
        for row in harness.sql("SELECT amount FROM day_spendings WHERE kind = %(k)s ORDER BY day, key", k=kind)
    ]


@kinds
def test_a_turn_over_its_budget_fails(harness: Harness, make: Any) -> None:
    """The call is not made. The error names the setting, and what the turn has cost stays counted."""
    make(harness)
    _limit(harness, turn="0.0025", user_day=1, tenant_day=1)
    harness.script(_looks(), _says("never"))
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"], turn["steps"]) == ("failed", "BUDGET_EXHAUSTED", 1)
    assert "0.0025 US dollars (PERDURE_BUDGET__TURN)" in turn["error"]["message"]
    assert _spent(harness) == _spent(harness, "tenant") == [REPLIED]
    assert harness.ask("again")["reply"]["text"] == "never"


@kinds
@pytest.mark.parametrize("limit", ["user_day", "tenant_day"])
def test_a_day_over_its_budget_fails(harness: Harness, make: Any, limit: str) -> None:
    """Of the same user or tenant; others have their own. The next day begins at midnight in the installation's zone."""
    make(harness)
    _limit(harness, **{limit: "0.003"})
    harness.settings = harness.settings.model_copy(update={"timezone": "Asia/Tokyo"})
    zoned = "SELECT extract(epoch FROM date_trunc('day', t) + interval '1 day' - t)::float FROM (SELECT perdure_now() "
    left_s = harness.sql(zoned + "AT TIME ZONE 'Asia/Tokyo' AS t) AS now")[0][0]
    harness.move(left_s + 3_600)
    harness.script(*[_says()] * 5)
    ask = {"user": user_key("acme", "ana")}
    for _ in range(2):
        assert harness.ask(**ask)["status"] == "done"
    turn = harness.ask(**ask)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "BUDGET_EXHAUSTED")
    assert f"PERDURE_BUDGET__{limit.upper()}" in turn["error"]["message"]
    assert harness.ask(user=user_key("acme", "ben"))["status"] == ("done" if limit == "user_day" else "failed")
    assert harness.ask(user=user_key("other", "ana"))["status"] == "done"
    harness.move(83_000)  # less than a day
    assert harness.ask(**ask)["status"] == "done"


def test_a_day_begins_at_midnight_of_summer_time(harness: Harness) -> None:
    """Also in a zone whose name is, to PostgreSQL, an abbreviation of its winter time."""
    _own(harness)
    _limit(harness, user_day=1)
    harness.settings = harness.settings.model_copy(update={"timezone": "CET"})
    now = harness.clock.now()
    evening = now.replace(year=now.year + 1, month=7, day=15, hour=22, minute=30)
    harness.move((evening - now).total_seconds())
    harness.script(_says())
    assert harness.ask()["status"] == "done"
    [row] = harness.sql("SELECT day FROM day_spendings")
    assert row.day == evening.date() + timedelta(days=1)


@kinds
def test_a_turn_that_continues_on_another_day_counts_on_each(harness: Harness, make: Any) -> None:
    """What it cost before midnight does not count again."""
    make(harness)
    _limit(harness, user_day="0.0056", on_exceeded="park")
    harness.script(*[_says()] * 5, _looks(), _says("done"))
    for _ in range(5):
        harness.ask()
    turn = harness.ask()
    assert (turn["status"], turn["steps"]) == ("parked", 1)
    assert _spent(harness) == [REPLIED * 6]
    harness.move(86_400)
    assert isinstance(harness.run(UUID(turn["session_id"])), Ran)
    assert harness.turn(UUID(turn["turn_id"]))["reply"]["text"] == "done"
    assert _spent(harness) == [REPLIED * 6, REPLIED]


@kinds
def test_a_parked_turn_waits_without_a_worker(harness: Harness, make: Any) -> None:
    """It says why, other users' turns do not wait behind it, and it goes on when the limit is raised."""
    make(harness)
    _limit(harness, user_day="0.003", on_exceeded="park")
    harness.script(*[_says()] * 4)
    harness.ask(), harness.ask()
    turn = harness.ask()
    session = harness.session(UUID(turn["session_id"]))
    assert (turn["status"], turn["delayed"]["code"]) == ("parked", "BUDGET_EXHAUSTED")
    assert turn["delayed"]["message"] == OVER_BUDGET
    assert (session.lease_until, session.parked_for, session.strikes) == (None, "PERDURE_BUDGET__USER_DAY", 0)
    assert harness.ask(user_id="ben")["status"] == "done"
    _limit(harness, user_day="0.01", on_exceeded="park")
    harness.move(605)
    harness.waker.sessions.clear()
    sweep(harness.runtime)
    assert harness.waker.sessions == [session.session_id]
    harness.run(session.session_id)
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "done"


@pytest.mark.parametrize("limit", ["turn", "user_day"])
def test_a_turn_does_not_wait_in_vain(harness: Harness, limit: str) -> None:
    """No day makes room for a call that exceeds the whole limit, or for a turn that is over its own."""
    _own(harness)
    _limit(harness, **{limit: "0.001"}, on_exceeded="park")
    assert harness.ask()["error"]["code"] == "BUDGET_EXHAUSTED"
    assert harness.model.requests == []


@kinds
def test_a_cheaper_model_answers(harness: Harness, make: Any) -> None:
    """It gets the call that exceeds the budget, and its replies cost what it costs. If even that is too much: fail."""
    make(harness)
    _limit(harness, user_day="0.003", on_exceeded=CHEAP)
    asked: list[str] = []
    harness_model = harness.model

    class Named:
        name = "scripted"

        def __init__(self, called: str) -> None:
            self.called = called

        def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
            asked.append(self.called)
            harness_model.respond(request, call)
            return _says(model=self.called.partition(":")[2])

    vars(harness)["_model"] = Named
    assert [harness.ask()["status"] for _ in range(4)] == ["done"] * 4
    assert asked == [MODEL, MODEL, CHEAP, CHEAP]
    cheap = Decimal("0.00012")
    assert _spent(harness) == [REPLIED * 2 + cheap * 2]
    _limit(harness, user_day="0.0017", on_exceeded=CHEAP)
    assert harness.ask()["error"]["code"] == "BUDGET_EXHAUSTED"
    assert len(asked) == 4


def test_two_workers_do_not_exceed_a_limit_together(harness: Harness) -> None:
    """Both turns fit alone. The second to reserve waits for the first, on another connection, and sees its amount."""
    _own(harness)
    _limit(harness, tenant_day="0.0035")
    sent = [harness.send(user_id=name) for name in ("ana", "ben")]
    harness.script(_says(), _says())
    side_by_side(*[lambda each=each: harness.run(each.session_id) for each in sent])
    statuses = sorted(harness.turn(each.turn_id)["status"] for each in sent)
    reserved = sum(row.amount for row in harness.sql("SELECT amount FROM day_spendings WHERE kind = 'tenant'"))
    assert statuses in (["done", "failed"], ["done", "done"])  # done, done: one ended before the other began
    assert reserved == REPLIED * len(harness.model.requests)


def _budget(harness: Harness, session_id: UUID, database: Database) -> TurnBudget:
    return TurnBudget(database, harness.clock, harness.settings, harness.claimed(session_id), Decimal)


def _turns_of_a_user(harness: Harness) -> list[UUID]:
    """The sessions of two turns, and the limit of the user's day."""
    _own(harness)
    _limit(harness, user_day="0.003")
    return [harness.send(conversation=name).session_id for name in ("a", "b")]


def _agents_of_a_turn(harness: Harness) -> list[UUID]:
    """The sessions of two agents that a turn has asked, and the limit of the turn, which has cost 0.0006."""
    searcher = Agent("searcher", "You search.", model=MODEL, settings={"max_tokens": MOST})
    asking = Agent("assistant", "You help.", [agent_tool(searcher, name="research")], model=MODEL)
    harness.agents = Agents([asking])
    harness.calls = Broker()
    asked = tuple(ToolCall(name, "research", f'{{"task": "{name}"}}') for name in ("one", "two"))
    harness.script(ModelReply("", asked, Usage(800, 200), "gpt-5-mini"))
    turn = harness.ask()
    _limit(harness, turn="0.003")
    return [UUID(each["turn_id"]) for each in turn["children"]]


@pytest.mark.parametrize(("make", "limit"), [(_turns_of_a_user, "USER_DAY"), (_agents_of_a_turn, "TURN")])
def test_two_reservations_race(harness: Harness, make: Any, limit: str) -> None:
    """The second, on another connection, waits for the first to commit, and is refused."""
    sent = make(harness)
    other = Database(harness.database.url, schema=harness.settings.database_schema)
    first, second = (_budget(harness, each, base) for each, base in zip(sent, (harness.database, other), strict=True))
    found: list[str] = []

    def follow() -> None:
        try:
            second.reserve(MODEL, 100, MOST)
        except BudgetExhausted as error:
            found.append(str(error.setting))

    racing = threading.Thread(target=follow)

    def hook(moment: str, name: str) -> None:
        if (moment, name) == ("before", "budgets.spend"):
            racing.start()
            until(lambda: harness.sql("SELECT FROM pg_locks WHERE NOT granted"), "the second waits for a lock")

    try:
        with harness.hooked(hook):
            first.reserve(MODEL, 100, MOST)
        racing.join(60)
    finally:
        other.close()
    assert found == [f"PERDURE_BUDGET__{limit}"]
    assert harness.sql("SELECT sum(total) AS total FROM turn_spendings")[0].total == Decimal("0.002025")


@kinds
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_killed_worker_doubles_nothing(harness: Harness, make: Any, moment: Any, nth: int) -> None:
    """At each commit of an amount: before the two calls, and after the turn. The next worker sets the same amounts."""
    make(harness)
    _limit(harness, turn="0.01", user_day="0.01", tenant_day="0.01")
    harness.script(_looks(), *[_says()] * 2)
    sent = harness.send()
    with harness.crashing(moment, "budgets.spend", nth):
        harness.run(sent.session_id)
    harness.move(AFTER_LEASE_S)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert _spent(harness) == _spent(harness, "tenant") == [REPLIED * 2]
    assert [row.total for row in harness.sql("SELECT total FROM turn_spendings")] == [REPLIED * 2]


def test_a_call_whose_worker_died_stays_reserved(harness: Harness) -> None:
    """Its provider may have counted it. Only a further call of the turn frees it."""
    _own(harness)
    _limit(harness, user_day="0.01")

    def dies(request: ModelRequest, call: ModelCall) -> ModelReply:
        raise Crash("killed")

    harness.script(dies)
    sent = harness.send()
    with pytest.raises(Crash):
        harness.run(sent.session_id)
    assert _spent(harness)[0] > Decimal("0.002")
    cancel(harness.runtime, sent.turn_id)
    harness.move(AFTER_LEASE_S)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert _spent(harness)[0] > Decimal("0.002")


@kinds
def test_a_call_that_was_broken_off_counts_with_what_it_streamed(harness: Harness, make: Any) -> None:
    """A user who cancels each answer before its end would spend nothing otherwise."""
    make(harness)
    _limit(harness, user_day="0.01")

    def breaks(request: ModelRequest, call: ModelCall) -> ModelReply:
        call.delta("x" * 3_000)
        raise CallAborted("aborted")

    harness.script(breaks)
    assert harness.ask()["status"] == "failed"
    assert [each > Decimal("0.002") for each in _spent(harness)] == [True]
    assert _spent(harness)[0] < Decimal("0.0025")


def _interrupts(harness: Harness, runner: Runner, sent: Accepted) -> None:
    harness.send("never mind", on_busy="interrupt")
    runner.keeper.beat()


def _cancels(harness: Harness, runner: Runner, sent: Accepted) -> None:
    cancel(harness.runtime, sent.turn_id)
    runner.keeper.beat()


def _shuts_down(harness: Harness, runner: Runner, sent: Accepted) -> None:
    runner.keeper.begin_shutdown()


def _must_exit(harness: Harness, runner: Runner, sent: Accepted) -> None:
    runner.keeper.release_all()


STOPS: dict[str, Stops] = {
    "interrupted": _interrupts,
    "cancelled": _cancels,
    "shut down": _shuts_down,
    "must exit": _must_exit,
}


@kinds
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_stopped_call_frees_what_it_has_not_used(harness: Harness, make: Any, stop: Stops) -> None:
    """Its prompt and what it had streamed count. A user who often interrupts does not use up the budget of the day."""
    make(harness)
    _limit(harness, user_day="0.01", tenant_day="0.01")
    runner = Runner(harness.runtime, "harness")

    def breaks(request: ModelRequest, call: ModelCall) -> ModelReply:
        call.delta("x" * 300)
        assert _spent(harness)[0] > Decimal("0.002")
        stop(harness, runner, sent)
        raise CallAborted("aborted")

    harness.script(breaks, _says())
    sent = harness.send()
    runner.run(sent.session_id)
    assert [Decimal("0.0002") < each < Decimal("0.0005") for each in _spent(harness)] == [True]
    assert _spent(harness) == _spent(harness, "tenant") == [row.total for row in harness.sql(TOTALS)]
    harness.check()


@kinds
@pytest.mark.parametrize("reply", [_says("too late"), _looks()], ids=["an answer", "calls"])
def test_a_reply_that_an_interruption_discards_counts(harness: Harness, make: Any, reply: ModelReply) -> None:
    """Its provider has billed it, and the worker cannot store it. What was reserved beyond it is free."""
    make(harness)
    _limit(harness, user_day="0.01")

    def late(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.send("never mind", on_busy="interrupt")
        return reply

    harness.script(late, _says())
    sent = harness.send()
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert _spent(harness) == [REPLIED]
    harness.run(sent.session_id)
    assert _spent(harness) == [REPLIED * 2]


@pytest.mark.skipif(not hasattr(exceptions, "RetryModelRequest"), reason="pydantic-ai 2.64 has no such exception")
def test_replies_that_a_hook_drops_count_if_the_turn_fails(harness: Harness) -> None:
    """Each reply counts once, the last one included, though none of them is stored. The turn's usage says the same."""
    hooks: Hooks[Any] = Hooks()

    @hooks.on.after_model_request
    async def drop(_: Any, *, request_context: Any, response: ModelResponse) -> ModelResponse:
        if response.text == "bad":
            raise exceptions.RetryModelRequest
        if response.text == "worse":
            raise exceptions.UserError("no more")
        return response

    bare = PydanticAgent[Any, Any](name="assistant", model_settings={"max_tokens": MOST}, capabilities=[hooks])
    harness.agents = Agents([adapt(bare, model=MODEL)])
    _limit(harness, user_day="0.01")
    harness.script(_says("bad"), _says("bad"), _says("worse"))
    turn = harness.ask()
    assert turn["status"] == "failed"
    assert _spent(harness) == [REPLIED * 3]
    used = Usage.from_dict(turn["usage"])
    assert cost(MODEL, used, harness.runtime.settings) == REPLIED * 3


@pytest.mark.parametrize("stop", [_interrupts, _cancels, _must_exit])
@pytest.mark.parametrize("declared", ["pure", "unsafe"])
def test_a_tool_that_is_stopped_frees_what_its_call_has_not_used(harness: Harness, declared: Any, stop: Stops) -> None:
    """The reply that asked for the tool counts once, whether it is stored before the tool runs or after."""

    @tool(effect=declared)
    def stops() -> str:
        """Stop the turn."""
        stop(harness, runner, sent)
        return "seen"

    harness.agents = Agents([Agent("assistant", "You help.", [stops], model=MODEL, settings={"max_tokens": MOST})])
    _limit(harness, user_day="0.01")
    runner = Runner(harness.runtime, "harness")
    harness.script(ModelReply("", (ToolCall("c", "stops", "{}"),), Usage(800, 200), "gpt-5-mini"))
    sent = harness.send()
    runner.run(sent.session_id)
    assert _spent(harness) == [REPLIED]


@pytest.mark.parametrize("settles", [True, False])
def test_a_worker_that_lost_the_session_frees_nothing_of_its_successor(harness: Harness, settles: bool) -> None:
    """The amount is that of the worker that set it last, whether or not it has settled the turn."""
    _own(harness)
    _limit(harness, user_day="0.01")
    seen: list[Decimal] = []

    def dies(request: ModelRequest, call: ModelCall) -> ModelReply:
        raise Crash("killed")

    def paused(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(AFTER_LEASE_S)
        if settles:
            harness.run(sent.session_id)
        else:
            with pytest.raises(Crash):
                harness.run(sent.session_id)
        seen.extend(_spent(harness))
        return _says("too late")

    twice = ModelReply("yes", (), Usage(1_600, 400), "gpt-5-mini")
    harness.script(paused, twice if settles else dies)
    sent = harness.send()
    harness.run(sent.session_id)
    assert _spent(harness) == seen
    assert (seen == [REPLIED * 2]) is settles


@kinds
def test_a_model_that_raises_an_unexpected_error_reserves_nothing(harness: Harness, make: Any) -> None:
    """Of the attempt. After the last one the turn fails without a further call, which would set the amount again."""
    make(harness)
    _limit(harness, user_day="0.01")
    harness.set(max_attempts=1)
    harness.script(ValueError("a bug of the model's adapter"))
    sent = harness.send()
    for _ in range(2):
        harness.run(sent.session_id)
        harness.move(AFTER_LEASE_S)
    assert harness.turn(sent.turn_id)["status"] == "failed"
    assert _spent(harness) == [Decimal()]


def test_a_worker_that_lost_the_session_reserves_nothing(harness: Harness) -> None:
    """The fence is checked in the statement."""
    _own(harness)
    _limit(harness, user_day="1")
    sent = harness.send()
    stale = _budget(harness, sent.session_id, harness.database)
    harness.move(AFTER_LEASE_S)
    harness.claimed(sent.session_id)
    with pytest.raises(LeaseLost):
        stale.reserve(MODEL, 100, MOST)
    assert _spent(harness) == []


def test_a_turn_is_not_lost_if_it_cannot_free_what_it_reserved(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply is there: the model is not called again. The worker tries for the duration of a lease."""
    _own(harness)
    _limit(harness, user_day="1")
    spend, seen, began = TurnBudget._spend, list[Decimal](), harness.clock.monotonic()

    def fails(self: TurnBudget, spent: Decimal, reserved: Decimal) -> None:
        seen.append(reserved)
        if not reserved:
            harness.clock.advance(timedelta(seconds=harness.settings.turn.lease_s / 2))
            raise Unavailable("gone")
        spend(self, spent, reserved)

    monkeypatch.setattr(TurnBudget, "_spend", fails)
    harness.script(_says())
    assert harness.ask()["status"] == "done"
    assert (len(seen), len(harness.model.requests)) == (3, 1)
    assert harness.clock.monotonic() - began < 2 * harness.settings.turn.lease_s


def _loses(moment: str, name: str, nth: int) -> Callable[[str, str], None]:
    """A hook that loses the connection before or after the `nth` commit called `name`."""
    seen = itertools.count(1)

    def lose(at: str, committed: str) -> None:
        if (at, committed) == (moment, name) and next(seen) == nth:
            raise Unavailable("the connection is lost")

    return lose


@kinds
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_lost_connection_leaves_nothing_reserved(harness: Harness, make: Any, moment: str) -> None:
    """When the turn frees what it has not used. A restart of the database would use up the budget of the day."""
    make(harness)
    _limit(harness, user_day="0.01", tenant_day="0.01")
    harness.script(_says())
    sent = harness.send()
    with harness.hooked(_loses(moment, "budgets.spend", 2)):
        harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert len(harness.model.requests) == 1
    assert _spent(harness) == _spent(harness, "tenant") == [REPLIED]


def test_a_restart_leaves_nothing_reserved_by_a_turn_that_is_interrupted_meanwhile(harness: Harness) -> None:
    """The worker learns that it has lost the session when it reads the session's state again."""
    _own(harness)
    _limit(harness, user_day="0.01")
    lose = _loses("before", "budgets.spend", 2)

    def lose_and_interrupt(at: str, committed: str) -> None:
        if (at, committed) == ("before", "turns.begin_next"):
            harness.database.observe = None
            harness.send("never mind", on_busy="interrupt")
        lose(at, committed)

    harness.script(_says("too late"))
    sent = harness.send()
    with harness.hooked(lose_and_interrupt):
        harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert _spent(harness) == [REPLIED]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_lost_connection_leaves_nothing_reserved_by_an_interrupted_turn(harness: Harness, moment: str) -> None:
    """Its worker has lost the session, and frees the rest of the reservation without the lease.

    What other turns cost stays, also of one that has reserved the same.
    """
    _own(harness)
    _limit(harness, user_day="0.01")

    def late(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.sql(
            "INSERT INTO turn_spendings SELECT %(other)s, %(other)s, day, earlier, today, total FROM turn_spendings"
            " WHERE turn_id <> %(other)s",
            other=other,
        )
        harness.send("never mind", on_busy="interrupt")
        return _says("too late")

    harness.script(_says(), late)
    other = harness.ask(user_id="ben")["turn_id"]
    harness.sql("DELETE FROM turn_spendings")
    sent = harness.send()
    with harness.hooked(_loses(moment, "budgets.give_back", 1)):
        harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert _spent(harness) == [REPLIED, REPLIED]
    (reserved,) = harness.sql("SELECT total FROM turn_spendings WHERE turn_id = %(other)s", other=other)
    assert reserved.total > REPLIED * 2


@kinds
def test_a_reservation_whose_commit_was_lost_is_freed(harness: Harness, make: Any) -> None:
    """If the turn is cancelled before it calls the model, no later reservation sets the amount."""
    make(harness)
    _limit(harness, user_day="0.01")
    sent, lose = harness.send(), _loses("after", "budgets.spend", 1)

    def lose_and_cancel(at: str, committed: str) -> None:
        try:
            lose(at, committed)
        except Unavailable:
            harness.database.observe = None
            cancel(harness.runtime, sent.turn_id)
            raise

    with harness.hooked(lose_and_cancel):
        harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert harness.model.requests == []
    assert sum(_spent(harness)) == 0


def test_what_other_agents_use_counts(harness: Harness) -> None:
    """Against the limit of the turn that asked them, and of the day; each counts once."""
    searcher = Agent("searcher", "You search.", [look], model=MODEL, settings={"max_tokens": MOST})
    _own(harness)
    own = Agent(
        "assistant", "You help.", [agent_tool(searcher, name="research")], model=MODEL, settings={"max_tokens": MOST}
    )
    harness.agents = Agents([own, searcher])
    _limit(harness, turn="0.0032", user_day=1)
    asks = ModelReply("", (ToolCall("r", "research", '{"task": "Rome?"}'),), Usage(800, 200), "gpt-5-mini")
    harness.script(asks, _looks(), _says("never"))
    turn = harness.ask()
    child = UUID(turn["children"][0]["turn_id"])
    harness.run(child)
    ended = harness.turn(child)
    assert (ended["status"], ended["error"]["code"], ended["steps"]) == ("failed", "BUDGET_EXHAUSTED", 1)
    assert _spent(harness) == [REPLIED * 2]
    assert cost_of(harness.database, UUID(turn["turn_id"]), harness.settings, harness.agents) == REPLIED * 2


def test_without_a_budget_no_statement_runs(harness: Harness) -> None:
    """A turn runs as many as before. With one, each call and the end run a transaction."""
    _own(harness)
    for _ in range(3):
        harness.ask()
    with counted(harness.database) as (statements, _):
        harness.ask()
    assert not any("budgets" in each for each in statements)
    before = len(statements)
    _limit(harness, user_day="1")
    harness.ask()
    with counted(harness.database) as (statements, commits):
        harness.ask()
    assert commits.count("budgets.spend") == 2
    assert len(statements) == before + 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PERDURE_MODEL": "offline"}, "prices of 'offline', the model of agent 'assistant', are unknown"),
        ({"PERDURE_FALLBACK_MODELS": "offline"}, "'offline' in PERDURE_FALLBACK_MODELS are unknown"),
        ({"PERDURE_BUDGET__ON_EXCEEDED": "offline"}, "'offline' in PERDURE_BUDGET__ON_EXCEEDED are unknown"),
        ({"PERDURE_BUDGET__ON_EXCEEDED": "stop"}, "'stop' in PERDURE_BUDGET__ON_EXCEEDED are unknown"),
        ({"PERDURE_BUDGET__USER_DAY": "0"}, "PERDURE_BUDGET__USER_DAY"),
        ({"PERDURE_BUDGET__USER_DAY": "NaN"}, "PERDURE_BUDGET__USER_DAY"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    """When a program starts. The message names the setting and the way out."""
    given = {"PERDURE_MODEL": MODEL, "PERDURE_BUDGET__TURN": "0.5", "OPENAI_API_KEY": "k", **changed}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        check(Settings.load(_env_file=None), asks_embedder=False)
    assert said in str(caught.value)


def test_status_names_the_budget(harness: Harness) -> None:
    """Not a model."""
    row: Any = SimpleNamespace(
        held=False, queued=False, unequipped_since=None, postponed=True, status="parked", waits_for=None,
        parked_for="PERDURE_BUDGET__USER_DAY", not_before=harness.clock.now(),
    )  # fmt: skip
    assert "would exceed PERDURE_BUDGET__USER_DAY" in _reason(row, None)  # type: ignore[arg-type]


def test_what_was_spent_today_and_its_erasure(harness: Harness) -> None:
    """The tenant's sum stays, so that an erasure does not renew the tenant's budget."""
    _own(harness)
    _limit(harness, user_day="1", tenant_day="2")
    harness.script(_says(), _says())
    harness.ask(user=user_key("acme", "ana"))
    harness.ask(user=user_key(None, "ben"))
    assert spent_today(harness.database, harness.settings, 10) == [
        {"tenant": None, "user": None, "spent_usd": "0.0006", "limit_usd": "2"},
        {"tenant": "acme", "user": None, "spent_usd": "0.0006", "limit_usd": "2"},
        {"tenant": "acme", "user": "ana", "spent_usd": "0.0006", "limit_usd": "1"},
        {"tenant": None, "user": "ben", "spent_usd": "0.0006", "limit_usd": "1"},
    ]
    runtime = harness.runtime
    eraser = Eraser(harness.database, harness.clock, harness.snapshots, None, 30, runtime.files)
    erased = eraser.erase(user_key("acme", "ana"))
    assert (erased.rows["turn_spendings"], erased.rows["day_spendings"]) == (1, 1)
    assert _spent(harness) == [REPLIED]
    assert _spent(harness, "tenant") == [REPLIED, REPLIED]
