"""A test server for Gemini's `streamGenerateContent` that validates requests as the provider does.

Without a script, the server responds with a call of the request's first function. To a request with the function's
result, it responds with that result. Each call carries a thought signature, without which it may not come back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.models.server import Answer, Player, ProviderServer, Status, Step, Wire, pieces, play

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,63}")
_PATH = re.compile(r"/v1beta/models/([^/:]+):streamGenerateContent")
_STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
_STATUSES |= {429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}
_REASONS = {"tool_calls": "STOP", "stop": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


def signature_of(call_id: str) -> str:
    """The thought signature of a call, in base64 as the provider sends it."""
    return f"c2ln{call_id.encode().hex()}"[: 4 * (len(call_id.encode().hex()) // 4 + 1)]


def _problems(body: Wire) -> Iterator[str]:
    contents = body.get("contents")
    if not isinstance(contents, list) or not contents:
        yield "contents: is not specified"
        return
    if contents[0].get("role") != "user" or contents[-1].get("role") != "user":
        yield "contents: expected a user turn at the beginning and at the end"
    yield from _turn_problems(contents)
    for declaration in _declarations(body):
        if not _NAME.fullmatch(declaration["name"]):
            yield f"tools: invalid function name {declaration['name']!r}"
        yield from _schema_problems(_schema(declaration), declaration["name"])


def _turn_problems(contents: Sequence[Wire]) -> Iterator[str]:
    open_calls: list[str] = []
    for at, turn in enumerate(contents):
        parts = turn.get("parts") or []
        if not parts or any(part.get("text") == "" for part in parts):
            yield f"contents[{at}].parts: contents must have parts that are not empty"
        answered = [part["functionResponse"]["name"] for part in parts if "functionResponse" in part]
        if answered != open_calls:
            yield f"contents[{at}]: function responses {answered} for the calls {open_calls}"
        calls = [part for part in parts if "functionCall" in part]
        open_calls = [part["functionCall"]["name"] for part in calls]
        is_signed = all(part.get("thoughtSignature") for part in calls)
        if not is_signed and not any("text" in each["parts"][-1] for each in contents[at + 1 :: 2]):
            yield f"contents[{at}]: function call is missing a thought_signature in functionCall parts"


def _declarations(body: Wire) -> list[Wire]:
    return [each for tool in body.get("tools", []) for each in tool.get("functionDeclarations", [])]


def _schema_problems(schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if schema.get("type") == "array" and "items" not in schema:
        yield f"{where}: items: missing field"
    for name, each in (schema.get("properties") or {}).items():
        yield from _schema_problems(each, f"{where}.{name}")


def _schema(declaration: Wire) -> Wire:
    """The parameters of a declaration. The SDK passes on some names as pydantic-ai spells them."""
    names = ("parametersJsonSchema", "parameters_json_schema", "parameters")
    return next((declaration[name] for name in names if declaration.get(name)), {})


def _two_steps(body: Wire) -> Step:
    last = body["contents"][-1]["parts"][-1]
    if "functionResponse" in last:
        response = last["functionResponse"]["response"]
        return play(str(next(iter(response.values()))), None)
    declared = _declarations(body)
    mode = body.get("toolConfig", {}).get("functionCallingConfig", {}).get("mode")
    tool = declared[0] if declared and mode != "NONE" else None
    return play(last["text"], (tool["name"], _schema(tool)) if tool else None)


class GeminiServer(ProviderServer):
    """A `ProviderServer` for Gemini. `base_url` has no version, because the SDK adds it."""

    def __init__(self, *steps: Step, player: Player | None = None, port: int = 0) -> None:
        super().__init__(*steps, player=player or _two_steps, port=port)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        """Record a request. The model's name and the streaming are in its path."""
        found = _PATH.fullmatch(path)
        body |= {"model": found[1] if found else "", "stream": True}
        body["messages"] = body.get("contents", [])
        return super().take(path, body, headers)

    def judge(self, path: str, body: Wire) -> Status | None:
        if not body["model"]:
            return Status(404, message=f"no route {path}")
        problems = list(_problems(body))
        return Status(400, message="; ".join(problems)) if problems else None

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        parts: list[dict[str, Any]] = [{"text": "Let me think.", "thought": True}] if self.thinks else []
        parts += [{"text": piece} for piece in pieces(answer.text, answer.piece)]
        parts += [
            {
                "functionCall": {"name": call.name, "args": json.loads(call.arguments), "id": call.id},
                "thoughtSignature": signature_of(call.id),
            }
            for call in answer.calls
        ]
        chunks = [_chunk({"content": {"role": "model", "parts": [part]}, "index": 0}, model) for part in parts]
        reason = answer.finish_reason or "stop"
        last = _chunk({"content": {"role": "model", "parts": []}, "index": 0}, model)
        last["candidates"][0]["finishReason"] = _REASONS.get(reason, "OTHER")
        if answer.usage is not None:
            last["usageMetadata"] = {
                "promptTokenCount": answer.usage["prompt_tokens"],
                "candidatesTokenCount": answer.usage["completion_tokens"] - 2,
                "thoughtsTokenCount": 2,
                "cachedContentTokenCount": 3,
                "totalTokenCount": answer.usage["prompt_tokens"] + answer.usage["completion_tokens"],
            }
        return [*chunks, last]

    def frame(self, chunk: Any) -> bytes:
        return b"data: %s\r\n\r\n" % (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode())

    def whole(self, answer: Answer, model: str) -> Wire:
        raise NotImplementedError("every request to this server is for a stream")

    def error(self, error: Status) -> Wire:
        status = _STATUSES.get(error.status, "UNKNOWN")
        return {"error": {"code": error.status or 400, "message": error.message, "status": error.code or status}}


def _chunk(candidate: Wire, model: str) -> dict[str, Any]:
    return {"candidates": [dict(candidate)], "modelVersion": model, "responseId": "response_1"}
