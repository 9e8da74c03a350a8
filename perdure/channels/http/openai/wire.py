"""OpenAI's request formats, reduced to the members that an agent can use, and parts of OpenAI's responses.

A request with a member that an agent cannot satisfy, such as `tools`, is refused; the error names the member. Sampling
parameters are ignored, because the agent's settings apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StrictBool, StrictInt, model_validator
from pydantic_core import CoreSchema

from perdure.channels.http.openai.errors import BadParameter
from perdure.models.endings import CONTENT_FILTER, LENGTH
from perdure.turns.inbox.incoming import Name, Text

_ANSWERED = frozenset({"assistant", "tool", "function"})


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: Text = ""
    stream: StrictBool | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    tools: list[Any] | None = None
    metadata: dict[str, Any] | None = None


class StreamOptions(BaseModel):
    """Options of a stream. With `include_usage`, the last chunk has the turn's usage."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: StrictBool | None = None


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "assistant", "user": "ann", "messages": [{"role": "user", "content": "What is 12 * 7?"}]}
            ]
        }
    )

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class ConversationRef(BaseModel):
    """A reference to a conversation by its key: `{"id": KEY}`, or the key alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: Name

    @model_validator(mode="before")
    @classmethod
    def _of_key(cls, given: object) -> object:
        return {"id": given} if isinstance(given, str) else given

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The object or the text."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [schema["properties"]["id"], schema]}


class ResponseRequest(_Request):
    """The body of `POST /v1/responses`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "assistant", "user": "ann", "input": "What is 12 * 7?"}]}
    )

    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1)]
    background: StrictBool | None = None
    previous_response_id: Text | None = None
    conversation: ConversationRef | None = None
    text: dict[str, Any] | None = None

    def items(self) -> list[dict[str, Any]]:
        """The input as messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return self.input


def require_usable(request: ChatRequest | ResponseRequest) -> None:
    """Check that an agent can answer the request.

    Raises:
        BadParameter: the request needs a feature that agents do not have.
    """
    if request.tools:
        raise BadParameter("tools: an agent has its own tools; a request cannot add any.", "tools")
    if isinstance(request, ChatRequest):
        if request.functions:
            raise BadParameter("functions: an agent has its own tools; a request cannot add any.", "functions")
        if request.n not in {None, 1}:
            raise BadParameter("n: a turn has one answer; accepted: 1.", "n")
        _require_text_format(request.response_format, "response_format")
    else:
        _require_text_format((request.text or {}).get("format"), "text.format")


def _require_text_format(wanted: object, param: str) -> None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if wanted is not None and kind != "text":
        raise BadParameter(f"{param}: an agent answers with text; accepted: {{'type': 'text'}}.", param)


def newest_user_message(messages: Sequence[Mapping[str, Any]], param: str) -> dict[str, Any]:
    """The `text` or the `parts` of the newest user message. `param` is the name of `messages` in the request.

    Raises:
        BadParameter: there is no user message, a message of the assistant or a tool follows it, or the user message is
            empty or has a part that is neither text, an image nor a file.
    """
    for position in range(len(messages) - 1, -1, -1):
        role = messages[position].get("role")
        if role in _ANSWERED:
            where = f"{param}[{position}].role"
            raise BadParameter(f"{where}: the last message must be the user's, not of the role {role}.", where)
        if role == "user":
            where = f"{param}[{position}].content"
            found = _content(messages[position].get("content"), where)
            if not any(str(part["text"]).strip() if part["type"] == "text" else True for part in found):
                raise BadParameter("The newest user message is empty.", where)
            texts = [str(part["text"]) for part in found if part["type"] == "text"]
            return {"text": "\n".join(texts)} if len(texts) == len(found) else {"parts": found}
    raise BadParameter(f"{param}: has no message with the role user.", param)


def _content(content: object, param: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadParameter(f"{param}: expected text or a list of parts.", param)
    return [_part(part, f"{param}[{position}]") for position, part in enumerate(content)]


def _part(part: object, where: str) -> dict[str, Any]:
    """A part of perdure for one of Chat Completions or Responses."""
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "input_image", "image_url": str(url)}:
            return {"type": "image", **_source(url)}
        case {"type": "input_image", "file_id": str(file_id)}:
            return {"type": "image", "file_id": _file_id(file_id, where)}
        case {"type": "file", "file": dict(file)} | {"type": "input_file", **file}:
            name = {"name": file["filename"]} if isinstance(file.get("filename"), str) and file["filename"] else {}
            match file:
                case {"file_id": str(file_id)}:
                    return {"type": "file", "file_id": _file_id(file_id, where), **name}
                case {"file_data": str(data)}:
                    return {"type": "file", "data": data, **name}
                case {"file_url": str(url)}:
                    return {"type": "file", **_source(url), **name}
                case _:
                    raise BadParameter(f"{where}: expected file_id, file_data or file_url.", where)
        case _:
            kind = str(part.get("type"))[:40] if isinstance(part, Mapping) else "none"
            raise BadParameter(f"{where}: only texts, images and files are accepted, not {kind!r}.", where)


def _source(url: str) -> dict[str, str]:
    return {"data": url} if url.startswith("data:") else {"url": url}


def _file_id(file_id: str, where: str) -> str:
    try:
        return str(UUID(file_id))
    except ValueError:
        raise BadParameter(f"{where}: there is no file {file_id[:100]!r}; POST /v1/files returns ids.", where) from None


def epoch_s(instant: str) -> int:
    """A time in ISO 8601 format as epoch seconds, rounded down."""
    return int(datetime.fromisoformat(instant).timestamp())


def finish_reason(turn: Mapping[str, Any]) -> str:
    """Why a settled turn's answer ends: `length` if a limit of tokens cut it off, `content_filter`, else `stop`.

    Clients check this member against the API's list, so it has no other value.
    """
    reason = (turn.get("reply") or {}).get("stop_reason")
    return reason if reason in {LENGTH, CONTENT_FILTER} else "stop"


def chat_usage(turn: Mapping[str, Any]) -> dict[str, Any] | None:
    """A turn's usage in the format of Chat Completions; `None` if the turn's models did not report it."""
    used = turn["usage"]
    if used is None:
        return None
    read, written = used.get("input_tokens", 0), used.get("output_tokens", 0)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": used.get("cached_tokens") or 0},
        "completion_tokens_details": {"reasoning_tokens": used.get("reasoning_tokens") or 0},
    }


def response_usage(turn: Mapping[str, Any]) -> dict[str, Any] | None:
    """A turn's usage in the format of the Responses API; `None` if the turn's models did not report it."""
    used = turn["usage"]
    if used is None:
        return None
    read, written = used.get("input_tokens", 0), used.get("output_tokens", 0)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": used.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": used.get("reasoning_tokens") or 0},
        "total_tokens": read + written,
    }


def response_id(turn_id: UUID | str) -> str:
    return f"resp_{UUID(str(turn_id)).hex}"


def turn_of(identifier: str) -> UUID | None:
    """The id of the turn that a response's id names; `None` if the response's id is malformed."""
    prefix, _, rest = identifier.partition("_")
    try:
        return UUID(rest) if prefix == "resp" else None
    except ValueError:
        return None
