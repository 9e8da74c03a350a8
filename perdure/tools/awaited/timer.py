"""`sleep_until`: a tool that makes the turn wait until a given time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any, ClassVar, NoReturn

from perdure.errors import SettingsError, ToolError
from perdure.models.protocol import ToolSchema
from perdure.text import declarations, untrusted
from perdure.text.patterns import compiled
from perdure.tools.awaited.declared import parse_text, refusal_of
from perdure.tools.registry import MAX_RESULT_CHARS, USER, Effect, ToolContext

LONGEST = timedelta(days=30)
"""The longest wait by default."""

_MOST_CHARS = 64
_NAME = compiled(r"[a-zA-Z0-9_-]{1,64}")

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "moment": {
            "type": "string",
            "description": "Date and time in ISO 8601, such as 2026-03-01T09:00 or 2026-03-01T09:00:00+01:00.",
        }
    },
    "required": ["moment"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, eq=False)
class SleepUntil:
    """A tool that makes a turn wait until a given time, for at most `longest`; see `sources.RunnableTool`.

    Example:
        >>> assistant = Agent("assistant", "You remind.", tools=[SleepUntil(longest=timedelta(days=7))])
        >>> model = Scripted(call("sleep_until", moment="2100-01-01T09:00"), "That is too far ahead.")
        >>> ask(assistant, "Remind me in 2100.", model=model).calls[0].status
        'failed'
        >>> patient = Agent("patient", "You remind.", tools=[sleep_until])  # at most 30 days
    """

    breaker: ClassVar[None] = None
    probe: ClassVar[None] = None
    timeout_s: ClassVar[None] = None
    effect: ClassVar[Effect] = Effect.PURE
    waits_for: ClassVar[str] = "timer"
    max_result_chars: ClassVar[int] = MAX_RESULT_CHARS
    parameters: ClassVar[Mapping[str, Any]] = _PARAMETERS

    name: str = "sleep_until"
    longest: timedelta = LONGEST

    def __post_init__(self) -> None:
        if not declarations.matches(self.name, _NAME):
            accepted = "1 to 64 of a-z, A-Z, 0-9, _ and -"
            raise SettingsError(f"sleep_until has name={declarations.shown(self.name)}; accepted: {accepted}")
        given: Any = self.longest
        if not isinstance(given, timedelta) or not timedelta() < given <= timedelta(days=3_660):
            accepted = "a timedelta above 0, at most 3660 days"
            raise SettingsError(f"sleep_until has longest={declarations.shown(given)}; accepted: {accepted}")

    @property
    def description(self) -> str:
        return (
            "Wait until a time, then continue. A time without an offset is in this installation's time zone. "
            f"The longest wait is {_shown(self.longest)}."
        )

    def schema(self) -> ToolSchema:
        return ToolSchema(self.name, self.description, self.parameters)

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check that the arguments are a strict JSON object with the string `moment` and no other key.

        Raises:
            ToolError: the arguments are anything else; the message is for the model.
        """
        return parse_text(arguments, "moment", _refusal)

    def wait_s(self, arguments: Mapping[str, Any], now: datetime, zone: tzinfo) -> float:
        """Seconds from `now` until the `moment` in `arguments`. A moment without an offset is in the time zone `zone`.

        Raises:
            ToolError: `moment` is not a date and time, is past, or is too far ahead; the message is for the model.
        """
        text = str(arguments["moment"]).strip()
        try:
            moment = datetime.fromisoformat(text) if len(text) <= _MOST_CHARS else None
            moment = moment.replace(tzinfo=zone) if moment is not None and moment.tzinfo is None else moment
            seconds = math.nan if moment is None else moment.timestamp() - now.timestamp()
        except (ValueError, OverflowError):
            seconds = math.nan
        if math.isnan(seconds):
            raise _refusal(f"{untrusted.first_line(text, 80)!r} is not a date and time in ISO 8601")
        shown = now.astimezone(zone).isoformat(timespec="seconds")
        if seconds <= 0:
            raise _refusal(f"{text} is past; it is {shown} now")
        if seconds > self.longest.total_seconds():
            raise _refusal(f"{text} is more than {_shown(self.longest)} ahead; it is {shown} now")
        return seconds

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:  # noqa: ARG002 (as RunnableTool)
        """Return False: waiting has no side effect."""
        return False

    def approver_of(self, arguments: Mapping[str, Any]) -> str:  # noqa: ARG002 (as RunnableTool)
        return USER

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> NoReturn:  # noqa: ARG002 (as RunnableTool)
        """Raise `ToolError`: the engine parks the turn and never calls this method."""
        raise ToolError(f"{self.name} makes the turn wait; no process runs it.")


sleep_until = SleepUntil()


def _refusal(reason: str) -> ToolError:
    return refusal_of("Not waited", reason, _PARAMETERS)


def _shown(span: timedelta) -> str:
    return f"{span.days} days" if span.days > 1 else f"{span.total_seconds() / 3600:g} hours"
