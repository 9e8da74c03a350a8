"""Agents whose code, models or values are not as one would like: the turn ends, or goes on, as it should."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import FunctionToolset, ModelRetry, ToolReturn, UsageLimits, WrapperToolset
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolReturnPart
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.settings import ModelSettings

from perdure import TurnStarted, adapt, effect, effect_id
from perdure.agents import Agents
from perdure.errors import Conflict, ProviderError, Unavailable
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.lease.claim import Unequipped
from perdure.turns.run.loop import Runner
from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use
from tests.models.endpoints import model_of
from tests.models.openai_server import Answer, OpenAIServer
from tests.models.openai_server import Call as ServerCall
from tests.turns.harness import PATIENCE_S, Harness, side_by_side, until
from tests.turns.scripted import says

ENDS: list[BaseException] = [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()]


def _act(bare: PydanticAgent[Any, Any], error: BaseException, *, on_loop: bool) -> None:
    def act() -> str:
        """Act."""
        raise error

    async def act_on_loop() -> str:
        """Act."""
        return act()

    bare.tool_plain(name="act")(act_on_loop if on_loop else act)


@pytest.mark.parametrize("on_loop", [True, False])
@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_a_tool_that_exits_the_process_fails_its_turn_only(
    harness: Harness, error: BaseException, on_loop: bool
) -> None:
    """The loop, which all turns of the process share, goes on."""
    bare = PydanticAgent(name="assistant")
    _act(bare, error, on_loop=on_loop)
    _use(harness, bare, Scripting([_call("act")]).model)
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"]) == ("failed", "TOOL_ERROR")
    _use(harness, PydanticAgent(name="assistant"), Scripting("hi").model)
    assert harness.ask()["reply"]["text"] == "hi"


@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_a_validator_that_exits_the_process_costs_an_attempt(harness: Harness, error: BaseException) -> None:
    """As any error of the agent's own code; the next attempt may succeed."""
    bare, raised = PydanticAgent(name="assistant"), [error]

    @bare.output_validator
    def check(text: str) -> str:
        if raised:
            raise raised.pop()
        return text

    _use(harness, bare, Scripting("one", "two").model)
    turn = harness.ask()
    assert turn["status"] == "parked"
    harness.move(31)
    harness.run(UUID(turn["session_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["reply"]["text"] == "two"


@pytest.mark.parametrize("value", ["a\x00b", "a\ud800b", {"x\x00": [float("inf"), float("nan")]}], ids=repr)
def test_a_result_that_postgresql_does_not_store(harness: Harness, value: Any) -> None:
    """Calls made side by side record their results before the step; what cannot be stored is replaced."""
    bare = PydanticAgent(name="assistant")

    def act() -> Any:
        """Act."""
        return value

    for name in ("one", "two"):
        bare.tool_plain(name=name)(act)
    _use(harness, bare, Scripting([_call("one"), _call("two", "c2")], "done").model)
    assert harness.ask()["status"] == "done"
    rows = harness.sql("SELECT status, payload FROM tool_effects")
    assert all(row.status == "done" and row.payload is not None for row in rows)


@pytest.mark.parametrize(
    ("value", "data"), [(float("nan"), None), ([1, float("inf")], [1, None]), (b"\xff", "_w=="), ("a\ud800", None)]
)
def test_an_output_that_is_no_json(harness: Harness, value: Any, data: Any) -> None:
    """The turn ends with what JSON can express of it."""

    def output() -> Any:
        """Make the output."""
        return value

    _use(harness, PydanticAgent(name="assistant", output_type=output), Scripting([_call("final_result")]).model)
    turn = harness.ask()
    assert (turn["status"], turn["reply"].get("data")) == ("done", data)


def test_an_error_of_perdures_model_keeps_its_code(harness: Harness) -> None:
    """The error of the connection that caused it, as each wire names it, does not take its place."""
    error = ProviderError("The model cannot be reached.")
    error.__cause__ = OSError("refused")
    harness.agents = Agents([adapt(PydanticAgent(name="assistant"))])
    harness.script(error)
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"]) == ("failed", "PROVIDER_ERROR")


def test_a_turn_waits_for_perdures_model(harness: Harness) -> None:
    """With `on_unavailable="park"`, as perdure's own agents do."""
    retry = harness.settings.retry.model_copy(update={"max_attempts": 1})
    harness.settings = harness.settings.model_copy(update={"retry": retry})
    error = ProviderError("The model cannot be reached.", transient=True)
    error.__cause__ = OSError("refused")
    harness.agents = Agents([adapt(PydanticAgent(name="assistant"), on_unavailable="park")])
    harness.script(error, says("hi"))
    turn = harness.ask()
    assert turn["status"] == "parked"
    harness.move(300)
    harness.run(UUID(turn["session_id"]))
    done = harness.turn(UUID(turn["turn_id"]))
    assert (done["reply"]["text"], done["attempts"]) == ("hi", 1)


@pytest.mark.long
def test_a_model_that_hangs_is_ended_at_the_turns_limit(harness: Harness) -> None:
    """By the turn's own thread, whatever the model does."""
    entered = threading.Event()

    async def hang(_: list[ModelMessage], __: AgentInfo) -> ModelResponse:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    harness.set(timeout_s=1.0)
    _use(harness, PydanticAgent(name="assistant"), FunctionModel(hang))
    sent = harness.send()
    thread = threading.Thread(target=harness.run, args=(sent.session_id,), daemon=True)
    thread.start()
    assert entered.wait(PATIENCE_S)
    harness.move(2)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert harness.turn(sent.turn_id)["status"] == "failed"


def test_a_processor_that_drops_results_does_not_drop_the_stored_ones(harness: Harness) -> None:
    """The rows have what the tool returned."""

    def without_results(messages: list[ModelMessage]) -> list[ModelMessage]:
        return [ModelRequest.user_text_prompt("go on") if _has_result(each) else each for each in messages]

    def _has_result(message: ModelMessage) -> bool:
        return any(isinstance(part, ToolReturnPart) for part in message.parts)

    bare = PydanticAgent(name="assistant", capabilities=[ProcessHistory(without_results)])

    @bare.tool_plain
    def act() -> str:
        """Act."""
        return "much"

    _use(harness, bare, Scripting([_call("act")], "done").model)
    turn = harness.ask()
    assert harness.lines(UUID(turn["session_id"]))[2] == ("tool", "much")


def test_agents_may_share_a_toolset() -> None:
    """Names that perdure gives to toolsets without ids do not collide."""

    def act() -> None:
        """Act."""

    def look() -> None:
        """Look."""

    shared = FunctionToolset([act])
    adapt(PydanticAgent("test", name="a", toolsets=[shared]))
    adapt(PydanticAgent("test", name="b", toolsets=[FunctionToolset([look]), shared]))


def test_the_limit_of_tool_calls_counts_the_turn_over_all_workers(harness: Harness) -> None:
    """A crash does not reset it."""
    bare, ran = PydanticAgent(name="assistant"), []

    @bare.tool_plain(metadata=effect("pure"))
    def act() -> str:
        """Act."""
        ran.append(1)
        return "done"

    model = Scripting(*[[_call("act", f"c{number}")] for number in range(4)])
    _use(harness, bare, model.model, usage_limits=UsageLimits(tool_calls_limit=2))
    sent = harness.send()
    with harness.crashing("after", "turns.step", 2):
        harness.run(sent.session_id)
    harness.move(31)
    harness.run(sent.session_id)
    assert (harness.turn(sent.turn_id)["error"]["code"], len(ran)) == ("BUDGET_EXHAUSTED", 2)


def test_a_call_that_never_began_is_not_in_doubt(harness: Harness) -> None:
    """The model's arguments were refused for the last time: the tool did not start."""
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain(retries=0)
    def act(amount: int) -> str:
        """Act."""
        return str(amount)

    _use(harness, bare, Scripting([_call("act")]).model)
    turn = harness.ask()
    assert turn["status"] == "failed"
    assert harness.lines(UUID(turn["session_id"]))[2] == ("tool", "Error: this call was not run.")


def test_a_lease_is_renewed_while_the_longest_call_runs(harness: Harness) -> None:
    """Although a call with a shorter limit began after it."""
    bare, gate, entered = PydanticAgent(name="assistant"), threading.Event(), threading.Event()

    @bare.tool_plain(timeout=300)
    def slow() -> str:
        """Wait."""
        gate.wait(PATIENCE_S)
        return "slow"

    @bare.tool_plain(timeout=1)
    def fast() -> str:
        """Return at once."""
        entered.set()
        return "fast"

    _use(harness, bare, Scripting([_call("slow"), _call("fast", "c2")], "done").model)
    sent = harness.send()
    runner = Runner(harness.runtime, "first")
    thread = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    thread.start()
    assert entered.wait(PATIENCE_S)
    until(lambda: harness.sql("SELECT 1 FROM tool_effects WHERE status = 'done'"), "the fast call is recorded")
    harness.move(20)
    before = harness.session(sent.session_id).lease_until
    runner.keeper.beat()
    assert harness.session(sent.session_id).lease_until > before
    gate.set()
    thread.join(PATIENCE_S)
    assert harness.turn(sent.turn_id)["status"] == "done"


class _Whole(Model[Any]):
    """A model of the agent's author, which does not stream."""

    model_name = system = "whole"
    provider = None

    async def request(
        self, messages: list[ModelMessage], settings: ModelSettings | None, parameters: ModelRequestParameters
    ) -> ModelResponse:
        return ModelResponse(parts=[TextPart("whole")])


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (_Whole(), "whole"),
        (FallbackModel(Scripting(ModelHTTPError(400, "m")).model, Scripting("second").model), "second"),
    ],
)
def test_models_that_do_not_stream(harness: Harness, model: Model[Any], text: str) -> None:
    """They are asked for their whole reply, as `agent.run` asks them."""
    _use(harness, PydanticAgent(name="assistant"), model)
    assert harness.ask()["reply"]["text"] == text


@pytest.mark.exhaustive
def test_dependencies_of_many_turns_are_made_side_by_side(harness: Harness) -> None:
    """A factory that blocks holds up no other turn of the process."""
    many = 40
    together = threading.Barrier(many, timeout=PATIENCE_S)

    def deps(_: TurnStarted) -> None:
        together.wait()

    def answer(_: list[ModelMessage], __: AgentInfo) -> ModelResponse:
        return ModelResponse(parts=[TextPart("hi")])

    _use(harness, PydanticAgent(name="assistant"), FunctionModel(answer), deps=deps)
    sent = [harness.send(user_id=f"user{number}") for number in range(many)]
    runner = Runner(harness.runtime, "many")
    side_by_side(*[lambda each=each: runner.run(each.session_id) for each in sent])
    assert {harness.turn(each.turn_id)["status"] for each in sent} == {"done"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Conflict("Not now."), "CONFLICT"),
        (Unavailable("Its database is away."), "UNAVAILABLE"),
        (LookupError("x"), "GUARD_REJECTED"),
    ],
    ids=repr,
)
def test_dependencies_that_cannot_be_made_fail_the_turn(harness: Harness, error: Exception, code: str) -> None:
    """As a required hook does: at once, and without an attempt."""

    def deps(_: TurnStarted) -> None:
        raise error

    _use(harness, PydanticAgent(name="assistant"), Scripting("hi").model, deps=deps)
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"]) == ("failed", code)


class _Persistent(WrapperToolset[Any]):
    """Calls a tool again that fails."""

    async def call_tool(self, *given: Any, **named: Any) -> Any:
        try:
            return await super().call_tool(*given, **named)
        except ValueError:
            return await super().call_tool(*given, **named)


@pytest.mark.parametrize("number", [1, 2])
def test_a_toolset_that_calls_a_tool_again(harness: Harness, number: int) -> None:
    """The runs are one unit: one row, one id, and the result of the last run."""
    tools, ids = FunctionToolset[Any](), []

    @tools.tool_plain
    def act() -> str:
        """Act."""
        ids.append(effect_id())
        if len(ids) == 1:
            raise ValueError("busy")
        return f"run {len(ids)}"

    bare = PydanticAgent(name="assistant", toolsets=[_Persistent(tools)])
    _use(harness, bare, Scripting([_call("act", f"c{each}") for each in range(number)], "done").model)
    turn = harness.ask()
    assert turn["reply"]["text"] == "done"
    rows = harness.sql("SELECT effect_id, status FROM tool_effects ORDER BY position")
    assert {row.status for row in rows} == {"done"}
    assert len(rows) == number
    assert (len(ids), set(ids)) == (number + 1, {row.effect_id for row in rows})
    told = [text for role, text in harness.lines(UUID(turn["session_id"])) if role == "tool"]
    assert sorted(told) == [f"run {each}" for each in range(2, number + 2)]


def test_a_tool_that_a_newer_release_of_the_agent_adds(harness: Harness) -> None:
    """The reply that calls it was committed by a worker without it, so the call has no intent and does not run."""
    _use(harness, PydanticAgent(name="assistant"), Scripting([_call("late")]).model)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    newer, ran = PydanticAgent(name="assistant"), []

    @newer.tool_plain
    def late() -> None:
        """Act."""
        ran.append(1)

    _use(harness, newer, Scripting("done").model)
    harness.move(31)
    harness.run(sent.session_id)
    assert (harness.turn(sent.turn_id)["reply"]["text"], ran) == ("done", [])


def test_a_call_in_doubt_of_a_tool_that_this_worker_lacks(harness: Harness) -> None:
    """The turn is left to a worker that has the tool; after a while its outcome is unknown, not failed."""
    older = PydanticAgent(name="assistant")

    @older.tool_plain
    def act() -> None:
        """Act."""

    _use(harness, older, Scripting([_call("act")]).model)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    _use(harness, PydanticAgent(name="assistant"), Scripting("done").model)
    harness.move(31)
    assert isinstance(harness.run(sent.session_id), Unequipped)
    harness.move(harness.settings.turn.unknown_agent_s)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    [row] = harness.sql("SELECT status FROM tool_effects")
    assert (row.status, harness.lines(sent.session_id)[2]) == ("unknown", ("tool", UNKNOWN_OUTCOME))


def _other() -> str:
    return "other"


def _retry() -> str:
    raise ModelRetry("a\ud83d")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: "a\ud83d", id="a text"),
        pytest.param(lambda: {"a\udcff": ["b\0"]}, id="members"),
        pytest.param(lambda: {"at": float("nan")}, id="no number"),
        pytest.param(lambda: ToolReturn("seen", content=["a\ud83d"]), id="content"),
        pytest.param(_retry, id="a message"),
    ],
)
@pytest.mark.parametrize("crashes", [False, True])
def test_the_model_receives_what_a_row_can_hold(harness: Harness, value: Any, *, crashes: bool) -> None:
    """Half a character, such as in the name of a file that is no UTF-8, neither fails the run nor differs after it."""
    bare = PydanticAgent(name="assistant", retries=2)
    bare.tool_plain(name="look", metadata=effect("pure"))(value)
    bare.tool_plain(name="other", metadata=effect("pure"))(_other)
    with OpenAIServer() as server:
        harness.any_model = model_of(server)
        harness.agents = Agents([adapt(bare)])
        server.script(Answer(calls=[ServerCall("look", "{}", "a"), ServerCall("other", "{}", "b")]), Answer("done"))
        sent = harness.send()
        if crashes:
            with harness.crashing("before", "turns.step", 2):
                harness.run(sent.session_id)
            harness.move(31)
        harness.run(sent.session_id)
        turn = harness.turn(sent.turn_id)
        assert (turn["status"], turn["attempts"]) == ("done", 1 + crashes)
        received = json.dumps([each for each in server.requests[-1]["messages"] if each["role"] in {"tool", "user"}])
        assert "\\u0000" not in received
        assert "\\ud83d" not in received
        assert "NaN" not in received
