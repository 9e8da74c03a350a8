"""An agent with an output: what reaches the model's server, what is stored, and what callers read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, Field

from perdure import Agent, GuardRejected, ModelRetry, Replace, TurnEnding, required, tool
from perdure.agents import Agents
from perdure.database.engine import Moment
from perdure.models.protocol import ModelReply, Usage
from perdure.output import OutputType
from perdure.turns import outbox
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, OpenAIServer, Status
from tests.turns.harness import Harness
from tests.turns.scripted import says, spoken


class Order(BaseModel):
    item: Literal["tea", "coffee"]
    amount: int = Field(ge=1)


ORDER = '{"item": "tea", "amount": 2}'
DATA = {"item": "tea", "amount": 2}


@tool(effect="pure")
def stock(item: str) -> int:
    """Say how much is in stock."""
    return len(item)


@pytest.fixture
def server(harness: Harness) -> Iterator[OpenAIServer]:
    """The model's server, which the harness's agents call over HTTP."""
    with OpenAIServer() as running:
        harness.any_model = model = model_of(running)
        yield running
        model.close()


def _order(harness: Harness, *tools: Any, **given: Any) -> None:
    harness.agents = Agents([Agent("shop", "You take orders.", tools, output=Order, **given)])


def _prompt(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in body["messages"] if each["role"] != "system"]


def test_the_reply_has_the_data(harness: Harness, server: OpenAIServer) -> None:
    """The server gets the schema. The turn's reply has the value, and its text is the JSON."""
    _order(harness)
    server.script(Answer(ORDER))
    turn = harness.ask("two teas")
    assert turn["reply"] == {"text": ORDER, "format": "text", "data": DATA, "stop_reason": "stop"}
    form = server.requests[0]["response_format"]["json_schema"]
    assert (form["strict"], form["schema"]["required"]) == (True, ["item", "amount"])


def test_a_reply_that_does_not_fit_is_repaired(harness: Harness, server: OpenAIServer) -> None:
    """The model reads its reply and what is wrong with it. Users, memory and later turns read the last reply only."""
    _order(harness)
    server.script(
        Answer("Sure!"), Answer('{"item": "milk", "amount": 0}'), Answer(f"```json\n{ORDER}\n```"), Answer(ORDER)
    )
    sent = harness.send("two teas")
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["steps"], turn["reply"]["data"], turn["reply"]["text"]) == ("done", 3, DATA, ORDER)
    assert turn["usage"]["output_tokens"] == 3 * 7
    asked = _prompt(server.requests[2])
    assert [role for role, _ in asked] == ["user", "assistant", "user", "assistant", "user"]
    assert (asked[1][1], asked[3][1]) == ("Sure!", '{"item": "milk", "amount": 0}')
    assert "it is not JSON" in asked[2][1]
    assert "item: must be 'tea' or 'coffee'; amount: must be greater than or equal to 1" in asked[4][1]
    assert harness.lines(sent.session_id) == [
        ("user", "two teas"), ("assistant", ""), ("assistant", ""), ("assistant", ORDER),
    ]  # fmt: skip
    assert [each.get("stop_reason") for each in harness.messages(sent.session_id)] == [
        None,
        "rejected",
        "rejected",
        "stop",
    ]
    harness.ask("again")
    assert _prompt(server.requests[3]) == [("user", "two teas"), ("assistant", ORDER), ("user", "again")]


def test_a_model_that_never_fits_fails_the_turn(harness: Harness, server: OpenAIServer) -> None:
    """After two repairs the turn fails with a code, and the next turn runs."""
    _order(harness)
    server.script(*[Answer("Sure!")] * 3, Answer(ORDER))
    turn = harness.ask("two teas")
    assert (turn["status"], turn["error"]["code"], turn["steps"]) == ("failed", "INVALID_RESPONSE", 3)
    assert "data" not in turn["reply"]
    assert len(server.requests) == 3
    assert harness.ask("again")["reply"]["data"] == DATA


@pytest.mark.parametrize("output", [Order, Annotated[str, Field(max_length=100)]])
def test_a_model_that_refuses_is_not_asked_again(harness: Harness, output: Any) -> None:
    """Its words are no answer, even to a type that they fit. Later turns do not read the turn."""
    harness.agents = Agents([Agent("shop", "You take orders.", output=output)])
    refused = ModelReply("I cannot help with that.", usage=Usage(10, 2), model="scripted", stop_reason="refusal")
    harness.script(refused, says(ORDER), says(ORDER))
    sent = harness.send("two teas")
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["error"]["code"], turn["steps"]) == ("failed", "CONTENT_FILTERED", 1)
    assert turn["usage"]["output_tokens"] == 2
    assert harness.lines(sent.session_id) == [
        ("user", "two teas"), ("assistant", "The model refused to answer this."),
    ]  # fmt: skip
    assert harness.ask("again")["status"] == "done"
    assert [each.content for each in spoken(harness.model.requests[1])] == ["again"]


def test_with_tools_the_output_is_a_tool_of_the_wire_only(harness: Harness, server: OpenAIServer) -> None:
    """The transcript has the agent's own calls, and the output as text."""
    _order(harness, stock)
    server.script(Answer("", (Call("stock", '{"item": "tea"}'),)), Answer("", (Call("final_answer", ORDER, "call_2"),)))
    sent = harness.send("two teas")
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["data"] == DATA
    assert harness.lines(sent.session_id) == [
        ("user", "two teas"), ("assistant", ""), ("tool", "3"), ("assistant", ORDER),
    ]  # fmt: skip
    assert [each["function"]["name"] for each in server.requests[1]["tools"]] == ["stock", "final_answer"]
    assert [each.tool for each in harness.sql("SELECT tool FROM tool_effects")] == ["stock"]


def test_a_check_makes_the_model_answer_again(harness: Harness, server: OpenAIServer) -> None:
    """The function gets the value. Its message reaches the model, and no user."""
    seen: list[Order] = []

    async def at_most_five(order: Order) -> None:
        seen.append(order)
        if order.amount > 5:
            raise ModelRetry("At most 5 are in stock.")

    _order(harness, check_output=at_most_five)
    server.script(Answer('{"item": "tea", "amount": 9}'), Answer(ORDER))
    turn = harness.ask("nine teas")
    assert turn["reply"]["data"] == DATA
    assert seen == [Order(item="tea", amount=9), Order(item="tea", amount=2)]
    assert _prompt(server.requests[1])[-1] == ("user", "At most 5 are in stock.")


def test_a_check_may_be_of_text(harness: Harness, server: OpenAIServer) -> None:
    """Without an output, the function gets the reply's text. Any other error is a guard's."""

    def polite(text: str) -> None:
        if "!" in text:
            raise ModelRetry("Do not shout.")
        if "secret" in text:
            raise GuardRejected("That is secret.")

    harness.agents = Agents([Agent("shop", "You help.", check_output=polite)])
    server.script(Answer("Hi!"), Answer("Hi."), Answer("a secret"))
    assert harness.ask("hello")["reply"]["text"] == "Hi."
    assert harness.ask("hello")["error"] == {"code": "GUARD_REJECTED", "message": "That is secret."}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_repair_survives_a_crash(harness: Harness, server: OpenAIServer, moment: Moment, nth: int) -> None:
    """A rejected reply that is committed is not asked for again, and the number of repairs is not forgotten."""
    _order(harness)
    lost = nth if moment == "before" else 0
    answers = [Answer("Sure!"), Answer("Of course!"), Answer(ORDER)]
    repeated = [answers[nth - 1]] if lost else []
    server.script(*answers[:nth], *repeated, *answers[nth:])
    sent = harness.send("two teas")
    with harness.crashing(moment, "turns.step", nth):
        harness.run(sent.session_id)
    harness.move(60)
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["steps"], turn["reply"]["data"]) == ("done", 3, DATA)
    assert len(server.requests) == 3 + len(repeated)
    assert [text for role, text in _prompt(server.requests[-1]) if role == "assistant"] == ["Sure!", "Of course!"]


def test_hooks_and_callbacks_have_the_data(harness: Harness, server: OpenAIServer) -> None:
    """`after_turn` sees the data before the turn is settled. The receiver of the reply gets it, too."""
    seen: list[TurnEnding] = []
    bodies: list[dict[str, Any]] = []

    class Carrier:
        def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
            del target, message_id
            bodies.append(json.loads(body))

    _order(harness, after_turn=[seen.append])
    server.script(Answer(ORDER))
    harness.ask("two teas", reply_to={"url": "https://a.example"})
    assert seen[0].data == DATA
    outbox.deliver(harness.database, {"url": Carrier()}, harness.waker.deliveries[-1])
    assert [each["reply"]["data"] for each in bodies] == [DATA]


def test_a_refused_schema_is_sent_as_a_tool(harness: Harness, server: OpenAIServer) -> None:
    """A server without structured output still gives the agent's output in one step."""
    _order(harness)
    server.script(Status(400, message="response_format is not supported"), Answer("", (Call("final_answer", ORDER),)))
    turn = harness.ask("two teas")
    assert (turn["steps"], turn["reply"]["data"]) == (1, DATA)
    assert server.requests[1]["tools"][0]["function"]["parameters"]["required"] == ["item", "amount"]
    assert json.loads(turn["reply"]["text"]) == DATA


class Fee(BaseModel):
    cents: Annotated[int, BeforeValidator(lambda value: round(float(value) * 100))]
    payer: str = Field(serialization_alias="paidBy")


def test_the_data_means_what_the_model_wrote(harness: Harness, server: OpenAIServer) -> None:
    """A caller's `result(output=…)` makes the same value of it, although pydantic's own JSON means another."""
    seen: list[TurnEnding] = []
    harness.agents = Agents([Agent("shop", "You bill.", output=Fee, after_turn=[seen.append])])
    written = {"cents": "1.5", "payer": "ana"}
    server.script(Answer(f"```json\n{json.dumps(written)}\n```"))
    turn = harness.ask("bill me")
    assert (turn["reply"]["data"], json.loads(turn["reply"]["text"])) == (written, written)
    assert seen[0].data == written
    assert OutputType(Fee, "result()").restore(turn["reply"]["data"]) == Fee.model_validate(written)


@pytest.mark.parametrize("by", ["output_guards", "after_turn"])
@pytest.mark.parametrize(("text", "data"), [("null", None), (ORDER, DATA), ("not JSON", "")])
def test_what_replaces_an_output_of_nothing_is_checked(
    harness: Harness, server: OpenAIServer, by: str, text: str, data: Any
) -> None:
    """The reply `null` is an output like any other."""
    changes: dict[str, Any] = {
        "output_guards": [lambda _, __: Replace(text)],
        "after_turn": [required(lambda ending: ending.replace(reply=text))],
    }
    harness.agents = Agents([Agent("shop", "You take orders.", output=Order | None, **{by: changes[by]})])
    server.script(Answer('{"output": null}'))
    turn = harness.ask("nothing")
    if data == "":
        assert (turn["status"], turn["error"]["code"]) == ("failed", "GUARD_REJECTED")
    else:
        assert (turn["status"], turn["reply"].get("data")) == ("done", data)
