"""What a model is told before the conversation itself: who it is, where the user writes, what came before.

Made once a turn. The past speaks through sections of bounded size (`memory.gathering`), the session
before last of all: through its summary, or through its last messages while that is being written.
All of it is quoted, as what was said and not as what to do. A memory that cannot be reached costs a
turn a bounded wait and what it would have recalled, never the turn.
"""

from __future__ import annotations

import logging

from sqlalchemy.exc import DBAPIError

from perdure.agents import Agent
from perdure.errors import PerdureError
from perdure.memory.context import Section, affordable, cut_to, render, tokens
from perdure.memory.gathering import MOST_RECALLED, Occasion, gather
from perdure.memory.quoting import CONVERSATION
from perdure.memory.recall import Recalled, Seen
from perdure.models.protocol import CallAborted, ModelCall, ToolSchema
from perdure.runtime import Runtime
from perdure.sessions.ending import read_conversation
from perdure.settings import MemorySettings
from perdure.turns.lease import Before, Hold, TurnRef
from perdure.turns.recalling import recall_of
from perdure.turns.transcript import Transcript
from perdure.untrusted import cut

log = logging.getLogger(__name__)

MAX_MESSAGES = 20
"""Messages of the session before, the newest, that stand in for its summary."""

_MAX_CHARS = 500


def brief(runtime: Runtime, hold: Hold, agent: Agent, turn: TurnRef, transcript: Transcript) -> str:
    """The system message of a turn; `transcript` is what the prompt holds besides.

    One statement; with a past to recall, those of the recall and one more; one more if the session
    before has no summary yet.

    Raises:
        CallAborted: the turn is to stop; the hold says why.
        Unavailable: the database cannot be reached.
    """
    limits = runtime.settings.memory
    channel = _channel(turn.channel, turn.before.channel)
    earlier = _earlier(runtime, turn.before)
    left = limits.model_copy(update={"budget_archive": limits.budget_archive - tokens(earlier)})
    parts = [
        cut_to(agent.instructions, limits.budget_system - tokens(channel)),
        channel,
        *_past(runtime, hold, turn, transcript, left),
        earlier,
    ]
    return "\n\n".join(part for part in parts if part)


def offered(agent: Agent, budget: int) -> tuple[ToolSchema, ...]:
    """The agent's tools as a model is told of them; those beyond the budget are left out, which is reported."""
    schemas = [tool.schema() for tool in agent.tool_list]
    told = affordable(schemas, budget)
    if len(told) < len(schemas):
        log.warning(
            "agent %s: the model is not told of %d of its tools (from %s on): PERDURE_MEMORY__BUDGET_TOOLS is %d",
            agent.name, len(schemas) - len(told), schemas[len(told)].name, budget,
        )  # fmt: skip
    return told


def _past(runtime: Runtime, hold: Hold, turn: TurnRef, transcript: Transcript, limits: MemorySettings) -> list[str]:
    """What is remembered; nothing where memory cannot be reached."""
    seen = Seen(hold.session_id, transcript.first_seen(limits.budget_working))
    occasion = Occasion(turn.user_id, hold.session_id, turn.before.session_id, transcript.asked, long=seen.from_seq > 1)
    stream = runtime.volatile.stream if runtime.volatile is not None else None
    call = ModelCall(runtime.clock, limits.recall_timeout_s)
    hold.step_within(limits.recall_timeout_s)

    def search(query: str) -> list[Recalled]:
        return recall_of(runtime).search(turn.user_id, query, MOST_RECALLED, seen=seen, call=call)

    try:
        with hold.calling(call):
            return gather(runtime.database, occasion, limits, search, stream)
    except CallAborted:
        raise
    except PerdureError as error:
        log.warning("turn %s goes on without what is remembered: %s", turn.turn_id, error.message)
    except DBAPIError:  # a text that the search stumbles over: no reason to leave its sender without an answer
        log.exception("turn %s goes on without what is remembered", turn.turn_id)
    return []


def _channel(present: str, previous: str | None) -> str:
    if previous in {None, present}:
        return f"The user is writing on the channel {present!r}."
    return f"The user wrote on {previous!r} before and now writes on {present!r}."


def _earlier(runtime: Runtime, before: Before) -> str:
    budget = runtime.settings.memory.budget_archive
    if before.session_id is None:
        return ""
    if before.summary is None:
        said = read_conversation(runtime.database, before.session_id, MAX_MESSAGES)
        lines = [f"{each.role}: {cut(each.content, _MAX_CHARS)}" for each in said if each.content]
        title = "The end of your previous conversation with this user, as it was said"
        return render(Section(CONVERSATION, title, lines[::-1], budget, backwards=True))
    title = "A summary of your previous conversation with this user"
    return render(Section(CONVERSATION, title, [before.summary], budget))
