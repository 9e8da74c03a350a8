"""Which turns a prompt shows: they leave it in blocks, so that consecutive prompts begin alike. All functions are pure.

A prompt has at least the newest `PERDURE_MEMORY__WORKING_TURNS` turns. It is full if it has more than twice as many, or
if they do not fit their budget. Its older half then leaves, and the running summary has it
(`perdure.sessions.running_summary`). Which turns leave next is decided when the prompt is half full, so that their
summary is ready when they leave.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from uuid import UUID

from perdure.agents import Agent
from perdure.models.protocol import Role
from perdure.sessions.running_summary import Running, extended
from perdure.settings import MemorySettings
from perdure.text.tokens import beginning, size
from perdure.turns.prompt.parts import latest
from perdure.turns.transcript import Entry

FEWEST_TURNS = 4
"""With fewer turns than this, turns leave prompts one by one, and there is no running summary.

An agent that is to see so little of its session would get all of it as a summary, at a statement for each turn.
"""

SUMMARY_SHARE = 4
"""The running summary has at most the budget of the turns divided by this number."""

_SHORTENED_BYTES = 600
"""The bytes that are kept of an old result of the present turn."""

Turn = Sequence[Entry]


def kept_turns(limits: MemorySettings, agent: Agent | None) -> int:
    """The newest turns that a prompt of the agent has in any case, the present one included."""
    return (agent and agent.keep_turns) or limits.working_turns


def turns_read(kept: int) -> int:
    """How many turns are read, so that a full prompt is noticed."""
    return kept if kept < FEWEST_TURNS else 2 * kept + 1


def turns_budget(limits: MemorySettings) -> int:
    """The tokens of the turns in a prompt; the running summary has the rest."""
    return limits.budget_working - limits.budget_working // SUMMARY_SHARE


def size_of(turn: Turn) -> int:
    return sum(entry.text_tokens for entry in turn)


def change(
    turns: Sequence[Turn], running: Running, *, kept: int, budget: int, forgotten: Collection[UUID] = ()
) -> Running | None:
    """What the running summary becomes at the beginning of the last of `turns`; `None`: it does not change.

    That turn has only the user's messages, and the others are settled. At most twice `kept` turns stay in the prompt,
    of at most `budget` tokens, but the last one always stays. An extract has nothing of the turns `forgotten`.
    """
    most = 2 * kept
    if kept < FEWEST_TURNS or len(turns) == 1:
        return None
    if _is_full(turns, most, budget):
        return _after_leaving(turns, running, most, budget, forgotten)
    return _planned(turns, running, most, budget) if running.next_seq is None else None


def _after_leaving(
    turns: Sequence[Turn], running: Running, most: int, budget: int, forgotten: Collection[UUID]
) -> Running:
    """The planned turns leave. If there is no plan, or too much stays, the older half of what stays does, too."""
    staying, found = list(turns), running
    if running.next_seq is not None:
        gone = [turn for turn in turns[:-1] if _end([turn]) <= running.next_seq]
        text = running.next_text or _extended(running.text, gone, forgotten)
        staying, found = staying[len(gone) :], Running(running.next_seq, text, extractive=running.next_text is None)
    if running.next_seq is None or _is_full(staying, most, budget):
        kept = latest(staying, size_of, budget // 2)[-(most // 2) :]
        if gone := staying[: len(staying) - len(kept)]:
            found = Running(_end(gone), _extended(found.text, gone, forgotten), extractive=True)
        staying = kept
    return _planned(staying, found, most, budget) or found


def _planned(turns: Sequence[Turn], running: Running, most: int, budget: int) -> Running | None:
    """If the prompt is half full, all turns but the last leave it next."""
    if len(turns) == 1 or not _is_full(turns, most // 2, budget // 2):
        return None
    return replace(running, next_seq=_end(turns[:-1]), next_text=None)


def shortened(present: Turn, budget: int) -> list[Entry]:
    """The present turn. If it exceeds `budget` tokens, the tools' results before its newest round are cut."""
    newest = max((at for at, entry in enumerate(present) if entry.role is Role.ASSISTANT), default=0)
    if size_of(present) <= budget:
        return list(present)
    return [_cut(entry) if at < newest else entry for at, entry in enumerate(present)]


def _cut(entry: Entry) -> Entry:
    if entry.role is not Role.TOOL or size(entry.content) <= _SHORTENED_BYTES:
        return entry
    return replace(entry, content=beginning(entry.content, _SHORTENED_BYTES))


def _is_full(turns: Sequence[Turn], most: int, budget: int) -> bool:
    return len(turns) > most or sum(map(size_of, turns)) > budget


def _end(turns: Sequence[Turn]) -> int:
    """The `seq` of the last message of settled turns."""
    return turns[-1][-1].seq or 0


def _extended(text: str, turns: Sequence[Turn], forgotten: Collection[UUID]) -> str:
    return extended(text, (entry.message for turn in turns for entry in turn if entry.turn_id not in forgotten))
