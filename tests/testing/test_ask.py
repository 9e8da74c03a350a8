"""`ask`, `Conversation` and `Scripted`, used as an agent's author uses them."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn
from uuid import UUID

import pytest

from perdure import (
    Agent,
    Allow,
    File,
    ModelRetry,
    Refuse,
    Replace,
    ToolContext,
    TurnContext,
    Verdict,
    agent_tool,
    ask_user,
    celery_tool,
    guard,
    handoff,
    required,
    sleep_until,
    tool,
)
from perdure.errors import Abandoned, GuardRejected, InvalidRequest, ProviderError
from perdure.files.results import named_in
from perdure.models.protocol import ModelReply, Role, ToolCall, Usage
from perdure.settings import Settings, TurnSettings
from perdure.testing import Call, Conversation, MovedClock, Scripted, ScriptExhausted, ask, call, late
from perdure.testing.conversation import Options
from perdure.tools.memory import recall, remember
from tests.files.contents import png
from tests.turns.scripted import spoken, system_text


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
    assert [each.content for each in spoken(model.requests[2])[1:]] == [
        "Sure!", model.requests[1].messages[-1].content, '{"article": "tea", "pieces": 9}', "At most 5.",
    ]  # fmt: skip


def test_records_what_the_model_was_sent() -> None:
    """`Scripted` records the requests to the model, so that a test can check the instructions, tools and results."""
    model = Scripted(call("price", article="tea"), ModelReply("3.5 euros."), "not asked for")
    ask(ASSISTANT, "What is tea?", model=model)
    assert system_text(model.requests[0]).startswith("You sell tea.")
    assert [each.name for each in model.requests[0].tools] == ["price"]
    assert model.requests[1].messages[-1].content == "3.5"
    assert model.unused == 1


def test_a_script_that_is_too_short_fails_the_test() -> None:
    """If a script has too few replies, `ask` raises `ScriptExhausted`, which shows the last message."""
    with pytest.raises(ScriptExhausted, match=r"request 2 has no reply in the script; .* tool: '3.5'"):
        ask(ASSISTANT, "What is tea?", model=Scripted(call("price", article="tea")))


def test_files_are_sent_to_a_model_that_reads_them() -> None:
    """They are described to another. Later turns have them, too."""
    image = {"type": "image", "data": base64.b64encode(png()).decode(), "name": "tea.png"}
    parts = [{"type": "text", "text": "What is"}, image, {"type": "text", "text": "this?"}]
    model = Scripted("Tea.", "Yes.", reads={"image/png"})
    conversation = Conversation(ASSISTANT, model=model)
    assert conversation.ask(parts=parts).reply == "Tea."
    conversation.ask("Is it?")
    for request in model.requests:
        [sent] = spoken(request)[0].files
        assert (sent.media_type, sent.data) == ("image/png", png())
    blind = Scripted("I see none.")
    ask(ASSISTANT, parts=[image], model=blind)
    assert "tea.png" in spoken(blind.requests[0])[0].content
    with pytest.raises(InvalidRequest, match="image 1"):
        ask(ASSISTANT, parts=[{"type": "image", "data": "no Base64!"}], model=Scripted())


_ANOTHER = "01931e71-20c4-7a05-8f3b-5d0f6a1e9b42"


@pytest.mark.parametrize("name", ["tea.png", "tea[1].png", "a]b[.png", f"a; file {_ANOTHER}] [image: b.png", None])
def test_the_file_of_a_tool_is_sent_whatever_its_name(name: str | None) -> None:
    """Browsers name a second download `tea[1].png`. A name names no other file."""

    @tool(effect="pure")
    def chart() -> File:
        """Draw a chart."""
        return File(png(), name=name)

    model = Scripted(call("chart"), "Nice.", reads={"image/png"})
    answer = ask(Agent("painter", "You draw.", [chart]), "Draw!", model=model)
    [sent] = spoken(model.requests[1])[-1].files
    assert sent.data == png()
    assert [each for each, _ in named_in(str(answer.calls[0].result))] == [UUID(str(answer.calls[0].result)[-37:-1])]


@pytest.mark.parametrize(
    ("limits", "error_code", "steps"),
    [
        ({"max_steps": 1}, "BUDGET_EXHAUSTED", 1),
        ({"max_tokens": 30}, "BUDGET_EXHAUSTED", 1),
        ({"max_cost": 0.0001, "model": "openai:gpt-5"}, "BUDGET_EXHAUSTED", 1),
        ({"max_tokens": 3_000, "max_cost": 1, "model": "openai:gpt-5", "max_steps": 2}, None, 2),
    ],
)
def test_the_limits_of_an_agent(limits: Mapping[str, Any], error_code: str | None, steps: int) -> None:
    """They are checked before each model call."""
    calls = (ToolCall("call_1", "price", '{"article": "tea"}'),)
    first = ModelReply("", calls, Usage(1_000, 500), "gpt-5", "tool_calls")
    answer = ask(Agent("assistant", "You sell tea.", [price], **limits), "Tea?", model=Scripted(first, "3.5 euros."))
    assert (answer.error_code, answer.steps) == (error_code, steps)


@pytest.mark.parametrize(("first", "error_code"), [("openai:gpt-5", "BUDGET_EXHAUSTED"), ("openai:gpt-5-nano", None)])
def test_a_limit_counts_each_reply_at_the_price_of_its_agent(first: str, error_code: str | None) -> None:
    """After a handoff, and after a turn has waited."""
    back = Agent("back", "You sell coffee.", [], model="openai:gpt-5-nano", max_cost=0.05)
    pay = tool(requires_approval=True)(price.function)
    front = Agent("front", "You sell tea.", [pay, handoff(back, name="over")], model=first, max_cost=0.5)
    large = Usage(100_000, 0)
    waits = ModelReply("", (ToolCall("c", "price", '{"article": "tea"}'),), Usage(1_000, 0), "m", "tool_calls")
    over = ModelReply("", (ToolCall("d", "over", "{}"),), large, "m", "tool_calls")
    models = {"back": Scripted(*([] if error_code else ["4 euros."]))}
    answer = ask(front, "Coffee?", model=Scripted(waits, over), models=models, approve=True)
    assert answer.error_code == error_code


def test_the_window_of_an_agent() -> None:
    """`keep_turns` counts the present turn. A small `window` leaves earlier turns out."""
    for given, kept in (({}, 5), ({"keep_turns": 2}, 3), ({"window": 400}, 1)):
        model = Scripted("One.", "Two.", "Three.")
        conversation = Conversation(Agent("assistant", "You sell tea.", **given), model=model)  # type: ignore[arg-type]
        for number in range(3):
            conversation.ask(f"{number} " + "a long question " * 40)
        assert len(spoken(model.requests[-1])) == kept, given


def test_instructions_and_dependencies_of_a_turn() -> None:
    """The functions get the turn, and the tools what `deps` made."""

    @tool
    def order(context: ToolContext[dict[str, str]]) -> str:
        """Order."""
        return context.deps["shop"]

    agent = Agent(
        "assistant", lambda turn: f"You help {turn.user_id} of {turn.deps['shop']}.", [order],
        deps=lambda turn: {"shop": f"the shop of {turn.tenant}"},
    )  # fmt: skip
    model = Scripted(call("order"), "Done.")
    answer = ask(agent, "An order.", model=model, user_id="ana", tenant="acme")
    assert answer.calls[0].result == "the shop of acme"
    assert system_text(model.requests[0]).startswith("You help ana of the shop of acme.")


def test_guards_and_hooks_that_change() -> None:
    """As in a worker: what the model is sent, what is stored, and what is shown."""

    def no_names(text: str, _: TurnContext) -> Verdict:
        return Replace(text.replace("Ana", "A."), Usage(2, 1))

    async def beside(text: str, _: TurnContext) -> Verdict:
        return Refuse("No lotteries.") if "lottery" in text else Allow(Usage(3, 1))

    agent = Agent(
        "assistant", "You help.", input_guards=[no_names, guard(beside, parallel=True)], output_guards=[no_names]
    )
    model = Scripted("Ana called.", "Never shown.", "Fine.")
    conversation = Conversation(agent, model=model)
    answer = conversation.ask("Did Ana call?")
    assert (answer.reply, answer.transcript[0].content) == ("A. called.", "Did A. call?")
    assert answer.usage is None or answer.usage.input_tokens >= 7
    refused = conversation.ask("The lottery, please.")
    assert (refused.error_code, refused.reply) == ("GUARD_REJECTED", "No lotteries.")
    conversation.ask("And now?")
    assert [each.content for each in spoken(model.requests[-1])] == [
        "Did A. call?", "A. called.", "[message withheld]", "And now?",
    ]  # fmt: skip


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


@pytest.mark.long
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


def test_each_wait_of_a_step_ends_at_its_time() -> None:
    """As in the engine, which wakes the turn at the first of the times."""
    clock = MovedClock()
    moments = [(clock.now() + timedelta(hours=hours)).replace(microsecond=0) for hours in (20, 10)]
    model = Scripted([call("sleep_until", moment=moment.isoformat()) for moment in moments], "Good morning.")
    answer = ask(Agent("assistant", "You wait.", [sleep_until]), "Wait.", model=model, clock=clock)
    for moment, each in zip(moments, answer.calls, strict=True):
        assert f"it is {moment:%Y-%m-%dT%H:%M}" in str(each.result)


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


def test_the_context_of_a_function_is_no_argument_of_its_call() -> None:
    @tool(effect="pure")
    def mine(context: ToolContext, article: str) -> str:
        """Look up the user's price of an article."""
        return f"{context.user_id}: {article}"

    assert call(mine, "tea") == call("mine", article="tea")
    answer = ask(Agent("seller", "You sell.", [mine]), "Tea?", model=Scripted(call(mine, "tea"), "Yes."), user_id="ana")
    assert answer.calls[0].result == "ana: tea"


def test_questions_to_the_user_are_answered_in_order() -> None:
    """Without a further answer, the turn is parked, and the question is what the user would read next."""
    waiter = Agent("waiter", "You serve.", [ask_user(bool, name="ask_milk"), ask_user(list[int], name="ask_seats")])
    milk, seats = call("ask_milk", question="Milk?"), call("ask_seats", question="Which seats?")
    answer = ask(waiter, "Tea.", model=Scripted([milk, seats], "Here."), answers=["hm", "yes", [1, 2]])
    assert [each.result for each in answer.calls] == ["true", "[1, 2]"]
    assert (answer.reply, answer.question) == ("Here.", None)
    parked = ask(waiter, "Tea.", model=Scripted(milk), answers=["hm"])
    assert (parked.status, parked.question) == ("parked", "Please answer yes or no.\nMilk?")
    asked: list[str] = []

    def never(question: str) -> str:
        asked.append(question)
        return "perhaps"

    answer = ask(waiter, "Tea.", model=Scripted(milk, "Without, then."), answers=never)
    assert answer.calls[0].result == "Error: The user's answers do not fit. They said: perhaps; perhaps; perhaps"
    assert (answer.calls[0].status, len(asked)) == ("failed", 3)


def test_questions_of_another_agent_are_answered_in_order() -> None:
    """The answers are those of the whole turn, in the order of the questions, however deep the agent is that asks."""
    milk, seats = call("ask_milk", question="Milk?"), call("ask_seats", question="How many?")
    cook = Agent("cook", "You cook.", [ask_user(bool, name="ask_milk")])
    host = Agent("host", "You receive.", [ask_user(int, name="ask_seats"), agent_tool(cook)])
    waiter = Agent("waiter", "You serve.", [agent_tool(host), ask_user(int, name="ask_seats")])
    script = [call("host", task="Tea."), call("cook", task="Tea."), milk, "With milk.", seats, "Two.", seats, "Here."]
    answer = ask(waiter, "Tea.", model=Scripted(*script), answers=["hm", "yes", "2", "3"])
    assert (answer.reply, [each.result for each in answer.calls]) == ("Here.", ["Two.", "3"])
    parked = ask(waiter, "Tea.", model=Scripted(*script[:3]), answers=["hm"])
    assert (parked.status, parked.question) == ("parked", "Please answer yes or no.\nMilk?")


def test_a_refusal_without_a_message_has_one() -> None:
    """A chat service refuses an empty message. The guard refuses nevertheless."""
    silent = Agent("silent", "You sell tea.", input_guards=[guard(required=False)(lambda *_: Refuse(""))])
    answer = ask(silent, "Tea.", model=Scripted())
    assert (answer.error_code, answer.reply) == ("GUARD_REJECTED", "I cannot answer this (GUARD_REJECTED).")


def test_what_guards_used_for_an_answer_counts() -> None:
    """Also for an answer that does not fit, and for one that a guard refuses."""

    def polite(text: str, turn: TurnContext) -> Verdict:
        return Refuse("Not that.", Usage(4, 4)) if text == "no!" else Allow(Usage(1, 1))

    waiter = Agent("waiter", "You serve.", [ask_user(bool, name="ask_milk")], input_guards=[polite])
    milk = call("ask_milk", question="Milk?")
    assert ask(waiter, "Tea.", model=Scripted(milk, "Here."), answers=["hm", "yes"]).usage == Usage(3, 3)
    answer = ask(waiter, "Tea.", model=Scripted(milk), answers=["hm", "no!"])
    assert (answer.error_code, answer.usage) == ("GUARD_REJECTED", Usage(6, 6))


def test_a_message_steers_the_running_turn() -> None:
    """It follows the results of the calls, and the model reads it with the next step."""
    model = Scripted(call("look", article="tea"), "Only green tea, then.")

    @tool(effect="pure")
    def look(article: str) -> str:
        """Look at an article."""
        conversation.steer("Only green tea!")
        return f"{article}: much"

    conversation = Conversation(Agent("assistant", "You sell tea.", [look]), model=model)
    answer = conversation.ask("Which tea is there?")
    assert (answer.status, answer.reply) == ("done", "Only green tea, then.")
    assert [each.content for each in answer.transcript if each.role is Role.USER] == [
        "Which tea is there?", "Only green tea!",
    ]  # fmt: skip
    assert [each.content for each in spoken(model.requests[1])][-2:] == ["tea: much", "Only green tea!"]


def test_a_message_that_finds_no_further_step_is_the_next_turn() -> None:
    def reply(*_: object) -> ModelReply:
        conversation.steer("And coffee?")
        return ModelReply("Tea is there.")

    conversation = Conversation(ASSISTANT, model=Scripted(reply, "No coffee.", "Milk is."))
    assert conversation.ask("Is tea there?").reply == "Tea is there."
    with pytest.raises(RuntimeError, match="joined no turn"):
        conversation.ask("Is milk there?")
    assert conversation.ask().reply == "No coffee."
    assert conversation.ask("Is milk there?").reply == "Milk is."
