"""Stores the step loop's commits in memory instead of PostgreSQL.

The step loop runs named statements (`perdure.database.engine.Statement`) and reads the returned rows. `MemoryStore`
implements the statements that the step loop runs for a user without earlier sessions, and returns the rows that
PostgreSQL would return. Any other statement raises `Unavailable`. `MemoryStore` stores messages, tool calls and working
variables. It does not check fencing tokens, since no other process can hold the session.

The tests in tests/testing run the same turns on `MemoryStore` and on PostgreSQL, and compare the results.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast
from uuid import UUID, uuid4

from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database, Statement, Transaction
from perdure.errors import Unavailable
from perdure.files.spool import Spool
from perdure.files.store import Call, Files, Owner, Stored
from perdure.sessions.running_summary import Running
from perdure.settings import FileSettings
from perdure.turns.transcript import heard


class _StoredFile(NamedTuple):
    """A file, with the columns of its row that prompts read, and its content."""

    file_id: UUID
    user_id: UserKey | None
    media_type: str
    name: str | None
    size: int
    width: int | None
    height: int | None
    pages: int | None
    sha256: bytes
    content: bytes


class MemoryFiles(Files):
    """Stores files in memory."""

    def __init__(self) -> None:
        super().__init__(cast("Database", None), FileSettings(), MovedClock())
        self._files: dict[UUID, _StoredFile] = {}

    def put(
        self,
        content: Spool,
        owner: Owner,
        *,
        named: str | None = None,
        name: str | None = None,
        of_call: Call | None = None,  # noqa: ARG002 (nothing runs again)
    ) -> Stored:
        """Store a file. Raises as `Files.put`."""
        kind, data, file_id = content.kind(named), b"".join(content.pieces(2**20)), uuid4()
        pixels = kind.width, kind.height
        self._files[file_id] = _StoredFile(
            file_id, owner.user, kind.media_type, name, len(data), *pixels, kind.pages, content.sha256, data
        )
        return Stored(file_id, kind.media_type, len(data), content.sha256.hex())

    def rows(self, file_ids: Iterable[UUID]) -> dict[UUID, Row[Any]]:
        """The files that exist."""
        return {each: cast("Row[Any]", self._files[each]) for each in file_ids if each in self._files}

    def pieces(self, row: Row[Any], most: int | None = None) -> Iterator[bytes]:
        """The content in one piece."""
        yield row.content[:most]


_LEFT_OPEN = {"intended": "unknown", "asked": "denied", "approved": "failed"}
"""The statuses of calls that are open when their turn ends, and those that they then have."""

_INTENT = ("position", "tool", "arguments", "effect", "status", "waits_for", "approver")


@dataclass(slots=True)
class Effect:
    """The row of one tool call, with the columns of `tool_effects` that the step loop reads."""

    effect_id: UUID
    message_seq: int
    position: int
    tool: str
    arguments: str
    effect: str
    status: str
    result: str | None = None
    variables: list[Any] | None = None
    finished: bool = False
    undecided_s: float = 0.0
    waits_for: str | None = None
    approver: str | None = None
    sent: bool = False
    parts: list[Any] | None = None
    payload: Any = None
    used: Any = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What another agent was asked, and in which turn."""

    agent: str
    task: str
    turn_id: UUID


@dataclass(frozen=True, slots=True)
class _Above:
    """A row that the statement `turns.above` returns."""

    turn_id: UUID
    agent: str


@dataclass(frozen=True, slots=True)
class _Used:
    """A row that the statement `turns.used` returns."""

    agent: str
    model: str
    fallback: bool | None
    usage: Any
    created_at: None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """One class for the rows of several statements. It has the columns of all of them."""

    base: int = 0
    cancel_requested_at: None = None
    undecided: bool = False
    variables: str | None = None
    ending: bool = False
    instructions: str | None = None
    joined: Sequence[Mapping[str, Any]] | None = None
    past: None = None
    metadata: None = None
    too_deep: bool = False
    is_new: bool = False
    priority: int = 5


@dataclass(frozen=True, slots=True)
class _Call:
    """The row that the statement `turns.read_call` returns: a call of a Celery tool."""

    effect_id: UUID
    agent: str
    tool: str
    arguments: str
    parts: list[Any] | None
    left_s: float
    waits: bool = True
    session_id: None = None
    turn_id: None = None
    priority: int = 5


class MemoryStore(Database):
    """The database of one conversation. Threads may share it."""

    def __init__(self) -> None:
        """Create an empty store. `Database.__init__` is not called, so there is no engine and no connection."""
        self.messages: list[dict[str, Any]] = []
        self.effects: dict[UUID, Effect] = {}
        self.variables: dict[str, Any] = {}
        self.agent = ""
        self.caller: tuple[MemoryStore, UUID] | None = None
        """The store and the turn of the agent that asks this one."""
        self.asked: dict[UUID, Asked] = {}
        """What other agents were asked, by the call's effect id."""
        self.children: list[tuple[UUID, MemoryStore]] = []
        """The stores of those agents, with the turns that asked them."""
        self.instructions: str | None = None
        """Those of the turn at hand."""
        self.running = Running()
        """The running summary, which is made of extracts."""
        self.steering: list[dict[str, Any]] = []
        """The messages that steer the running turn and have not joined it, as rows of the inbox."""
        self._lock = threading.RLock()
        self._statements: dict[str, Callable[[Mapping[str, Any]], Sequence[object]]] = {
            "turns.step": self._step,
            "turns.step_joining": self._step_joining,
            "turns.step_handing_off": self._step,
            "turns.delegate": self._delegate,
            "turns.used": lambda given: self.used(given["turn_id"], with_others=given["with_others"]),
            "turns.above": lambda _: self.above(),
            "turns.step_replaced": self._step,
            "turns.finish_effect": self._finish_effect,
            "turns.extend_effect": lambda _: [_Row()],
            "turns.change_arguments": self._change_arguments,
            "turns.repeat_effect": self._repeat_effect,
            "turns.effects_of_step": self._effects_of_step,
            "turns.ask_approval": self._ask_approval,
            "turns.defer_call": self._defer_call,
            "turns.intend_call": self._intend_call,
            "turns.begin_approved": self._begin_approved,
            "turns.note_sent": self._note_sent,
            "turns.lock_held": lambda _: [_Row()],
            "turns.lock_of_call": lambda _: [_Row()],
            "turns.read_call": self._read_call,
            "turns.finish_task": self._finish_task,
            "turns.close_call": self._close_call,
            "turns.resume_parked": lambda _: [],
            "turns.make_parts": self._set_parts,
            "turns.set_parts": self._set_parts,
            "turns.leave_out_tools": lambda _: [],
            "turns.instructions": lambda _: [_Row(instructions=self.instructions)],
            "turns.keep_instructions": self._keep_instructions,
            "turns.is_ending": lambda _: [_Row()],
            "turns.refuse_answer": self._refuse_answer,
            "turns.close_question": self._close_question,
            "turns.charge_question": self._charge_question,
            "turns.note_received": lambda _: [],
            "snapshots.kept": lambda _: [_Row(variables=json.dumps(self.variables))],
            "context.past": lambda _: [_Row(past=None)],
            "summaries.keep": self._keep_summary,
            "summaries.forgotten": lambda _: [],
            "windows.read": lambda _: [],
            "windows.learn": lambda _: [],
            "windows.forget": lambda _: [],
        }

    def run(self, statement: Statement, parameters: Mapping[str, Any], *, urgent: bool = False) -> Sequence[Row[Any]]:
        """Run a statement of the step loop.

        Raises:
            Unavailable: the statement needs PostgreSQL.
        """
        del urgent
        answer = self._statements.get(statement.name)
        if answer is None:
            raise Unavailable(f"perdure.testing has no PostgreSQL, which the statement {statement.name} needs.")
        with self._lock:
            return cast("Sequence[Row[Any]]", answer(parameters))

    @contextmanager
    def transaction(self, name: str) -> Iterator[Transaction]:
        """A block of statements. If it raises, nothing is rolled back."""
        del name
        yield cast("Transaction", self)

    def close(self) -> None:
        """Do nothing: the store has no connections."""

    def append(self, turn_id: UUID, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append messages of a turn, in the form of `Entry.to_dict`."""
        base = len(self.messages)
        self.messages += [{**each, "turn_id": turn_id, "seq": base + each["position"]} for each in messages]

    def steer(self, message: dict[str, Any]) -> None:
        """Add a message, in the form of a row of the inbox, that joins the running turn after a step."""
        with self._lock:
            self.steering.append(message)

    def decide(self, effect: Effect, *, approved: bool, denial: str) -> None:
        effect.status, effect.result = ("approved", None) if approved else ("denied", denial)

    def record(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Record the results of calls while other calls of the same message wait."""
        for result in results:
            effect = self.effects[result["effect_id"]]
            if not effect.finished and effect.status in {"intended", "approved"}:
                effect.status, effect.result = result["status"], result["result"]
                effect.finished = result["status"] != "unknown"

    def answer(self, effect: Effect, said: Mapping[str, Any]) -> None:
        """Record the user's answer to a question."""
        payload = effect.payload or {}
        effect.payload = {**payload, "said": [*payload.get("said", ()), said]}

    def close_calls(self) -> None:
        """End the calls that the end of their turn leaves open."""
        for effect in self.effects.values():
            effect.status = _LEFT_OPEN.get(effect.status, effect.status)

    def awaiting_decision(self) -> list[Effect]:
        return [each for each in self.effects.values() if each.status == "asked"]

    def waiting(self) -> list[Effect]:
        return [each for each in self.effects.values() if each.waits_for is not None and each.status == "intended"]

    def _step_joining(self, step: Mapping[str, Any]) -> Sequence[object]:
        joined, self.steering = self.steering, []
        [row] = self._step({**step, "joins": False})
        told = heard(step["turn_id"], joined)
        self.append(step["turn_id"], [entry.to_dict(position) for position, entry in enumerate(told, start=1)])
        return [replace(cast("_Row", row), joined=joined)]

    def _step(self, step: Mapping[str, Any]) -> Sequence[object]:
        if step["joins"] and self.steering:
            return []
        base = len(self.messages)
        self.append(step["turn_id"], json.loads(step["messages"]))
        for intent in json.loads(step["intents"]):
            effect_id = UUID(intent["effect_id"])
            columns = {name: intent[name] for name in _INTENT}
            self.effects[effect_id] = made = Effect(effect_id, len(self.messages), **columns)
            made.undecided_s = 0.0 if made.waits_for is None else intent["timeout_s"]
        for result in json.loads(step["results"]):
            effect = self.effects[UUID(result["effect_id"])]
            effect.status, effect.result, effect.variables = result["status"], result["result"], None
            effect.finished = result["status"] != "unknown"
        self.agent = step.get("agent", self.agent)
        if step["variables"] is not None:
            self.variables = json.loads(step["variables"])
        return [_Row(base)]

    def _delegate(self, given: Mapping[str, Any]) -> Sequence[object]:
        if len(self.above()) >= given["most"]:
            return [_Row(too_deep=True)]
        self.effects[given["effect_id"]].sent = True
        self.asked.setdefault(given["effect_id"], Asked(given["agent"], given["task"], given["turn_id"]))
        return [_Row(is_new=True)]

    def above(self) -> Sequence[_Above]:
        """The turns for which this store's works, the nearest first."""
        if self.caller is None:
            return []
        store, turn_id = self.caller
        return [_Above(turn_id, store.agent), *store.above()]

    def used(self, turn_id: UUID, *, with_others: bool) -> Sequence[_Used]:
        """The replies of a turn of this store, or of one above it; `with_others`: and of those that it asked."""
        if self.caller is not None and any(each.turn_id == turn_id for each in self.above()):
            return self.caller[0].used(turn_id, with_others=with_others)
        said = [each for each in self.messages if each["turn_id"] == turn_id]
        names = [(each.get("prompt") or {}).get("agent") for each in said]
        agent, own = next(filter(None, names), self.agent), list[_Used]()
        for each, name in zip(said, names, strict=True):
            agent = name or agent
            if each["model"] is not None if each["role"] == "assistant" else each["usage"] is not None:
                own.append(_Used(agent, each["model"], each["fallback"], each["usage"]))
        asked = [child for asking, child in self.children if with_others and asking == turn_id]
        return [*own, *(row for child in asked for row in child.used_in_all())]

    def used_in_all(self) -> Sequence[_Used]:
        """The replies of all turns of this store, and of those that they asked."""
        turns = {each["turn_id"] for each in self.messages}
        return [row for turn_id in turns for row in self.used(turn_id, with_others=True)]

    def _keep_summary(self, kept: Mapping[str, Any]) -> Sequence[object]:
        self.running = Running(kept["to_seq"], kept["summary"], kept["next_seq"], extractive=kept["extractive"])
        return [_Row()]

    def _keep_instructions(self, made: Mapping[str, Any]) -> Sequence[object]:
        self.instructions = self.instructions or made["instructions"]
        return [_Row(instructions=self.instructions)]

    def _finish_effect(self, finished: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[finished["effect_id"]]
        if effect.finished:
            return []
        if effect.status == "intended":
            effect.status = finished["status"]
        effect.result, effect.finished = finished["result"], True
        if finished.get("variables") is not None:
            effect.variables = json.loads(finished["variables"])
        if finished.get("payload") is not None:
            effect.payload = json.loads(finished["payload"])
        return []

    def _repeat_effect(self, repeated: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[repeated["effect_id"]]
        effect.status, effect.result, effect.payload, effect.finished = "intended", None, None, False
        return [_Row()]

    def _change_arguments(self, changed: Mapping[str, Any]) -> Sequence[object]:
        self.effects[changed["effect_id"]].arguments = changed["arguments"]
        return [_Row()]

    def _ask_approval(self, asked: Mapping[str, Any]) -> Sequence[object]:
        for call in json.loads(asked["calls"]):
            effect_id = UUID(call["effect_id"])
            columns = {name: call.get(name) for name in _INTENT}
            columns["status"] = "asked"
            self.effects[effect_id] = Effect(effect_id, asked["message_seq"], **columns)
        return [_Row()]

    def _intend_call(self, intended: Mapping[str, Any]) -> Sequence[object]:
        for call in json.loads(intended["calls"]):
            effect_id = UUID(call["effect_id"])
            columns = {**{name: call.get(name) for name in _INTENT}, "status": "intended"}
            self.effects[effect_id] = Effect(effect_id, intended["message_seq"], **columns)
        return [_Row()]

    def _defer_call(self, deferred: Mapping[str, Any]) -> Sequence[object]:
        for call in json.loads(deferred["calls"]):
            effect_id = UUID(call["effect_id"])
            columns = {**{name: call.get(name) for name in _INTENT}, "status": "intended", "waits_for": "client"}
            self.effects[effect_id] = made = Effect(effect_id, deferred["message_seq"], **columns)
            made.payload, made.undecided_s = call["payload"], deferred["expires_s"]
        return [_Row()]

    def _refuse_answer(self, refused: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[refused["effect_id"]]
        effect.payload = {**effect.payload, **json.loads(refused["refused"])}
        return []

    def _charge_question(self, charged: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[charged["effect_id"]]
        effect.payload = {**(effect.payload or {}), **json.loads(charged["used"])}
        return []

    def _close_question(self, closed: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[closed["effect_id"]]
        effect.status, effect.result, effect.finished = closed["status"], closed["result"], True
        return [_Row()]

    def _note_sent(self, sent: Mapping[str, Any]) -> Sequence[object]:
        self.effects[sent["effect_id"]].sent = True
        return []

    def _read_call(self, given: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[given["effect_id"]]
        call = _Call(effect.effect_id, self.agent, effect.tool, effect.arguments, effect.parts, effect.undecided_s)
        return [] if effect.finished else [call]

    def _finish_task(self, finished: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[finished["effect_id"]]
        effect.status, effect.result, effect.finished = finished["status"], finished["result"], True
        effect.payload = None
        return []

    def _close_call(self, closed: Mapping[str, Any]) -> Sequence[object]:
        effect = self.effects[closed["effect_id"]]
        if effect.status == "intended":
            effect.status, effect.result = closed["status"], closed["result"]
        return [effect]

    def _set_parts(self, given: Mapping[str, Any]) -> Sequence[object]:
        self.effects[given["effect_id"]].parts = json.loads(given["parts"])
        return []

    def _effects_of_step(self, step: Mapping[str, Any]) -> Sequence[object]:
        found = [each for each in self.effects.values() if each.message_seq == step["message_seq"]]
        guards = {each.effect_id: (each.payload or {}).get("used") for each in found if each.waits_for == "user"}
        return [replace(each, used=guards.get(each.effect_id, each.used)) for each in found]

    def _begin_approved(self, step: Mapping[str, Any]) -> Sequence[object]:
        if self.awaiting_decision():
            return [_Row(undecided=True)]
        for each in json.loads(step["calls"]):
            effect = self.effects[UUID(each["effect_id"])]
            if effect.status == "approved":
                effect.status = "intended"
        return [_Row()]
