"""Path and query parameters: their types, limits and descriptions."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Path, Query
from pydantic import AfterValidator, Field

from perdure.channels.http.middleware import unescaped
from perdure.errors import NotFound
from perdure.text.untrusted import NOT_BLANK_PATTERN, STORABLE_PATTERN, USER_PATTERN, checked_storable, is_storable

MAX_WAIT_S = 300.0
MAX_SESSIONS = 1_000
MAX_QUEUE = 100

_MAX_BIGINT = 2**63 - 1


IdPath = Annotated[str, Path(json_schema_extra={"format": "uuid"})]
"""An id in a path. Its type is text, so that a malformed id gets 404 (see `parse_id`), like an unknown id."""

Wait = Annotated[
    float | None,
    Query(
        ge=0,
        allow_inf_nan=False,
        description=f"Seconds to wait for the turn to be settled; {MAX_WAIT_S:g} at most.",
    ),
]
RunWait = Annotated[
    float,
    Query(
        ge=0,
        allow_inf_nan=False,
        description=f"Seconds to wait for the run to finish; {MAX_WAIT_S:g} at most.",
    ),
]
RunLimit = Annotated[int, Query(ge=1, le=1_000, description="At most this many runs, the newest ones.")]
_STORABLE = {"pattern": STORABLE_PATTERN}
_USER = {"pattern": USER_PATTERN}
CaseQuery = Annotated[
    str,
    Query(min_length=1, description="The question.", json_schema_extra={"pattern": NOT_BLANK_PATTERN}),
    AfterValidator(checked_storable),
]
User = Annotated[str, Field(min_length=1, max_length=200, json_schema_extra=_USER), AfterValidator(checked_storable)]
UserPath = Annotated[
    str,
    Path(description="The user's id, one segment of the path: a slash in it is `%2F`."),
    AfterValidator(unescaped),
    Field(min_length=1, max_length=200, json_schema_extra=_USER),
    AfterValidator(checked_storable),
]
UserId = Annotated[
    User | None,
    Query(description="Only sessions of this user. Default: the user token's user; with an admin key, all users."),
]
Owner = Annotated[User | None, Query(description="The user; with a user token, the token's user by default.")]
ConversationPath = Annotated[
    str,
    Path(description="The conversation's key, one segment of the path: a slash in it is `%2F`."),
    AfterValidator(unescaped),
    Field(min_length=1, max_length=200, json_schema_extra=_STORABLE),
    AfterValidator(checked_storable),
]
ConversationKey = Annotated[
    Annotated[str, Field(min_length=1, max_length=200, json_schema_extra=_STORABLE), AfterValidator(checked_storable)]
    | None,
    Query(description="Only sessions of this conversation; requires `user_id`."),
]
SessionChannel = Annotated[
    Annotated[str, Field(min_length=1, max_length=40, json_schema_extra=_STORABLE), AfterValidator(checked_storable)]
    | None,
    Query(description="Only sessions of the default conversation, as this channel reaches it; requires `user_id`."),
]
QueueLimit = Annotated[int, Query(ge=1, le=MAX_QUEUE, description="At most this many turns, the ones that run first.")]
ConversationLimit = Annotated[
    int, Query(ge=1, le=1_000, description="At most this many conversations, the most recently active ones.")
]
Archived = Annotated[
    bool | None, Query(description="`true`: only archived conversations; `false`: only those that are not archived.")
]
MemoryAfter = Annotated[
    UUID | None, Query(description="Only memories that follow this one in the list; 404 if it was forgotten.")
]
MemoryLimit = Annotated[int, Query(ge=1, le=1_000, description="At most this many memories, the newest ones.")]
SessionLimit = Annotated[int, Query(ge=1, le=MAX_SESSIONS, description="At most this many sessions, the newest ones.")]
After = Annotated[int, Query(ge=0, le=_MAX_BIGINT, description="Only messages with a `seq` above this.")]
MessageLimit = Annotated[
    int | None, Query(ge=1, le=_MAX_BIGINT, description="At most this many messages; default: all.")
]
BreakerAfter = Annotated[
    Annotated[str, Field(min_length=1, max_length=500, json_schema_extra=_STORABLE), AfterValidator(checked_storable)]
    | None,
    Query(description="Only breakers whose name follows this one."),
]
BreakerLimit = Annotated[
    int | None, Query(ge=1, le=_MAX_BIGINT, description="At most this many breakers; default: all.")
]
UsageLimit = Annotated[
    int | None, Query(ge=1, le=_MAX_BIGINT, description="At most this many rows, the first ones; default: all.")
]


def parse_name(text: str, thing: str) -> str:
    """The name of an object in a path, unescaped. `thing` says what the object is, such as "case".

    Raises:
        NotFound: PostgreSQL cannot store the name, so no object has it.
    """
    if not is_storable(text):
        raise NotFound(f"There is no such {thing}.")
    return unescaped(text)


def parse_id(text: str, thing: str) -> UUID:
    """The UUID of an object in a path. `thing` says what the object is, such as "session".

    Raises:
        NotFound: `text` is not a UUID, so it is no object's id.
    """
    try:
        return UUID(text)
    except ValueError:
        raise NotFound(f"There is no such {thing}.") from None
