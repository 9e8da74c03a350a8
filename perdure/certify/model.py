"""The model of the workers of a certification: a server on loopback that speaks Chat Completions.

A message ends with the number of its case. The reply to it is the next step of the case's scenario: as many steps are
over as replies with calls follow the message. So a call of the model that is repeated after a kill gets the same reply.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

from perdure.certify.arguments import derive
from perdure.certify.certification import Scenario
from perdure.models.protocol import ToolCall
from perdure.servers.loopback import Loopback
from perdure.text.patterns import compiled

ENDPOINT = "certify"
MODEL = f"{ENDPOINT}:scenario"
DONE = "Done."
"""The last reply of a scenario without a text."""

_CASE = compiled(r"\(case (\d+)\)")
_HEAD = {"id": "chatcmpl-certify", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "scenario"}
_OUTPUT_TOOL = "final_answer"


def text_of(scenario: Scenario, case: int) -> str:
    """The user's message of a case."""
    return f"{scenario.text} (case {case})"


class ScenarioModel:
    """The server: its `url`. `asked` is called with the case and the number of the call, before each reply."""

    def __init__(self, asked: Callable[[int, int], None]) -> None:
        self._asked = asked
        self._scenarios: dict[int, Scenario] = {}
        self._calls: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._server = Loopback(partial(_Handler, self))
        self.url = f"{self._server.url}/v1"

    def play(self, case: int, scenario: Scenario) -> None:
        """Reply to the messages of a case."""
        self._scenarios[case] = scenario

    def calls(self, case: int) -> int:
        """How often the model was asked about a case."""
        return self._calls[case]

    def serving(self) -> AbstractContextManager[None]:
        """Serve requests during the block."""
        return self._server.serving()

    def reply(self, request: Mapping[str, Any]) -> tuple[Sequence[ToolCall], str]:
        """The calls of the next reply, or its text."""
        messages = request["messages"]
        found = [(at, match) for at, each in enumerate(messages) if (match := _case_of(each))]
        if not found:
            return (), DONE  # a summary, or another request in the background
        at, case = found[-1][0], int(found[-1][1].group(1))
        with self._lock:
            self._calls[case] += 1
            number = self._calls[case]
        self._asked(case, number)
        scenario = self._scenarios.get(case)
        over = sum(1 for each in messages[at + 1 :] if each["role"] == "assistant" and each.get("tool_calls"))
        if scenario is not None and over < len(scenario.steps):
            return scenario.steps[over], ""
        return _answer(request, None if scenario is None else scenario.reply)


def _case_of(message: Mapping[str, Any]) -> Any:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else " ".join(each.get("text", "") for each in content)
    return _CASE.search(text) if message["role"] == "user" else None


def _answer(request: Mapping[str, Any], reply: str | None) -> tuple[Sequence[ToolCall], str]:
    """The last reply: the scenario's text, or what fits the agent's output."""
    if reply is not None:
        return (), reply
    form = (request.get("response_format") or {}).get("json_schema")
    if form is not None:
        return (), json.dumps(derive(form["schema"]))
    for each in request.get("tools", ()):
        if each["function"]["name"].startswith(_OUTPUT_TOOL):
            arguments = json.dumps(derive(each["function"]["parameters"]))
            return (ToolCall("", each["function"]["name"], arguments),), ""
    return (), DONE


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, model: ScenarioModel, *connection: Any) -> None:
        self._model = model
        super().__init__(*connection)

    def do_POST(self) -> None:
        """Answer a request."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        calls, text = self._model.reply(request)
        delta: dict[str, Any] = {"content": text}
        if calls:
            named = [{"name": each.name, "arguments": each.arguments} for each in calls]
            delta = {
                "tool_calls": [
                    {"index": at, "id": f"call-{len(request['messages'])}-{at}", "type": "function", "function": each}
                    for at, each in enumerate(named)
                ]
            }
        try:
            self._send(request, delta, "tool_calls" if calls else "stop")
        except ConnectionError:
            return  # the worker was killed

    def _send(self, request: Mapping[str, Any], delta: dict[str, Any], reason: str) -> None:
        self.send_response(200)
        if not request.get("stream"):
            message = {"role": "assistant", "content": None, **delta}
            whole = {**_HEAD, "object": "chat.completion", "choices": [_choice(reason, message=message)]}
            self._end("application/json", json.dumps(whole))
            return
        chunks = [_choice(None, delta=delta), _choice(reason, delta={})]
        body = "".join(f"data: {json.dumps({**_HEAD, 'choices': [each]})}\n\n" for each in chunks)
        self._end("text/event-stream", f"{body}data: [DONE]\n\n")

    def _end(self, media_type: str, body: str) -> None:
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _choice(reason: str | None, **more: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": reason, **more}
