"""What a turn reads before its first prompt, in one statement: its transcript, and the user's past."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy.exc import DBAPIError

from perdure.agents import Agent
from perdure.casebank.search import authors
from perdure.database.engine import Statement, was_refused
from perdure.errors import Unavailable, loggable
from perdure.memory.recall import past, past_queries
from perdure.runtime import Runtime
from perdure.settings import CaseScope
from perdure.turns.lease.tenure import TurnRow
from perdure.turns.transcript import HISTORY, Transcript, history_parameters

log = logging.getLogger(__name__)

FIRST_READ = Statement(
    "turns.first_read",
    f"SELECT history.*, {past_queries.PAST} AS past FROM ({HISTORY}) AS history",  # noqa: S608 (constants)
    writes=False,
)


def load(runtime: Runtime, turn: TurnRow, agent: Agent | None, *, window: int) -> Transcript:
    """The transcript of at most the last `window` turns, with the user's past if the agent's first prompt tells it.

    If the server refuses the statement, the transcript is read alone: the refusal may concern the past.

    Raises:
        Unavailable: the database cannot be reached.
        Exception: the present turn cannot be parsed.
    """
    if agent is None or turn.verdict is not None or not _tells_the_past_as_read(agent):
        return Transcript.load(runtime.database, turn, window=window)
    given = {**history_parameters(turn, window=window), **past_parameters(runtime, turn, agent)}
    try:
        [row] = runtime.database.run(FIRST_READ, given)
    except (Unavailable, DBAPIError) as error:
        if not was_refused(error):
            raise
        log.warning("turn %s: its transcript is read without the user's past: %s", turn.turn_id, loggable(error))
        return Transcript.load(runtime.database, turn, window=window)
    transcript = Transcript.read(turn, row)
    transcript.past = past.past_of(row.past)
    return transcript


def _tells_the_past_as_read(agent: Agent) -> bool:
    """Whether no code of the agent runs between the first read and the first prompt. It might change the past."""
    return agent.is_own and not (agent.screens or agent.deps is not None or callable(agent.instructions))


def past_parameters(runtime: Runtime, turn: TurnRow, agent: Agent) -> dict[str, Any]:
    """The parameters of `past_queries.PAST` for the prompts of `agent`."""
    return past.past_parameters(
        turn.user_id,
        turn.session_id,
        previous_id=turn.before.session_id,
        most_summaries=runtime.settings.memory.archive_sessions,
        bank=agent.bank,
        embedder=runtime.embedder.name,
        authors=authors(turn.user_id),
        all_cases=runtime.settings.casebank.scope is CaseScope.ALL,
    )
