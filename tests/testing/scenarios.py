"""Scenarios that `perdure.testing` must run exactly as the engine does on PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from perdure import (
    Agent,
    Allow,
    DidNotHappen,
    Effect,
    Happened,
    OutcomeUnknown,
    Refuse,
    Replace,
    ToolContext,
    ToolError,
    TurnContext,
    Unknown,
    Verdict,
    agent_tool,
    ask_user,
    guard,
    handoff,
    required,
    tool,
)
from perdure.agents import ErrorTexts
from perdure.errors import ContextTooLong, GuardRejected, ProviderError, RateLimited
from perdure.models.protocol import ModelReply, ToolCall, Usage
from perdure.testing.conversation import Approve
from perdure.testing.scripted import Late, Reply, call, late

Script = list[Reply | Late]


@dataclass(frozen=True)
class Scenario:
    """An agent and its model's replies. `make` makes a new agent for each run, because some tools count their calls."""

    make: Callable[[], Agent]
    script: Script
    texts: tuple[str, ...] = ("hello",)
    approve: Approve = True
    language: str | None = None


SCENARIOS: dict[str, Scenario] = {}


class Order(BaseModel):
    top: int = Field(alias="$top")


@tool(effect="pure")
def sell(by: Order) -> str:
    """Sell articles."""
    return f"{by.top} sold"


@tool(effect="pure")
def price(article: str, pieces: int = 1) -> float:
    """Look up a price.

    Args:
        article: Its name.
        pieces: How many.
    """
    if article == "gold":
        raise ToolError("Gold is not sold.")
    if article == "bug":
        raise KeyError(article)
    if article == "cause":
        raise ToolError("The shop is closed.") from TimeoutError("no answer")
    return 3.5 * pieces


def assistant(*tools: Any, **given: Any) -> Agent:
    """Make the agent of a scenario."""
    return Agent("assistant", "You help.", tools, **given)


SCENARIOS["a reply"] = Scenario(assistant, ["Hello."])
SCENARIOS["an output"] = Scenario(
    lambda: assistant(price, output=list[int]), ["Sure!", call("price", article="tea"), [1, 2]]
)
SCENARIOS["no output"] = Scenario(lambda: assistant(output=int), ["Sure!", "Of course!", "Soon!"])
SCENARIOS["a reply that cannot be stored as it is"] = Scenario(
    assistant, [ModelReply("Half \ud83d and \x00.", usage=Usage(7, 3), model="m\x00", stop_reason="stop")]
)
SCENARIOS["a tool call"] = Scenario(lambda: assistant(price), [call("price", article="tea", pieces=2), "7 euros."])
SCENARIOS["calls that run fail and are refused"] = Scenario(
    lambda: assistant(price),
    [
        [call("price", article="tea"), call("price", article="ink", pieces="3"), call("price", article="gold")],
        [call("price", "{no json"), call("price", item="tea"), call("cost", article="tea")],
        [call("price", article="bug"), call("price", article="cause")],
        "Done.",
    ],
)
SCENARIOS["more calls than one reply may have"] = Scenario(
    lambda: assistant(price), [[call("price", article=f"article {number}") for number in range(34)], "Too many."]
)
SCENARIOS["a second turn"] = Scenario(
    lambda: assistant(price),
    ["It costs 1.", call("price", article="tea"), "It costs 3.5."],
    texts=("And ink?", "And tea?"),
)
SCENARIOS["the step limit"] = Scenario(lambda: assistant(price, max_steps=3), [call("price", article="tea")] * 3)
SCENARIOS["the time limit"] = Scenario(
    lambda: assistant(price, timeout_s=100), [call("price", article="tea"), late(200, "Too late.")]
)
SCENARIOS["the time limit over several steps"] = Scenario(
    lambda: assistant(price, timeout_s=100), [late(60, call("price", article="tea")), late(60, "Too late.")]
)
SCENARIOS["a reply later than the lease"] = Scenario(assistant, [late(60, "In time.")])
SCENARIOS["a provider error"] = Scenario(
    lambda: assistant(price), [call("price", article="tea"), ProviderError("The provider failed.")]
)
SCENARIOS["a rate limit"] = Scenario(assistant, [RateLimited("Slow down.", retry_after_s=7)])
SCENARIOS["an empty reply"] = Scenario(assistant, [""])
SCENARIOS["a turn that is parked"] = Scenario(
    lambda: assistant(price, on_unavailable="park"),
    [call("price", article="tea"), ProviderError("The provider failed.", transient=True)],
)
SCENARIOS["a failure with the agents own text"] = Scenario(
    lambda: assistant(error_messages=ErrorTexts({}, {"de": {"CONTEXT_TOO_LONG": "Das ist zu lang."}})),
    [ContextTooLong("Too long.")],
    language="de-AT",
)


SCENARIOS["a reply that was cut off"] = Scenario(
    lambda: assistant(price),
    [
        ModelReply("Let me see", (call("price", article="tea"), call("price", "")), Usage(5, 9), "m", "length"),
        ModelReply("It costs", usage=None, model="m", stop_reason="length"),
        "It costs 3.5.",
    ],
    texts=("tea?", "and?"),
)
SCENARIOS["a reply that a filter ended"] = Scenario(
    assistant, [ModelReply("It", model="m", stop_reason="content_filter"), "Hello."], texts=("a", "b")
)
SCENARIOS["a conversation that is too long"] = Scenario(
    assistant,
    ["One.", ContextTooLong("Too long."), "Two.", *[ContextTooLong("Too long.")] * 3, "Three."],
    texts=("one " * 100, "two", "three", "four"),
)


def _a_failure_without_a_text() -> Agent:
    class Broken:
        def find(self, code: str, language: str | None) -> str | None:
            raise LookupError(code)

    return assistant(error_messages=Broken())


SCENARIOS["a failure without a text"] = Scenario(_a_failure_without_a_text, [ContextTooLong("Too long.")])


def _a_long_result() -> Agent:
    @tool(max_result_chars=40)
    def cut() -> str:
        """Return a long text."""
        return "x" * 1_000

    return assistant(cut)


SCENARIOS["a long result"] = Scenario(_a_long_result, [call("cut"), "Cut."])


# --- effects in doubt


def doubtful(effect: str, *, probe: Any = None, failing: int = 9) -> Any:
    """A tool that raises `OutcomeUnknown` on its first `failing` calls."""
    left = iter(range(failing))

    @tool(effect=Effect(effect), probe=probe, name="transfer")
    def transfer(cents: int) -> str:
        """Transfer money."""
        for _ in left:
            raise OutcomeUnknown("The bank hung up.")
        return f"{cents} transferred"

    return transfer


def hanging(effect: str, *, probe: Any = None, hangs: int = 9) -> Any:
    """A tool that exceeds its time limit on its first `hangs` calls."""
    left = iter(range(hangs))

    @tool(effect=Effect(effect), probe=probe, timeout_s=0.3, name="transfer")
    def transfer(cents: int, context: ToolContext) -> str:
        """Transfer money."""
        if next(left, None) is not None:
            threading.Event().wait(1.0)
        return f"{cents} transferred"

    return transfer


def in_doubt(make: Callable[..., Any], *given: Any, **more: Any) -> Agent:
    """An agent with the tool that `make(*given, **more)` returns."""
    return assistant(make(*given, **more))


TRANSFER: Script = [call("transfer", cents=5), "Done."]


def _doubts() -> Iterator[tuple[str, Callable[[], Agent]]]:
    """The names and agents of scenarios in which a call's outcome is unknown or the call exceeds its time limit."""
    probes: dict[str, Any] = {
        "happened": lambda _: Happened("receipt 7"),
        "did not happen": lambda _: DidNotHappen(),
        "unknown": lambda _: Unknown(),
        "broken": lambda _: 1 / 0,
    }
    for effect in ("pure", "idempotent", "unsafe"):
        yield f"{effect}, unknown once", partial(in_doubt, doubtful, effect, failing=1)
        yield f"{effect}, always unknown", partial(in_doubt, doubtful, effect)
        yield f"{effect}, hanging", partial(in_doubt, hanging, effect)
    for name, probe in probes.items():
        yield f"unsafe, probe: {name}", partial(in_doubt, doubtful, "unsafe", probe=probe, failing=1)
        yield f"unsafe, hanging, probe: {name}", partial(in_doubt, hanging, "unsafe", probe=probe)


SCENARIOS |= {name: Scenario(make, TRANSFER) for name, make in _doubts()}


# --- hooks


def refuse(_: object) -> None:
    """Refuse, as a guard does."""
    raise GuardRejected("I do not talk about that.")


def fail(_: object) -> None:
    """Raise, as a bug does."""
    raise KeyError("a bug")


PRICED: Script = [call("price", article="tea"), "3.5 euros."]

_POINTS = ("before_turn", "after_turn", "before_tool", "after_tool")


def _hooked() -> Iterator[tuple[str, Callable[[], Agent]]]:
    for point in _POINTS:
        for name, hook in {
            "refusing": required(refuse),
            "required and broken": required(fail),
            "broken": fail,
            "passing": required(lambda _: None),
        }.items():
            yield f"{point}, {name}", partial(assistant, price, **{point: [hook]})


SCENARIOS |= {name: Scenario(make, PRICED) for name, make in _hooked()}


def _quiet(text: str, _: TurnContext) -> Verdict:
    if "hello" in text:
        return Replace(text.replace("hello", "hi"), Usage(3, 1))
    return Refuse("Never.", Usage(2, 2)) if "never" in text else Allow(Usage(1, 1))


def _sees(text: str, _: TurnContext) -> Verdict:
    return Refuse("Not that.") if "not that" in text else Allow(Usage(4, 1))


SCENARIOS["hooks that change"] = Scenario(
    lambda: assistant(
        price,
        before_turn=[required(lambda turn: turn.replace(text=f"{turn.text}?"))],
        before_tool=[required(lambda made: made.replace(arguments={"article": "ink", "pieces": 2}))],
        after_tool=[lambda called: called.replace(result=f"{called.result} euros")],
        after_turn=[lambda ending: ending.replace(reply="Bye.") if ending.status == "done" else None],
    ),
    [*PRICED, "Really?"],
    texts=("hello", "again"),
)
SCENARIOS["a refusal without a message"] = Scenario(
    lambda: assistant(input_guards=[lambda _, turn: Refuse("" if turn.text == "hello" else " ")]),
    [],
    texts=("hello", "again"),
)
SCENARIOS["guards"] = Scenario(
    lambda: assistant(input_guards=[_quiet], output_guards=[_quiet]),
    ["hello you", "never", "fine"],
    texts=("hello", "never", "and?", "last"),
)
SCENARIOS["a parallel guard"] = Scenario(
    lambda: assistant(price, input_guards=[_quiet, guard(_sees, parallel=True)]),
    [*PRICED, "Fine."],
    texts=("hello", "and?"),
)


# --- types with code of their own


Cents = Annotated[int, BeforeValidator(lambda value: round(float(value) * 100))]
Names = Annotated[list[str], BeforeValidator(lambda value: value.split(","))]


@tool
def settle(amount: Cents, region: str = "us", names: Names | None = None) -> str:
    """Settle an amount in euros."""
    return f"{amount} {region} {names}"


def _edit_in_place(made: Any) -> Any:
    made.arguments["region"] = "eu"
    return made.replace(arguments=made.arguments)


SCENARIOS["hooks that change one argument"] = Scenario(
    lambda: assistant(settle, before_tool=[required(_edit_in_place), lambda made: made.arguments.clear()]),
    [
        [call("settle", amount=5, names="a,b"), call("settle", amount=7)],
        call("settle", amount=9, names=["a"]),
        "Settled.",
    ],
)
SCENARIOS["a limited output of which nothing is left"] = Scenario(
    lambda: assistant(
        output=Annotated[list[Names], Field(max_length=1)] | None,
        output_guards=[lambda text, _: Replace("none") if text == "null" else Allow()],
    ),
    ['["a,b", "c"]', '[["a"]]', '["a,b"]', "null"],
    texts=("hello", "again"),
)
SCENARIOS["keys that providers refuse"] = Scenario(
    lambda: assistant(sell),
    [call("sell", '{"by": {"_top": 3}}'), call("sell", '{"by": {"$top": 4}}'), call("sell", '{"by": {}}'), "Sold."],
)


# --- approvals and working variables


@tool(effect="pure", requires_approval=lambda arguments: arguments["cents"] > 100)
def pay(cents: int) -> str:
    """Pay."""
    return f"{cents} paid"


PAYMENTS: Script = [[call("pay", cents=50), call("pay", cents=500), call("pay", "{")], "Paid."]

SCENARIOS |= {
    "approved": Scenario(lambda: assistant(pay), PAYMENTS, approve=True),
    "denied": Scenario(lambda: assistant(pay), PAYMENTS, approve=False),
    "approved by the call": Scenario(
        lambda: assistant(pay),
        [[call("pay", cents=500), call("pay", cents=900)], call("pay", cents=500), "Paid."],
        approve=lambda call: "900" in call.arguments,
    ),
}


SCENARIOS["a hook changes an approved call"] = Scenario(
    lambda: assistant(
        pay, price, before_tool=[lambda made: made.replace(arguments={"cents": 5}) if made.tool == "pay" else None]
    ),
    [[call("pay", cents=500), call("price", article="tea")], "Paid."],
)
SCENARIOS["a required hook fails before a call waits"] = Scenario(
    lambda: assistant(pay, on_approval_waiting=[required(fail)]), PAYMENTS
)


def _working_variables() -> Agent:
    @tool(effect="pure")
    def count(by: int, context: ToolContext) -> str:
        """Count up."""
        with context.working_variables as variables:
            variables["count"] = variables.get("count", 0) + by
            variables["user"] = [context.user_id, context.tenant, context.channel]
        return "counted"

    @tool(effect="pure")
    def forget(context: ToolContext) -> str:
        """Set a variable and fail. The variable is kept."""
        context.working_variables["left"] = True
        raise ToolError("I failed.")

    return assistant(count, forget)


SCENARIOS["working variables"] = Scenario(
    _working_variables,
    [
        *(call("count", by=1), [call("count", by=2), call("count", by=3)], call("forget"), "Counted."),
        *(call("count", by=1), "Counted again."),
    ],
    texts=("count", "again"),
)


def _other_agents() -> Agent:
    searcher = Agent("searcher", "You search.", [price, agent_tool("searcher", name="deeper")], output=dict[str, int])
    strict = Agent("strict", "You do little.", max_steps=1, tools=[price])
    return Agent("assistant", "You help.", [agent_tool(searcher, name="research"), agent_tool(strict, name="strictly")])


_ASKED = call("deeper", task="Deeper!")

SCENARIOS["other agents"] = Scenario(
    _other_agents,
    [
        *(call("research", task="Prices?"), call("price", article="tea"), '{"tea": 3}', "Here you are."),
        *(call("strictly", task="Prices?"), call("price", article="tea"), "It gave up."),
        *(call("research", task=" "), call("research", task="Deep?"), _ASKED, _ASKED, _ASKED),
        *('{"deepest": 3}', '{"deeper": 2}', '{"deep": 1}', "So deep."),
    ],
    texts=("hello", "again", "thirdly"),
)


def _limited_with_others() -> Agent:
    searcher = Agent("searcher", "You search.", [price, ask_user()])
    return Agent("assistant", "You help.", [agent_tool(searcher, name="research"), price], max_tokens=100)


_COSTLY = ModelReply("", (ToolCall("call_1", "price", '{"article": "tea"}'),), Usage(60, 10), "m", "tool_calls")
_CHEAP = ModelReply("", (ToolCall("call_1", "price", '{"article": "tea"}'),), Usage(20, 10), "m", "tool_calls")
_RESEARCH = ModelReply("", (ToolCall("call_1", "research", '{"task": "Prices?"}'),), Usage(20, 10), "m", "tool_calls")

SCENARIOS["the limit of an agent that asks another"] = Scenario(
    _limited_with_others,
    [_RESEARCH, _CHEAP, ModelReply("3.5", usage=Usage(5, 5), model="m"), "Tea.", _CHEAP, "Again.", _RESEARCH, _COSTLY],
    texts=("hello", "again", "thirdly"),
)
SCENARIOS["a question of another agent"] = Scenario(
    _limited_with_others, [call("research", task="Prices?"), call("ask_user", question="Which?")]
)


class Ruling(BaseModel):
    reason: str
    to: float = 0.5


SCENARIOS["the data of another agent"] = Scenario(
    lambda: Agent("assistant", "You help.", [agent_tool(Agent("judge", "You judge.", output=Ruling))]),
    [call("judge", task="Who?"), '{"reason": "late", "to": 1}', "Half."],
)


def _handoffs() -> Agent:
    billing = Agent("billing", lambda turn: f"You bill {turn.user_id}.", [price])
    other = Agent("other", "You do not.")
    return Agent("assistant", "You help.", [handoff(billing), handoff(other, requires_approval=True), price])


SCENARIOS["handoffs"] = Scenario(
    _handoffs,
    [
        [call("handoff_to_other"), call("price", article="gold"), call("handoff_to_billing")],
        *(call("price", article="tea"), "3.5 euros."),
        "Again 3.5 euros.",
    ],
    texts=("hello", "again"),
    approve=lambda asked: asked.name != "handoff_to_other",
)
