"""The agent and the model of the benchmarks.

By default, the model has no latency, so the figures contain only perdure's own cost. A worker loads the agent through
`PERDURE_AGENTS`. It loads the model `benchmark:SECONDS` through the entry-point group `perdure.models`.
`benchmarks.setup` declares the entry point. Each turn has two model calls and one tool call.
"""

from __future__ import annotations

import threading

from perdure.agents import Agent
from perdure.clock import Clock
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.settings import Settings
from perdure.tools.registry import tool

QUESTION = "What is twice twenty-one, please? I would rather not work it out by myself."
PATIENT = "Take your time. "
"""Prefix of a question that makes the model wait before it calls the tool."""

ASKING = ModelReply("", (ToolCall("call_1", "double", '{"number": 21}'),), Usage(120, 12), "benchmark")
ANSWER = "Twice twenty-one is forty-two. Ask me again whenever you like; it will not change."


@tool(effect="pure")
def double(number: int) -> int:
    """Double a number."""
    return number * 2


INSTRUCTIONS = "You double numbers."
assistant = Agent("assistant", INSTRUCTIONS, tools=[double])


class InProcessModel:
    """A model that calls the tool, then answers.

    If the question starts with `PATIENT`, the model waits `latency_s` seconds before the tool call.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s

    @property
    def name(self) -> str:
        """The name by which `PERDURE_MODEL` selects this model."""
        return f"benchmark:{self._latency_s:g}"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """The answer if the last message is a tool result, otherwise the tool call."""
        last = request.messages[-1]
        if last.role is Role.TOOL:
            call.delta(ANSWER)
            return ModelReply(ANSWER, usage=Usage(150, 20), model="benchmark")
        if last.content.startswith(PATIENT):
            self._wait(call)
        return ASKING

    def _wait(self, call: ModelCall) -> None:
        ended = threading.Event()
        with call.aborting(ended.set):
            ended.wait(min(self._latency_s, call.remaining()))


def model(latency_s: str, _settings: Settings, _clock: Clock) -> InProcessModel:
    """Make the model `benchmark:SECONDS`. perdure calls this function as an entry point of `perdure.models`."""
    return InProcessModel(float(latency_s))
