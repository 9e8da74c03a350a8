"""What pydantic-ai's own documents promise works in a turn of perdure, and what cannot be durable is refused."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import httpx2
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import (
    ApprovalRequired,
    DeferredToolRequests,
    FunctionToolset,
    ModelRetry,
    NativeOutput,
    PromptedOutput,
    RunContext,
    TextOutput,
    ToolReturn,
    UsageLimits,
    capabilities,
)
from pydantic_ai.capabilities import AbstractCapability, ProcessHistory, durable_operation
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool

from perdure import TurnStarted, adapt, effect, effect_id
from perdure.adapters.adopt import collect
from perdure.adapters.pydantic_ai.units import Durability
from perdure.agents import Agent, Agents
from perdure.errors import SettingsError
from perdure.models.adapted import event_loop
from perdure.models.providers.chat_wire import request_body
from perdure.testing import Scripted, ask, call
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.lease.claim import Ran, Unequipped
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, Call, Chunks, OpenAIServer, Raw, Step, chunk
from tests.turns.harness import Harness


class Scripting:
    """A model of pydantic-ai that replies with its lines, and records what it receives."""

    def __init__(self, *lines: Any, name: str | None = None) -> None:
        self.lines = list(lines)
        self.seen: list[list[ModelMessage]] = []
        self.instructions: list[str | None] = []
        self.model = FunctionModel(self.answer, model_name=name)

    def answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        """The next line."""
        self.seen.append(list(messages))
        self.instructions.append(info.instructions)
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, str):
            return ModelResponse(parts=[TextPart(line)])
        return line if isinstance(line, ModelResponse) else ModelResponse(parts=line)


def _call(name: str, call_id: str = "c1", **arguments: Any) -> ToolCallPart:
    return ToolCallPart(name, arguments, tool_call_id=call_id)


def _use(harness: Harness, bare: PydanticAgent[Any, Any], model: Any, **given: Any) -> None:
    harness.agents = Agents([adapt(bare, name="assistant", **given).with_model(model)])


def test_a_tool_that_asks_to_be_called_again() -> None:
    """The model receives the message of a `ModelRetry`, and the second call counts."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain
    def guess(number: int) -> str:
        """Guess."""
        if number < 5:
            raise ModelRetry("higher")
        return "right"

    answer = ask(bare, "go", model=Scripted(call("guess", number=1), call("guess", number=7), "done"))
    assert (answer.status, [each.status for each in answer.calls]) == ("done", ["failed", "done"])
    assert "higher" in (answer.calls[0].result or "")


def test_a_rejected_text_is_stored_and_not_the_reply(harness: Harness) -> None:
    """An output validator rejects the first text; after a crash the model still knows why."""
    bare = PydanticAgent(name="assistant")

    @bare.output_validator
    def polite(text: str) -> str:
        if "please" not in text:
            raise ModelRetry("say please")
        return text

    model = Scripting("go away", "please go away")
    _use(harness, bare, model.model)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    harness.move(31)
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.lines(sent.session_id) == [
        ("user", "hello"), ("assistant", "go away"), ("assistant", "please go away"),
    ]  # fmt: skip
    assert "say please" in str(model.seen[-1])
    assert harness.turn(sent.turn_id)["reply"]["text"] == "please go away"


class Box(BaseModel):
    """An output."""

    width: int


@pytest.mark.parametrize("output_type", [Box, NativeOutput(Box)])
def test_an_output_becomes_data(harness: Harness, output_type: Any) -> None:
    """`reply.data` has the output, and `reply.text` its JSON."""
    bare = PydanticAgent(TestModel(custom_output_args={"width": 3}, custom_output_text=None), output_type=output_type)
    if isinstance(output_type, NativeOutput):
        bare.model = Scripting('{"width":3}').model
    harness.agents = Agents([adapt(bare, name="assistant")])
    turn = harness.ask()
    assert (turn["status"], turn["reply"]["data"]) == ("done", {"width": 3})
    assert turn["reply"]["text"].replace(" ", "") == '{"width":3}'
    assert turn["steps"] == 1


class Bag(BaseModel):
    """Another output."""

    litres: int = 5


def _width(text: str) -> dict[str, int]:
    return {"width": len(text)}


@pytest.mark.parametrize(
    ("output_type", "written"),
    [
        (PromptedOutput([Box, Bag]), '{"result": {"kind": "Box", "data": {"width": 3}}}'),
        (NativeOutput([Box, Bag]), '{"result": {"kind": "Box", "data": {"width": 3}}}'),
        (PromptedOutput(Box), '```json\n{"width": 3}\n```'),
        (TextOutput(_width), "abc"),
    ],
)
def test_the_text_of_an_output_is_its_json(harness: Harness, output_type: Any, written: str) -> None:
    """Users do not see the envelope in which a model writes one of several types. The model sees what it wrote."""
    bare = PydanticAgent(name="assistant", output_type=output_type)
    model = Scripting(written, written)
    _use(harness, bare, model.model)
    turn = harness.ask()
    assert (turn["reply"]["data"], turn["reply"]["text"]) == ({"width": 3}, '{"width": 3}')
    assert harness.lines(UUID(turn["session_id"]))[1:] == [("assistant", '{"width": 3}')]
    harness.ask()
    assert [part.content for part in model.seen[-1][1].parts if isinstance(part, TextPart)] == [written]


def test_a_native_output_of_a_model_of_perdure() -> None:
    """The model's server enforces the schema, as for an `output` of perdure's own agents."""
    bare = PydanticAgent(name="assistant", output_type=NativeOutput[Any]([Box, list[int]]))
    model = Scripted("Sure!", '{"result": {"kind": "Box", "data": {"width": 3}}}')
    answer = ask(bare, "How wide?", model=model)
    assert (answer.status, answer.data) == ("done", {"width": 3}), answer.error
    body = request_body("m", model.requests[0])
    assert body["response_format"]["json_schema"]["strict"] is True
    assert "result" in body["response_format"]["json_schema"]["schema"]["properties"]


def test_a_native_output_next_to_tools() -> None:
    """Many servers enforce a schema or offer tools, but not both: the answer is the arguments of an additional tool."""
    bare = PydanticAgent(name="assistant", output_type=NativeOutput(Box))
    bare.tool_plain(metadata=effect("pure"))(_measure)
    final = Answer(calls=[Call("final_answer", '{"width": 3}', "call_1")])
    with OpenAIServer(Answer(calls=[Call("_measure", "{}", "call_0")]), final) as server:
        model = model_of(server)
        answer = ask(bare, "How wide?", model=model)
        model.close()
    assert (answer.status, answer.data) == ("done", {"width": 3}), answer.error
    assert [each.result for each in answer.calls] == ["3"]
    names = [[each["function"]["name"] for each in request["tools"]] for request in server.requests]
    assert names == [["_measure", "final_answer"]] * 2


def _measure() -> int:
    """Measure the width."""
    return 3


@pytest.mark.parametrize(("argument", "value"), [("memory", "no"), ("usage_limits", 5)])
def test_what_only_adapt_takes_is_checked(argument: str, value: Any) -> None:
    """The mistake is found where the agent is declared."""
    with pytest.raises(SettingsError, match=rf"agent 'assistant' has {argument}={value!r}; accepted"):
        adapt(PydanticAgent(name="assistant"), **{argument: value})


def test_an_output_that_a_function_makes_of_text(harness: Harness) -> None:
    """The user receives what the function returns, and the model keeps its own words."""

    def upper(text: str) -> str:
        return text.upper()

    bare = PydanticAgent(name="assistant", output_type=TextOutput(upper))
    model = Scripting("hi", "there")
    _use(harness, bare, model.model)
    assert harness.ask()["reply"]["text"] == "HI"
    assert harness.ask()["reply"]["text"] == "THERE"
    assert "hi" in str(model.seen[-1])
    assert "HI" not in str(model.seen[-1])


@dataclass
class Deps:
    """Dependencies."""

    user: str


def test_dependencies_are_made_of_the_turn() -> None:
    """`deps` is called with the turn, and may be `async`."""
    bare = PydanticAgent(name="assistant", deps_type=Deps)

    @bare.instructions
    def who(ctx: RunContext[Deps]) -> str:
        return f"You talk to {ctx.deps.user}."

    async def deps(turn: TurnStarted) -> Deps:
        return Deps(turn.user_id)

    model = Scripting("hi")
    ask(adapt(bare, deps=deps, memory=False), "hello", model=model.model, user_id="ana")
    assert model.instructions == ["You talk to ana."]


def test_what_perdure_remembers_is_added_to_the_instructions(harness: Harness) -> None:
    """With `memory`, the agent's prompt has the parts of perdure's."""
    for memory in (True, False):
        bare, model = PydanticAgent(name="assistant", instructions="Be kind."), Scripting("hi")
        _use(harness, bare, model.model, memory=memory)
        harness.ask()
        assert ("The user is writing on the channel" in str(model.seen[0])) is memory
        assert ("Today is" in str(model.seen[0])) is memory
        assert "Be kind." in str(model.instructions[0])


def test_history_processors_shape_only_what_is_sent(harness: Harness) -> None:
    """A processor may drop messages; the stored ones stay."""

    def newest(messages: list[ModelMessage]) -> list[ModelMessage]:
        return messages[-1:]

    bare, model = PydanticAgent(name="assistant", capabilities=[ProcessHistory(newest)]), Scripting("1", "2", "3")
    _use(harness, bare, model.model)
    for _ in range(3):
        turn = harness.ask()
    assert [len(each) for each in model.seen] == [1, 1, 1]
    assert len(harness.lines(UUID(turn["session_id"]))) == 6


def test_what_the_model_thought_comes_back_to_it(harness: Harness) -> None:
    """Parts that the transcript cannot show are stored with the row, over a crash and in the next turn."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain(metadata=effect("pure"))
    def look() -> ToolReturn[str]:
        """Look."""
        return ToolReturn("seen", content="a picture", metadata={"size": 3})

    thought = ThinkingPart("hm", signature="s1", provider_name="function")
    model = Scripting([thought, _call("look")], "done", "again")
    _use(harness, bare, model.model)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    harness.ask("next")
    assert all("s1" in str(each) for each in model.seen[1:])
    assert all("a picture" in str(each) and "'size': 3" in str(each) for each in model.seen[1:])
    assert "hm" not in str(harness.messages(sent.session_id))


def test_a_call_may_ask_for_approval_while_it_runs(harness: Harness) -> None:
    """`ApprovalRequired` parks the turn, as the declaration does; calls beside it have run and do not run again."""
    bare = PydanticAgent(name="assistant", output_type=[str, DeferredToolRequests])
    ran: list[str] = []

    @bare.tool
    def pay(ctx: RunContext[Any], amount: int) -> str:
        """Pay."""
        if amount > 100 and not ctx.tool_call_approved:
            raise ApprovalRequired(metadata={"why": "much"})
        ran.append(f"paid {amount} {effect_id()}")
        return f"paid {amount}"

    model = Scripting([_call("pay", "c1", amount=5), _call("pay", "c2", amount=500)], "done")
    _use(harness, bare, model.model)
    turn = harness.ask()
    assert turn["status"] == "waiting_approval"
    [pending] = turn["pending_approvals"]
    assert (pending["call_id"], pending["arguments"]) == ("c2", {"amount": 500})
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": "c2", "decision": "approve"}))
    harness.run(UUID(turn["session_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "done"
    rows = harness.sql("SELECT effect_id FROM tool_effects ORDER BY position")
    assert ran == [f"paid 5 {rows[0].effect_id}", f"paid 500 {rows[1].effect_id}"]


def streamed(harness: Harness) -> list[str]:
    """Let the turns stream; returns the texts that are shown."""
    seen: list[str] = []

    class Events:
        def open(self, *_: Any) -> Any:
            return types.SimpleNamespace(
                state=lambda _: None,
                delta=seen.append,
                rewind=seen.clear,
                committed=lambda _: None,
                progress=lambda *_: None,
            )

        def start(self) -> None: ...
        def close(self) -> None: ...

    harness.events = Events()  # type: ignore[assignment]
    return seen


def test_text_of_a_streaming_model_reaches_the_turns_events(harness: Harness) -> None:
    """A model that streams is streamed."""

    async def stream(messages: list[ModelMessage], _: AgentInfo) -> AsyncIterator[str]:
        for word in ("to", "day"):
            yield word

    seen = streamed(harness)
    _use(harness, PydanticAgent(name="assistant"), FunctionModel(stream_function=stream))
    assert harness.ask()["reply"]["text"] == "today"
    assert "".join(seen) == "today"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelHTTPError(400, "m"), "PROVIDER_ERROR"), (ModelHTTPError(429, "m"), "RATE_LIMITED")],
)
def test_a_models_error_fails_the_turn(harness: Harness, error: Exception, code: str) -> None:
    """With the code that the same error of perdure's own models has."""
    harness.settings = harness.settings.model_copy(
        update={"retry": harness.settings.retry.model_copy(update={"max_attempts": 1})}
    )
    _use(harness, PydanticAgent(name="assistant"), Scripting(error).model)
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"]) == ("failed", code)


def test_a_transient_error_is_retried(harness: Harness) -> None:
    """By perdure, within the same step."""
    retry = harness.settings.retry.model_copy(update={"base_s": 0.001, "cap_s": 0.001})
    harness.settings = harness.settings.model_copy(update={"retry": retry})
    model = Scripting(ModelHTTPError(503, "m"), "hi")
    _use(harness, PydanticAgent(name="assistant"), model.model)
    assert harness.ask()["reply"]["text"] == "hi"
    assert len(model.seen) == 2


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as running:
        yield running


@pytest.fixture
def paid(harness: Harness, server: OpenAIServer) -> Iterator[list[int]]:
    """The amounts that the tool of an agent with a model of its own has paid."""
    retry = harness.settings.retry.model_copy(update={"base_s": 0.001, "cap_s": 0.001})
    harness.settings = harness.settings.model_copy(update={"retry": retry})
    connections = httpx2.AsyncClient()
    provider = OpenAIProvider(base_url=server.base_url, api_key="sk-of-the-tests", http_client=connections)
    bare: PydanticAgent[Any, Any] = PydanticAgent(OpenAIChatModel("m", provider=provider), name="assistant")
    ran: list[int] = []

    @bare.tool_plain
    def pay(amount: int) -> str:
        ran.append(amount)
        return "paid"

    harness.agents = Agents([adapt(bare)])
    yield ran
    asyncio.run_coroutine_threadsafe(connections.aclose(), event_loop.running()).result(10)


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_that_ended_early_is_no_reply(
    harness: Harness, server: OpenAIServer, paid: list[int], *, streams: bool
) -> None:
    """Its call does not run and its text is withdrawn: the model is asked again, as one of perdure's own."""
    seen = streamed(harness) if streams else []
    payment = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"amount": 1}'}}
    message = {"role": "assistant", "content": "I pay", "tool_calls": [{"index": 0, **payment}]}
    whole = {**server.whole(Answer(""), "m"), "choices": [{"index": 0, "message": message, "finish_reason": None}]}
    broken = (
        Chunks([chunk([{"index": 0, "delta": message}])])
        if streams
        else Raw(json.dumps(whole).encode(), "application/json")
    )
    server.script(broken, Answer("", (Call("pay", '{"amount": 2}'),)), broken, Answer("Done."))
    turn = harness.ask()
    assert (turn["status"], turn["reply"]["text"], turn["steps"], paid) == ("done", "Done.", 2, [2])
    assert not streams or "".join(seen) == "Done."


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Answer("I", (Call("pay", '{"amount": 1}'),), finish_reason="content_filter"), id="a filter"),
        pytest.param(
            Chunks([chunk([{"index": 0, "delta": {"refusal": "I can't."}, "finish_reason": "stop"}])]), id="a refusal"
        ),
    ],
)
def test_a_reply_that_a_filter_stopped_fails_the_turn(
    harness: Harness, server: OpenAIServer, paid: list[int], step: Step
) -> None:
    """pydantic-ai counts a refusal in the model's own words as filtered, too."""
    server.script(step)
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"], paid) == ("failed", "CONTENT_FILTERED", [])


DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}


@pytest.mark.parametrize("model", ["its own", "perdure's"])
@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, None),
        ({}, {"cached_tokens": None, "reasoning_tokens": None}),
        (DETAILS, {"cached_tokens": 0, "reasoning_tokens": 0}),
    ],
    ids=["none", "without details", "zeros"],
)
def test_usage_that_no_server_reported_is_unknown(  # noqa: PLR0917 (three fixtures and a table)
    harness: Harness, server: OpenAIServer, paid: list[int], usage: Any, expected: Any, model: str
) -> None:
    """pydantic-ai has 0 for each count that a server did not report. A 0 that it did report stays."""
    if model == "perdure's":
        harness.agents = Agents([adapt(PydanticAgent(name="assistant"))])
        harness.any_model = model_of(server)
    counts = {"prompt_tokens": 11, "completion_tokens": 7}
    server.script(Answer("Done.", usage=None if usage is None else {**counts, **usage}))
    found = harness.ask()["usage"]
    assert found == (None if expected is None else {"input_tokens": 11, "output_tokens": 7, **expected})
    assert paid == []


def test_limits_of_usage_count_the_turn_over_all_workers(harness: Harness) -> None:
    """A limit of requests is not reset by a crash."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain(metadata=effect("pure"))
    def look() -> str:
        """Look."""
        return "seen"

    model = Scripting(*[[_call("look", f"c{number}")] for number in range(5)])
    _use(harness, bare, model.model, usage_limits=UsageLimits(request_limit=2))
    sent = harness.send()
    with harness.crashing("after", "turns.step", 2):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["error"]["code"], len(model.seen)) == ("BUDGET_EXHAUSTED", 2)


def test_a_tool_that_raises_fails_the_turn_as_it_fails_a_plain_run(harness: Harness) -> None:
    """The tool does not run again, whatever its class."""
    bare = PydanticAgent(name="assistant")
    ran: list[int] = []

    @bare.tool_plain
    def broken() -> str:
        """Break."""
        ran.append(1)
        raise RuntimeError("no")

    model = Scripting([_call("broken")], "done")
    _use(harness, bare, model.model)
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"], len(ran), len(model.seen)) == ("failed", "TOOL_ERROR", 1, 1)
    assert harness.lines(UUID(turn["session_id"]))[2] == ("tool", "Error: RuntimeError: no")


def test_messages_that_this_version_cannot_read_are_left_to_another_worker(harness: Harness) -> None:
    """A newer pydantic-ai wrote a part that the installed one refuses: the turn waits for a worker that reads it."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain(metadata=effect("pure"))
    def look() -> str:
        """Look."""
        return "seen"

    _use(harness, bare, Scripting([_call("look")], "done").model)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    harness.sql(
        "UPDATE messages SET opaque = jsonb_set(opaque, '{parts,response,parts,0,part_kind}', '\"hologram\"') "
        "WHERE role = 'assistant' RETURNING 1"
    )
    harness.move(31)
    assert isinstance(harness.run(sent.session_id), Unequipped)
    assert harness.turn(sent.turn_id)["status"] != "failed"


def test_a_result_that_this_version_cannot_read_is_left_to_another_worker(harness: Harness) -> None:
    """The same for the recorded result of a call."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain(metadata=effect("pure"))
    def look() -> str:
        """Look."""
        return "seen"

    _use(harness, bare, Scripting([_call("look", "a"), _call("look", "b")], "done").model)
    sent = harness.send()
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id)
    harness.sql('UPDATE tool_effects SET payload = \'{"kind": "hologram"}\' RETURNING 1')
    harness.move(31)
    assert isinstance(harness.run(sent.session_id), Unequipped)


def test_a_session_may_change_its_agent(harness: Harness) -> None:
    """An agent of pydantic-ai continues a conversation of perdure's own agent, and the other way round."""
    model = Scripting("two", "four")
    adapted = adapt(PydanticAgent(name="other")).with_model(model.model)
    harness.agents = Agents([Agent("assistant", "You help."), adapted])
    harness.script(*[])
    harness.ask("1")
    harness.ask("2", agent="other")
    harness.ask("3")
    harness.ask("4", agent="other")
    assert [len(each) for each in model.seen] in ([1, 3], [3, 7])


def test_an_agent_of_another_library_as_it_is_in_a_module() -> None:
    """Bare agents are collected under their own names, or those of their variables."""
    named, unnamed, hidden = PydanticAgent("test", name="named"), PydanticAgent("test"), PydanticAgent("test")
    adapted = PydanticAgent("test", name="twice")
    own = Agent("own", "You help.")
    found = collect(
        {"a": named, "second": unnamed, "_hidden": hidden, "own": own, "b": adapted, "c": adapt(adapted, name="once")}
    )
    assert [each.name for each in found] == ["named", "second", "own", "once"]


class _Custom(AbstractToolset[Any]):
    """A toolset of the agent's author, without an id."""

    _id: str | None = None

    @property
    def id(self) -> str | None:
        return self._id

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        def act() -> None:
            """Act."""

        made = await FunctionToolset([act]).get_tools(ctx)
        return {name: replace(tool, toolset=self) for name, tool in made.items()}

    async def call_tool(self, name: str, tool_args: Any, ctx: RunContext[Any], tool: Any) -> Any:
        return f"custom {effect_id()}"


@pytest.mark.long
def test_toolsets_without_ids_are_named_and_recorded() -> None:
    """Function toolsets, dynamic ones and toolsets of the agent's author all go through the ledger."""

    def shout() -> str:
        """Shout."""
        return f"loud {effect_id()}"

    bare = PydanticAgent(name="assistant", toolsets=[FunctionToolset([shout]), _Custom()])

    @bare.toolset
    def dynamic(ctx: RunContext[Any]) -> FunctionToolset[Any]:
        def whisper() -> str:
            """Whisper."""
            return f"quiet {effect_id()}"

        return FunctionToolset([whisper])

    answer = ask(bare, "go", model=Scripted([call("shout"), call("whisper"), call("act")], "done"))
    words = zip(("loud", "quiet", "custom"), answer.calls, strict=True)
    assert [each.result for each in answer.calls] == [f"{word} {each.effect_id}" for word, each in words]


def test_the_names_of_units_are_pinned() -> None:
    """They name what a trace shows; members of stored messages are pinned in `test_messages`."""
    backend = Durability("greeter").get_durable_operation_backend()
    from pydantic_ai.durable_exec import ModelRequestId, ToolsetCallToolId  # noqa: PLC0415

    namer = backend._namer  # type: ignore[attr-defined]
    assert namer.operation_name(ModelRequestId(model_name="m")) == "greeter__model.request"
    assert (
        namer.operation_name(ToolsetCallToolId("function", toolset_id="<agent>"))
        == "greeter__function_toolset__<agent>.call_tool"
    )


class _Recording(AbstractCapability[Any]):
    """A capability with a durable operation of its own."""

    id = "recording"

    @durable_operation(name="record")
    async def record(self, ctx: RunContext[Any], text: str) -> str:
        del ctx
        return text


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: PydanticAgent("test", name="a", deps_type=Deps), {}, "needs dependencies"),
    (lambda: PydanticAgent("test"), {}, "without a name"),
    (lambda: PydanticAgent("test", name="a"), {"deps": 3}, "accepted: a function with one parameter"),
    (lambda: Agent("a", "b"), {}, "accepted: an Agent of pydantic-ai"),
    (lambda: PydanticAgent("test", name="a", capabilities=[Durability("a")]), {}, "has Durability, but perdure makes"),
    (lambda: PydanticAgent("test", name="a", capabilities=[_Recording()]), {}, "with durable operations of its own"),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED)
def test_what_cannot_be_durable_is_refused(make: Any, given: dict[str, Any], message: str) -> None:
    """With a sentence, when the module is loaded."""
    with pytest.raises(SettingsError, match=message):
        adapt(make(), **given)


@pytest.mark.skipif(not hasattr(capabilities, "RequestInput"), reason="pydantic-ai 2.64 has no such capability")
def test_a_wait_within_the_process_is_refused() -> None:
    """Else each turn with a deferred call would fail."""
    waiting = capabilities.RequestInput[Any](lambda *_: None)
    for each in (waiting, capabilities.CombinedCapability([waiting])):
        with pytest.raises(SettingsError, match=r"agent 'a' has RequestInput, .*: remove it"):
            adapt(PydanticAgent("test", name="a", capabilities=[each]))


async def _approves_later(arguments: Mapping[str, Any]) -> str:
    """An approver that cannot be called where a call is judged."""
    return "user"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"perdure": "pure"}, "accepted: perdure.effect"),
        ({"perdure": {"effect": "clean"}}, "accepted: pure, idempotent, unsafe"),
        ({"perdure": {"probe": 3}}, "accepted: a function with one parameter"),
        ({"perdure": {"approver": "boss"}}, "accepted: 'user', 'staff'"),
        ({"perdure": {"approver": _approves_later}}, "has an async function as approver; accepted: a plain def"),
    ],
)
def test_a_wrong_declaration_of_a_tool_is_refused(metadata: dict[str, Any], message: str) -> None:
    """Before a message is accepted."""
    bare = PydanticAgent("test", name="a")

    def act() -> str:
        """Act."""
        return "done"

    bare.tool_plain(metadata=metadata)(act)
    with pytest.raises(SettingsError, match=message):
        adapt(bare)
