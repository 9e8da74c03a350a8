"""OpenAI's request formats: their members, and which of them an agent can satisfy; parts of OpenAI's responses.

A request with a member that an agent cannot satisfy is refused; the error names the member (`require_usable`). What a
request adds to the agent, such as tools and settings, is made in `added`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StrictBool, StrictInt, model_validator
from pydantic_core import CoreSchema

from perdure.channels.http.openai.errors import BadParameter
from perdure.errors import ContentFiltered, IncompleteReply
from perdure.models.endings import CONTENT_FILTER, LENGTH
from perdure.turns.calls.client import Exchange
from perdure.turns.inbox.incoming import Name, Text

_ANSWERED = ("assistant", "tool", "function")
_ID_DIGITS = 32
_MOST_DIGITS = 10
_ENDS = {ContentFiltered.code: CONTENT_FILTER, IncompleteReply.code: LENGTH}
"""The errors of turns that are ends of an answer in OpenAI's API."""
_CLOSED: dict[str, Any] = {"additionalProperties": False}


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    model: Text = ""
    stream: StrictBool | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    temperature: Any = None
    top_p: Any = None
    service_tier: Any = None
    top_logprobs: Any = None
    store: StrictBool | None = None
    metadata: dict[str, Any] | None = None


class StreamOptions(BaseModel):
    """Options of a stream. With `include_usage`, the last chunk has the turn's usage."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: StrictBool | None = None


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            **_CLOSED,
            "examples": [
                {"model": "assistant", "user": "ann", "messages": [{"role": "user", "content": "What is 12 * 7?"}]}
            ],
        }
    )

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    stop: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    reasoning_effort: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    logprobs: Any = None
    verbosity: Any = None

    def items(self) -> list[dict[str, Any]]:
        """The messages."""
        return self.messages


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
        json_schema_extra={**_CLOSED, "examples": [{"model": "assistant", "user": "ann", "input": "What is 12 * 7?"}]}
    )

    input: Text | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: Text | None = None
    background: StrictBool | None = None
    previous_response_id: Text | None = None
    conversation: ConversationRef | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Any = None
    max_tool_calls: Any = None
    include: list[Any] | None = None
    client_metadata: Any = None
    prompt: Any = None
    truncation: Any = None
    stream_options: StreamOptions | None = None

    def items(self) -> list[dict[str, Any]]:
        """The input as messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return self.input


_REFUSED: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "n": ("a turn has one answer", (1,)),
    "functions": ("send tools in their place", ()),
    "function_call": ("send tool_choice in its place", ()),
    "modalities": ("an agent answers with text", (["text"],)),
    "audio": ("an agent answers with text", ()),
    "prediction": ("no model is given a prediction", ()),
    "web_search_options": ("an agent has its own tools for this", ()),
    "logprobs": ("an answer has no probabilities", (False,)),
    "top_logprobs": ("an answer has no probabilities", (0,)),
    "verbosity": ("a model is given no verbosity", ("medium",)),
    "max_tool_calls": ("the agent's own limits apply", ()),
    "prompt": ("an agent has its own instructions", ()),
    "truncation": ("a prompt has what fits of the conversation", ("auto", "disabled")),
}
"""The members that no agent can satisfy, with the values that ask for nothing."""

_INCLUDED = ("reasoning.encrypted_content",)
"""What `include` may name: a response has no such part."""


def require_usable(request: ChatRequest | ResponseRequest, *, ignores_unknown: bool = False) -> None:
    """Check that an agent can answer the request; `ignores_unknown`: members that OpenAI does not have are ignored.

    Raises:
        BadParameter: the request needs a feature that agents do not have.
    """
    for name, (why, accepted) in _REFUSED.items():
        given = getattr(request, name, None)
        if given is not None and not any(given == each and type(given) is type(each) for each in accepted):
            allowed = f"; accepted: {', '.join(map(repr, accepted))}" if accepted else ""
            raise BadParameter(f"{name}: is not supported, because {why}{allowed}.", name)
    unknown = next((name for name, value in (request.model_extra or {}).items() if value is not None), None)
    if unknown is not None and not ignores_unknown:
        raise BadParameter(f"{unknown[:100]}: is not supported.", unknown[:100])
    if isinstance(request, ResponseRequest):
        verbosity = (request.text or {}).get("verbosity")
        if verbosity not in (None, "medium"):
            raise BadParameter("text.verbosity: is not supported; accepted: 'medium'.", "text.verbosity")
        for position, each in enumerate(request.include or ()):
            if each not in _INCLUDED:
                where = f"include[{position}]"
                raise BadParameter(f"{where}: is not supported; accepted: {', '.join(_INCLUDED)}.", where)


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


@dataclass(frozen=True, slots=True)
class Results:
    """What a request has of the calls that its client runs, by the ids of perdure's calls.

    `contents` has the parts of each result: texts, images and files. `where` has the place of each result in the
    request. `asked` are the calls in its history. `newest` are those whose results no message of the user follows: if
    there are any, the request brings results, and no message.
    """

    contents: Mapping[UUID, Sequence[Mapping[str, Any]]]
    where: Mapping[UUID, str]
    asked: frozenset[UUID]
    newest: tuple[UUID, ...]


def results_in(messages: Sequence[Mapping[str, Any]], param: str) -> Results:
    """The results of calls in `messages`, and the calls that the history has.

    Raises:
        BadParameter: a result that is newer than the user's newest message is neither text nor a list of parts, or no
            call of perdure has its id.
    """
    contents: dict[UUID, list[dict[str, Any]]] = {}
    places: dict[UUID, str] = {}
    newest_user = max((at for at, each in enumerate(messages) if each.get("role") == "user"), default=-1)
    newest: list[UUID] = []
    for position, each in enumerate(messages):
        if each.get("role") == "tool":
            member, given, result = "tool_call_id", each.get("tool_call_id"), each.get("content")
        elif each.get("type") == "function_call_output":
            member, given, result = "call_id", each.get("call_id"), each.get("output")
        else:
            continue
        where, effect_id = f"{param}[{position}]", effect_of(given)
        if effect_id is None and position > newest_user:
            raise BadParameter(f"{where}.{member}: there is no such call.", f"{where}.{member}")
        if effect_id is not None:
            newest += [effect_id] if position > newest_user else []
            if position > newest_user and not isinstance(result, str | list | None):
                named = f"{where}.{'content' if member == 'tool_call_id' else 'output'}"
                raise BadParameter(f"{named}: expected text or a list of parts.", named)
            contents[effect_id] = _result(result)
            places[effect_id] = f"{where}.{member}"
    return Results(contents, places, frozenset(_asked(messages)), tuple(newest))


def _result(given: object) -> list[dict[str, Any]]:
    """The parts of a result. A line stands for a part that is neither text, an image nor a file."""
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    return [_part_or_line(part) for part in given] if isinstance(given, list) else []


def _part_or_line(part: object) -> dict[str, Any]:
    try:
        return _part(part, "")
    except BadParameter:
        kind = part.get("type") if isinstance(part, Mapping) else None
        return {"type": "text", "text": f"[{str(kind)[:40] if kind else 'a part'}: left out]"}


def _asked(messages: Sequence[Mapping[str, Any]]) -> Iterator[UUID]:
    """The calls of perdure that the client has in its history."""
    for each in messages:
        calls = each.get("tool_calls") if each.get("role") == "assistant" else None
        ids = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        if each.get("type") == "function_call":
            ids.append(each.get("call_id"))
        yield from (found for given in ids if (found := effect_of(given)) is not None)


def call_id(effect_id: UUID) -> str:
    """The id by which a client knows a call, of at most 40 characters."""
    return f"call_{effect_id.hex}"


def effect_of(given: object) -> UUID | None:
    """The effect of the call that a client knows by this id; `None` if it is none of perdure's."""
    prefix, _, digits = given.partition("_") if isinstance(given, str) else ("", "", "")
    try:
        return UUID(digits) if prefix == "call" and len(digits) == _ID_DIGITS else None
    except ValueError:
        return None


def texts_of(content: object, param: str) -> str:
    """The text of a message, or of its parts.

    Raises:
        BadParameter: it has another part.
    """
    if content is None:
        return ""
    found = _content(content, param)
    other = next((number for number, part in enumerate(found) if part["type"] != "text"), None)
    if other is not None:
        raise BadParameter(f"{param}[{other}]: only text is accepted here.", f"{param}[{other}]")
    return "\n".join(str(part["text"]) for part in found)


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
    if is_cut_off(turn):
        return _ENDS[turn["error"]["code"]]
    reason = (turn.get("reply") or {}).get("stop_reason")
    return reason if reason in {LENGTH, CONTENT_FILTER} else "stop"


def has_failed(turn: Mapping[str, Any]) -> bool:
    """Whether a settled turn has an error that is no end of an answer in OpenAI's API."""
    return turn["error"] is not None and not is_cut_off(turn)


def is_cut_off(turn: Mapping[str, Any]) -> bool:
    """Whether a settled turn has an error that is an end of an answer in OpenAI's API."""
    return (turn.get("error") or {}).get("code") in _ENDS


def chat_usage(used: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Tokens in the format of Chat Completions; `None` if the answer is not complete."""
    if used is None:
        return None
    read, written = used.get("input_tokens", 0), used.get("output_tokens", 0)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": used.get("cached_tokens")},
        "completion_tokens_details": {"reasoning_tokens": used.get("reasoning_tokens")},
        **_estimated(used),
    }


def response_usage(used: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Tokens in the format of the Responses API; `None` if the answer is not complete.

    The format requires all counts, and typed clients refuse `null`: those that no server reported are 0.
    """
    if used is None:
        return None
    read, written = used.get("input_tokens", 0), used.get("output_tokens", 0)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": used.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": used.get("reasoning_tokens") or 0},
        "total_tokens": read + written,
        **_estimated(used),
    }


def _estimated(used: Mapping[str, Any]) -> dict[str, bool]:
    """The mark of tokens that no model's server reported. Clients read the counts of each answer, so there are some."""
    return {"estimated": True} if used.get("estimated") else {}


def response_id(exchange: Exchange) -> str:
    """The id of a response: that of its turn. One that goes on with a turn also has the place where it begins."""
    return f"resp_{suffixed(exchange, exchange.turn_id.hex)}"


def suffixed(exchange: Exchange, name: str) -> str:
    """`name` and, unless the exchange begins with its turn, the place where it begins."""
    return f"{name}_{exchange.after}" if exchange.after else name


def exchange_of(identifier: str) -> Exchange | None:
    """The exchange that a response's id names; `None` if the response's id is malformed."""
    prefix, _, rest = identifier.partition("_")
    digits, _, after = rest.partition("_")
    try:
        turn_id = UUID(digits)
    except ValueError:
        return None
    if prefix != "resp" or not (not after or (after.isascii() and after.isdecimal() and len(after) < _MOST_DIGITS)):
        return None
    return Exchange(turn_id, int(after or 0))
