"""Hooks and guards of both kinds of agents: what they change or refuse reaches no model, no row and no reader."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent

from perdure import Allow, Refuse, Replace, TurnContext, Verdict, adapt, guard, required
from perdure.agents import Agents
from perdure.errors import Conflict, GuardRejected, ProviderError
from perdure.hooks import ToolCalled, ToolCalling, TurnEnding, TurnStarted
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Usage
from perdure.turns.cancel import cancel
from perdure.turns.costs import cost_of
from perdure.turns.lease.tenure import TurnScope
from perdure.turns.run.loop import Runner
from perdure.turns.run.verdict import WITHHELD
from tests.adapters.pydantic_ai.conftest import Bench, Tool
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says, spoken

CARD = "4111 1111 1111 1111"
REFUSED = "A guard of this installation refused this."


class Order(BaseModel):
    pieces: int


def _mask(turn: TurnStarted) -> TurnStarted:
    return turn.replace(text=turn.text.replace(CARD, "[card]"))


def _allow(text: str, turn: TurnContext) -> Verdict:
    return Allow(Usage(5, 1))


def _masked(text: str, turn: TurnContext) -> Verdict:
    return Replace(text.replace(CARD, "[card]"), Usage(5, 1))


def _refuse(text: str, turn: TurnContext) -> Verdict:
    return Refuse("Not with me.", Usage(5, 1)) if "forbidden" in text else Allow(Usage(5, 1))


def _always(verdict: Verdict) -> Callable[[str, TurnContext], Verdict]:
    return lambda _text, _turn: verdict


def _everywhere(harness: Harness) -> str:
    """All text that the database has."""
    tables = [row.table_name for row in harness.sql("SELECT table_name FROM information_schema.tables "
              "WHERE table_schema = current_schema() AND table_type = 'BASE TABLE'")]  # fmt: skip
    return " ".join(str(harness.sql(f"SELECT t::text FROM {table} AS t")) for table in tables)  # noqa: S608 (names)


@pytest.mark.parametrize(
    "given", [{"before_turn": [required(_mask)]}, {"input_guards": [_masked]}], ids=["hook", "guard"]
)
def test_a_changed_text_is_the_only_one(harness: Harness, bench: Bench, given: dict[str, Any]) -> None:
    """The original is in no prompt and in no row: not in the inbox, and not in the conversation's title."""
    bench.equip(**given)
    sent = harness.send(f"My card is {CARD}.", conversation="cards", message_id="m-1")
    harness.script(ProviderError("down"))
    harness.run(sent.session_id)
    harness.script(says("Noted."))
    harness.ask("And now?", conversation="cards")
    told = [[each.content for each in spoken(request)] for request in harness.model.requests]
    assert told == [["My card is [card]."], ["My card is [card].", "And now?"]]
    assert harness.lines(sent.session_id)[0] == ("user", "My card is [card].")
    assert CARD not in _everywhere(harness)
    assert harness.sql("SELECT title FROM conversations")[0].title == "My card is [card]."
    again = harness.send(f"My card is {CARD}.", conversation="cards", message_id="m-1")
    assert (again.turn_id, again.duplicate) == (sent.turn_id, True)


def test_a_message_that_no_hook_changed_keeps_its_text(harness: Harness, bench: Bench) -> None:
    """Another text with its message_id is refused as before."""
    bench.equip(before_turn=[_mask])
    harness.ask("hello", message_id="m-1")
    with pytest.raises(Conflict):
        harness.send("other", message_id="m-1")


def test_merged_messages_become_one(harness: Harness, bench: Bench) -> None:
    """The hook sees one text, so its change is one message."""
    bench.equip(before_turn=[_mask])
    sent = harness.send("My card", on_busy="merge")
    harness.send(f"is {CARD}", on_busy="merge")
    harness.run(sent.session_id)
    assert harness.lines(sent.session_id)[0] == ("user", "My card\nis [card]")
    assert CARD not in _everywhere(harness)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_change_is_committed_once(harness: Harness, bench: Bench, moment: Any) -> None:
    """After a crash before the commit of the changed text, the hook runs again, and never after this commit."""
    seen: list[str] = []

    def mask(turn: TurnStarted) -> TurnStarted:
        seen.append(turn.text)
        return _mask(turn)

    bench.equip(before_turn=[required(mask)])
    sent = harness.send(CARD)
    with harness.crashing(moment, "turns.step_replaced"):
        harness.run(sent.session_id)
    assert harness.model.requests == []
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert seen == [CARD] * (2 if moment == "before" else 1)
    assert harness.lines(sent.session_id) == [("user", "[card]"), ("assistant", "ok")]


def test_a_message_that_was_not_let_pass_is_withheld(harness: Harness, bench: Bench) -> None:
    """A refused message, and one whose turn ends before its guards, is in no later prompt and in no memory."""
    bench.equip(input_guards=[_refuse])
    refused = harness.ask("something forbidden")
    assert (refused["error"]["code"], refused["reply"]["text"], refused["steps"]) == (
        "GUARD_REJECTED",
        "Not with me.",
        0,
    )
    assert refused["usage"]["input_tokens"] == 5
    session_id = UUID(refused["session_id"])
    assert harness.lines(session_id) == [("user", WITHHELD), ("assistant", "Not with me.")]

    def cancels(text: str, turn: TurnContext) -> Verdict:
        cancel(harness.runtime, turn.turn_id)
        return Allow()

    bench.equip(input_guards=[cancels])
    sent = harness.send("forbidden, too")
    runner = Runner(harness.runtime, "harness")
    with harness.hooked(lambda *_: None):
        runner.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    bench.equip()
    harness.ask("hello")
    assert "something forbidden" not in str(harness.model.requests[-1].messages)


def test_a_reply_is_changed_before_anyone_reads_it(harness: Harness, bench: Bench) -> None:
    """The guards come first, then the hooks. The guard's tokens count with the reply."""
    seen: list[str | None] = []

    def signs(ending: TurnEnding) -> TurnEnding:
        seen.append(ending.reply)
        return ending.replace(reply=f"{ending.reply} Yours.")

    bench.equip(output_guards=[_masked], after_turn=[signs])
    harness.script(says(f"It is {CARD}."))
    turn = harness.ask()
    assert turn["reply"]["text"] == "It is [card]. Yours."
    assert seen == ["It is [card]."]
    assert (turn["usage"]["input_tokens"], turn["usage"]["output_tokens"], turn["steps"]) == (15, 3, 1)
    harness.ask("again")
    assert CARD not in str(harness.model.requests[-1].messages) + _everywhere(harness)


def test_an_output_guard_refuses(harness: Harness, bench: Bench) -> None:
    """The user reads the verdict's message. The reply is not stored, and counts."""
    bench.equip(output_guards=[_refuse])
    harness.script(says("forbidden words"))
    turn = harness.ask()
    assert (turn["error"]["code"], turn["reply"]["text"]) == ("GUARD_REJECTED", "Not with me.")
    assert (turn["steps"], turn["usage"]["input_tokens"]) == (1, 15)
    assert "forbidden" not in _everywhere(harness)


@pytest.mark.parametrize("refuses", [False, True])
def test_an_output_guard_judges_the_output_of_a_tool(harness: Harness, *, refuses: bool) -> None:
    """The output is no step of its own, whether or not it is refused; what the guard used counts."""
    bare = PydanticAgent(name="assistant", output_type=Order)
    verdict = Refuse("Not with me.", Usage(5, 1)) if refuses else Allow(Usage(5, 1))
    harness.agents = Agents([adapt(bare, output_guards=[_always(verdict)])])
    harness.script(calls(("final_result", {"pieces": 2})))
    turn = harness.ask()
    assert turn["status"] == ("failed" if refuses else "done")
    assert (turn["steps"], turn["usage"]["input_tokens"]) == (1, 15)
    harness.check()


def test_changed_arguments_run_and_are_recorded(harness: Harness, bench: Bench) -> None:
    """The ledger has what ran. Arguments that do not fit the tool do not run."""

    def at_most_5(call: ToolCalling) -> ToolCalling | None:
        amount = call.arguments["amount"]
        return call.replace(arguments={"amount": min(amount, 5) if amount < 100 else "many"})

    def shout(called: ToolCalled) -> ToolCalled:
        return called.replace(result=f"{called.result}!")

    bench.equip(Tool("act"), before_tool=[required(at_most_5)], after_tool=[shout])
    harness.script(calls(("act", {"amount": 7})), calls(("act", {"amount": 700})), says("done"))
    turn = harness.ask()
    tools = [content for role, content in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert tools[0] == "act 5!"
    assert "amount" in tools[1]
    assert "many" not in tools[1] or bench.counts == {"act": 1}
    assert bench.counts == {"act": 1}
    rows = harness.sql("SELECT arguments::json AS arguments, status FROM tool_effects ORDER BY message_seq")
    assert [(row.arguments["amount"], row.status) for row in rows] == [(5, "done"), (700, "failed")]


def test_a_crash_after_changed_arguments(harness: Harness, bench: Bench) -> None:
    """The recorded arguments run again. The hook sees them, or those of the model again (pydantic-ai)."""
    seen: list[int] = []

    def five(call: ToolCalling) -> ToolCalling:
        seen.append(call.arguments["amount"])
        return call.replace(arguments={"amount": 5})

    bench.equip(Tool("act", "idempotent"), before_tool=[required(five)])
    harness.script(calls(("act", {"amount": 7})), says("done"))
    sent = harness.send()
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id)
    assert harness.sql("SELECT arguments::json AS given FROM tool_effects")[0].given == {"amount": 5}
    harness.move(31)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert [content for role, content in harness.lines(sent.session_id) if role == "tool"] == ["act 5"]
    assert seen == [7, 5 if bench.kind == "native" else 7]


def test_a_guard_that_fails(harness: Harness, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """It fails closed, and its error is in the log. `required=False` lets the turn continue."""

    def broken(text: str, turn: TurnContext) -> Verdict:
        raise LookupError("a bug")

    def mute(text: str, turn: TurnContext) -> Any:
        return None

    for each in (broken, mute):
        for declared in (
            {"input_guards": [each]},
            {"output_guards": [each]},
            {"input_guards": [guard(each, parallel=True)]},
        ):
            caplog.clear()
            bench.equip(**declared)
            harness.script(says("fine"))
            assert harness.ask()["error"] == {"code": "GUARD_REJECTED", "message": REFUSED}, declared
            assert any(record.exc_info for record in caplog.records), declared
        for declared in (
            {"input_guards": [guard(each, required=False)]},
            {"output_guards": [guard(each, required=False)]},
        ):
            bench.equip(**declared)
            harness.script(says("fine"))
            assert harness.ask()["reply"]["text"] == "fine"


@pytest.mark.parametrize(
    "verdict",
    [
        Refuse(ValueError("no text")),  # type: ignore[arg-type]
        Refuse("No.", usage={"input_tokens": 5}),  # type: ignore[arg-type]
        Allow(usage=5),  # type: ignore[arg-type]
        Replace(None),  # type: ignore[arg-type]
    ],
)
def test_a_verdict_that_cannot_be_used(harness: Harness, bench: Bench, verdict: Verdict) -> None:
    """The guard has failed, as with no verdict: the turn neither waits for another one, nor runs again."""
    for declared in (
        {"input_guards": [_always(verdict)]},
        {"output_guards": [_always(verdict)]},
        {"input_guards": [guard(_always(verdict), parallel=True)]},
    ):
        bench.equip(**declared)
        harness.script(says("fine"))
        assert harness.ask()["error"] == {"code": "GUARD_REJECTED", "message": REFUSED}, declared


def test_no_reply_is_replaced_with_an_empty_one(harness: Harness, bench: Bench) -> None:
    """An empty reply of a model fails the turn, too."""
    for declared in (
        {"output_guards": [_always(Replace(" "))]},
        {"after_turn": [required(lambda ending: ending.replace(reply=""))]},
    ):
        bench.equip(**declared)
        harness.script(says("fine"))
        assert harness.ask()["error"] == {"code": "GUARD_REJECTED", "message": REFUSED}, declared
    bench.equip(after_turn=[lambda ending: ending.replace(reply="")])
    harness.script(says("fine"))
    assert harness.ask()["reply"]["text"] == "fine"


class Beside:
    """A parallel guard that waits for the test, and then returns its verdict."""

    def __init__(self, verdict: Verdict | Exception) -> None:
        self.verdict = verdict
        self.called = threading.Event()
        self.go = threading.Event()
        self.runs = 0

    def __call__(self, text: str, turn: TurnContext) -> Verdict:
        self.runs += 1
        self.called.set()
        assert self.go.wait(PATIENCE_S)
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


def test_a_parallel_guard_lets_pass(harness: Harness, bench: Bench) -> None:
    """The model is called meanwhile. Nothing is committed and no tool runs before the verdict; then all is."""
    beside = Beside(Allow(Usage(5, 1)))
    bench.equip(Tool("act"), input_guards=[guard(beside, parallel=True)])

    def first(request: ModelRequest, call: ModelCall) -> ModelReply:
        assert beside.called.wait(PATIENCE_S)
        threading.Timer(0.2, look).start()
        return calls(("act", {"amount": 1}))

    seen: list[Any] = []

    def look() -> None:
        seen.extend((harness.counts()["messages"], bench.counts))
        beside.go.set()

    harness.script(first, says("done"))
    turn = harness.ask()
    assert seen == [0, {}]
    assert (turn["status"], turn["steps"], turn["usage"]["input_tokens"], bench.counts) == ("done", 2, 25, {"act": 1})
    assert beside.runs == 1


def test_a_parallel_guard_does_not_shorten_the_step(
    harness: Harness, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is renewed for as long as the call of the model may take, and not only for the guard's time limit."""
    within: list[tuple[str, float]] = []
    real = TurnScope.step_within

    def noted(self: TurnScope, seconds: float) -> None:
        within.append((threading.current_thread().name, seconds))
        real(self, seconds)

    monkeypatch.setattr(TurnScope, "step_within", noted)

    def waits(request: ModelRequest, call: ModelCall) -> ModelReply:
        until(lambda: beside.runs, "the guard runs")
        assert within[-1][1] > 100, "the deadline is that of the model's call"
        beside.go.set()
        return says("done")

    beside = Beside(Allow())
    bench.equip(input_guards=[guard(beside, parallel=True)])
    harness.script(waits)
    assert harness.ask()["status"] == "done"
    assert [name for name, _ in within if name.startswith("perdure-guard")] == []


@pytest.mark.parametrize("verdict", [Refuse("Not with me.", Usage(5, 1)), GuardRejected("Not with me.")])
def test_a_parallel_guard_refuses(harness: Harness, bench: Bench, verdict: Any) -> None:
    """The call of the model is cancelled; what it may have used counts, and so does the guard's own use."""
    beside = Beside(verdict)
    bench.equip(Tool("act"), input_guards=[guard(beside, parallel=True)])
    aborted = threading.Event()

    def hangs(request: ModelRequest, call: ModelCall) -> ModelReply:
        call.delta("Some text that nobody reads")
        with call.aborting(aborted.set):
            beside.go.set()
            assert aborted.wait(PATIENCE_S)
        raise AssertionError("the call is over")

    harness.script(hangs)
    turn = harness.ask("something forbidden")
    assert (turn["error"]["code"], turn["reply"]["text"], turn["steps"]) == ("GUARD_REJECTED", "Not with me.", 1)
    own = 5 if isinstance(verdict, Refuse) else 0
    assert turn["usage"]["input_tokens"] > own + 5
    assert turn["usage"]["output_tokens"] >= 9
    assert harness.lines(UUID(turn["session_id"])) == [("user", WITHHELD), ("assistant", "Not with me.")]


def test_a_parallel_guard_refuses_a_finished_reply(harness: Harness, bench: Bench) -> None:
    """No tool of the reply runs, and its tokens count."""
    beside = Beside(Refuse("Not with me.", Usage(5, 1)))
    bench.equip(Tool("act"), input_guards=[guard(beside, parallel=True)])

    def replies(request: ModelRequest, call: ModelCall) -> ModelReply:
        threading.Timer(0.3, beside.go.set).start()
        return calls(("act", {"amount": 1}))

    harness.script(replies)
    turn = harness.ask()
    assert (turn["error"]["code"], turn["steps"], turn["usage"]["input_tokens"]) == ("GUARD_REJECTED", 1, 15)
    assert bench.counts == {}


def test_a_verdict_is_committed_with_the_reply(harness: Harness, bench: Bench) -> None:
    """After a crash before this commit, the guard runs again; after it, it does not. So it is if the model fails."""
    beside = Beside(Allow())
    beside.go.set()
    bench.equip(Tool("act", "pure"), input_guards=[guard(beside, parallel=True)])
    for moment, runs in (("before", 2), ("after", 1)):
        beside.runs = 0
        harness.script(*[calls(("act", {"amount": 1}))] * runs, says("done"))
        sent = harness.send(user_id=moment)
        with harness.crashing(moment, "turns.step"):  # type: ignore[arg-type]
            harness.run(sent.session_id)
        harness.move(31)
        harness.run(sent.session_id)
        assert (harness.turn(sent.turn_id)["reply"]["text"], beside.runs) == ("done", runs)
    beside.runs = 0
    harness.set(on_unavailable="park")
    harness.script(ProviderError("down", transient=True), says("back"))
    sent = harness.send("hello", user_id="cyd")
    harness.run(sent.session_id)
    assert harness.lines(sent.session_id) == [("user", "hello")]
    harness.move(120)
    harness.run(sent.session_id)
    assert (harness.turn(sent.turn_id)["reply"]["text"], beside.runs) == ("back", 1)


def test_hooks_before_a_parallel_guard(harness: Harness, bench: Bench) -> None:
    """The parallel guard and the model get the changed text."""
    seen: list[str] = []

    def see(text: str, turn: TurnContext) -> Verdict:
        seen.append(text)
        return Allow(Usage(5, 1))

    bench.equip(before_turn=[required(_mask)], input_guards=[_masked, guard(see, parallel=True)])
    turn = harness.ask(CARD)
    assert seen == ["[card]"]
    assert harness.lines(UUID(turn["session_id"])) == [("user", "[card]"), ("assistant", "ok")]
    assert turn["usage"]["input_tokens"] == 20
    assert CARD not in _everywhere(harness)


@pytest.mark.long
def test_a_cancelled_turn_does_not_wait_for_its_guard(harness: Harness, bench: Bench) -> None:
    """Neither for one before the model call nor for a parallel one."""
    for parallel in (False, True):
        beside = Beside(Allow())
        declared = guard(beside, parallel=parallel, required=parallel, timeout_s=PATIENCE_S)
        bench.equip(input_guards=[declared])  # even one that lets pass if it fails
        sent = harness.send(user_id=str(parallel))
        runner = Runner(harness.runtime, "harness")
        runner.start()
        thread = threading.Thread(target=runner.run, args=[sent.session_id])
        thread.start()
        assert beside.called.wait(PATIENCE_S)
        cancel(harness.runtime, sent.turn_id)
        until(lambda turn_id=sent.turn_id: harness.turn(turn_id)["status"] == "cancelled", "the turn is cancelled")  # type: ignore[misc]
        thread.join(PATIENCE_S)
        beside.go.set()
        runner.close()
        assert harness.lines(sent.session_id) == [("user", WITHHELD)]


def test_a_guard_counts_towards_the_time_limit(harness: Harness, bench: Bench) -> None:
    """Its own limit is longer than what is left of the turn."""
    beside = Beside(Allow())
    bench.equip(input_guards=[guard(beside, timeout_s=PATIENCE_S)], timeout_s=0.3)
    turn = harness.ask()
    assert turn["error"]["code"] in {"GUARD_REJECTED", "TIMEOUT"}
    beside.go.set()


def test_the_cost_of_guards(harness: Harness, bench: Bench) -> None:
    """The stored messages have the tokens of the guards."""
    bench.equip(input_guards=[_allow], output_guards=[_allow])
    harness.script(says("fine"))
    turn = harness.ask()
    rows = harness.sql("SELECT role, usage FROM messages ORDER BY seq")
    assert [row.usage["input_tokens"] for row in rows] == [5, 15]
    assert turn["usage"]["input_tokens"] == 20
    assert cost_of(harness.database, UUID(turn["turn_id"]), harness.settings, harness.agents) is None
