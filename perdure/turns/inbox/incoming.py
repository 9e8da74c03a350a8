"""Incoming messages of every channel: parsed and validated once, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from perdure.access.tenants import UserKey, user_key
from perdure.errors import InvalidRequest
from perdure.files.parts import MAX_FILES, Part, Parts, files_in, joined
from perdure.settings import OnBusy
from perdure.text.untrusted import (
    IDENTIFIER_PATTERN,
    NOT_BLANK_PATTERN,
    STORABLE_PATTERN,
    USER_PATTERN,
    checked_storable,
    identifier,
    is_storable,
    load_object,
    validated,
    whole,
)

DEFAULT_PRIORITY = 5
MAX_METADATA_CHARS = 16_384
MAX_REASON_CHARS = 1_000
MAX_NAME_CHARS = 200
"""The longest name that a message has: of a user, a conversation, a message."""


_TEXT_SCHEMA: dict[str, JsonValue] = {"pattern": STORABLE_PATTERN}
Text = Annotated[str, Field(strict=True, json_schema_extra=_TEXT_SCHEMA), AfterValidator(checked_storable)]
Name = Annotated[
    str,
    Field(strict=True, min_length=1, max_length=MAX_NAME_CHARS, json_schema_extra=_TEXT_SCHEMA),
    AfterValidator(checked_storable),
]
UserId = Annotated[Name, Field(json_schema_extra={"pattern": USER_PATTERN})]
ChannelName = Annotated[Name, AfterValidator(identifier), Field(json_schema_extra={"pattern": IDENTIFIER_PATTERN})]


_ABSENT: JsonValue = {"type": "null"}
_TEXT: JsonValue = {"type": "string"}
_ONE_OF_THEM: list[JsonValue] = [
    {"required": ["url"], "properties": {"url": _TEXT, "task": _ABSENT, "queue": _ABSENT}},
    {"required": ["task"], "properties": {"url": _ABSENT, "task": _TEXT}},
]
"""The rule of `ReplyTo._one_or_the_other`, as JSON Schema."""


class ReplyTo(BaseModel):
    """The receiver of the reply: a URL, or a Celery task by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"oneOf": _ONE_OF_THEM})

    url: Annotated[Text, Field(max_length=2_000, json_schema_extra={"pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"})] | None = (
        None
    )
    task: Name | None = None
    queue: Name | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self) -> ReplyTo:
        if (self.url is None) == (self.task is None):
            raise ValueError("give either url or task")
        if self.url is not None:
            _check_web_address(self.url)
        if self.url is not None and self.queue is not None:
            raise ValueError("queue goes with task only")
        return self


def _check_web_address(url: str) -> None:
    try:
        parts = urlsplit(url)  # ignores leading blanks
        named = url.lower().startswith(("http://", "https://")) and bool(parts.hostname)
    except ValueError:  # an invalid host
        named = False
    if not named:
        raise ValueError("url must begin with http:// or https:// and name a host")
    try:
        reachable = parts.port != 0
    except ValueError:  # not a number, or out of range
        reachable = False
    if not reachable:
        port = parts.netloc.rpartition(":")[2]
        raise ValueError(f"url names the port {port}; a port is a number from 1 to 65535")


def _text_or_parts(schema: dict[str, Any]) -> None:
    """One of `text` and `parts` is required, as JSON Schema."""
    schema["properties"]["text"]["pattern"] = NOT_BLANK_PATTERN
    others = [name for name in schema.get("required", []) if name != "text"]
    schema |= {"required": others} if others else {}
    if not others:
        schema.pop("required", None)
    schema["oneOf"] = [
        {"required": ["text"], "properties": {"parts": _ABSENT}},
        {"required": ["parts"], "properties": {"text": False, "parts": {"type": "array"}}},
    ]


class MessageFields(BaseModel):
    """The fields of a message, without its user. `text` is that of the `parts`, if a message has parts.

    With `remember` false, nothing of the message's turn becomes a memory, or is recalled in other conversations.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_text_or_parts)

    parts: Parts | None = None
    text: Text
    channel: ChannelName = "http"
    message_id: Name | None = None
    conversation: Name | None = None
    session_id: UUID | None = None
    agent: Name | None = None
    priority: Annotated[StrictInt, Field(ge=0, le=9), BeforeValidator(whole)] = DEFAULT_PRIORITY
    on_busy: OnBusy | None = None
    reply_to: ReplyTo | None = None
    remember: StrictBool = True
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_of_parts(cls, given: Any) -> Any:
        parts = given.get("parts") if isinstance(given, dict) else None
        if not isinstance(parts, list | tuple):
            return given
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        text = joined(each for each in texts if isinstance(each, str))
        if given.get("text", text) != text:
            raise ValueError("give text or parts, not both")
        return {**given, "text": text}

    @field_validator("parts")
    @classmethod
    def _few_files(cls, value: tuple[Part, ...] | None) -> tuple[Part, ...] | None:
        if value is not None and len(files_in(value)) > MAX_FILES:
            raise ValueError(f"has more than {MAX_FILES} files")
        return value

    @field_validator("text", "conversation")
    @classmethod
    def _not_blank(cls, value: str | None, info: ValidationInfo) -> str | None:
        has_files = info.field_name == "text" and files_in(info.data.get("parts") or ())
        if value is not None and not value.strip() and not has_files:
            raise ValueError("is empty")
        return value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.conversation is not None and self.session_id is not None:
            raise ValueError("give session_id or conversation, not both")
        return self

    @field_validator("metadata")
    @classmethod
    def _bounded(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        try:
            text = json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError("must be JSON, which excludes NaN and infinities") from error
        if len(text) > MAX_METADATA_CHARS:
            raise ValueError(f"is longer than {MAX_METADATA_CHARS} characters of JSON")
        load_object(text)  # raises for text that PostgreSQL cannot store, and for deep nesting
        return value

    def of(self, user: UserKey) -> Incoming:
        """The message with these fields of the user with the key `user`."""
        return Incoming.model_construct(**{**dict(self), "user": user})  # the fields are validated already


class Submitted(MessageFields):
    """A message that names its user by id, such as the argument of the task `turns.submit`."""

    user_id: UserId


class Incoming(MessageFields):
    """One message for an agent, of the user with the key `user`."""

    user: UserKey


def parse_incoming(given: Any, *, channel: Literal["http", "celery"] = "http", tenant: str | None = None) -> Incoming:
    """Parse a message that another program sent for a user of `tenant`.

    Raises:
        InvalidRequest: `given` is not a message; the error names the field and the reason.
    """
    submitted = parse_submitted(given, channel=channel)
    return submitted.of(user_key(tenant, submitted.user_id))


def parse_submitted(given: Any, *, channel: Literal["http", "celery"] = "http") -> Submitted:
    """Parse a message whose user the caller converts to a key.

    Raises:
        InvalidRequest: `given` is not a message; the error names the field and the reason.
    """
    if not isinstance(given, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return validated(Submitted, {"channel": channel, **given})


def stored_incoming(key: UserKey, fields: Mapping[str, Any]) -> Incoming:
    """Parse the message of a stored row. `fields` does not contain the user; `key` is the user's key.

    Raises:
        InvalidRequest: this release does not accept the fields.
    """
    return validated(MessageFields, fields).of(key)


def parse_reason(given: object) -> str:
    """Check the reason for ending a session.

    Raises:
        InvalidRequest: the reason is not text, is too long, or cannot be stored.
    """
    if not isinstance(given, str) or len(given) > MAX_REASON_CHARS or not is_storable(given):
        raise InvalidRequest(f"reason: must be text of at most {MAX_REASON_CHARS} characters, without NUL.")
    return given
