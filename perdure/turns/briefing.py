"""What a model is told before the conversation itself: who it is, where the user writes, what came before.

The session before speaks through its summary, or through its last messages while that is
being written. Both are quoted, as what was said and not as what to do.
"""

from __future__ import annotations

import re

from perdure.agents import Agent
from perdure.database.engine import Executor
from perdure.sessions.ending import read_conversation
from perdure.turns.lease import Before, TurnRef
from perdure.untrusted import cut

MAX_MESSAGES = 20
"""Messages of the session before, the newest, that stand in for its summary."""

_MAX_CHARS = 500
_MARK = re.compile(r"<(/?previous_conversation)", re.IGNORECASE)


def brief(executor: Executor, agent: Agent, turn: TurnRef) -> str:
    """The system message of a turn. One statement if the session before has no summary yet, else none."""
    parts = [agent.instructions, _channel(turn.channel, turn.before.channel)]
    if turn.before.session_id is not None:
        parts.append(_earlier(executor, turn.before))
    return "\n\n".join(part for part in parts if part)


def _channel(present: str, previous: str | None) -> str:
    if previous in {None, present}:
        return f"The user is writing on the channel {present!r}."
    return f"The user wrote on {previous!r} before and now writes on {present!r}."


def _earlier(executor: Executor, before: Before) -> str:
    if before.summary is None and before.session_id is not None:
        said = read_conversation(executor, before.session_id, MAX_MESSAGES)
        lines = [f"{each.role}: {cut(each.content, _MAX_CHARS)}" for each in said if each.content]
        title = "The end of your previous conversation with this user, as it was said"
        return _quoted(title, "\n".join(lines))
    return _quoted("A summary of your previous conversation with this user", before.summary or "")


def _quoted(title: str, text: str) -> str:
    text = _MARK.sub(r"[\1", text)  # what was said must not end its own quotation
    return f"{title}:\n<previous_conversation>\n{text}\n</previous_conversation>" if text else ""
