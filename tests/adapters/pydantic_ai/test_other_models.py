"""Requests that a capability of the agent sends to another model than the agent's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import RunContext
from pydantic_ai.capabilities import AbstractCapability, ModelFallback, ResolveModelId, SelectModel
from pydantic_ai.exceptions import ModelHTTPError, RetryModelRequest
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import Model, ModelRequestContext
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

from perdure import adapt
from perdure.agents import Agents
from perdure.errors import CircuitBreakerOpen, ProviderError, SettingsError
from perdure.testing import Scripted, ask
from perdure.turns.lease.claim import Ran
from tests.adapters.pydantic_ai.test_agents import Scripting, _call
from tests.turns.harness import Harness


class Swap(AbstractCapability[Any]):
    """Sends each request to another model."""

    def __init__(self, model: Model[Any]) -> None:
        self.model = model

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        """Replace the model."""
        request_context.model = self.model
        return request_context


def _down() -> Scripting:
    return Scripting(*[ModelHTTPError(503, "down", None)] * 100)


_KINDS = ["fallback", "fallback by name", "selected", "selected by name", "swapped"]


def _choosing(model: Model[Any]) -> dict[str, list[AbstractCapability[Any]]]:
    """Capabilities that have a request answered by the model."""
    named = ResolveModelId[Any](lambda _, name: model if name == "own:other" else None)
    return {
        "fallback": [ModelFallback(model)],
        "fallback by name": [ModelFallback("own:other"), named],
        "selected": [SelectModel(lambda _: model)],
        "selected by name": [SelectModel(lambda _: "own:other"), named],
        "swapped": [Swap(model)],
    }


@pytest.mark.parametrize("kind", _KINDS)
def test_a_capability_chooses_the_model(kind: str) -> None:
    """The model may be an object, as without perdure: requests do not leave this process."""
    other = Scripting([_call("look")], "from the other")
    capabilities = _choosing(other.model)
    bare = PydanticAgent(_down().model, name="assistant", capabilities=capabilities[kind])

    @bare.tool_plain
    def look() -> str:
        """Look."""
        return "seen"

    answer = ask(bare, "go")
    assert (answer.status, answer.reply) == ("done", "from the other")
    assert [each.result for each in answer.calls] == ["seen"]


def test_a_model_of_perdure_has_a_fallback() -> None:
    """Its errors are those of a model of pydantic-ai for the run."""
    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[ModelFallback(Scripting("from the other").model)])
    adapted = adapt(bare, model="offline")
    assert ask(adapted, "go", model=Scripted(ProviderError("down", transient=False))).reply == "from the other"
    assert ask(adapted, "go", model=Scripted("from perdure's")).reply == "from perdure's"


async def _streaming(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
    if messages:
        raise ModelHTTPError(503, "down", None)
    yield ""


@pytest.mark.parametrize("kind", _KINDS)
def test_another_model_cannot_stream(harness: Harness, kind: str) -> None:
    """It is asked without streaming."""
    other = Scripting("from the other")
    streaming = FunctionModel(stream_function=_streaming)
    harness.agents = Agents(
        [adapt(PydanticAgent(streaming, name="assistant", capabilities=_choosing(other.model)[kind]))]
    )
    sent = harness.send()
    harness.run(sent.session_id)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["reply"]["text"]) == ("done", "from the other")
    assert len(other.seen) == 1


class Breakers:
    """Records which breaker admits a call, and refuses those of open ones."""

    def __init__(self, *is_open: str) -> None:
        self.is_open = is_open
        self.asked: list[str] = []

    def get(self, name: str) -> Breakers:
        """The breaker of a model."""
        self.asked.append(name)
        return self

    def execute(self, work: Callable[[], Any], lease_s: float) -> Any:
        """Call the model."""
        del lease_s
        if self.asked[-1] in self.is_open:
            raise CircuitBreakerOpen("The model is not asked.")
        return work()


@pytest.mark.parametrize("kind", _KINDS)
def test_each_model_has_its_own_breaker(harness: Harness, kind: str) -> None:
    """While that of the agent's model is open, another one answers."""
    first, other = Scripting("from the first", name="first"), Scripting("from the other", name="other")
    bare = PydanticAgent(first.model, name="assistant", capabilities=_choosing(other.model)[kind])
    harness.agents = Agents([adapt(bare)])
    breakers = Breakers("llm:function:first")
    runtime = replace(harness.runtime, breakers=cast("Any", breakers))
    turn = harness.run_with(runtime, "go")
    assert (turn["status"], turn["reply"]["text"]) == ("done", "from the other")
    assert not first.seen
    asked = ["llm:function:first"] if "fallback" in kind else []
    assert breakers.asked == [*asked, "llm:own:other" if "by name" in kind else "llm:function:other"]


class Elsewhere(AbstractCapability[Any]):
    """Has another model answer after an error, or in place of the first reply."""

    def __init__(self, model: Model[Any], *, after_reply: bool) -> None:
        self.model = model
        self.after_reply = after_reply

    async def on_model_request_error(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, error: Exception
    ) -> ModelResponse:
        """Ask the other model."""
        raise RetryModelRequest(self.model)

    async def after_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, response: ModelResponse
    ) -> ModelResponse:
        """Ask the other model, once."""
        if self.after_reply and request_context.attempt == 1:
            raise RetryModelRequest(self.model)
        return response


@pytest.mark.parametrize("after_reply", [False, True])
def test_a_hook_asks_another_model(*, after_reply: bool) -> None:
    """`RetryModelRequest` names a model, which may be an object."""
    first = Scripting("from the first") if after_reply else _down()
    capabilities = [Elsewhere(Scripting("from the other").model, after_reply=after_reply)]
    answer = ask(PydanticAgent(first.model, name="assistant", capabilities=capabilities), "go")
    assert (answer.status, answer.reply) == ("done", "from the other")


def test_the_last_error_counts() -> None:
    """If every model fails, the turn fails as with one model."""
    bare = PydanticAgent(_down().model, name="assistant", capabilities=[ModelFallback(_down().model)])
    answer = ask(bare, "go")
    assert (answer.status, getattr(answer.error, "code", None)) == ("failed", "PROVIDER_ERROR")


def test_a_crash_behind_the_reply_of_another_model(harness: Harness) -> None:
    """Another process goes on behind the stored reply, and has the next request answered in the same way."""
    other = Scripting([_call("look")], "done", name="other")
    bare = PydanticAgent(_down().model, name="assistant", capabilities=[ModelFallback(other.model)])

    @bare.tool_plain
    def look() -> str:
        """Look."""
        return "seen"

    harness.agents = Agents([adapt(bare)])
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    harness.move(31)
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "done"
    assert len(other.seen) == 2
    models = {
        row.model for row in harness.sql("SELECT prompt ->> 'model' AS model FROM messages WHERE role = 'assistant'")
    }
    assert models == {"function:other"}


@pytest.mark.parametrize("is_named", [False, True])
def test_the_first_fallback_is_the_model_of_an_agent_without_one(*, is_named: bool) -> None:
    """As without perdure: the agent is not asked with `PERDURE_MODEL`."""
    first = TestModel(custom_output_text="from the first")
    named = ResolveModelId[Any](lambda _, name: first if name == "own:first" else None)
    fallback = ModelFallback[Any]("own:first" if is_named else first, Scripting().model)
    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[fallback, named])
    assert ask(bare, "go").reply == "from the first"
    assert ask(bare, "go", model=Scripted("from the test")).reply == "from the test"


def test_the_second_fallback_of_an_agent_without_a_model() -> None:
    """It answers if the first one fails."""
    fallback = ModelFallback[Any](_down().model, Scripting("from the second").model)
    assert ask(PydanticAgent[Any, Any](name="assistant", capabilities=[fallback]), "go").reply == "from the second"


def test_a_selection_without_a_model_to_replace_is_refused() -> None:
    """The agent would be asked with `PERDURE_MODEL`, and nothing would be selected."""
    bare = PydanticAgent[Any, Any](name="assistant", capabilities=[SelectModel(lambda _: "openai:gpt-5")])
    with pytest.raises(SettingsError, match="no model for it to replace: pass model="):
        adapt(bare)


def test_a_conversation_without_a_model() -> None:
    """The error names the way out, as for an agent of perdure."""
    bare = PydanticAgent[Any, Any](name="assistant")
    for agent in (bare, adapt(bare, model="offline")):
        with pytest.raises(SettingsError, match=r"agent 'assistant' needs a model, such as Scripted"):
            ask(agent, "go")
