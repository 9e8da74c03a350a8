"""A test server for Anthropic's Messages API that validates requests as the provider does.

Without a script, the server responds with a call of the request's first tool. To a request with the tool's result, it
responds with that result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.models.server import Answer, Player, ProviderServer, Status, Step, Wire, pieces, play

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_KEPT = frozenset({"thinking", "redacted_thinking", "server_tool_use", "web_search_tool_result"})
"""The blocks that the provider wants back as it sent them."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


THOUGHTS = {"type": "thinking", "thinking": "Let me think.", "signature": "c2ln"}


def validate_body(body: Wire) -> list[str]:
    """The reasons for which the provider would refuse a request; empty if the request is valid."""
    return [*_frame_problems(body), *_tool_problems(body), *_turn_problems(body)]


def _frame_problems(body: Wire) -> Iterator[str]:
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        yield "max_tokens: field required"
    if not str(body.get("system", "x")).strip():
        yield "system: text content blocks must be non-empty"


def _tool_problems(body: Wire) -> Iterator[str]:
    names = [each.get("name") for each in body.get("tools", [])]
    yield from (f"tools: {name!r} does not match {_NAME.pattern}" for name in names if not _NAME.fullmatch(str(name)))
    if len(set(names)) != len(names):
        yield "tools: tool names must be unique"
    if any(each.get("input_schema", {}).get("type") != "object" for each in body.get("tools", [])):
        yield "tools.input_schema.type: expected object"
    types = {each.get("type") for _, blocks in _turns(body.get("messages") or []) for each in blocks}
    if types & {"tool_use", "tool_result"} and not names:
        yield "requests which include `tool_use` or `tool_result` blocks must define tools"


def _turn_problems(body: Wire) -> Iterator[str]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        yield "messages: at least one message is required"
        return
    turns = list(_turns(messages))
    if turns[0][0] != "user":
        yield "messages: first message must use the user role"
    if turns[-1][0] != "user":
        yield "messages: this model does not support assistant message prefill"
    for at, (role, blocks) in enumerate(turns):
        call_ids = _call_ids(turns[at - 1][1]) if at else []
        yield from _block_problems(f"messages[{at}]", role, blocks)
        yield from _result_problems(f"messages[{at}]", blocks, call_ids)
    if _call_ids(turns[-1][1]):
        yield "`tool_use` ids were found without `tool_result` blocks at the end"
    call_ids = [each for _, blocks in turns for each in _call_ids(blocks)]
    if len(set(call_ids)) != len(call_ids):
        yield "`tool_use` ids must be unique"


def _call_ids(blocks: Sequence[Wire]) -> list[str]:
    return [str(each.get("id")) for each in blocks if each.get("type") == "tool_use"]


def _turns(messages: Sequence[Wire]) -> Iterator[tuple[str, list[Wire]]]:
    """The role and the content blocks of each turn. Consecutive messages of one role form one turn."""
    role, blocks = "", list[Wire]()
    for message in messages:
        if message.get("role") != role and role:
            yield role, blocks
            blocks = []
        role = str(message.get("role"))
        content = message.get("content")
        blocks += [{"type": "text", "text": content}] if isinstance(content, str) else content or [{}]
    yield role, blocks


def _block_problems(where: str, role: str, blocks: Sequence[Wire]) -> Iterator[str]:  # noqa: C901 (a flat list of kinds)
    if role not in ("user", "assistant"):
        yield f"{where}.role: {role!r} is not a role"
    for block in blocks:
        match block.get("type"):
            case "text":
                if not str(block.get("text")).strip():
                    yield f"{where}: text content blocks must contain non-whitespace text"
            case "tool_use" if role == "assistant":
                yield from _call_problems(where, block)
            case "tool_result" if role == "user":
                if not str(block.get("content", "x")).strip():
                    yield f"{where}: the content of a tool_result must not be blank"
            case "image" | "document" if role == "user":
                yield from _source_problems(where, block)
            case kind if role == "assistant" and kind in _KEPT:
                if "thinking" in kind and not (block.get("signature") or block.get("data")):
                    yield f"{where}: Invalid `signature` in `thinking` block"
            case other:
                yield f"{where}: a block of type {other!r} does not belong to the role {role}"


def _source_problems(where: str, block: Wire) -> Iterator[str]:
    source, is_image = block.get("source", {}), block["type"] == "image"
    accepted = {"image/png", "image/jpeg", "image/gif", "image/webp"} if is_image else {"application/pdf"}
    if source.get("type") != "base64" or source.get("media_type") not in accepted or not source.get("data"):
        yield f"{where}.{block['type']}.source: expected base64 data of {sorted(accepted)}"


def _call_problems(where: str, block: Wire) -> Iterator[str]:
    if not _ID.fullmatch(str(block.get("id"))):
        yield f"{where}.tool_use.id: {block.get('id')!r} does not match {_ID.pattern}"
    if not _NAME.fullmatch(str(block.get("name"))):
        yield f"{where}.tool_use.name: {block.get('name')!r} does not match {_NAME.pattern}"
    if not isinstance(block.get("input"), dict):
        yield f"{where}.tool_use.input: expected an object"


def _result_problems(where: str, blocks: Sequence[Wire], call_ids: Sequence[str]) -> Iterator[str]:
    """An error message if `blocks` does not begin with exactly one result for each id in `call_ids`."""
    kinds = [each.get("type") for each in blocks]
    answered = [each.get("tool_use_id") for each in blocks if each.get("type") == "tool_result"]
    if "tool_result" in kinds[len(answered) :]:
        yield f"{where}: tool_result blocks must stand before any other"
    if sorted(map(str, answered)) != sorted(call_ids):
        yield f"{where}: `tool_use` ids {list(call_ids)} were found, and `tool_result` blocks for {answered}"


def two_steps(body: Wire) -> Step:
    """The response to `body`: a call of the first tool or, after the tool's result, a reply with that result.

    If the request has no tools or forbids calls, the response is a reply with the last message's text.
    """
    last = body["messages"][-1]["content"]
    results = [each["content"] for each in last if each["type"] == "tool_result"]
    allowed = body.get("tool_choice", {}).get("type") != "none"
    tools = body.get("tools", []) if allowed and not results else []
    tool = (tools[0]["name"], tools[0]["input_schema"]) if tools else None
    return play(results[-1] if results else last[-1]["text"], tool)


def events_of(answer: Answer, model: str = "test-model") -> list[dict[str, Any]]:
    """The events in which the provider would stream `answer`."""
    usage = _usage(answer)
    before, after = ({"usage": {**usage, "output_tokens": 1}}, {"usage": usage}) if usage else ({}, {})
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**_message(answer, model), "content": [], **before}},
        {"type": "ping"},
    ]
    if answer.text:
        events.append(_opening(0, {"type": "text", "text": ""}))
        events += [_delta(0, {"type": "text_delta", "text": each}) for each in pieces(answer.text, answer.piece)]
        events.append({"type": "content_block_stop", "index": 0})
    for index, call in enumerate(answer.calls, start=1):
        events.append(_opening(index, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}))
        for piece in pieces(call.arguments, answer.piece):
            events.append(_delta(index, {"type": "input_json_delta", "partial_json": piece}))
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": _stop_reason(answer)}, **after})
    return events


def _opening(index: int, block: Wire) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: Wire) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _message(answer: Answer, model: str) -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "stop_reason": None}


def _usage(answer: Answer) -> Mapping[str, int] | None:
    """Token counts under this provider's field names, with cached tokens counted separately."""
    if answer.usage is None:
        return None
    read = answer.usage["prompt_tokens"]
    return {
        "input_tokens": read - 5,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 3,
        "output_tokens": answer.usage["completion_tokens"],
    }


def _stop_reason(answer: Answer) -> str:
    reason = answer.finish_reason or ("tool_calls" if answer.calls else "stop")
    return _STOP_REASONS.get(reason, reason)


class AnthropicServer(ProviderServer):
    """A `ProviderServer` for Anthropic's Messages API."""

    end = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
    request_id_header = "request-id"

    def __init__(self, *steps: Step, player: Player = two_steps, port: int = 0) -> None:
        super().__init__(*steps, player=player, port=port)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def judge(self, path: str, body: Wire) -> Status | None:
        if path != "/v1/messages":
            return Status(404, message=f"no route {path}")
        problems = validate_body(body)
        called = [each["content"] for each in body["messages"] if _call_ids(each["content"])]
        if self.thinks and any(blocks[0] != THOUGHTS for blocks in called):
            problems.append("Invalid `signature` in `thinking` block")
        return Status(400, message="; ".join(problems)) if problems else None

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        begin, *events = events_of(answer, model)
        return [begin, *([_opening(-1, THOUGHTS)] if self.thinks else []), *events]

    def frame(self, chunk: Any) -> bytes:
        if isinstance(chunk, bytes):
            return b"event: content_block_delta\ndata: %s\n\n" % chunk
        kind = chunk.get("type", "message_delta") if isinstance(chunk, dict) else "message_delta"
        return f"event: {kind}\ndata: {json.dumps(chunk)}\n\n".encode()

    def whole(self, answer: Answer, model: str) -> Wire:
        calls = [
            {"type": "tool_use", "id": each.id, "name": each.name, "input": json.loads(each.arguments)}
            for each in answer.calls
        ]
        text = [{"type": "text", "text": answer.text}] if answer.text else []
        message = {**_message(answer, model), "stop_reason": _stop_reason(answer), "content": [*text, *calls]}
        return {**message, "usage": _usage(answer)}

    def error(self, error: Status) -> Wire:
        kind = error.code or _TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
