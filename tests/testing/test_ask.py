"""`ask`, `Conversation` and `Scripted`, used as an agent's author uses them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

import pytest

from perdure import Agent, ModelRetry, ToolContext, celery_tool, required, sleep_until, tool
from perdure.errors import Abandoned, GuardRejected, ProviderError
from perdure.models.protocol import ModelReply, Role
from perdure.settings import Settings, TurnSettings
from perdure.testing import Call, Conversation, MovedClock, Scripted, ScriptExhausted, ask, call, late
from perdure.testing.conversation import Options
from perdure.tools.memory import recall, remember


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every connection fail, because `ask` needs none."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("something opens a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@tool(effect="pure")
def price(article: str) -> float:
    """Look up a price."""
    return {"tea": 3.5}[article]


ASSISTANT = Agent("assistant", "You sell tea.", [price])


def test_returns_the_reply_the_calls_and_the_transcript() -> None:
    """An answer contains the turn's status, reply, number of steps, tool calls and transcript."""
    answer = ask(ASSISTANT, "What is tea?", model=Scripted(call("price", article="tea"), "3.5 euros."))
    assert (answer.status, answer.reply, answer.steps) == ("done", "3.5 euros.", 2)
    assert answer.calls == (Call("price", {"article": "tea"}, "done", "3.5", answer.calls[0].effect_id),)
    assert [each.role for each in answer.transcript] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert answer.error_code is None


def test_arguments_that_are_no_json_are_shown_as_text() -> None:
    """Malformed arguments are shown as text, so that a test can check how an agent recovers from them."""
    answer = ask(ASSISTANT, "What is tea?", model=Scripted(call("price", "{tea"), "Sorry."))
    assert (answer.calls[0].arguments, answer.calls[0].status) == ("{tea", "failed")


@dataclass
class Order:
    article: str
    pieces: int


def test_an_output_is_a_value_of_its_type() -> None:
    """A script has outputs as values. What the model gets to repair one is in the next request."""

    def at_most_five(order: Order) -> None:
        if order.pieces > 5:
            raise ModelRetry("At most 5.")

    model = Scripted("Sure!", Order("tea", 9), Order("tea", 2))
    answer = ask(Agent("shop", "You sell tea.", output=Order, check_output=at_most_five), "Tea!", model=model)
    assert (answer.data, answer.reply, answer.steps) == (Order("tea", 2), '{"article": "tea", "pieces": 2}', 3)
    assert [each.content for each in model.requests[2].messages[2:]] == [
        "Sure!", model.requests[1].messages[-1].content, '{"article": "tea", "pieces": 9}', "At most 5.",
    ]  # fmt: skip


def test_records_what_the_model_was_sent() -> None:
    """`Scripted` records the requests to the model, so that a test can check the instructions, tools and results."""
    model = Scripted(call("price", article="tea"), ModelReply("3.5 euros."), "not asked for")
    ask(ASSISTANT, "What is tea?", model=model)
    assert model.requests[0].messages[0].content.startswith("You sell tea.")
    assert [each.name for each in model.requests[0].tools] == ["price"]
    assert model.requests[1].messages[-1].content == "3.5"
    assert model.unused == 1


def test_a_script_that_is_too_short_fails_the_test() -> None:
    """If a script has too few replies, `ask` raises `ScriptExhausted`, which shows the last message."""
    with pytest.raises(ScriptExhausted, match=r"request 2 has no reply in the script; .* tool: '3.5'"):
        ask(ASSISTANT, "What is tea?", model=Scripted(call("price", article="tea")))


def test_a_models_bug_reaches_the_test() -> None:
    """If the model raises an error that is not a `PerdureError`, `ask` raises this error: the model has a bug."""
    with pytest.raises(ZeroDivisionError):
        ask(ASSISTANT, "hello", model=Scripted(lambda *_: 1 / 0))


def test_a_models_failure_fails_the_turn() -> None:
    """If a scripted reply is a `PerdureError`, the turn fails at once, without retries, breakers or fallback models."""
    model = Scripted(ProviderError("The provider is down.", transient=True), "not asked for")
    answer = ask(ASSISTANT, "hello", model=model)
    assert (answer.status, answer.reply, answer.error_code) == ("failed", "The provider is down.", "PROVIDER_ERROR")
    assert (answer.steps, model.unused) == (0, 1)


def test_a_model_that_breaks_off_fails_the_turn() -> None:
    """If a model raises `Abandoned` although its call was not aborted, the turn fails, as in the engine."""

    class Abandoning(Scripted):
        def respond(self, *_: Any) -> NoReturn:
            raise Abandoned("The call was ended.")

    assert ask(ASSISTANT, "hello", model=Abandoning()).status == "failed"


def test_late_replies_take_no_time() -> None:
    """A late reply advances the clock, so that time limits of minutes are tested in milliseconds."""
    model = Scripted(late(90, "Late."), late(30, "Later."))
    conversation = Conversation(Agent("assistant", "You help.", timeout_s=60), model=model)
    assert conversation.ask("hello").error_code == "TIMEOUT"
    assert conversation.ask("hello").reply == "Later."
    assert model.clock.offset >= timedelta(seconds=120)


def test_a_tool_may_advance_the_clock() -> None:
    """A tool may advance the clock, so that a test of the tool's time limit does not wait."""
    clock, over = MovedClock(), threading.Event()

    @tool(effect="unsafe", timeout_s=20)
    def hang() -> str:
        """Take more than a minute."""
        clock.advance(timedelta(minutes=1))
        over.wait(30)
        return "done"

    answer = ask(Agent("a", "You help.", [hang]), "go", model=Scripted(call("hang"), "Hm."), clock=clock)
    over.set()
    assert (answer.reply, answer.calls[0].status) == ("Hm.", "unknown")


def test_without_a_decision_the_turn_waits() -> None:
    """Without `approve`, the turn waits for approval, so that a test can check the call that needs approval."""
    ran: list[int] = []

    @tool(requires_approval=True)
    def pay(cents: int) -> str:
        """Pay."""
        ran.append(cents)
        return "paid"

    agent = Agent("assistant", "You pay.", [pay, price])
    script = ([call("pay", cents=5), call("price", article="tea")], "Paid.")
    conversation = Conversation(agent, model=Scripted(*script))
    answer = conversation.ask("Pay 5 cents.")
    assert (answer.status, answer.reply) == ("waiting_approval", None)
    assert [(each.tool, each.status, each.result) for each in answer.calls] == [
        ("pay", "asked", None),
        ("price", "approved", None),
    ]
    assert not ran
    with pytest.raises(RuntimeError, match="the previous turn is not settled"):
        conversation.ask("Pay!")

    assert ask(agent, "Pay 5 cents.", model=Scripted(*script), approve=True).reply == "Paid."
    assert ran == [5]
    denied = ask(agent, "Pay 5 cents.", model=Scripted(*script), approve=lambda call: "6" in call.arguments)
    assert [each.status for each in denied.calls] == ["denied", "done"]
    assert ran == [5]


def test_tools_are_called_for_the_user_that_was_given() -> None:
    """A tool gets the user, tenant, channel and working variables that the test passed."""
    seen: list[tuple[str, str | None, str, Mapping[str, Any]]] = []

    @tool(effect="pure")
    def look(context: ToolContext) -> str:
        """Look."""
        seen.append((context.user_id, context.tenant, context.channel, dict(context.working_variables)))
        return "seen"

    agent = Agent("assistant", "You look.", [look])
    given = Options(user_id="ana", tenant="acme", channel="cli", working_variables={"open": "a.txt"})
    ask(agent, "look", model=Scripted(call("look"), "Seen."), **given)
    assert seen == [("ana", "acme", "cli", {"open": "a.txt"})]


def test_a_guards_refusal_precedes_the_model() -> None:
    """If a guard refuses the message, the refusal is the reply, and the model is not called."""

    def off_topic(_: object) -> None:
        raise GuardRejected("I sell tea.")

    model = Scripted()
    answer = ask(Agent("a", "You sell tea.", before_turn=[required(off_topic)]), "lottery?", model=model)
    assert (answer.status, answer.reply, answer.error_code) == ("failed", "I sell tea.", "GUARD_REJECTED")
    assert model.requests == []


def test_memory_tools_fail_with_a_message() -> None:
    """The memory tools fail with a message, because `perdure.testing` has no PostgreSQL."""
    agent = Agent("assistant", "You remember.", [remember, recall])
    answer = ask(
        agent, "I am Ana.", model=Scripted(call("remember", content="Ana"), call("recall", query="name"), "Hm.")
    )
    assert [each.status for each in answer.calls] == ["failed", "failed"]
    assert "perdure.testing has no PostgreSQL" in str(answer.calls[0].result)


def test_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ask` ignores environment variables. A test can pass `settings` instead."""
    monkeypatch.setenv("PERDURE_TURN__MAX_STEPS", "1")
    monkeypatch.setenv("PERDURE_TIMEZONE", "nowhere")
    model = Scripted(call("price", article="tea"), call("price", article="tea"), "3.5 euros.")
    assert ask(ASSISTANT, "What is tea?", model=model).status == "done"
    limited = Settings.model_construct(turn=TurnSettings(max_steps=1))
    answer = ask(ASSISTANT, "What is tea?", model=Scripted(call("price", article="tea")), settings=limited)
    assert answer.error_code == "BUDGET_EXHAUSTED"


def test_needs_no_pytest() -> None:
    """`perdure.testing` does not import pytest, so that agents can be tried in scripts and notebooks."""
    program = "import sys, perdure.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_functions_replace_celery_tasks() -> None:
    """The functions in `tasks` run instead of Celery tasks. A Celery task without a function parks the turn."""

    def export(year: int) -> dict[str, int]:
        if year < 2000:
            raise ValueError("too old")
        return {"rows": year}

    tools = [
        celery_tool("reports.export", effect="idempotent"),
        celery_tool("reports.export", name="many", max_parallel=2),
        celery_tool("reports.other", name="other"),
    ]
    agent = Agent("assistant", "You report.", tools)
    both = [call("reports_export", year=2025), call("reports_export", year=1999)]
    many = call("many", calls=[{"year": 2001}, {"year": 2002}, {"year": 2003}])
    answer = ask(agent, "Report.", model=Scripted(both, many, "Done."), tasks={"reports.export": export})
    assert (answer.status, answer.reply) == ("done", "Done.")
    assert [each.result for each in answer.calls[:2]] == ['{"rows": 2025}', "Error: ValueError: too old"]
    assert str(answer.calls[2].result).count("rows") == 3

    answer = ask(agent, "Report.", model=Scripted(call("other")))
    assert (answer.status, answer.calls[0].status) == ("parked", "intended")


def test_waits_of_one_step_are_concurrent() -> None:
    """Two calls of `sleep_until` in one step advance the clock by the longer of their waits."""
    clock = MovedClock()
    moments = [(clock.now() + timedelta(seconds=seconds)).isoformat() for seconds in (100, 200)]
    model = Scripted([call("sleep_until", moment=moment) for moment in moments], "Good morning.")
    began = clock.now()
    ask(Agent("assistant", "You wait.", [sleep_until]), "Wait.", model=model, clock=clock)
    assert clock.now() - began < timedelta(seconds=250)


def test_sleep_until_advances_the_clock() -> None:
    """`sleep_until` advances the clock instead of waiting."""
    model = Scripted(call("sleep_until", moment=(datetime.now(UTC) + timedelta(days=2)).isoformat()), "Good morning.")
    answer = ask(Agent("assistant", "You wait.", [sleep_until]), "Wait.", model=model)
    assert answer.reply == "Good morning."
    assert model.clock.offset > timedelta(days=1)


def test_a_call_may_name_the_function() -> None:
    """The parameters of the function are checked, where a script is written."""
    assert call(price, "tea") == call("price", article="tea")
    with pytest.raises(TypeError, match="artcle"):
        call(price, artcle="tea")  # type: ignore[call-overload]
