"""Whatever a model or a tool does, the turn ends and the next message is answered."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from perdure import errors, tool
from perdure.database.engine import Moment
from perdure.errors import PerdureError, ToolError
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.tools.registry import Effect, ToolContext
from perdure.turns.calls.plan import MAX_CALLS
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.lease.claim import Unequipped
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import UNREPORTED, calls, says, spoken


@tool(effect="pure")
def double(number: int) -> int:
    """Double it."""
    return number * 2


@tool(effect="pure")
def repeat(given: Any) -> Any:
    """Return the argument."""
    return given


@tool
def broken() -> str:
    """Fail."""
    raise RuntimeError("secret detail\nsecond line")


@tool
def refusing() -> str:
    """Refuse."""
    raise ToolError("not today")


@tool(effect="pure")
def endless() -> str:
    """Return ten million characters."""
    return "x" * 10_000_000


def _answers_the_next_message(harness: Harness) -> None:
    """Check that the session answers its next message."""
    harness.script(says("still here"))
    assert harness.ask("next")["reply"] == {"text": "still here", "format": "text", "stop_reason": "stop"}


def test_a_turn_of_two_steps(harness: Harness) -> None:
    """A turn with one tool call stores two steps, four messages, the total usage and one row in `tool_effects`."""
    harness.equip(double)
    harness.script(calls(("double", {"number": 4})), says("It is 8."))
    turn = harness.ask("double 4")
    assert turn["status"] == "done"
    assert turn["reply"] == {"text": "It is 8.", "format": "text", "stop_reason": "stop"}
    assert (turn["attempts"], turn["steps"], turn["error"]) == (1, 2, None)
    assert turn["usage"] == {**UNREPORTED, "input_tokens": 20, "output_tokens": 7}
    rows = harness.sql("SELECT role, content FROM messages ORDER BY seq")
    assert [(row.role, row.content) for row in rows] == [
        ("user", "double 4"), ("assistant", ""), ("tool", "8"), ("assistant", "It is 8."),
    ]  # fmt: skip
    effect = harness.sql("SELECT status, effect, tool FROM tool_effects")[0]
    assert tuple(effect) == ("done", "pure", "double")
    _answers_the_next_message(harness)


def test_the_model_sees_the_conversation_and_its_tools(harness: Harness) -> None:
    """A request contains the system message, the session's messages in order, and the agent's tools."""
    harness.equip(double)
    harness.script(says("hi"), says("again"))
    harness.ask("one")
    harness.ask("two")
    request = harness.model.requests[-1]
    assert request.messages[0].role is Role.SYSTEM
    assert [each.content for each in spoken(request)] == ["one", "hi", "two"]
    assert [each.name for each in request.tools] == ["double"]


def test_calls_of_one_reply_run_concurrently_with_results_in_order(harness: Harness) -> None:
    """The calls wait for each other and end in reverse order. Their results are stored in the order of the calls."""
    barrier = threading.Barrier(4)
    turnstile = [threading.Event() for _ in range(4)]

    @tool(effect="pure")
    def meet(number: int) -> int:
        """Wait until all four calls run, then return in reverse order of `number`."""
        barrier.wait(PATIENCE_S)
        if number < 3:
            assert turnstile[number + 1].wait(PATIENCE_S)
        turnstile[number].set()
        return number

    harness.equip(meet)
    harness.script(calls(*[("meet", {"number": number}) for number in range(4)]), says("met"))
    assert harness.ask()["status"] == "done"
    assert harness.results() == ["0", "1", "2", "3"]


BAD_CALLS: dict[str, tuple[tuple[str, Any], str]] = {
    "unknown tool": (("fly", {}), "There is no tool 'fly'. Available: double, repeat, broken, refusing, endless."),
    "no JSON": (("double", "{number: 4"), "not valid JSON"),
    "an array": (("double", "[4]"), "expected a JSON object"),
    "wrong type": (("double", {"number": "four"}), "number: "),
    "missing": (("double", {}), "number is missing"),
    "one too many": (("double", {"number": 4, "more": 1}), "more is not a parameter"),
    "NaN": (("repeat", '{"given": NaN}'), "NaN is not a JSON number"),
    "infinite": (("repeat", '{"given": 1e999}'), "too large"),
    "NUL": (("repeat", '{"given": "\\u0000"}'), "NUL"),
    "lone surrogate": (("repeat", '{"given": "\\ud800"}'), "surrogate"),
    "twice the same key": (("repeat", '{"given": 1, "given": 2}'), "given twice"),
    "raises": (("broken", {}), "RuntimeError: secret detail"),
    "refuses": (("refusing", {}), "not today"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_the_error_of_a_call_is_returned_to_the_model(harness: Harness, case: str) -> None:
    """The result of a failed or invalid call is a one-line error. The turn continues."""
    wanted, expected = BAD_CALLS[case]
    harness.equip(double, repeat, broken, refusing, endless)
    harness.script(calls(wanted), says("I see."))
    assert harness.ask()["reply"]["text"] == "I see."
    (result,) = harness.results()
    assert result.startswith("Error: ")
    assert expected in result
    assert "second line" not in result
    _answers_the_next_message(harness)


@pytest.mark.parametrize("given", ["grüße 😀 \u202e", 10**300, -0.0, [[["deep"]]], {"a": None}, "", "\\u0000"])
def test_odd_arguments_survive(harness: Harness, given: Any) -> None:
    """Valid arguments, however unusual, reach the tool unchanged."""
    harness.equip(repeat)
    harness.script(calls(("repeat", {"given": given}), ("repeat", {"given": given})), says("ok"))
    harness.ask()
    results = [result if isinstance(given, str) else json.loads(result) for result in harness.results()]
    assert results == [given, given]
    _answers_the_next_message(harness)


def test_a_result_of_ten_megabytes_is_cut(harness: Harness) -> None:
    """A result that is too long for the model is cut before it is stored."""
    harness.equip(endless)
    harness.script(calls(("endless", {})), says("long"))
    assert harness.ask()["status"] == "done"
    (result,) = harness.results()
    assert len(result) <= 32_000
    assert "10,000,000 characters in all" in result
    _answers_the_next_message(harness)


@pytest.mark.parametrize("number", [20, 40])
def test_many_calls_at_once(harness: Harness, number: int) -> None:
    """If a reply has 20 calls, all of them run. If a reply has 40 calls, the first 32 run. The others get an error."""
    harness.equip(double)
    harness.script(calls(*[("double", {"number": each}) for each in range(number)]), says("done"))
    assert harness.ask()["status"] == "done"
    results = harness.results()
    assert len(results) == number
    assert results[:MAX_CALLS] == [str(2 * each) for each in range(min(number, MAX_CALLS))]
    assert all("at most 32 calls" in each for each in results[MAX_CALLS:])
    assert harness.counts()["tool_effects"] == min(number, MAX_CALLS)
    _answers_the_next_message(harness)


def test_the_same_call_id_twice(harness: Harness) -> None:
    """Calls with the same id each get their own result, within one reply and across replies."""
    harness.equip(double)
    harness.script(
        calls(("double", {"number": 1}), ("double", {"number": 2}), ids=["same", "same"]),
        calls(("double", {"number": 3}), ids=["same"]),
        calls(("double", {"number": 4}), ids=[""]),
        says("done"),
    )
    assert harness.ask()["status"] == "done"
    assert harness.results() == ["2", "4", "6", "8"]
    _answers_the_next_message(harness)


def test_ids_and_names_that_cannot_be_stored(harness: Harness) -> None:
    """NUL characters and lone surrogates in a reply are replaced, and do not fail the turn."""
    harness.equip(double)
    bad = ModelReply(
        "text\x00 \ud800",
        (ToolCall("id\x00", "do\x00uble", '{"number": "\x00"}'), ToolCall("\ud800" * 60, "x" * 500, "\udc00")),
        Usage(1, 1), "model\x00",
    )  # fmt: skip
    harness.script(bad, says("fine\x00"))
    turn = harness.ask()
    assert (turn["status"], turn["attempts"]) == ("done", 1)
    _answers_the_next_message(harness)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_reply_fails_the_turn_with_a_message(harness: Harness, text: str) -> None:
    """If the model's reply is empty, the turn fails, and the user receives an error message."""
    harness.script(says(text))
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"]) == ("failed", "INVALID_RESPONSE")
    assert turn["reply"]["text"] == turn["error"]["message"] != ""
    _answers_the_next_message(harness)


ALL_ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PerdureError)]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_a_models_error_fails_the_turn(harness: Harness, kind: type[PerdureError]) -> None:
    """If the model raises an error, the turn stores the error's code and replies with the error's message."""
    harness.script(kind("I am sorry.\x00"))
    turn = harness.ask()
    # `Unavailable` means that the database is unavailable. If a model raises it, the turn stores PROVIDER_ERROR.
    code = "PROVIDER_ERROR" if issubclass(kind, errors.Unavailable) else kind.code
    assert (turn["status"], turn["attempts"], turn["error"]["code"]) == ("failed", 1, code)
    assert turn["reply"]["text"].startswith("I am sorry.")
    assert len(harness.model.requests) == 1
    _answers_the_next_message(harness)


def test_an_error_in_the_second_step_keeps_the_first(harness: Harness) -> None:
    """If the second step fails, the transcript keeps the first step and its tool result, and ends with the error."""
    harness.equip(double)
    harness.script(calls(("double", {"number": 4})), errors.ProviderError("The provider is down."))
    turn = harness.ask("double")
    assert (turn["status"], turn["steps"]) == ("failed", 1)
    assert turn["usage"] == {**UNREPORTED, "input_tokens": 10, "output_tokens": 5}
    assert harness.results() == ["8"]
    _answers_the_next_message(harness)


def test_too_many_steps(harness: Harness) -> None:
    """If the model still calls tools in step `max_steps`, the turn fails, and the reply names the limit."""
    harness.equip(double, max_steps=3)
    harness.script(*[calls(("double", {"number": number})) for number in range(10)])
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"], turn["steps"]) == ("failed", "BUDGET_EXHAUSTED", 3)
    assert "3 steps" in turn["reply"]["text"]
    assert harness.results() == ["0", "2", "4"]
    _answers_the_next_message(harness)


def test_too_much_time(harness: Harness) -> None:
    """A turn's time limit covers all its steps. The runner checks the limit between two steps."""

    def slowly(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(200)
        return calls(("double", {"number": 1}))

    harness.equip(double)
    harness.script(slowly, slowly, says("never"))
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"], turn["steps"]) == ("failed", "TIMEOUT", 2)
    assert "300 seconds" in turn["reply"]["text"]
    _answers_the_next_message(harness)


def test_the_time_limit_spans_all_runners_of_a_turn(harness: Harness) -> None:
    """After a crash, the next runner has only the remaining time of the turn."""

    def slowly(request: ModelRequest, call: ModelCall) -> ModelReply:
        harness.move(250)
        return calls(("double", {"number": 1}))

    harness.equip(double)
    harness.script(slowly)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    harness.move(10_000)
    harness.script(slowly, says("never"))
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["error"]["code"] == "TIMEOUT"
    assert harness.turn(sent.turn_id)["steps"] == 2
    _answers_the_next_message(harness)


def test_a_model_call_gets_no_more_time_than_the_turn_has(harness: Harness) -> None:
    """The time limit of a model call is at most the remaining time of the turn."""
    left: list[float] = []

    def look(request: ModelRequest, call: ModelCall) -> ModelReply:
        left.append(call.remaining())
        harness.move(250)
        return calls(("double", {"number": 1}))

    def look_again(request: ModelRequest, call: ModelCall) -> ModelReply:
        left.append(call.remaining())
        return says("in time")

    harness.equip(double)
    harness.script(look, look_again)
    harness.ask()
    assert left[0] == pytest.approx(300, abs=5)
    assert left[1] == pytest.approx(50, abs=5)


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
def test_a_repeatable_tool_that_hangs_is_run_once_more(harness: Harness, effect: str) -> None:
    """A pure or idempotent call that times out is run again. If it times out again, its result is an error."""
    begun: list[int] = []
    release = threading.Event()

    def hang() -> str:
        """Hang."""
        begun.append(1)
        harness.move(31)
        release.wait(PATIENCE_S)
        return "too late"

    harness.equip(tool(effect=Effect(effect), timeout_s=30)(hang))
    harness.script(calls(("hang", {})), says("I see."))
    assert harness.ask()["status"] == "done"
    release.set()
    assert len(begun) == 2
    assert harness.results() == ["Error: hang did not finish within 30 s."]
    _answers_the_next_message(harness)


def test_a_repeatable_tool_that_hangs_once_gives_its_result(harness: Harness) -> None:
    """If a call times out and its second run returns in time, the second run's result is used."""
    begun: list[int] = []
    release = threading.Event()

    @tool(effect="pure", timeout_s=30)
    def hang_once() -> str:
        """Hang the first time."""
        begun.append(1)
        if len(begun) == 1:
            harness.move(31)
            release.wait(PATIENCE_S)
        return f"run {len(begun)}"

    harness.equip(hang_once)
    harness.script(calls(("hang_once", {})), says("I see."))
    harness.ask()
    release.set()
    assert harness.results() == ["run 2"]


def test_an_unsafe_tool_that_hangs_is_not_repeated(harness: Harness) -> None:
    """A call that timed out may have taken effect. It is not run again, and its result says: outcome unknown."""
    begun: list[int] = []
    release = threading.Event()

    @tool(timeout_s=30)
    def transfer() -> str:
        """Transfer."""
        begun.append(1)
        harness.move(31)
        release.wait(PATIENCE_S)
        return "transferred"

    harness.equip(transfer)
    harness.script(calls(("transfer", {})), says("I see."))
    harness.ask()
    assert harness.results() == [UNKNOWN_OUTCOME]
    release.set()
    assert begun == [1]
    _answers_the_next_message(harness)


def test_a_result_that_came_in_time_counts_while_another_call_hangs(harness: Harness) -> None:
    """If one call times out and runs again, the results of the other calls are kept."""
    begun: list[int] = []
    release, again = threading.Event(), threading.Event()
    done = "SELECT 1 FROM tool_effects WHERE tool = 'transfer' AND status = 'done' OFFSET 2"

    @tool(effect="pure", timeout_s=10)
    def hang() -> str:
        """Hang in the first run. In the second run, return after the time limit of `transfer` has passed."""
        begun.append(1)
        if len(begun) == 1:
            harness.move(11)
            release.wait(PATIENCE_S)
            return "late"
        again.set()
        until(lambda: harness.sql(done), "the others are done")
        harness.move(9)
        return "second"

    @tool(timeout_s=15)
    def transfer() -> str:
        """Return during the second run of `hang`."""
        assert again.wait(PATIENCE_S)
        return "transferred"

    harness.equip(hang, transfer)
    harness.script(calls(*[("transfer", {})] * 3, ("hang", {})), says("I see."))
    harness.ask()
    assert harness.results() == [*["transferred"] * 3, "second"]
    release.set()


@pytest.mark.long
def test_a_result_that_came_in_time_counts_while_it_is_recorded(harness: Harness) -> None:
    """The result of a call that ends in time is used, even if the time limit passes before the result is stored."""
    first = "SELECT 1 FROM tool_effects WHERE tool = 'note' AND status = 'done'"
    moved: list[str] = []

    @tool(effect="pure")
    def note() -> str:
        """Finish first."""
        return "noted"

    @tool(timeout_s=10)
    def transfer() -> str:
        """Finish second."""
        until(lambda: harness.sql(first), "the first call is done")
        return "transferred"

    def late(moment: Moment, name: str) -> None:
        if (moment, name) == ("before", "turns.finish_effect"):
            moved.append(name)
            if len(moved) == 2:
                harness.move(12)
                pause.wait(1)  # longer than one wait of the turn for its calls

    pause = threading.Event()
    harness.equip(note, transfer)
    harness.script(calls(("note", {}), ("transfer", {})), says("I see."))
    with harness.hooked(late):
        harness.ask()
    assert harness.results() == ["noted", "transferred"]


def test_a_tool_knows_on_whose_behalf_it_runs(harness: Harness) -> None:
    """A tool's context names the user, the turn, the channel and the idempotency key of the call (`effect_id`)."""
    seen: list[ToolContext] = []

    @tool(effect="pure")
    def look(context: ToolContext) -> str:
        """Return `seen`."""
        seen.append(context)
        return "seen"

    harness.equip(look)
    harness.script(calls(("look", {})), says("ok"))
    turn = harness.ask(channel="telegram")
    assert (seen[0].user_id, str(seen[0].turn_id), seen[0].channel) == ("ana", turn["turn_id"], "telegram")
    assert seen[0].effect_id == harness.sql("SELECT effect_id FROM tool_effects")[0].effect_id


def test_a_removed_agents_turns_fail_with_a_message(harness: Harness) -> None:
    """If a deploy removes an agent, a turn of this agent waits for a worker that has it, then fails with a reply."""
    harness.equip()
    sent = harness.send(agent="other")
    harness.agents = type(harness.agents)([harness.agents.default])
    assert isinstance(harness.run(sent.session_id), Unequipped)
    harness.move(harness.settings.turn.unknown_agent_s + 1)
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"]) == ("failed", "INVALID_REQUEST")
    assert turn["reply"] is not None
