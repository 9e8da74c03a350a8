"""The commits of a worker, by name: those of a turn, and those that a worker makes besides."""

from __future__ import annotations

REPEATABLE = ("turns.claim_due", "deliveries.take")
"""Commits that a duplicate wake-up repeats without effect."""

PERIODIC = (
    "turns.renew",
    "sweep.take",
    "sweep.wake_due",
    "sweep.admit_due",
    "sweep.probe_due",
    "deliveries.due",
    "sessions.endings_due",
    "slots.take_round",
    "slots.register",
)
"""Commits that a worker makes every few seconds, regardless of the progress of its turns."""

_ELSEWHERE = (
    "slots.",
    "sessions.count_from_now",
    "sessions.expire_idle",
    "embedding.",
    "consolidation.",
    "erasure.",
    "statistics.",
    "sweep.keep_paces",
    "decay.",
    "meta.",
    "casebank.",
    "retention.",
    "files.",
    "observe.",
    "summaries.",
)
"""Prefixes of the names of commits that belong neither to a turn nor to a session's end."""


def is_unrelated(name: str) -> bool:
    """Whether the commit `name` belongs neither to a turn nor to a session's end."""
    return name in PERIODIC or name.startswith(_ELSEWHERE)
