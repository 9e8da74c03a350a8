"""`perdure.result` waits for the reply of a turn; `perdure.answer` brings the result of one of its calls."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload
from uuid import UUID

from pydantic import ValidationError

from perdure.application.process import parts
from perdure.application.sending import Sent
from perdure.errors import DeadlineExceeded, InvalidRequest, InvalidResponse
from perdure.models.protocol import Usage
from perdure.output import OutputType
from perdure.tools import around
from perdure.turns.calls import outside
from perdure.turns.reading import SETTLED, question_of, read_turn

_ROUND_S = 0.5
"""Seconds between reads of the turn.

`Parts.watch` ends a wait early if the turn settles, but not if the turn is refused.
"""

_STARVES = (
    "perdure.result cannot wait inside {waiting}: the other turn may need the place that this turn occupies. Make the "
    "tool a Celery task and declare it with celery_tool, so that this turn is parked while the task waits; or send the "
    "message with reply_to, and do not wait."
)


Data = TypeVar("Data")


@dataclass(frozen=True, slots=True)
class TurnError:
    """Why a turn failed: a stable code, and a message for its user."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class TurnResult(Generic[Data]):
    """A turn, as `result` returns it.

    `reply` is the reply's text, and the error's message if the turn has failed; `None` if there is no reply. `data` is
    the answer of an agent with an `output`, else `None`. `session_id` is `None` until the message is routed. `usage`
    has the tokens of the turn, if the model reported them. `body` is the turn in the format of `GET /v1/turns/{id}`;
    `turn["reply"]` is the body's member `reply`.

    Example:
        >>> with engine.begin() as connection:
        ...     sent = send(connection, user_id="ana", text="Hello.")
        >>> turn = result(sent, timeout=30)
        >>> turn.status, turn.error, turn["attempts"]
        ('done', None, 1)
    """

    turn_id: UUID
    session_id: UUID | None
    status: Literal["accepted", "running", "waiting_approval", "parked", "done", "failed", "cancelled"]
    reply: str | None
    data: Data
    error: TurnError | None
    steps: int
    usage: Usage | None
    body: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, member: str) -> Any:
        return self.body[member]


@overload
def result(turn: Sent | UUID | str, *, timeout: float | None = None) -> TurnResult[Any]: ...


@overload
def result(turn: Sent | UUID | str, *, output: type[Data], timeout: float | None = None) -> TurnResult[Data | None]: ...


def result(turn: Sent | UUID | str, *, output: Any = None, timeout: float | None = None) -> TurnResult[Any]:
    """Wait for a turn to settle, or to wait for results of an `external_tool` or an answer, and return it.

    `turn` is the result of `perdure.send`, or a turn's id. `output` is the type of the agent's answers, of which
    `TurnResult.data` is a value; without it, `data` is JSON values. `timeout` is in seconds; `None` sets no limit. Call
    `result` after the commit: perdure's connection cannot see an uncommitted turn. A failed turn raises no exception:
    the result has its `error`.

    Do not wait in a tool or a hook: its turn occupies one of the places that the other turn needs. With `timeout=0`,
    `result` does not wait.

    Raises:
        NotFound: there is no such turn.
        InvalidRequest: the call would wait inside a tool, a probe, a hook or a `requires_approval`.
        InvalidResponse: the turn's data does not fit `output`.
        DeadlineExceeded: the turn did not settle within `timeout`; it continues.
        Unavailable: the database cannot be reached.

    Example:
        >>> with engine.begin() as connection:
        ...     sent = send(connection, user_id="ana", text="Hello.")
        >>> turn = result(sent, timeout=30)
        >>> turn.status, turn.reply
        ('done', 'Good day.')
    """
    own, turn_id = parts(), _parse(turn)
    expected = None if output is None else OutputType(output, "result()")
    ends = None if timeout is None else own.clock.monotonic() + timeout
    while not _is_for_the_caller(found := read_turn(own.database, turn_id)):
        if timeout != 0 and (waiting := around.running.get()) is not None:
            raise InvalidRequest(_STARVES.format(waiting=waiting))
        left_s = _ROUND_S if ends is None else ends - own.clock.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"Turn {turn_id} is {found['status']} after {timeout:g} s, and continues.")
        settled = own.watch.settled(turn_id)
        try:
            settled.result(min(left_s, _ROUND_S))
        except NotInTime:
            settled.cancel()
    return _result(found, expected)


def _result(body: Mapping[str, Any], output: OutputType | None) -> TurnResult[Any]:
    reply, session_id, error, usage = (body[name] or None for name in ("reply", "session_id", "error", "usage"))
    data = None if reply is None else reply.get("data")
    try:
        value = data if output is None or data is None else output.restore(data)
    except ValidationError as fault:
        raise InvalidResponse(f"The data of turn {body['turn_id']} does not fit the output: {fault}") from None
    return TurnResult(
        UUID(body["turn_id"]),
        None if session_id is None else UUID(session_id),
        body["status"],
        None if reply is None else reply["text"],
        value,
        None if error is None else TurnError(error["code"], error["message"]),
        body["steps"],
        None if usage is None else Usage.from_dict(usage),
        body,
    )


def answer(turn: Sent | UUID | str, call_id: str, result: Any = None, *, error: str | None = None) -> TurnResult[Any]:
    """Bring the result of a call of `external_tool`, and return the turn.

    `call_id` is that of an item of the turn's `pending_calls`. `result` is any JSON value; `error` says instead why the
    call failed. The first result of a call counts: a repeated one changes nothing. The turn goes on when each of its
    calls has its result.

    Raises:
        NotFound: there is no such turn, or no such call in it.
        Conflict: the call is not run outside, has not begun, or the turn no longer waits for it.
        InvalidRequest: there is both a result and an error, or the result has no JSON form.
        Unavailable: the database cannot be reached.

    Example:
        >>> with engine.begin() as connection:
        ...     sent = send(connection, user_id="ana", text="Where am I?")
        >>> for pending in result(sent, timeout=30)["pending_calls"]:  # of the tool get_location
        ...     turn = answer(sent, pending["call_id"], {"city": "Paris"})
    """
    own, turn_id = parts(), _parse(turn)
    brought = {"error": error} if error is not None and result is None else {"result": result}
    brought |= {} if error is None else {"error": error}
    given = outside.parse_result({"call_id": call_id, **brought})
    outside.bring(own.database, own.waker, None, turn_id, given)
    return _result(read_turn(own.database, turn_id), None)


def _is_for_the_caller(turn: Mapping[str, Any]) -> bool:
    """Whether the turn is settled, or waits for results that its caller may bring, or for the user's answer."""
    return turn["status"] in SETTLED or bool(turn["pending_calls"]) or question_of(turn) is not None


def _parse(turn: Sent | UUID | str) -> UUID:
    if isinstance(turn, Sent):
        return turn.turn_id
    try:
        return turn if isinstance(turn, UUID) else UUID(turn)
    except (ValueError, TypeError, AttributeError):
        raise InvalidRequest("turn: must be a turn's id, a UUID.") from None
