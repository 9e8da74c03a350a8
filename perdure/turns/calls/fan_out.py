"""A Celery tool called with a list of arguments: one task for each element, at most `max_parallel` of them at a time.

Each task is a part of the call. The call's row holds the status and the result of every part, in the order of the
arguments. A part is first `waiting`, then `taken` (a process is about to send its task), then `sent`, and at the end
`done` or `failed`. A part is committed as `taken` before its task is sent. If the process crashes after this commit, it
is unknown whether the task was sent. The sweeper sends a `pure` or `idempotent` part again with the same id; an
`unsafe` part counts as sent. When a part ends, the next waiting part is sent.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never
from uuid import UUID

from sqlalchemy import Row

from perdure.database.engine import Executor, as_json
from perdure.ids import part_task_id
from perdure.runtime import Runtime
from perdure.text.untrusted import load_object
from perdure.tools.awaited.port import TaskCall, TaskSent
from perdure.tools.awaited.task import CeleryTool
from perdure.tools.registry import Effect
from perdure.turns.calls import queries

LOST_PART = "The task of this part has not ended, and this conversation no longer waits for it: its outcome is unknown."

_LEAST_CHARS = 200
"""The limit for the result of one part is never below this number of characters, however many parts the call has."""


@dataclass(slots=True)
class Part:
    """One task of a call. `extra` holds stored fields that this release does not know."""

    status: str = "waiting"
    result: str | None = None
    extra: tuple[Any, ...] = ()

    @property
    def ended(self) -> bool:
        return self.status in {"done", "failed"}


def load(stored: Sequence[Sequence[Any]]) -> list[Part]:
    """Parse the parts of a call, as read from its database row."""
    return [Part(status, result, tuple(extra)) for status, result, *extra in stored]


def running(parts: Sequence[Part]) -> list[int]:
    """The numbers of the parts whose tasks may be queued or running."""
    return [number for number, part in enumerate(parts) if part.status in {"taken", "sent"}]


def begin(runtime: Runtime, effect_id: UUID, count: int) -> None:
    """Store the parts of a call, unless they are stored already. In either case, send waiting parts (`advance`).

    The call's intent must be committed.
    """
    made = _dump([Part() for _ in range(count)])
    runtime.database.run(queries.MAKE_PARTS, {"effect_id": effect_id, "parts": made})
    advance(runtime, effect_id)


def advance(runtime: Runtime, effect_id: UUID, *, again: bool = False) -> None:
    """Send waiting parts until `max_parallel` parts are queued or running.

    With `again`, parts that are already `taken` are also sent, unless the tool is `unsafe`.
    """
    with runtime.database.transaction("turns.take_parts") as transaction:
        row = locked_call(transaction, effect_id)
        tool = None if row is None else _tool(runtime, row)
        if row is None or tool is None or not row.waits:
            return
        parts = load(row.parts)
        chosen = _choose(parts, tool, again=again)
        in_doubt = {number for number in chosen if parts[number].status == "taken"}
        for number in chosen:
            parts[number].status = "taken"
        _store(transaction, effect_id, parts)
    arguments = load_object(row.arguments)["calls"]
    statuses = {number: _send(runtime, tool, row, number, arguments[number]) for number in chosen}
    with runtime.database.transaction("turns.note_parts") as transaction:
        row = locked_call(transaction, effect_id)
        if row is None:
            return
        parts = load(row.parts)
        for number, status in statuses.items():
            # The part keeps its status in two cases: its task has ended, or the broker refused the task now but may
            # have accepted it earlier.
            if parts[number].status == "taken" and not (status == "waiting" and number in in_doubt):
                parts[number].status = status
        _store(transaction, effect_id, parts)


def _choose(parts: Sequence[Part], tool: CeleryTool, *, again: bool) -> list[int]:
    """The numbers of the parts to send now."""
    taken = [number for number, part in enumerate(parts) if part.status == "taken"]
    room = max(0, (tool.max_parallel or 1) - len(running(parts)))
    waiting = [number for number, part in enumerate(parts) if part.status == "waiting"]
    return (taken if again and tool.effect is not Effect.UNSAFE else []) + waiting[:room]


def _send(runtime: Runtime, tool: CeleryTool, row: Row[Any], number: int, arguments: Mapping[str, Any]) -> str:
    """Send the task of a part; returns the part's new status."""
    own_id = part_task_id(row.effect_id, number)
    call = TaskCall(
        own_id, tool.task, arguments, tool.queue, row.left_s, row.effect_id, number, runtime.traces.headers()
    )
    sent = TaskSent.NO if runtime.calls is None else runtime.calls.send(call)
    match sent:
        case TaskSent.NO:
            return "waiting"
        case TaskSent.MAYBE if tool.effect is not Effect.UNSAFE:
            return "taken"  # the sweeper sends it again
        case TaskSent.YES | TaskSent.MAYBE:
            return "sent"
        case _:
            assert_never(sent)


def end_part(executor: Executor, row: Row[Any], part: int, outcome: tuple[str, str]) -> str | None:
    """Record the status and the text of a part's outcome. `row` is the result of `locked_call`.

    Returns the result of the call if all of its parts have ended, otherwise `None`. A part that had already ended is
    not changed.
    """
    parts = load(row.parts)
    if not 0 <= part < len(parts) or parts[part].ended:
        return None
    parts[part] = Part(*outcome, parts[part].extra)
    _store(executor, row.effect_id, parts)
    return rendered(parts) if all(each.ended for each in parts) else None


def most_chars(limit: int, count: int) -> int:
    """The limit, in characters, for the result of one of `count` parts."""
    return max(limit // count - 30, _LEAST_CHARS)


def rendered(parts: Sequence[Part]) -> str:
    """The result of a call, for the model: a JSON list with one entry per part."""
    shown = []
    for part in parts:
        match part.status:
            case "done":
                shown.append({"result": part.result})
            case "failed":
                shown.append({"error": part.result})
            case "waiting":
                shown.append({"error": "this part was not run."})
            case _:
                shown.append({"unknown": LOST_PART})
    return json.dumps(shown, ensure_ascii=False)


def locked_call(executor: Executor, effect_id: UUID) -> Row[Any] | None:
    """Lock the session of a Celery tool's call, and return the call's row; `None` if the call already has a result."""
    if not executor.run(queries.LOCK_OF_CALL, {"effect_id": effect_id}):
        return None
    rows = executor.run(queries.READ_CALL, {"effect_id": effect_id})
    return rows[0] if rows else None


def _store(executor: Executor, effect_id: UUID, parts: Sequence[Part]) -> None:
    ended = sum(part.ended for part in parts)
    progress = f"{ended} of {len(parts)} done"
    executor.run(queries.SET_PARTS, {"effect_id": effect_id, "parts": _dump(parts), "progress": progress})


def _dump(parts: Sequence[Part]) -> str:
    return as_json([[part.status, part.result, *part.extra] for part in parts])


def _tool(runtime: Runtime, row: Row[Any]) -> CeleryTool | None:
    agent = runtime.agents.find(row.agent)
    found = None if agent is None else agent.find_tool(row.tool)
    return found if isinstance(found, CeleryTool) and found.max_parallel is not None else None
