"""pydantic-ai's messages as rows of the transcript, and back.

A reply is the row of the assistant, and the results of its calls are rows of tools, as for perdure's own agents. So
every channel, memory and erasure treat the conversation like any other. What the rows cannot express (signatures,
thoughts, files, the shape of a result) is in the column `opaque`, as pydantic-ai writes it to JSON:

    the assistant's row       {"response": MESSAGE}; for files: `files`; of a reply that was rejected, also `requests`
                              and `usage`
    the last row of a round   {"requests": [MESSAGE, …]}: what the model received after the reply; for files: `files`;
                              {"usage": {…}}: the turn's usage until then, with what tools added to it
    a rendered output         {"output": true}: no message of the model, so it is not part of its history

These names are stored data: a test pins them. Instructions are not stored, because each run makes its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import groupby
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter, ValidationError
from pydantic_ai import __version__
from pydantic_ai.messages import (
    BinaryContent,
    FilePart,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    RetryPromptPart,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.usage import RequestUsage, RunUsage
from pydantic_core import to_jsonable_python

from perdure.adapters.pydantic_ai.files import filled, is_reference, lines_of, with_texts
from perdure.models import endings
from perdure.models.adapted.messages import usage_of
from perdure.models.protocol import Attachment, Message, ModelReply, Opaque, Role, ToolCall
from perdure.text.untrusted import storable, storable_json
from perdure.turns.transcript import Entry, reply_entry

ENDPOINT = "pydantic-ai"
"""The endpoint in `opaque`, so that no wire sends these parts."""

RESPONSE, REQUESTS, USAGE, OUTPUT = "response", "requests", "usage", "output"

_UNNAMED = "tool"

_USAGE = TypeAdapter(RunUsage)

Data = Callable[[Mapping[str, Any]], bytes | None]
"""The bytes of a file that a stored message refers to, or `None` to describe the file."""


class Note(str):
    """The text of a note, by which perdure's own model tells it from what a user wrote."""

    __slots__ = ()


class Unreadable(Exception):
    """The installed pydantic-ai cannot read a stored message."""


def reply_of(response: ModelResponse, record: Any, turn_id: UUID, taken: Iterable[str]) -> tuple[ModelReply, Entry]:
    """The reply as the engine judges it, and its row. `record` is the response as `units.CODEC` writes it.

    The text names the files to which `record` refers.
    """
    calls = tuple(ToolCall(each.tool_call_id, each.tool_name, each.args_as_json_str()) for each in response.tool_calls)
    made = ModelReply(
        naming(response.text or "", lines_of(record)),
        calls,
        usage_of(record["usage"]),
        response.model_name or "",
        response.finish_reason or endings.STOP,
        opaque=_opaque({RESPONSE: record}),
    )
    return made, reply_entry(turn_id, made, frozenset(taken))


def is_text_of(reply: Entry, text: str) -> bool:
    """Whether `text` is what the model wrote in the reply, to which the lines about its files are added."""
    return reply.content == naming(text, made_in(reply))


def is_file_of(reply: Entry, data: Any) -> bool:
    """Whether an output is a file of the reply, or the line in place of one that was refused."""
    return (data["description"] if is_reference(data) else data) in made_in(reply)


def made_in(reply: Entry) -> list[str]:
    """The lines about the files of a reply."""
    return lines_of(reply.opaque.parts[RESPONSE]) if _has_response(reply) else []  # type: ignore[union-attr]


def made_before(entries: Iterable[Entry]) -> list[str]:
    """The lines about the files of a turn's earlier replies, those that had calls or no text, without repetitions."""
    replies = [entry for entry in entries if _has_response(entry)]
    return list(
        dict.fromkeys(line for each in replies if each.tool_calls or is_text_of(each, "") for line in made_in(each))
    )


def naming(text: str, lines: Iterable[str]) -> str:
    """The text with the lines about files."""
    return "\n".join([*([text] if text else []), *lines])


def _has_response(entry: Entry) -> bool:
    return _is_ours(entry) and entry.opaque is not None and RESPONSE in entry.opaque.parts


def with_requests(
    entry: Entry, requests: Sequence[ModelMessage], usage: RunUsage, referring: Callable[[Any], Any]
) -> Entry:
    """The row, with the messages that the model received after it or after its round, and the turn's usage until then.

    `referring` puts references in place of files that are stored.
    """
    parts = entry.opaque.parts if entry.opaque is not None else {}
    records = ModelMessagesTypeAdapter.dump_python([_without_instructions(each) for each in requests], mode="json")
    used = _USAGE.dump_python(usage, mode="json", exclude_defaults=True)
    return replace(entry, opaque=_opaque({**parts, REQUESTS: referring(records), USAGE: used}))


def rendered(turn_id: UUID, text: str) -> Entry:
    """The row of an output that is not the text of a reply."""
    return Entry(turn_id, Role.ASSISTANT, storable(text), stop_reason=endings.STOP, opaque=_opaque({OUTPUT: True}))


def as_json(output: Any) -> Any:
    """An output as JSON values that PostgreSQL stores."""
    return storable_json(to_jsonable_python(output, bytes_mode="base64", serialize_unknown=True))


def as_text(data: Any) -> str:
    """The text of an output that is no text: its JSON, or the line about a file."""
    if is_reference(data):
        return str(data["description"])
    return "" if data is None else json.dumps(data, ensure_ascii=False)


def last_requests(messages: Sequence[ModelMessage]) -> list[ModelRequest]:
    """The requests after the last response."""
    found: list[ModelRequest] = []
    for each in reversed(messages):
        if not isinstance(each, ModelRequest):
            break
        found.insert(0, each)
    return found


def system_text(part: ModelRequestPart) -> str:
    """The text of a part of the system prompt, or of a note; empty for other parts, which entries have."""
    if isinstance(part, SystemPromptPart):
        return part.content
    return str(part.content) if isinstance(part, UserPromptPart) and isinstance(part.content, Note) else ""


def usage_of_run(entries: Sequence[Entry]) -> RunUsage:
    """The usage with which a run continues a turn: that of its last closed round, and of the replies after it.

    A round that other agents closed has no record: what they and the guards used counts by the rows.
    """
    found, after = RunUsage(), list(entries)
    for number, entry in reversed(list(enumerate(entries))):
        if (recorded := _recorded_usage(entry)) is not None:
            found, after = recorded, after[number + 1 :]
            break
    for entry in after:
        replied = _stored(entry, RESPONSE, lambda _: None, is_strict=False)
        for response in replied:
            if isinstance(response, ModelResponse):
                found.incr(_billed(response))
        if not replied and entry.usage is not None:
            found.incr(RequestUsage(input_tokens=entry.usage.input_tokens, output_tokens=entry.usage.output_tokens))
        found.requests += entry.role is Role.ASSISTANT
    return found


def _recorded_usage(entry: Entry) -> RunUsage | None:
    if not _is_ours(entry) or entry.opaque is None or USAGE not in entry.opaque.parts:
        return None
    try:
        return _USAGE.validate_python(entry.opaque.parts[USAGE])
    except ValidationError:
        return None


def _billed(response: ModelResponse) -> RequestUsage:
    """The usage of a reply, with its cost, which pydantic-ai computes after the reply is committed."""
    usage = copy(response.usage)
    if usage.cost is None:
        with suppress(AssertionError, LookupError, ValueError):  # pydantic-ai knows no price
            usage.cost = response.cost().total_price
    return usage


def result_texts(requests: Sequence[ModelRequest]) -> dict[str, tuple[str, str]]:
    """The status and the text of each call's result, by the id that pydantic-ai knows the call by."""
    found = {}
    for part in (part for request in requests for part in request.parts):
        if isinstance(part, ToolReturnPart):
            status = {"success": "done", "denied": "denied"}.get(part.outcome, "failed")
            found[part.tool_call_id] = status, part.model_response_str()
        elif isinstance(part, RetryPromptPart) and part.tool_name is not None:
            found[part.tool_call_id] = "failed", part.model_response()
    return found


def content_of(message: Message, media_types: Collection[str]) -> str | list[UserContent]:
    """What a user said: text, or text and the files of these types."""
    pieces = message.pieces(media_types)
    if not any(isinstance(each, Attachment) for each in pieces):
        return message.content
    return [each if isinstance(each, str) else BinaryContent(each.data, media_type=each.media_type) for each in pieces]


def files_in(prompt: str | Sequence[UserContent] | None) -> int:
    """The number of files in a prompt."""
    return sum(isinstance(each, BinaryContent) for each in prompt) if isinstance(prompt, list) else 0


def history(
    turns: Sequence[Sequence[Entry]],
    *,
    strictly: UUID | None,
    told: Callable[[Entry], str | list[UserContent]] = lambda entry: entry.content,
    data: Data = lambda _: None,
) -> list[ModelMessage]:
    """The messages of turns, oldest first. `told` is what a user's message tells the model.

    `data` returns the bytes of a file of a tool's result, or `None` to describe the file.

    A row whose JSON the installed pydantic-ai cannot read is rebuilt from its text and calls, unless it is of the turn
    `strictly`.

    Raises:
        Unreadable: a row of the turn `strictly` cannot be read.
    """
    return [message for turn in turns for message in _of_turn(turn, told, data, is_strict=turn[0].turn_id == strictly)]


def without_signatures(found: Sequence[ModelMessage]) -> list[ModelMessage]:
    """The messages without thoughts, and without what else only the sender of a reply can read, such as signatures."""
    bare = [_bare(each) if isinstance(each, ModelResponse) else each for each in found]
    return [each for each in bare if each.parts]


def _bare(response: ModelResponse) -> ModelResponse:
    kept = [part for part in response.parts if isinstance(part, TextPart | ToolCallPart | FilePart)]
    parts = [replace(part, id=None, provider_name=None, provider_details=None) for part in kept]
    return replace(response, parts=parts, provider_details=None, provider_response_id=None)


def _of_turn(
    entries: Sequence[Entry], told: Callable[[Entry], str | list[UserContent]], data: Data, *, is_strict: bool
) -> list[ModelMessage]:
    found: list[ModelMessage] = []
    parts: dict[str, ToolCallPart] = {}
    for is_reply, group in groupby(entries, key=lambda entry: entry.role is Role.ASSISTANT):
        rows = list(group)
        if not is_reply:
            joined = [row for row in rows if row.role is Role.USER] if rows[0].role is Role.TOOL else []
            round_ = rows[: len(rows) - len(joined)]  # messages that joined the turn follow the results
            found += _stored(round_[-1], REQUESTS, data, is_strict=is_strict) or [_request(round_, parts, told)]
            found += [_request(joined, parts, told)] if joined else []
            continue
        for entry in rows:
            if _is_ours(entry) and entry.opaque is not None and entry.opaque.parts.get(OUTPUT):
                continue
            replied = _stored(entry, RESPONSE, data, is_strict=is_strict) or [_response(entry)]
            called = [part for each in replied if isinstance(each, ModelResponse) for part in each.tool_calls]
            # A call's id in its row may differ from the id that the model gave it, which may recur within a turn.
            parts.update(zip((call.id for call in entry.tool_calls), called, strict=False))
            found += [*replied, *_stored(entry, REQUESTS, data, is_strict=is_strict)]
    return found


def _response(entry: Entry) -> ModelResponse:
    text = [TextPart(entry.content)] if entry.content or not entry.tool_calls else []
    calls = [ToolCallPart(call.name, call.arguments, tool_call_id=call.id) for call in entry.tool_calls]
    return ModelResponse(parts=[*text, *calls])


def _request(
    rows: Sequence[Entry], called: Mapping[str, ToolCallPart], told: Callable[[Entry], str | list[UserContent]]
) -> ModelRequest:
    parts: list[ModelRequestPart] = []
    for row in rows:
        if row.role is Role.TOOL and row.tool_call_id is not None:
            call = called.get(row.tool_call_id) or ToolCallPart(_UNNAMED, tool_call_id=row.tool_call_id)
            parts.append(ToolReturnPart(call.tool_name, row.content, tool_call_id=call.tool_call_id))
        else:
            parts.append(UserPromptPart(told(row)))
    return ModelRequest(parts=parts)


def _stored(entry: Entry, member: str, data: Data, *, is_strict: bool) -> list[ModelMessage]:
    """The messages of a member of the row's opaque parts; none if there are none, or they may and cannot be read.

    Raises:
        Unreadable: they cannot be read.
    """
    if not _is_ours(entry) or entry.opaque is None or (record := entry.opaque.parts.get(member)) is None:
        return []
    found = filled(record if isinstance(record, list) else [record], data)
    try:
        return ModelMessagesTypeAdapter.validate_python([with_texts(each) for each in found])
    except ValidationError as error:
        if is_strict:
            raise Unreadable from error
        return []


def _is_ours(entry: Entry) -> bool:
    return entry.opaque is not None and entry.opaque.endpoint == ENDPOINT


def _without_instructions(message: ModelMessage) -> ModelMessage:
    return replace(message, instructions=None) if isinstance(message, ModelRequest) else message


def _opaque(parts: dict[str, Any]) -> Opaque:
    return Opaque(ENDPOINT, __version__, storable_json(parts))
