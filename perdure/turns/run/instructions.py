"""The instructions of a turn: the agent's text, or what the agent's function made for the turn.

What the function made is stored with the turn before the first model call, so that each worker uses the same text.
"""

from __future__ import annotations

from perdure.errors import SettingsError
from perdure.runtime import Runtime
from perdure.text import declarations
from perdure.turns.lease.tenure import LeaseLost, Tenure
from perdure.turns.run import queries
from perdure.turns.run.turn_hooks import TurnHooks


def instructions_of(runtime: Runtime, tenure: Tenure, hooks: TurnHooks) -> str:
    """The instructions of the turn at hand.

    Raises:
        PerdureError: the agent's function raised it.
        SettingsError: the function returned no text, or did not return in time.
        Unavailable: the database cannot be reached.
        LeaseLost: another worker has the session.
    """
    given = hooks.agent.instructions
    if isinstance(given, str):
        return given
    turn = {"turn_id": tenure.at_hand.turn_id}
    if not hooks.transcript.uncommitted:  # a worker has begun the turn
        stored = [row.instructions for row in runtime.database.run(queries.INSTRUCTIONS, turn)]
        if stored and stored[0] is not None:
            return str(stored[0])
    made = hooks.evaluate("instructions", given)
    if not declarations.is_text(made):
        raise SettingsError(
            f"agent {hooks.agent.name!r} has a function as instructions that returned {declarations.shown(made)}; "
            "accepted: text"
        )
    rows = runtime.database.run(queries.KEEP_INSTRUCTIONS, {**tenure.fenced, **turn, "instructions": made})
    if not rows:
        raise LeaseLost
    return str(rows[0].instructions)
