"""Working variables: values that a session's tools store between calls.

Each call accesses them through its own `WorkingVariables`. The calls of a turn share one `VariableSet`, so concurrent
calls see each other's changes. The changes are committed with the next step. A call that has timed out can no longer
change variables.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from threading import Condition
from types import TracebackType
from typing import Any

from perdure.errors import InvalidRequest, TooLarge, ToolError
from perdure.snapshots.codec import checked_variables

log = logging.getLogger(__name__)

Change = tuple[int, str] | tuple[int, str, Any]
"""A change of one variable: sequence number, name and new value.

A change without a value removed the variable.
"""


class VariableSet:
    """The working variables of a turn, shared by its calls."""

    def __init__(self, initial: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(initial or {})
        self._committed = self._values
        self._last = 0
        self._holder: object | None = None
        self._free = Condition()

    def changed(self) -> dict[str, Any] | None:
        """The variables to commit with the next step; None if nothing changed since the last committed step."""
        values = self._values
        return None if values is self._committed else values

    def kept(self) -> Mapping[str, Any]:
        """The variables as of the last committed step; read-only."""
        return self._committed

    def committed(self, values: dict[str, Any] | None) -> None:
        """Record that a step was committed. `values` is what `changed` returned for that step."""
        if values is not None:
            self._committed = values

    def replay(self, changes: Iterable[Change]) -> None:
        """Apply `changes` in the order of their numbers. Another worker recorded them with the results of its calls."""
        for number, name, *value in sorted(changes, key=lambda change: change[0]):
            self._last = number
            after = {key: kept for key, kept in self._values.items() if key != name}
            try:
                self._values = checked_variables({**after, name: value[0]} if value else after)
            except TooLarge as error:  # another call made room, but its changes were not recorded
                log.warning("the working variable %r is not changed: %s", name, error.message)

    def lock(self, holder: WorkingVariables) -> dict[str, Any]:
        """Wait for the exclusive right to change the variables; returns a copy for the caller to change.

        Raises:
            ToolError: the call has timed out.
        """
        with self._free:
            self._free.wait_for(lambda: holder.revoked or self._holder is None)
            holder.require_time()
            self._holder = holder
            return deepcopy(self._values)

    def update(self, holder: WorkingVariables, draft: Mapping[str, Any]) -> list[Change]:
        """Replace the variables by `draft`; returns the changes.

        Raises:
            ToolError: `draft` cannot be stored, or the call has timed out. In either case the variables do not change.
        """
        try:
            values = checked_variables(draft)
        except (InvalidRequest, TooLarge) as error:
            raise ToolError(error.message) from error
        with self._free:
            holder.require_time()
            before, changes = self._values, []
            for name in [*values, *(name for name in before if name not in values)]:
                if name in before and name in values and _same(before[name], values[name]):
                    continue
                self._last += 1
                changes.append((self._last, name, values[name]) if name in values else (self._last, name))
            if changes:
                self._values = values
            return changes

    def unlock(self, holder: object) -> None:
        with self._free:
            if self._holder is holder:
                self._holder = None
            self._free.notify_all()

    def values(self) -> Mapping[str, Any]:
        return self._values


class WorkingVariables(MutableMapping[str, Any]):
    """The session's working variables, for one call of a tool.

    A mapping of names to JSON values, at most 64 KiB in total. Reading returns a copy: to change a variable, assign to
    it. If a change depends on the current value, or several changes belong together, use

        with context.working_variables as variables:
            variables["count"] = variables.get("count", 0) + 1

    No other call can change variables during the block. If the block raises, its changes are discarded; of a block
    within another block, only its own.
    """

    def __init__(self, shared: VariableSet | None = None) -> None:
        self._shared = shared or VariableSet()
        self._draft: dict[str, Any] | None = None
        self._before: list[dict[str, Any]] = []
        self._changes: dict[str, Change] = {}
        self.revoked = False
        """Whether the call has timed out and can no longer change variables."""

    def __enter__(self) -> dict[str, Any]:
        """Lock the variables; returns a copy to change in place."""
        if self._draft is None:
            self._draft = self._shared.lock(self)
        else:
            self._before.append(deepcopy(self._draft))
        return self._draft

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Store the changes, unless the block raised."""
        if self._draft is None:
            return
        if self._before:  # a block within a block
            before = self._before.pop()
            if error is not None:
                self._draft.clear()
                self._draft.update(before)
            return
        draft, self._draft = self._draft, None
        try:
            if error is None:
                self._changes.update((change[1], change) for change in self._shared.update(self, draft))
        finally:
            self._shared.unlock(self)

    def __getitem__(self, name: str) -> Any:
        return deepcopy(self._present()[name])

    def __setitem__(self, name: str, value: Any) -> None:
        if self._draft is not None:
            self._draft[name] = value
            return
        with self as variables:
            variables[name] = value

    def __delitem__(self, name: str) -> None:
        if self._draft is not None:
            del self._draft[name]
            return
        with self as variables:
            del variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._present()))

    def __len__(self) -> int:
        return len(self._present())

    def __repr__(self) -> str:
        return f"WorkingVariables({dict(self._present())!r})"

    def changes(self) -> list[Change]:
        return [] if self.revoked else list(self._changes.values())

    def revoke(self) -> None:
        """Record that the call has timed out, and release its lock."""
        self.revoked = True
        self._shared.unlock(self)

    def require_time(self) -> None:
        """Check that the call has not timed out.

        Raises:
            ToolError: the call has timed out.
        """
        if self.revoked:
            raise ToolError("The call's time is up; it can no longer set working variables.")

    def _present(self) -> Mapping[str, Any]:
        return self._shared.values() if self._draft is None else self._draft


def _same(one: Any, other: Any) -> bool:
    """Whether the two values have the same JSON text: 1, 1.0 and true differ."""
    return json.dumps(one) == json.dumps(other)
