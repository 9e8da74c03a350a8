"""`sleep_until`: a tool that makes the turn wait until a given time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any, ClassVar

from perdure.errors import ToolError
from perdure.models.protocol import ToolSchema
from perdure.text import declarations, untrusted
from perdure.tools.awaited.declared import Asleep, parse_text
from perdure.tools.registry import refusal_of, require_name

LONGEST = timedelta(days=30)
"""The longest wait by default."""

_MOST_CHARS = 64

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
class SleepUntil(Asleep):
    """A tool that makes a turn wait until a given time, for at most `longest`; see `sources.RunnableTool`.

    Example:
        >>> assistant = Agent("assistant", "You remind.", tools=[SleepUntil(longest=timedelta(days=7))])
        >>> model = Scripted(call("sleep_until", moment="2100-01-01T09:00"), "That is too far ahead.")
        >>> ask(assistant, "Remind me in 2100.", model=model).calls[0].status
        'failed'
        >>> patient = Agent("patient", "You remind.", tools=[sleep_until])  # at most 30 days
    """

    timeout_s: ClassVar[None] = None
    waits_for: ClassVar[str] = "timer"
    parameters: ClassVar[Mapping[str, Any]] = _PARAMETERS

    name: str = "sleep_until"
    longest: timedelta = LONGEST

    def __post_init__(self) -> None:
        require_name("sleep_until", self.name)
        given: Any = self.longest
        fits = isinstance(given, timedelta) and timedelta() < given <= timedelta(days=3_660)
        declarations.require(fits, "sleep_until", "longest", given, "a timedelta above 0, at most 3660 days")

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


sleep_until = SleepUntil()


def _refusal(reason: str) -> ToolError:
    return refusal_of("Not waited", reason, _PARAMETERS)


def _shown(span: timedelta) -> str:
    return f"{span.days} days" if span.days > 1 else f"{span.total_seconds() / 3600:g} hours"
