"""What was in the prompts of a turn: the records of its replies (`turns.prompt.record`), with the texts they refer to.

The texts are read from the rows that the prompts were made of. What was erased or forgotten is missing, and what has
changed since is marked: a part has a `note` that says so. The sentences with which perdure explains quotations to the
model, and the marks of the quotations, are left out.

Called by `perdure turns prompt` and `GET /v1/turns/{id}/prompt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.casebank.search import FoundCase
from perdure.database.engine import Executor, Statement, as_json
from perdure.errors import NotFound
from perdure.memory.recall.past import Dated, read_surroundings
from perdure.memory.recall.search import Layer, Recalled
from perdure.models.protocol import Role
from perdure.settings import Settings
from perdure.text.tokens import cut_to, estimate_tokens
from perdure.turns.additions import Additions
from perdure.turns.lease.tenure import Before, TurnRow
from perdure.turns.prompt import record
from perdure.turns.prompt.build import circumstances, dated, last_messages, made_part, told_case, told_recalled
from perdure.turns.prompt.parts import Place
from perdure.turns.prompt.window import shortened
from perdure.turns.transcript import Entry, read_entry

_READ = Statement(
    "prompts.turn",
    """
    SELECT t.turn_id, t.session_id, t.seq, t.user_id, t.agent, t.channel, t.first_seq, t.started_at, t.accepted_at,
           t.metadata, t.additions, t.instructions,
           coalesce(
               (SELECT channel FROM turns WHERE session_id = t.session_id AND seq = t.seq - 1),
               (SELECT channel FROM turns WHERE session_id = s.previous_session_id ORDER BY seq DESC LIMIT 1)
           ) AS previous_channel
    FROM turns AS t JOIN sessions AS s USING (session_id)
    WHERE t.turn_id = %(turn_id)s::uuid
    """,
    writes=False,
)

_OF_TURN = Statement(
    "prompts.of_turn",
    """
    SELECT m.* FROM messages AS m
    WHERE m.session_id = %(session_id)s AND m.seq >= %(first_seq)s AND m.turn_id = %(turn_id)s ORDER BY m.seq
    """,
    writes=False,
)

_EARLIER = Statement(
    "prompts.earlier",
    """
    SELECT m.*
    FROM jsonb_to_recordset(%(ranges)s::jsonb) AS r (lower bigint, upper bigint)
    JOIN messages AS m ON m.session_id = %(session_id)s AND m.seq BETWEEN r.lower AND r.upper
    ORDER BY m.seq
    """,
    writes=False,
)

_SESSIONS = Statement(
    "prompts.sessions",
    """
    SELECT session_id, created_at, summary FROM sessions
    WHERE session_id = ANY (%(ids)s::uuid[]) AND user_id = %(user_id)s AND summary <> ''
    """,
    writes=False,
)

_RUNNING = Statement(
    "prompts.running",
    "SELECT to_seq, summary FROM running_summaries WHERE session_id = %(session_id)s",
    writes=False,
)

_MEMORIES = Statement(
    "prompts.memories",
    """
    SELECT memory_id, content, valid_from, valid_to FROM memories
    WHERE memory_id = ANY (%(ids)s::uuid[]) AND user_id = %(user_id)s
    """,
    writes=False,
)

_MESSAGES = Statement(
    "prompts.messages",
    """
    SELECT m.session_id, m.seq, m.role, m.author, m.content, m.created_at
    FROM unnest(%(session_ids)s::uuid[], %(seqs)s::bigint[]) AS wanted (session_id, seq)
    JOIN messages AS m USING (session_id, seq) JOIN sessions AS s USING (session_id)
    WHERE s.user_id = %(user_id)s
    """,
    writes=False,
)

_CASES = Statement(
    "prompts.cases",
    """
    SELECT case_id, query, response_text, category_path, usage_count, success_rate, status FROM cases
    WHERE case_id = ANY (%(ids)s::text[])
    """,
    writes=False,
)

_KINDS = {
    "archive": "summary", "previous": "summary", "last_messages": "history", "running": "summary",
    "hot": "memory", "events": "memory", "relations": "memory", "recalled": "memory", "cases": "case",
}  # fmt: skip

_UNKEPT = {
    "events": "the events of channels are not kept",
    "relations": "the relations of memories are not kept as the prompt had them",
}


def read_prompts(
    executor: Executor, settings: Settings, agents: Agents, turn_id: UUID, *, step: int | None = None
) -> dict[str, Any]:
    """What the model calls of a turn were given, as JSON values: `{steps: [...]}`. `step` counts from 1.

    Raises:
        NotFound: there is no such turn or step, or its user was erased.
        Unavailable: the database cannot be reached.
    """
    rows = executor.run(_READ, {"turn_id": turn_id})
    if not rows:
        raise NotFound("There is no such turn.")
    reader = _Reader(executor, settings, agents, rows[0])
    found = list(reader.steps(step))
    if step is not None and not found:
        raise NotFound("There is no such step: no reply of the turn's model is stored for it.")
    return {"steps": found}


@dataclass
class _Reader:
    """Reads the prompts of the turn in `row`, a row of `_READ`."""

    executor: Executor
    settings: Settings
    agents: Agents
    row: Row[Any]

    def steps(self, only: int | None) -> Iterator[dict[str, Any]]:
        """The prompts of the steps, or of the step `only`."""
        row = self.row
        of_turn: list[tuple[Entry, Any]] = []
        if row.first_seq is not None:
            given = {"session_id": row.session_id, "turn_id": row.turn_id, "first_seq": row.first_seq}
            of_turn = [(read_entry(each), each.prompt) for each in self.executor.run(_OF_TURN, given)]
        before: Mapping[str, Any] | None = None
        replies = [each for each in of_turn if each[0].role is Role.ASSISTANT and each[0].model is not None]
        for number, (reply, stored) in enumerate(replies, start=1):
            before = None if stored is None else record.whole(stored, before)
            if only not in {None, number}:
                continue
            if before is None:
                yield {"step": number, "model": None, "settings": None, "instructions_hash": None, "parts": []}
                continue
            present = [entry for entry, _ in of_turn if (entry.seq or 0) < (reply.seq or 0)]
            yield {
                "step": number,
                "model": before["model"],
                "settings": before["settings"],
                "instructions_hash": before["instructions"]["sha256"],
                "agent": before["agent"],
                "fingerprint": before["fingerprint"],
                "release": before["release"],
                "parts": list(self._parts(before, present)),
            }

    def _parts(self, made: Mapping[str, Any], present: Sequence[Entry]) -> Iterator[dict[str, Any]]:
        """The parts of a prompt in their order, and its tools."""
        yield self._instructions(made)
        known = [each for each in made["parts"] if each["name"] in _KINDS]  # a newer release may know others
        quoted = [(made_part(each["name"], (), 0).place, each) for each in known]
        yield from (self._quoted(each) for place, each in quoted if place is not Place.TURN)
        yield from self._history(made["history"])
        yield from (self._quoted(each) for place, each in quoted if place is Place.TURN)
        if made["is_noted"]:
            now = self._circumstances()
            yield {"kind": "instructions", "tokens": estimate_tokens(now), "text": now}
        for each in shortened(present, made["history"]["budget"] // 2):
            yield from _said("message", each)
        if made["tools"]["names"]:
            yield {
                "kind": "tools",
                "tokens": made["tools"]["tokens"],
                "ids": made["tools"]["names"],
                "text": None,
                "note": f"the schemas are not kept; their SHA-256 is {made['tools']['sha256']}",
            }

    def _instructions(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """The agent's instructions, with those of the turn's client, and the circumstances of the turn."""
        sent, row = made["instructions"], self.row
        agent = self.agents.find(made["agent"])
        base = row.instructions
        if base is None and agent is not None and isinstance(agent.instructions, str):
            base = agent.instructions
        text, note = None, "made by an agent of pydantic-ai; only their hash is kept"
        if sent["room"] is not None:
            text = cut_to(Additions.from_dict(row.additions).instructed(base or ""), sent["room"])
            note = "changed since: the agent is now declared with others"
        is_same = text is not None and record.sha256(text) == sent["sha256"]
        told = {} if is_same else {"note": note}
        return {"kind": "instructions", "tokens": sent["tokens"], "text": text if is_same else None, **told}

    @property
    def _turn(self) -> TurnRow:
        row = self.row
        begun = TurnRow.begun(row.session_id, row)
        return replace(begun, before=Before(row.previous_channel), metadata=row.metadata or {})

    def _circumstances(self) -> str:
        """What perdure itself tells the model at the end of its note."""
        return circumstances(self._turn, self.row.started_at or self.row.accepted_at, self.settings.timezone)

    def _history(self, made: Mapping[str, Any]) -> list[dict[str, Any]]:
        ranges = [{"lower": lower, "upper": upper} for lower, upper in made["ranges"]]
        given = {"session_id": self.row.session_id, "ranges": as_json(ranges)}
        found = [read_entry(each) for each in self.executor.run(_EARLIER, given)] if ranges else []
        missing = sum(upper - lower + 1 for lower, upper in made["ranges"]) - len(found)
        gone = {"kind": "history", "tokens": 0, "text": None, "note": f"{missing} messages are no longer stored"}
        return [*([gone] if missing else []), *(part for each in found for part in _said("history", each))]

    def _quoted(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """A quoted part, from the rows that it was made of."""
        name, ids, scores = made["name"], made.get("ids", []), made.get("scores")
        found = self._pieces(name, ids, made["budget"])
        if name == "last_messages":  # one id for all of them
            pieces, missing = list(found.get(ids[0], ())), int(not found)
        else:
            pieces = [piece for each in ids for piece in found.get(each, ())]
            missing = sum(each not in found for each in ids)
        told = made_part(name, pieces, made["budget"]).told()
        text = "\n".join(told)
        note = _UNKEPT.get(name)
        if note is None and missing:
            note = f"{missing} of {len(ids)} erased, forgotten or replaced since"
        elif note is None and record.digest(text) != made["digest"]:
            note = "changed since"
        return {
            "kind": _KINDS[name],
            "tokens": made["tokens"],
            **({"ids": ids} if ids else {}),
            **({"scores": scores} if scores else {}),
            "text": text or None,
            **({} if note is None else {"note": note}),
        }

    def _pieces(  # noqa: PLR0911 (each kind)
        self, name: str, ids: Sequence[str], budget: int
    ) -> Mapping[str, Sequence[str]]:
        """The pieces of a part's text, by the ids that still have one."""
        run, user = self.executor.run, UserKey(self.row.user_id)
        match name:
            case "archive":
                rows = run(_SESSIONS, {"ids": list(map(UUID, ids)), "user_id": user})
                return {
                    str(each.session_id): [
                        dated(Dated(each.created_at, each.summary), self._turn.zone(self.settings.timezone))
                    ]
                    for each in rows
                }
            case "previous":
                rows = run(_SESSIONS, {"ids": list(map(UUID, ids)), "user_id": user})
                return {str(each.session_id): [each.summary] for each in rows}
            case "last_messages":
                said = last_messages(self.executor, UUID(ids[0]))
                return {ids[0]: said} if said else {}
            case "running":
                rows = run(_RUNNING, {"session_id": self.row.session_id})
                return {str(each.to_seq): [cut_to(each.summary, budget // 2)] for each in rows}  # as `past_parts`
            case "hot":
                rows = run(_MEMORIES, {"ids": list(map(UUID, ids)), "user_id": user})
                return {
                    str(each.memory_id): [
                        dated(Dated(each.valid_from, each.content), self._turn.zone(self.settings.timezone))
                    ]
                    for each in rows
                }
            case "recalled":
                return self._recalled(ids, user)
            case "cases":
                rows = run(_CASES, {"ids": ids})
                return {each.case_id: [told_case(FoundCase(**each._asdict(), similarity=0.0))] for each in rows}
            case _:
                return {}

    def _recalled(self, ids: Sequence[str], user: UserKey) -> Mapping[str, Sequence[str]]:
        places = [each.split(":") for each in ids if ":" in each]
        messages = {
            "session_ids": [UUID(session_id) for session_id, _ in places], "seqs": [int(seq) for _, seq in places],
            "user_id": user,
        }  # fmt: skip
        found = [
            Recalled(
                Layer.EPISODIC, f"{each.session_id}:{each.seq}", each.content, 0.0, (), each.created_at,
                role=each.role, author=each.author,
            )
            for each in (self.executor.run(_MESSAGES, messages) if places else ())
        ]  # fmt: skip
        memories = {"ids": [UUID(each) for each in ids if ":" not in each], "user_id": user}
        found += [
            Recalled(
                Layer.SEMANTIC, each.memory_id, each.content, 0.0, (), each.valid_from, valid_to=each.valid_to
            )
            for each in (self.executor.run(_MEMORIES, memories) if memories["ids"] else ())
        ]  # fmt: skip
        around = read_surroundings(self.executor, user, found)
        zone = self._turn.zone(self.settings.timezone)
        return {str(each.id): [told_recalled(each, around, zone)] for each in found}


def _said(kind: str, entry: Entry) -> Iterator[dict[str, Any]]:
    """A message of the transcript; a rejected reply is followed by what is wrong with it."""
    for message in entry.messages:
        calls = [call.to_dict() for call in message.tool_calls]
        yield {
            "kind": kind,
            "tokens": estimate_tokens(message.content),
            "ids": [str(entry.seq)],
            "role": message.role.value,
            "text": message.content,
            **({"tool_calls": calls} if calls else {}),
        }
