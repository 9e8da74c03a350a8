"""A settled turn as a bundle: one JSON object, with which `perdure.testing.recorded` replays the turn without servers.

A bundle has what is stored of the turn: the messages before it that its prompts had, its own messages, its calls with
their results, and the instructions that a function of the agent made. It also has what the turn's prompt would be now:
the agent's instructions and tools as this installation declares them, and the memories and cases that recall finds now.
`not_reproduced` lists what a replay lacks. docs/testing.md describes the members.

The bundle of a session has those of its newest turns, each with the messages before it.

Called by `perdure turns export` and `perdure sessions export`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import tenant_of, user_of
from perdure.agents import Agent
from perdure.clock import iso
from perdure.database.engine import Statement
from perdure.errors import Conflict, NotFound
from perdure.models.protocol import Role
from perdure.runtime import Runtime
from perdure.text.quoting import Quoter
from perdure.text.untrusted import load_object
from perdure.turns.lease.tenure import Before, TurnRow, TurnScope
from perdure.turns.prompt.build import past_parts, within_window
from perdure.turns.prompt.tools import window
from perdure.turns.prompt.window import kept_turns
from perdure.turns.reading import SETTLED, read_turn
from perdure.turns.transcript import Entry, Transcript, read_entry

FORMAT, VERSION = "perdure.turn", 1
CONVERSATION = "perdure.conversation"
"""The format of the bundle of a session; its version is that of its turns."""

_READ = Statement(
    "turns.read_recorded",
    """
    SELECT t.turn_id, t.session_id, t.seq, t.user_id, t.agent, t.channel, t.first_seq, t.started_at, t.metadata::text,
           t.instructions, s.previous_session_id, previous.summary AS previous_summary,
           coalesce(
               (SELECT channel FROM turns WHERE session_id = t.session_id AND seq = t.seq - 1),
               (SELECT channel FROM turns WHERE session_id = s.previous_session_id ORDER BY seq DESC LIMIT 1)
           ) AS previous_channel,
           perdure_now() AS now
    FROM turns AS t JOIN sessions AS s USING (session_id)
         LEFT JOIN sessions AS previous ON previous.session_id = s.previous_session_id
    WHERE t.turn_id = %(turn_id)s::uuid
    """,
    writes=False,
)

# The newest turns of a session that have settled, and have messages.
_TURNS = Statement(
    "turns.recorded_of_session",
    """
    SELECT turn_id FROM turns
    WHERE session_id = %(session_id)s::uuid AND settled_at IS NOT NULL AND first_seq IS NOT NULL
    ORDER BY seq DESC LIMIT %(most)s
    """,
    writes=False,
)

_MESSAGES = Statement(
    "turns.messages_of_recorded",
    """
    SELECT m.* FROM messages AS m
    WHERE m.session_id = %(session_id)s AND m.turn_id = %(turn_id)s ORDER BY m.seq
    """,
    writes=False,
)

_CALLS = Statement(
    "turns.calls_of_recorded",
    """
    SELECT message_seq, position, tool, arguments, effect, status, waits_for, approver FROM tool_effects
    WHERE turn_id = %(turn_id)s ORDER BY message_seq, position
    """,
    writes=False,
)


def record(runtime: Runtime, turn_id: UUID) -> dict[str, Any]:
    """The bundle of a settled turn, as JSON values.

    Raises:
        NotFound: there is no such turn, or its user was erased.
        Conflict: the turn is not settled, or it has no messages, because it ended before it began.
        Unavailable: the database cannot be reached.
    """
    database = runtime.database
    body = read_turn(database, turn_id)
    if body["status"] not in SETTLED:
        raise Conflict(f"The turn is {body['status']}: only a settled turn can be exported.")
    rows = database.run(_READ, {"turn_id": turn_id})
    if not rows:
        raise NotFound("There is no such turn.")
    turn = _turn_row(rows[0])
    given = {"session_id": turn.session_id, "turn_id": turn_id}
    messages = [read_entry(row) for row in database.run(_MESSAGES, given)]
    if not messages:
        raise Conflict("The turn has no messages: it ended before it began.")
    agent = runtime.agents.find(turn.agent)
    kept = kept_turns(runtime.settings.memory, agent)
    loaded = Transcript.load(database, turn, window=kept, before_seq=messages[0].seq or 1)
    history = [entry for each in loaded.turns for entry in each if entry.turn_id != turn_id]
    transcript = Transcript(turn_id, [*history, *messages], loaded.running)
    parts, case_ids, missing = _recalled(runtime, turn, agent, transcript)
    return {
        "format": FORMAT,
        "version": VERSION,
        "recorded_at": rows[0].now.isoformat(),
        "turn_id": str(turn_id),
        "session_id": str(turn.session_id),
        "user_id": user_of(turn.user_id),
        "tenant": tenant_of(turn.user_id),
        "agent": turn.agent,
        "channel": turn.channel,
        "previous_channel": turn.before.channel,
        "metadata": dict(turn.metadata),
        "started_at": iso(turn.started_at),
        "timezone": turn.zone(runtime.settings.timezone).key,
        "status": body["status"],
        "reply": body["reply"],
        "error": body["error"],
        "steps": body["steps"],
        "usage": body["usage"],
        "history": [_message(entry) for entry in history],
        "messages": [_message(entry) for entry in messages],
        "calls": _calls(messages, database.run(_CALLS, given)),
        "prompt": {**_declared(agent, rows[0].instructions), "parts": parts, "case_ids": list(case_ids)},
        "not_reproduced": [*missing, *_not_reproduced(agent, messages)],
    }


def record_session(runtime: Runtime, session_id: UUID, most: int) -> dict[str, Any]:
    """The bundle of a session, as JSON values: its newest settled turns, at most `most`, in their order.

    Raises:
        NotFound: there is no such session, or no turn of it has settled.
        Unavailable: the database cannot be reached.
    """
    rows = runtime.database.run(_TURNS, {"session_id": session_id, "most": most})
    if not rows:
        raise NotFound("There is no such session, or none of its turns is settled.")
    turns = [record(runtime, row.turn_id) for row in reversed(rows)]
    return {"format": CONVERSATION, "version": VERSION, "session_id": str(session_id), "turns": turns}


def _turn_row(row: Row[Any]) -> TurnRow:
    return replace(
        TurnRow.begun(row.session_id, row),
        before=Before(row.previous_channel, row.previous_session_id, row.previous_summary),
        started_at=row.started_at,
        metadata={} if row.metadata is None else load_object(row.metadata),
    )


def _message(entry: Entry) -> dict[str, Any]:
    stored = entry.to_dict(0)
    del stored["position"]
    return {**stored, "turn_id": str(entry.turn_id), "seq": entry.seq}


def _calls(messages: Sequence[Entry], rows: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    """The calls in the order of the messages. `arguments` are those that ran, `asked` those that the model wrote."""
    effects = {(row.message_seq, row.position): row for row in rows}
    results = {entry.tool_call_id: entry.content for entry in messages if entry.role is Role.TOOL}
    found = []
    for entry in messages:
        for position, call in enumerate(entry.tool_calls):
            row = effects.get((entry.seq or 0, position))
            found.append({
                "call_id": call.id,
                "tool": call.name,
                "asked": call.arguments,
                "arguments": call.arguments if row is None else row.arguments,
                "status": "failed" if row is None else row.status,
                "ran": row is not None,
                "approver": None if row is None else row.approver,
                "result": results.get(call.id),
            })  # fmt: skip
    return found


def _recalled(
    runtime: Runtime, turn: TurnRow, agent: Agent | None, transcript: Transcript
) -> tuple[list[dict[str, Any]], tuple[str, ...], list[str]]:
    """The parts of the prompt about the past, as they are now; and why there are none."""
    if agent is None:
        return [], (), [f"memories: this installation has no agent {turn.agent!r}"]
    limits = within_window(runtime.settings.memory, window(runtime.settings, agent))
    scope = TurnScope(runtime.clock, runtime.settings.turn.lease_s)
    parts, case_ids = past_parts(
        runtime, scope, turn, agent, transcript, limits=limits, quoter=Quoter(runtime.quoting_key), is_noted=False
    )
    told = [{**asdict(replace(each, ids=(), scores=())), "pieces": list(each.pieces)} for each in parts if each.pieces]
    for each in told:
        del each["name"], each["ids"], each["scores"]
    return told, case_ids, ["memories and cases: as recalled when the turn was exported, not when it ran"]


def _declared(agent: Agent | None, stored: str | None) -> dict[str, Any]:
    """The instructions and tools of the agent as it is declared now; `None` where only pydantic-ai knows them."""
    if agent is None or not agent.is_own:
        return {"instructions": stored, "tools": None}
    text = agent.instructions if isinstance(agent.instructions, str) else None
    tools = {each.name: dict(each.parameters) for each in agent.toolset(None).schemas()}
    return {"instructions": text if stored is None else stored, "tools": tools}


def _not_reproduced(agent: Agent | None, messages: Sequence[Entry]) -> list[str]:
    found = ["working variables: a replay begins without any", "replies that a guard or a hook has changed or refused"]
    if any(entry.parts for entry in messages):
        found.append("files: a replay has their names and types, not their contents")
    if agent is not None and agent.servers:
        found.append("tools of MCP servers: a replay connects to none")
    if agent is not None and not agent.is_own:
        found.append("the instructions and tools of an agent of pydantic-ai, which are not compared")
    return found
