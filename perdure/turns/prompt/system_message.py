"""The system message: the agent's instructions, the user's channel, and sections about the past.

A worker builds the message before its first model call for a turn. The sections have a bounded size
(`memory.sections`). They contain memories of the user, cases that are similar to the question, and the summary of the
previous session. While the previous session has no summary, its last messages are shown instead. All sections are
quoted as data (`text.quoting`). If memory is unavailable, the turn waits for a bounded time and continues without
memories and cases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from perdure.agents import Agent
from perdure.casebank.search import FoundCase, authors
from perdure.errors import Abandoned, PerdureError, Unavailable
from perdure.memory.recall.search import PromptWindow, Recalled
from perdure.memory.sections.assemble import MOST_RECALLED, SectionsRequest, assemble_sections
from perdure.memory.sections.budget import Section, affordable, render
from perdure.models.embedders.memoized import MemoizedEmbedder
from perdure.models.protocol import CallAborted, ModelCall, ToolSchema
from perdure.runtime import Runtime
from perdure.sessions.ending import read_conversation
from perdure.settings import CaseScope, MemorySettings
from perdure.text.quoting import CONVERSATION, NOTE, Quoter, label_lines
from perdure.text.tokens import cut_to, estimate_tokens
from perdure.text.untrusted import cut
from perdure.turns.lease.tenure import Before, Tenure
from perdure.turns.transcript import Transcript

log = logging.getLogger(__name__)

MAX_MESSAGES = 20
"""The most messages of the previous session that are shown while that session has no summary."""

MOST_CASES = 4
"""The most cases of the CaseBank in one prompt."""

_MAX_CHARS = 500
_CASE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Briefing:
    """The system message of a turn, and the ids of the cases in it."""

    text: str
    case_ids: tuple[str, ...] = ()


def halved(limits: MemorySettings, prompt_tokens: int) -> MemorySettings:
    """The limits for a prompt that replaces one of `prompt_tokens` tokens, which did not fit the model.

    Each budget is halved. A budget that is greater than the prompt counts as large as the prompt, because half of it
    might leave nothing out. The agent's instructions and tools keep their budgets: an agent without them is another
    agent, and a long message must not remove a rule that the agent is to keep.
    """
    return limits.model_copy(update={name: min(getattr(limits, name), prompt_tokens) // 2 for name in _SHRINKING})


_SHRINKING = (
    "budget_working", "budget_stream", "budget_semantic", "budget_concepts", "budget_archive", "budget_meta",
)  # fmt: skip


def brief(
    runtime: Runtime, tenure: Tenure, agent: Agent, transcript: Transcript, *, limits: MemorySettings
) -> Briefing:
    """Build the system message within `limits`; `transcript` is the rest of the prompt.

    Runs one statement. Memories, cases and a previous session without a summary need further statements.

    Raises:
        CallAborted: the turn must stop; `tenure` has the reason.
        Unavailable: the database cannot be reached.
    """
    quoter, turn = Quoter(runtime.quoting_key), tenure.at_hand
    channel = _channel(turn.channel, turn.before.channel)
    earlier = _previous_session(runtime, turn.before, quoter, limits.budget_archive)
    left = limits.model_copy(update={"budget_archive": limits.budget_archive - estimate_tokens(earlier)})
    past, case_ids = _recall(runtime, tenure, transcript, left, quoter=quoter, bank=agent.bank)
    quotations = [each for each in (*past, earlier) if each]
    instructions = cut_to(agent.instructions, limits.budget_system - estimate_tokens(channel) - estimate_tokens(NOTE))
    parts = [instructions, channel, *([NOTE] if quotations else []), *quotations]
    return Briefing("\n\n".join(part for part in parts if part), case_ids)


def offered(agent: Agent, schemas: Sequence[ToolSchema], budget: int) -> tuple[ToolSchema, ...]:
    """The first tools of `schemas`, as many as fit in `budget` tokens. Only these tools are sent to the model.

    Logs a warning if tools are left out.
    """
    sent = affordable(schemas, budget)
    if len(sent) < len(schemas):
        log.warning(
            "agent %s: %d of its tools (from %s on) are not sent to the model: PERDURE_MEMORY__BUDGET_TOOLS is %d",
            agent.name, len(schemas) - len(sent), schemas[len(sent)].name, budget,
        )  # fmt: skip
    return sent


def _recall(
    runtime: Runtime,
    tenure: Tenure,
    transcript: Transcript,
    limits: MemorySettings,
    *,
    quoter: Quoter,
    bank: str | None,
) -> tuple[list[str], tuple[str, ...]]:
    """The sections about the past, and the ids of the cases in them. There are no sections if memory is unavailable."""
    turn = tenure.at_hand
    in_prompt = PromptWindow(tenure.session_id, transcript.first_seen(limits.budget_working))
    embedder = MemoizedEmbedder(runtime.embedder)
    occasion = SectionsRequest(
        turn.user_id,
        tenure.session_id,
        turn.before.session_id,
        transcript.asked,
        embedder.name,
        authors(turn.user_id),
        long=in_prompt.from_seq > 1,
        all_cases=runtime.settings.casebank.scope is CaseScope.ALL,
        bank=bank,
    )
    stream = runtime.redis_memory.stream if runtime.redis_memory is not None else None
    call = ModelCall(runtime.clock, limits.recall_timeout_s)
    tenure.step_within(limits.recall_timeout_s)
    cases: list[FoundCase] = []

    def search(query: str, related: Sequence[UUID]) -> list[Recalled]:
        return runtime.recall.using(embedder).search(
            turn.user_id, query, MOST_RECALLED, in_prompt=in_prompt, exclude_sessions=related, call=call
        )

    def answers(query: str) -> list[str]:
        try:
            near = runtime.cases.for_prompt(
                turn.user_id, query, MOST_CASES, bank=bank or "", embedder=embedder, call=call
            )
            cases.extend(near)
        except (Abandoned, Unavailable):
            raise
        except PerdureError as error:
            log.warning("turn %s continues without cases of the CaseBank: %s", turn.turn_id, error.message)
        return [_case(each) for each in cases]

    try:
        with tenure.calling(call):
            gathered = assemble_sections(
                runtime.database, occasion, limits, search, answers=answers, stream=stream, quoter=quoter
            )
            return gathered.sections, tuple(each.case_id for each in cases[: gathered.answers])
    except CallAborted:
        raise
    except PerdureError as error:
        log.warning("turn %s continues without its memories: %s", turn.turn_id, error.message)
    except DBAPIError:  # the user's text may make a query fail, which must not fail the turn
        log.exception("turn %s continues without its memories", turn.turn_id)
    return [], ()


def _case(case: FoundCase) -> str:
    served = "" if case.success_rate is None else f" (successful in {case.success_rate:.0f} % of its uses)"
    return f"- Asked: {cut(case.query, _CASE_CHARS)}\n  Answered{served}: {cut(case.response_text, _CASE_CHARS)}"


def _channel(present: str, previous: str | None) -> str:
    if previous is None or previous == present:
        return f"The user is writing on the channel '{present}'."
    return f"The user wrote on '{previous}' before and now writes on '{present}'."


def _previous_session(runtime: Runtime, before: Before, quoter: Quoter, budget: int) -> str:
    if before.session_id is None:
        return ""
    if before.summary is None:
        said = read_conversation(runtime.database, before.session_id, MAX_MESSAGES)
        lines = [label_lines(each.role, cut(each.content, _MAX_CHARS)) for each in said if each.content.strip()]
        title = "The last messages of your previous conversation with this user"
        return render(Section(CONVERSATION, title, lines[::-1], budget, backwards=True), quoter)
    title = "A summary of your previous conversation with this user"
    return render(Section(CONVERSATION, title, [before.summary], budget), quoter)
