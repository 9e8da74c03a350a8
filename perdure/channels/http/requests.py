"""What a request brings along: its body, bounded while it comes in, its ids and its numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any
from uuid import UUID

from fastapi import Path, Query, Request
from pydantic import AfterValidator, Field

from perdure.channels.http.path_segments import unescaped
from perdure.errors import InvalidRequest, NotFound, TooLarge
from perdure.text.untrusted import NOT_BLANK_PATTERN, STORABLE_PATTERN, first_line, is_storable, load_object

MAX_BODY_BYTES = 2**20
MAX_DRAINED_BYTES = 2**26
LONGEST_WAIT_S = 300.0
MOST_SESSIONS = 1_000

_DRAIN_S = 5.0
_MAX_BIGINT = 2**63 - 1


def _storable(value: str) -> str:
    if not is_storable(value):
        raise ValueError("contains NUL or a character that is no valid Unicode")
    return value


Wait = Annotated[
    float | None,
    Query(
        ge=0,
        allow_inf_nan=False,
        description=f"Seconds to wait for the turn to be settled; {LONGEST_WAIT_S:g} at most.",
    ),
]
RunWait = Annotated[
    float,
    Query(
        ge=0,
        allow_inf_nan=False,
        description=f"Seconds to wait for the run to finish; {LONGEST_WAIT_S:g} at most.",
    ),
]
RunLimit = Annotated[int, Query(ge=1, le=1_000, description="How many, newest first.")]
_STORABLE = {"pattern": STORABLE_PATTERN}
Question = Annotated[
    str,
    Query(min_length=1, description="What is asked.", json_schema_extra={"pattern": NOT_BLANK_PATTERN}),
    AfterValidator(_storable),
]
User = Annotated[str, Field(min_length=1, max_length=200, json_schema_extra=_STORABLE), AfterValidator(_storable)]
UserPath = Annotated[
    str,
    Path(description="The user's id, one segment of the path: a slash in it is `%2F`."),
    AfterValidator(unescaped),
    Field(min_length=1, max_length=200, json_schema_extra=_STORABLE),
    AfterValidator(_storable),
]
UserId = Annotated[
    User | None,
    Query(description="Whose sessions; everybody's if it is not given, which takes an admin key."),
]
SessionLimit = Annotated[int, Query(ge=1, le=MOST_SESSIONS, description="How many, newest first.")]
After = Annotated[int, Query(ge=0, le=_MAX_BIGINT, description="Only messages with a `seq` above this.")]
MessageLimit = Annotated[int | None, Query(ge=1, le=_MAX_BIGINT, description="How many; all of them if not given.")]


async def read_body(request: Request) -> bytes:
    """The request's body.

    Raises:
        TooLarge: it is longer than `MAX_BODY_BYTES`; what is beyond was not kept.
    """
    body = bytearray()
    stream = request.stream()
    async for chunk in stream:
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            await _drain(stream)
            raise TooLarge(f"The body is longer than {MAX_BODY_BYTES} bytes.")
    return bytes(body)


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Take in the rest of a body and drop it, up to a limit.

    Most clients read no answer before they have sent everything; and closing a connection with
    bytes in it that nobody read resets it, which takes the answer along.
    """
    taken = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for chunk in stream:
                taken += len(chunk)
                if taken > MAX_DRAINED_BYTES:
                    return


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` holds.

    Raises:
        InvalidRequest: it is not UTF-8, not JSON, no object, or holds what no text may.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8 (at byte {error.start}).") from None
    if not text.strip():
        raise InvalidRequest("The body is empty; it must be a JSON object.")
    try:
        return load_object(text)
    except ValueError as error:
        raise InvalidRequest(f"The body cannot be used: {error}.") from None


def optional_member(body: bytes, member: str) -> object:
    """The one member that `body` may have, None if it has none.

    Raises:
        InvalidRequest: it has others, or is no JSON object.
    """
    given = parse_object(body) if body.strip() else {}
    unknown = ", ".join(sorted(given.keys() - {member}))
    if unknown:
        raise InvalidRequest(f"The body has members that are not known: {first_line(unknown, 200)}.")
    return given.get(member)


def parse_name(text: str, thing: str) -> str:
    """A name of others' in a path.

    Raises:
        NotFound: no text in the database is like it, so there is no `thing` of that name.
    """
    if not is_storable(text):
        raise NotFound(f"There is no such {thing}.")
    return unescaped(text)


def parse_id(text: str, thing: str) -> UUID:
    """The id in a path.

    Raises:
        NotFound: it is none, so there is no `thing` of that id.
    """
    try:
        return UUID(text)
    except ValueError:
        raise NotFound(f"There is no such {thing}.") from None
