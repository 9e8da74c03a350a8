"""A test server for OpenAI's Responses API that validates requests as the provider does.

Without a script, the server responds with a call of the request's first tool. To a request with the tool's result, it
responds with that result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tests.models.server import Answer, Player, ProviderServer, Status, Step, Wire, pieces, play

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_INCOMPLETE = {"length": "max_output_tokens"}
_FAILED = "insufficient_system_resource"

REASONING: Wire = {
    "type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Let me think."}],
    "encrypted_content": "secret-of-the-vendor",
}  # fmt: skip


def response(status: str, output: Sequence[Wire], model: str = "gpt-test", **more: Any) -> dict[str, Any]:
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": model, "status": status,
        "output": list(output), "error": None, "incomplete_details": None, "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": [], "metadata": {}, **more,
    }  # fmt: skip


def streamed(item: Wire, at: int, piece: int = 4) -> Iterator[dict[str, Any]]:
    """The events in which the provider streams one item of its output."""
    place = {"item_id": item["id"], "output_index": at}
    opened = dict(item)
    deltas: list[dict[str, Any]] = []
    if item["type"] == "message":
        [part] = item["content"]
        opened["content"] = []
        place = {**place, "content_index": 0}
        deltas.append({"type": "response.content_part.added", **place, "part": {**part, "text": ""}})
        deltas += [
            {"type": "response.output_text.delta", **place, "delta": each, "logprobs": []}
            for each in pieces(part["text"], piece)
        ]
    elif item["type"] == "function_call":
        opened["arguments"] = ""
        kind = "response.function_call_arguments"
        deltas += [{"type": f"{kind}.delta", **place, "delta": each} for each in pieces(item["arguments"], piece)]
        deltas.append({"type": f"{kind}.done", **place, "arguments": item["arguments"], "name": item["name"]})
    elif item["type"] == "reasoning":
        [part] = item["summary"]
        opened["summary"] = []
        place = {**place, "summary_index": 0}
        deltas.append({"type": "response.reasoning_summary_part.added", **place, "part": {**part, "text": ""}})
        deltas += [
            {"type": "response.reasoning_summary_text.delta", **place, "delta": each}
            for each in pieces(part["text"], piece)
        ]
    yield {"type": "response.output_item.added", "output_index": at, "item": opened}
    yield from deltas
    yield {"type": "response.output_item.done", "output_index": at, "item": dict(item)}


def _items(answer: Answer, *, thinks: bool) -> list[dict[str, Any]]:
    items = [dict(REASONING)] if thinks else []
    if answer.text:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
        items.append(message)
    items += [
        {
            "type": "function_call", "id": f"fc_{number}", "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": "completed",
        }
        for number, call in enumerate(answer.calls, start=1)
    ]  # fmt: skip
    return items


def _end(reason: str) -> tuple[str, dict[str, Any]]:
    """The status with which a response ends, and the members that say why."""
    if reason in ("stop", "tool_calls"):
        return "completed", {}
    if reason == _FAILED:
        return "failed", {"error": {"code": "server_error", "message": "The server failed."}}
    return "incomplete", {"incomplete_details": {"reason": _INCOMPLETE.get(reason, reason)}}


def _problems(body: Wire) -> Iterator[str]:
    items = body.get("input")
    if not isinstance(items, list) or not items:
        yield "Missing required parameter: 'input'."
        return
    called = [each["call_id"] for each in items if each.get("type") == "function_call"]
    answered = [each["call_id"] for each in items if each.get("type") == "function_call_output"]
    for call_id in dict.fromkeys((*called, *answered)):
        if called.count(call_id) != 1 or answered.count(call_id) != 1:
            yield f"Every function call needs exactly one output, and each its own call_id: {call_id!r}."
    for number, each in enumerate(items):
        if each.get("type") == "function_call" and not _is_object(each.get("arguments")):
            yield f"Invalid value: 'input[{number}].arguments'."
        if each.get("type") == "reasoning" and each.get("encrypted_content") != REASONING["encrypted_content"]:
            yield f"Item 'input[{number}]' of type 'reasoning' cannot be decrypted."
    names = [each["name"] for each in body.get("tools", [])]
    yield from (f"Invalid 'tools.name': {name!r}." for name in names if not _NAME.fullmatch(name))
    if len(set(names)) != len(names):
        yield "Tool names must be unique."


def _is_object(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _two_steps(body: Wire) -> Step:
    last = body["input"][-1]
    if last.get("type") == "function_call_output":
        return play(str(last["output"]), None)
    content = last["content"] if isinstance(last["content"], str) else last["content"][-1]["text"]
    tools = body.get("tools", []) if body.get("tool_choice") != "none" else []
    return play(content, (tools[0]["name"], tools[0]["parameters"]) if tools else None)


class ResponsesServer(ProviderServer):
    """A `ProviderServer` for the Responses API."""

    def __init__(self, *steps: Step, player: Player | None = None, port: int = 0) -> None:
        super().__init__(*steps, player=player or _two_steps, port=port)

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        """Record a request."""
        body["messages"] = body.get("input")
        return super().take(path, body, headers)

    def judge(self, path: str, body: Wire) -> Status | None:
        if path != "/v1/responses":
            return Status(404, message=f"no route {path}")
        problems = list(_problems(body))
        kinds = [each.get("type") for each in body.get("input") or []]
        if self.thinks and kinds.count("function_call") > kinds.count("reasoning"):
            problems.append("Item 'function_call' was provided without its required 'reasoning' item.")
        return Status(400, message="; ".join(problems)) if problems else None

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        items = _items(answer, thinks=self.thinks)
        events: list[dict[str, Any]] = [{"type": "response.created", "response": response("in_progress", [], model)}]
        for at, item in enumerate(items):
            events += streamed(item, at, answer.piece)
        status, more = _end(answer.finish_reason or "stop")
        if answer.usage is not None:
            read, written = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
            more["usage"] = {
                "input_tokens": read, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": read + written,
            }  # fmt: skip
        events.append({"type": f"response.{status}", "response": response(status, items, model, **more)})
        return [{**event, "sequence_number": number} for number, event in enumerate(events)]

    def frame(self, chunk: Any) -> bytes:
        if isinstance(chunk, bytes):
            return b"event: response.output_text.delta\ndata: %s\n\n" % chunk
        kind = chunk.get("type", "error")
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.dumps(chunk).encode())

    def whole(self, answer: Answer, model: str) -> Wire:
        raise NotImplementedError("every request to this server is for a stream")

    def error(self, error: Status) -> Wire:
        kind = "invalid_request_error" if 400 <= error.status < 500 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}
