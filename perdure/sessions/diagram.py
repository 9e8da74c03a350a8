"""Draws the states of a session from `states.TRANSITIONS`.

    python -m perdure.sessions.diagram

This command prints the diagram of `docs/sessions.md`. A test compares the command's output with that file.
"""

from __future__ import annotations

import sys

from perdure.sessions.states import TRANSITIONS, State


def draw() -> str:
    """The table of transitions as a Mermaid diagram, without transitions from a state to itself."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (before, trigger), after in TRANSITIONS.items():
        if before is not after:
            arrows.setdefault((before, after), []).append(trigger)
    lines = [f"    {before} --> {after}: {' / '.join(triggers)}" for (before, after), triggers in arrows.items()]
    begin, end = f"    [*] --> {State.INITIALIZING}", f"    {State.ENDED} --> [*]"
    return "\n".join(["```mermaid", "stateDiagram-v2", begin, *lines, end, "```"])


if __name__ == "__main__":
    sys.stdout.write(draw() + "\n")
