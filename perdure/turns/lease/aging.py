"""A session's effective priority: its own, raised by one for each `PERDURE_TURN__PRIORITY_AGING_S` seconds of waiting.

Without aging, sessions of a high priority delay those of a lower one for as long as the workers are busy. The effective
priority orders the sessions that wait, and it is the priority of the wake-ups that are published for them.
"""

from __future__ import annotations

HIGHEST = 9


def levels(waited_s: str) -> str:
    """The SQL expression for the levels by which `waited_s` seconds raise a priority. 0 if aging is off."""
    return f"coalesce(floor(greatest({waited_s}, 0) / nullif(%(aging_s)s::float, 0)), 0)"


def effective(priority: str, since: str) -> str:
    """The SQL expression for the effective priority of a session that has waited since the time `since`."""
    waited_s = f"extract(epoch FROM perdure_now() - {since})::float"
    return f"least({priority} + {levels(waited_s)}, {HIGHEST})::int"
