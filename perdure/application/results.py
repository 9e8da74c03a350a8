"""`perdure.result` waits for the reply of a turn; `perdure.answer` brings the result of one of its calls."""

from __future__ import annotations

from concurrent.futures import TimeoutError as NotInTime
from typing import Any
from uuid import UUID

from perdure.application.process import parts
from perdure.application.sending import Sent
from perdure.errors import DeadlineExceeded, InvalidRequest
from perdure.tools import around
from perdure.turns.calls import outside
from perdure.turns.reading import SETTLED, read_turn

_ROUND_S = 0.5
"""Seconds between reads of the turn.

`Parts.watch` ends a wait early if the turn settles, but not if the turn is refused.
"""

_STARVES = (
    "perdure.result cannot wait inside {waiting}: the other turn may need the place that this turn occupies. Make the "
    "tool a Celery task and declare it with celery_tool, so that this turn is parked while the task waits; or send the "
    "message with reply_to, and do not wait."
)


def result(turn: Sent | UUID | str, *, timeout: float | None = None) -> dict[str, Any]:
    """Wait for a turn to settle and return it in the format of `GET /v1/turns/{id}`.

    `turn` is the result of `perdure.send`, or a turn's id. `timeout` is in seconds; `None` sets no limit. Call `result`
    after the commit: perdure's connection cannot see an uncommitted turn. A failed turn raises no exception: the result
    contains its `error`.

    Do not wait in a tool or a hook: its turn occupies one of the places that the other turn needs. With `timeout=0`,
    `result` does not wait.

    Raises:
        NotFound: there is no such turn.
        InvalidRequest: the call would wait inside a tool, a probe, a hook or a `requires_approval`.
        DeadlineExceeded: the turn did not settle within `timeout`; it continues.
        Unavailable: the database cannot be reached.

    Example:
        >>> with engine.begin() as connection:
        ...     sent = send(connection, user_id="ana", text="Hello.")
        >>> turn = result(sent, timeout=30)
        >>> turn["status"], turn["reply"]["text"]
        ('done', 'Good day.')
    """
    own, turn_id = parts(), _parse(turn)
    ends = None if timeout is None else own.clock.monotonic() + timeout
    while (found := read_turn(own.database, turn_id))["status"] not in SETTLED:
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
    return found


def answer(turn: Sent | UUID | str, call_id: str, result: Any = None, *, error: str | None = None) -> dict[str, Any]:
    """Bring the result of a call of `external_tool`, and return the turn in the format of `GET /v1/turns/{id}`.

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
    return read_turn(own.database, turn_id)


def _parse(turn: Sent | UUID | str) -> UUID:
    if isinstance(turn, Sent):
        return turn.turn_id
    try:
        return turn if isinstance(turn, UUID) else UUID(turn)
    except (ValueError, TypeError, AttributeError):
        raise InvalidRequest("turn: must be a turn's id, a UUID.") from None
