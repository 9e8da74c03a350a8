"""The model of these tests: an HTTP server whose answers depend only on the transcript.

If a message begins with the name of a tool, the model calls the tool. For `pure: 3`, it calls `pure` with the whole
text as the argument `note`. For `all: 3`, it calls three tools in one reply. It answers other messages without a tool
call. A model call that is repeated after a crash gets the same answer. A gate holds back the answer to one text, so
that a test can act during the model call.

If a request offers the tool of an output, the answer without a tool call is the member `said` of the output.

The answer to a request to extract memories is one memory, about the first line of the conversation.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

from perdure.memory.consolidation.extraction import PROMPT as EXTRACTION
from perdure.models.output_tool import _NAME as OUTPUT
from perdure.sessions.summary import PROMPT as SUMMARY
from tests.models.openai_server import Answer, Call, OpenAIServer, Status, Step, Wire

SIDE_BY_SIDE = ("pure", "idempotent", "unsafe")
ALONE = ("pure", "idempotent", "unsafe", "probed", "deadly", "stuck", "slow", "guarded", "hanging", "frozen")
OUTSIDE = "outside"
OF_CLIENT = "weather"
"""A tool that the client of a request brings."""
HAND_OFF = "hands off"
"""A text for which the model calls the tool with which openai-agents hands a conversation to its agent `friend`."""
TASKS = ("report", "reports", "charge", "slowly", "stepping", "fails", "odd", "silent", "nobodys")
ASK, ASK_ADAPTED, HAND_OVER = "research", "research_otherwise", "hand_over"
ASK_SIZE = "ask_size"
ASK_BARISTA = "barista"
"""A tool that is an agent, which the model asks for coffee."""
CHART = "chart"
"""A tool that returns an image."""
SECRET = "4111"
REFUSED, GUARD_TOKENS = "poison", 100
"""What the guard of the agent `cautious` refuses, and the tokens that it uses for each text."""
PLANS: dict[str, tuple[str, ...]] = {name: (name,) for name in (*ALONE, *TASKS, OUTSIDE, OF_CLIENT)}
PLANS |= {
    HAND_OFF: ("transfer_to_friend",),
    "all": SIDE_BY_SIDE,
    "asks": (ASK, ASK_ADAPTED),
    "hands over": (HAND_OVER,),
    "coffee": (ASK_SIZE,),
    "breakfast": (ASK_BARISTA,),
    CHART: (CHART,),
    "charts": (CHART, CHART),
}

PARTS = 5
"""The number of tasks that one call of the tool `reports` sends."""

REPAIR = "Once more."
"""What the agent `judging` answers to each reply but the one to this text."""

_LONGEST_S = 60.0


class Gate:
    """Holds back one model call until `opened` is set. `arrived` is set when the call arrives.

    `nth` is the number of the call among all calls with the same newest user message, counted from 1.
    """

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> None:
        """Wait until the call has arrived."""
        if not self.arrived.wait(_LONGEST_S):
            raise AssertionError("no model call arrived")


class ModelServer:
    """The model's HTTP server. While `down` is true, the server answers 503.

    A call is about the text of the newest user message. `latency_s` is the default latency of answers. For single
    texts, `latencies` overrides the latency, and `answers` overrides the whole answer; `extracted` overrides the answer
    to each request to extract memories. `called_at` has the monotonic times of the calls about each text.

    If `thoughts` is set, each answer begins with them in tags, in small pieces. Before calls, no tag closes them. If
    `thinks_long` is set, summaries and extractions get no further than that.
    """

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.down = False
        self.latencies: dict[str, float] = {}
        self.answers: dict[str, Step] = {}
        self.extracted: Step | None = None
        self.thoughts = ""
        self.thinks_long = False
        self.called_at: defaultdict[str, list[float]] = defaultdict(list)
        self.server = _Server(self)
        self._gates: dict[str, Gate] = {}
        self._lock = threading.Lock()

    def gate(self, text: str, nth: int = 1) -> Gate:
        """Hold back the `nth` call whose newest user message is `text`."""
        made = self._gates[text] = Gate(nth)
        return made

    def close(self) -> None:
        """Open every gate and stop."""
        for gate in self._gates.values():
            gate.opened.set()
        self.server.stop()

    def answer(self, body: Wire) -> Step:
        """The answer to a prompt."""
        found = self._answer(body)
        if not self.thoughts or not isinstance(found, Answer):
            return found
        if self.thinks_long and body["messages"][0]["content"].startswith((EXTRACTION, SUMMARY)):
            return Answer(f"<think>{self.thoughts}", piece=3, finish_reason="length")
        end = "" if found.calls else "</think>\n\n"
        return replace(found, text=f"<think>{self.thoughts}{end}{found.text}", piece=3)

    def _answer(self, body: Wire) -> Step:
        if self.down:
            return Status(503, message="The model is down.")
        text = _newest(body)
        if self.extracted is not None and body["messages"][0]["content"] == EXTRACTION:
            return self.extracted
        if text in self.answers:
            return self.answers[text]
        found = _answer(_said(body), text, self.latencies.get(text, self.latency_s))
        if found.calls or all(each["function"]["name"] != OUTPUT for each in body.get("tools", ())):
            return found
        return Answer(calls=[Call(OUTPUT, json.dumps({"said": found.text}), "call_output")], latency_s=found.latency_s)

    def pass_gate(self, body: Wire) -> None:
        """Record the call. If it has a gate, wait until the gate opens."""
        text = _newest(body)
        with self._lock:
            self.called_at[text].append(time.monotonic())
            gate = self._gates.get(text)
            held = gate is not None and gate.nth == len(self.called_at[text])
        if gate is not None and held:
            gate.arrived.set()
            gate.opened.wait(_LONGEST_S)


class _Server(OpenAIServer):
    def __init__(self, model_server: ModelServer) -> None:
        super().__init__(player=model_server.answer)
        self._model_server = model_server

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        """If the call has a gate, wait until the gate opens. Then return the response. Other calls do not wait."""
        self._model_server.pass_gate(body)
        return super().take(path, body, headers)


def answer_to(text: str, *results: str) -> str:
    """The reply to `text`, given the results of the tools. It has no spaces at its end, as pages show none."""
    return f"answer to {text!r}: {' and '.join(results)}".rstrip()


def task_of(text: str, number: int) -> str:
    """What the model gives to an agent in its call number `number` about `text`."""
    return f"task {number} of {text}"


def memory_of(text: str) -> str:
    """The memory that the model extracts from a conversation whose first line is `text`."""
    return f"The user spoke of {text}."


def _said(body: Wire) -> list[dict[str, Any]]:
    """The messages of a prompt, without those that only have the files of the results before them."""
    messages: list[dict[str, Any]] = body["messages"]
    return [
        each
        for before, each in zip([{"role": ""}, *messages], messages, strict=False)
        if (before["role"], each["role"]) != ("tool", "user") or isinstance(each["content"], str)
    ]


def _newest(body: Wire) -> str:
    content = next(each["content"] for each in reversed(_said(body)) if each["role"] == "user")
    return content if isinstance(content, str) else "\n".join(each.get("text", "") for each in content).strip()


def _answer(messages: list[dict[str, Any]], text: str, latency_s: float) -> Answer:
    if messages[0]["content"] == EXTRACTION:
        first = messages[1]["content"].splitlines()[0].partition("user: ")[2]  # another message has the known memories
        memory = {"content": memory_of(first), "type": "fact", "importance": 0.5, "sources": [1]}
        return Answer(json.dumps([memory]), piece=64, latency_s=latency_s)
    if messages[-1]["role"] == "tool":
        return Answer(answer_to(text, *_results(messages)), piece=64, latency_s=latency_s)
    tools = PLANS.get(text.partition(":")[0], ())
    if not tools:
        return Answer(answer_to(text), piece=64, latency_s=latency_s)
    parts = [{"note": f"{text} {number}"} for number in range(PARTS)]
    arguments = json.dumps({"calls": parts} if tools == ("reports",) else {"note": text})
    tasks = [json.dumps({"task": task_of(text, number)}) for number in range(len(tools))]
    has_none = HAND_OVER in tools or text == HAND_OFF
    given = tasks if ASK in tools else ["{}" if has_none else arguments] * len(tools)
    if tools == (ASK_SIZE,):
        given = [json.dumps({"question": f"Which size, for {text}?"})]
    if tools == (ASK_BARISTA,):
        given = [json.dumps({"task": f"coffee: {text}"})]
    calls = [Call(name, given[number], f"call_{number}") for number, name in enumerate(tools)]
    return Answer(calls=calls, piece=64, latency_s=latency_s)


def _results(messages: list[dict[str, Any]]) -> list[str]:
    results: list[str] = []
    for message in reversed(messages):
        if message["role"] != "tool":
            break
        results.insert(0, message["content"])
    return results
