"""A test server for Chat Completions and embeddings that validates requests as the provider does.

Without a script, the server responds with a call of the request's first tool. To a request with the tool's result, it
responds with that result. To run the server as a program:

    python -m tests.models.openai_server --port 8000 --latency-ms 500
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tests.models.server import (
    Answer,
    Broken,
    Call,
    Chunks,
    Drip,
    Player,
    ProviderServer,
    Raw,
    Silence,
    Status,
    Step,
    Wire,
    pieces,
    play,
)

__all__ = [
    "Answer",
    "Broken",
    "Call",
    "Chunks",
    "Drip",
    "OpenAIServer",
    "Player",
    "Raw",
    "Silence",
    "Status",
    "Step",
    "Wire",
    "chunk",
    "chunks_of",
    "embedding_of",
    "two_steps",
    "validate_transcript",
]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_ID = 40
_MAX_TEXTS = 2048


def validate_transcript(messages: object) -> list[str]:
    """The reasons for which the provider would refuse a request's `messages`; empty if the messages are valid."""
    if not isinstance(messages, list) or not messages:
        return ["messages: expected an array that is not empty"]
    return list(_problems(messages))


def _problems(messages: Sequence[Any]) -> Iterator[str]:
    seen: set[str] = set()
    open_ids: list[str] = []
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            yield f"{where}: expected an object"
        elif message.get("role") == "tool":
            yield from _result_problems(where, message, open_ids)
        else:
            if open_ids:
                yield f"{where}: tool calls without a result before it: {', '.join(open_ids)}"
                open_ids.clear()
            yield from _spoken_problems(where, message, seen, open_ids)
    if open_ids:
        yield f"tool calls without a result at the end: {', '.join(open_ids)}"


def _spoken_problems(where: str, message: Wire, seen: set[str], open_ids: list[str]) -> Iterator[str]:
    role = message.get("role")
    if role == "assistant" and "tool_calls" in message:
        yield from _asking_problems(where, message, seen, open_ids)
    elif role not in ("system", "developer", "user", "assistant"):
        yield f"{where}.role: {role!r} is not a role"
    elif isinstance(message.get("content"), list) and role == "user":
        yield from (f"{where}.content: {part} is no part" for part in message["content"] if not _is_part(part))
    elif not isinstance(message.get("content"), str):
        yield f"{where}.content: expected a string"


def _is_part(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str(text), **rest}:
            return bool(text.strip()) and not rest
        case {"type": "image_url", "image_url": {"url": str(url)}, **rest}:
            return url.startswith("data:image/") and not rest
        case {"type": "file", "file": {"filename": str(name), "file_data": str(data)}, **rest}:
            return bool(name) and data.startswith("data:application/pdf;base64,") and not rest
        case _:
            return False


def _result_problems(where: str, message: Wire, open_ids: list[str]) -> Iterator[str]:
    call_id = message.get("tool_call_id")
    if call_id in open_ids:
        open_ids.remove(call_id)
    else:
        yield f"{where}.tool_call_id: {call_id!r} answers no call of the message before, or answers it twice"
    if not isinstance(message.get("content"), str):
        yield f"{where}.content: expected a string"


def _asking_problems(where: str, message: Wire, seen: set[str], open_ids: list[str]) -> Iterator[str]:
    if not isinstance(message.get("content"), str | None):
        yield f"{where}.content: expected a string or null"
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not calls:
        yield f"{where}.tool_calls: expected an array that is not empty"
        return
    for number, call in enumerate(calls):
        yield from _call_problems(f"{where}.tool_calls[{number}]", call, seen, open_ids)


def _call_problems(where: str, call: Any, seen: set[str], open_ids: list[str]) -> Iterator[str]:
    if not isinstance(call, dict) or call.get("type") != "function" or not isinstance(call.get("function"), dict):
        yield f"{where}: expected an object of type function"
        return
    call_id = call.get("id")
    if not isinstance(call_id, str) or not 0 < len(call_id) <= _MAX_ID:
        yield f"{where}.id: expected 1 to {_MAX_ID} characters, got {call_id!r}"
    elif call_id in seen:
        yield f"{where}.id: {call_id!r} occurs twice"
    else:
        seen.add(call_id)
        open_ids.append(call_id)
    if not _NAME.fullmatch(str(call["function"].get("name"))):
        yield f"{where}.function.name: {call['function'].get('name')!r} does not match {_NAME.pattern}"
    if not _is_json_object(call["function"].get("arguments")):
        yield f"{where}.function.arguments: expected a string that holds a JSON object"


def _is_json_object(text: object) -> bool:
    def refuse(name: str) -> float:
        raise ValueError(name)

    try:
        return isinstance(text, str) and isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def two_steps(latency_s: float = 0.0, words: int = 20) -> Player:
    """A player that calls the first tool, and then replies with the tool's result, padded to `words` words."""

    def step(body: Wire) -> Step:
        last = body["messages"][-1]
        tools = [] if last["role"] == "tool" else [each["function"] for each in body.get("tools", [])]
        tool = (tools[0]["name"], tools[0].get("parameters", {})) if tools else None
        return play(last["content"], tool, latency_s, words)

    return step


def embedding_of(text: str, dimensions: int = 3) -> list[float]:
    """The server's vector of `text`, computed from the text's length and first character."""
    vector = [float(len(text)), float(ord(text[0])), *range(1, dimensions)]
    return [float(each) for each in vector[:dimensions]]


def chunks_of(answer: Answer, model: str = "test-model") -> list[dict[str, Any]]:
    """The chunks in which the provider would stream `answer`."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in pieces(answer.text, answer.piece)]
    for index, call in enumerate(answer.calls):
        opening = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        deltas.append({"tool_calls": [opening]})
        for piece in pieces(call.arguments, answer.piece):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    chunks = [chunk([{"index": 0, "delta": delta, "finish_reason": None}], model) for delta in deltas]
    chunks.append(chunk([{"index": 0, "delta": {}, "finish_reason": _finish_reason(answer)}], model))
    if answer.usage is not None:
        chunks.append({**chunk([], model), "usage": dict(answer.usage)})
    return chunks


def chunk(choices: Sequence[Wire], model: str = "test-model") -> dict[str, Any]:
    """One chunk of a stream."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": model,
        "choices": list(choices),
    }


def _finish_reason(answer: Answer) -> str:
    return answer.finish_reason or ("tool_calls" if answer.calls else "stop")


class OpenAIServer(ProviderServer):
    """A `ProviderServer` for Chat Completions and embeddings."""

    end = b"data: [DONE]\n\n"

    def __init__(self, *steps: Step, player: Player | None = None, port: int = 0) -> None:
        super().__init__(*steps, player=player or two_steps(), port=port)

    def judge(self, path: str, body: Wire) -> Status | None:
        if path == "/v1/embeddings":
            texts = body.get("input")
            usable = isinstance(texts, list) and 0 < len(texts) <= _MAX_TEXTS and all(texts)
            return None if usable else Status(400, message="$.input: expected texts that are not empty")
        if path != "/v1/chat/completions":
            return Status(404, message=f"no route {path}")
        problems = validate_transcript(body.get("messages")) + list(_tool_problems(body))
        if self.thinks and any(each.get("tool_calls") and not self.has_thoughts(each) for each in body["messages"]):
            problems.append("Missing `reasoning_content` field in an assistant message")
        return Status(400, code="invalid_transcript", message="; ".join(problems)) if problems else None

    def unscripted(self, path: str, body: Wire) -> Step:
        if path != "/v1/embeddings":
            return self.player(body)
        data = [{"index": at, "embedding": embedding_of(each)} for at, each in enumerate(body["input"])]
        return Raw(json.dumps({"object": "list", "data": data[::-1]}).encode(), "application/json")

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        thoughts = [chunk([{"index": 0, "delta": self.thoughts, "finish_reason": None}], model)] if self.thinks else []
        return [*thoughts, *chunks_of(answer, model)]

    thoughts: ClassVar[Wire] = {"reasoning_content": "Let me think."}
    """The members of a message with thoughts, and of a delta."""

    def has_thoughts(self, message: Wire) -> bool:
        """Whether a message that came back has its thoughts."""
        return self.thoughts.items() <= message.items()

    def frame(self, chunk: Any) -> bytes:
        return b"data: %s\n\n" % (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode())

    def whole(self, answer: Answer, model: str) -> Wire:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        if answer.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer)}
        return {**chunk([choice], model), "object": "chat.completion", "usage": answer.usage}

    def error(self, error: Status) -> Wire:
        kind = "invalid_request_error" if 400 <= error.status < 500 else "server_error"
        details = {"message": error.message, "type": kind, "param": None, "code": error.code}
        return {"error": details}


def _tool_problems(body: Wire) -> Iterator[str]:
    names = [each["function"]["name"] for each in body.get("tools", [])]
    yield from (f"tools: {name!r} does not match {_NAME.pattern}" for name in names if not _NAME.fullmatch(name))
    if len(set(names)) != len(names):
        yield "tools: a name occurs twice"


def main() -> None:
    """Serve the responses of `two_steps` until interrupted."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server that plays turns of two steps.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before each reply")
    parser.add_argument("--words", type=int, default=20, help="length of each answer")
    options = parser.parse_args()
    server = OpenAIServer(player=two_steps(options.latency_ms / 1000, options.words), port=options.port)
    print(server.base_url, flush=True)  # noqa: T201 (the address is what the program prints)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()


if __name__ == "__main__":
    main()
