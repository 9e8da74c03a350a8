"""The result of a certification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from textwrap import fill
from typing import Any

_WIDTH = 100


class Kind(StrEnum):
    """What is wrong. `PERDURE` is a fault of perdure itself, which the author should report."""

    NOT_PURE = "not pure"
    NOT_IDEMPOTENT = "not idempotent"
    PROBE_DENIES = "probe denies"
    PROBE_CLAIMS = "probe claims"
    UNANSWERED = "unanswered"
    PERDURE = "perdure"


@dataclass(slots=True)
class Finding:
    """A false declaration. `schedule` is the shortest one that shows it, in words; `seen` is what showed it."""

    agent: str
    tool: str
    kind: Kind
    message: str
    schedule: str
    seen: str
    schedules: int = 1
    """In how many schedules it was seen."""

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON."""
        return {
            "agent": self.agent,
            "tool": self.tool,
            "kind": self.kind.value,
            "message": self.message,
            "schedule": self.schedule,
            "seen": self.seen,
            "schedules": self.schedules,
        }

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.tool} of {self.agent}: {self.message}",
                *(_line(name, text) for name, text in (("schedule", self.schedule), ("seen", self.seen))),
                _line("in", "1 schedule" if self.schedules == 1 else f"{self.schedules} schedules"),
            )
        )


def _line(name: str, text: str) -> str:
    begin = f"  {name + ':':<10}"
    return fill(text, _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin), break_long_words=False)


@dataclass(slots=True)
class ToolReport:
    """How often a tool ran. `calls` is the number of calls, `ran` that of executions.

    `repeated` counts the executions after the first of a call, and `unknown` the calls whose outcome the model was told
    is unknown. `notes` say what the certification could not see.
    """

    agent: str
    tool: str
    effect: str
    calls: int = 0
    ran: int = 0
    repeated: int = 0
    unknown: int = 0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "agent": self.agent,
            "tool": self.tool,
            "effect": self.effect,
            "calls": self.calls,
            "ran": self.ran,
            "repeated": self.repeated,
            "unknown": self.unknown,
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class Certificate:
    """What `certify` found. It is true, and `ok`, if no declaration is false and each scenario could be played."""

    module: str
    tools: list[ToolReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    left_out: Mapping[tuple[str, str], str] = field(default_factory=dict)
    played: Counter[str] = field(default_factory=Counter)
    """How many `schedules` were played, and how many `kills` and `flushes` there were."""
    complete: bool = True
    """Whether all schedules were played."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found in all schedules."""
        return self.complete and not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def findings_of(self, agent: str, tool: str) -> list[Finding]:
        """What was found about a tool."""
        return [each for each in self.findings if (each.agent, each.tool) == (agent, tool)]

    def to_dict(self) -> dict[str, Any]:
        """The certificate as JSON."""
        return {
            "module": self.module,
            "ok": self.ok,
            "complete": self.complete,
            "schedules": self.played["schedules"],
            "kills": self.played["kills"],
            "flushes": self.played["flushes"],
            "tools": [each.to_dict() for each in self.tools],
            "findings": [each.to_dict() for each in self.findings],
            "left_out": [
                {"agent": agent, "tool": tool, "reason": each} for (agent, tool), each in self.left_out.items()
            ],
        }

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.findings)) or f"{self.module}: no declaration is false"
