"""A test server for Amazon Bedrock's `ConverseStream` that validates requests as the provider does.

A reply is a binary stream of events, each with its length and checksums. Without a script, the server responds with a
call of the request's first tool. To a request with the tool's result, it responds with that result.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from tests.models.server import Answer, Player, ProviderServer, Status, Step, Wire, pieces, play

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PATH = re.compile(r"/model/([^/]+)/converse-stream")
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "content_filtered"}
_CODES = {
    400: "ValidationException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    408: "ModelTimeoutException",
    429: "ThrottlingException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
}
_STREAM_CODES = {429: "throttlingException", 503: "serviceUnavailableException"}
SIGNATURE = "c2ln"
_ENDLESS = 4 * 1024**2


def message(payload: bytes, **headers: str) -> bytes:
    """One message of an event stream: its length, the length of its headers, headers, payload and checksums."""
    named = b"".join(
        struct.pack("!B", len(name)) + name + struct.pack("!BH", 7, len(value)) + value
        for name, value in ((f":{each.replace('_', '-')}".encode(), text.encode()) for each, text in headers.items())
    )
    beginning = prelude(16 + len(named) + len(payload), len(named))
    whole = beginning + named + payload
    return whole + struct.pack("!I", zlib.crc32(whole))


def prelude(length: int, of_headers: int = 0) -> bytes:
    """The beginning of a message: its length, that of its headers, and a checksum."""
    lengths = struct.pack("!II", length, of_headers)
    return lengths + struct.pack("!I", zlib.crc32(lengths))


def _problems(body: Wire) -> Iterator[str]:
    messages = body.get("messages") or []
    roles = [each.get("role") for each in messages]
    if not roles or roles[0] != "user" or roles[-1] != "user":
        yield "A conversation must start and end with a user message."
    if any(one == other for one, other in pairwise(roles)):
        yield "A conversation must alternate between user and assistant roles."
    yield from _block_problems([each.get("content") or [] for each in messages])
    called = [each["toolUse"]["toolUseId"] for message in messages for each in message["content"] if "toolUse" in each]
    if len(set(called)) != len(called):
        yield "The conversation has duplicate tool Ids."
    if called and not _tools(body):
        yield "The toolConfig field must be defined when using toolUse and toolResult content blocks."
    for tool in _tools(body):
        if not _NAME.fullmatch(tool["name"]):
            yield f"toolConfig.tools: {tool['name']!r} does not match {_NAME.pattern}"
        if tool["inputSchema"]["json"].get("type") != "object":
            yield "toolConfig.tools.inputSchema.json.type must be object"


def _block_problems(contents: Sequence[Sequence[Wire]]) -> Iterator[str]:
    open_ids: list[str] = []
    for at, blocks in enumerate(contents):
        if not blocks or any("text" in block and not block["text"].strip() for block in blocks):
            yield f"messages.{at}.content: the text field in the ContentBlock object is blank"
        answered = [block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block]
        if sorted(answered) != sorted(open_ids):
            yield f"messages.{at}: toolResult blocks {answered} for the toolUse blocks {open_ids}"
        open_ids = [block["toolUse"]["toolUseId"] for block in blocks if "toolUse" in block]
        if any("reasoningContent" in block and not _is_signed(block) for block in blocks):
            yield f"messages.{at}: a reasoningContent block without its signature"


def _is_signed(block: Wire) -> bool:
    text = block["reasoningContent"].get("reasoningText", {})
    return bool(text.get("signature") == SIGNATURE)


def _tools(body: Wire) -> list[Wire]:
    return [each["toolSpec"] for each in body.get("toolConfig", {}).get("tools", [])]


def _two_steps(body: Wire) -> Step:
    last = body["messages"][-1]["content"]
    results = [each["toolResult"]["content"] for each in last if "toolResult" in each]
    if results:
        return play(_text(results[-1][0]), None)
    # A tool without parameters is only defined because the conversation has a call of it.
    tools = [each for each in _tools(body) if each["inputSchema"]["json"].get("properties")]
    return play(last[-1]["text"], (tools[0]["name"], tools[0]["inputSchema"]["json"]) if tools else None)


def _text(block: Wire) -> str:
    return str(block["text"]) if "text" in block else json.dumps(block["json"])


class BedrockServer(ProviderServer):
    """A `ProviderServer` for Bedrock."""

    request_id_header = "x-amzn-RequestId"
    content_type = "application/vnd.amazon.eventstream"
    endless = prelude(_ENDLESS)

    def __init__(self, *steps: Step, player: Player | None = None, port: int = 0) -> None:
        super().__init__(*steps, player=player or _two_steps, port=port)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        """Record a request. The model's name and the streaming are in its path."""
        found = _PATH.fullmatch(path)
        body |= {"model": unquote(found[1]) if found else "", "stream": True}
        return super().take(path, body, headers)

    def judge(self, path: str, body: Wire) -> Status | None:
        if not body["model"]:
            return Status(404, message=f"no route {path}")
        problems = list(_problems(body))
        if self.thinks:
            called = [
                each["content"] for each in body["messages"] if any("toolUse" in block for block in each["content"])
            ]
            problems += ["Expected reasoningContent before toolUse"] * any(
                "reasoningContent" not in each[0] for each in called
            )
        return Status(400, message="; ".join(problems)) if problems else None

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        del model
        events: list[tuple[str, Any]] = [("messageStart", {"role": "assistant"})]
        at = 0
        if self.thinks:
            thoughts: Sequence[Wire] = ({"text": "Let me think."}, {"signature": SIGNATURE})
            events += _block(at, [{"reasoningContent": each} for each in thoughts])
            at += 1
        if answer.text:
            events += _block(at, [{"text": each} for each in pieces(answer.text, answer.piece)])
            at += 1
        for number, call in enumerate(answer.calls, start=at):
            start = {"toolUse": {"toolUseId": call.id, "name": call.name}}
            events.append(("contentBlockStart", {"contentBlockIndex": number, "start": start}))
            events += _block(number, [{"toolUse": {"input": each}} for each in pieces(call.arguments, answer.piece)])
        reason = answer.finish_reason or ("tool_calls" if answer.calls else "stop")
        events.append(("messageStop", {"stopReason": _REASONS.get(reason, reason)}))
        if answer.usage is not None:
            read, written = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
            usage = {"inputTokens": read - 3, "outputTokens": written, "totalTokens": read + written}
            usage |= {"cacheReadInputTokens": 3, "cacheWriteInputTokens": 0}
            events.append(("metadata", {"usage": usage, "metrics": {"latencyMs": 1}}))
        return events

    def frame(self, chunk: Any) -> bytes:
        if isinstance(chunk, bytes):
            return message(chunk, message_type="event", event_type="contentBlockDelta", content_type="application/json")
        if isinstance(chunk, dict):  # an error, of which botocore knows few kinds
            kind, said = chunk["__type"], chunk["message"]
            if kind not in _STREAM_CODES.values():
                kind, said = "modelStreamErrorException", f"{kind}: {said}"
            payload = json.dumps({"message": said}).encode()
            return message(payload, message_type="exception", exception_type=kind, content_type="application/json")
        kind, payload = chunk
        return message(
            json.dumps(payload).encode(), message_type="event", event_type=kind, content_type="application/json"
        )

    def whole(self, answer: Answer, model: str) -> Wire:
        raise NotImplementedError("every request to this server is for a stream")

    def error(self, error: Status) -> Wire:
        code = error.code or _CODES.get(error.status) or _STREAM_CODES.get(error.status, "modelStreamErrorException")
        return {"__type": code, "message": error.message}


def _block(number: int, deltas: Sequence[Wire]) -> list[tuple[str, Any]]:
    """The deltas and the end of a block of content."""
    events: list[tuple[str, Any]] = [
        ("contentBlockDelta", {"contentBlockIndex": number, "delta": delta}) for delta in deltas
    ]
    return [*events, ("contentBlockStop", {"contentBlockIndex": number})]
