"""Working variables: what a session's tools keep from one call to the next.

A call sees them through a `WorkingVariables` of its own; those of one turn's calls share one
set, so calls side by side see what the others change. The engine commits what a step changed
together with the step. A call whose time is up has no say any more, and holds up nobody.
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
"""The number of a change, the name of a variable, and its new value; without one it was removed."""


class VariableSet:
    """The working variables as a turn finds and changes them; its calls share one."""

    def __init__(self, found: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(found or {})
        self._committed = self._values
        self._last = 0
        self._holder: object | None = None
        self._free = Condition()

    def changed(self) -> dict[str, Any] | None:
        """The variables as a step that is committed now leaves them; None if it changes none."""
        values = self._values
        return None if values is self._committed else values

    def kept(self) -> Mapping[str, Any]:
        """The variables as the last committed step left them; not to be changed."""
        return self._committed

    def committed(self, values: dict[str, Any] | None) -> None:
        """Note that a step was committed with what `changed` had returned."""
        if values is not None:
            self._committed = values

    def replay(self, changes: Iterable[Change]) -> None:
        """Make the changes of calls whose results were recorded by another runner, in their order."""
        for number, name, *value in sorted(changes, key=lambda change: change[0]):
            self._last = number
            after = {key: kept for key, kept in self._values.items() if key != name}
            try:
                self._values = checked_variables({**after, name: value[0]} if value else after)
            except TooLarge as error:  # they had room beside what another call took away, of which there is no result
                log.warning("the working variable %r is left as it was: %s", name, error.message)

    def lock(self, holder: WorkingVariables) -> dict[str, Any]:
        """Wait until no other call is changing them; a copy to change."""
        with self._free:
            self._free.wait_for(lambda: holder.revoked or self._holder is None)
            holder.require_time()
            self._holder = holder
            return deepcopy(self._values)

    def update(self, holder: WorkingVariables, draft: Mapping[str, Any]) -> list[Change]:
        """Let `draft` be the variables from now on; what that changed.

        Raises:
            ToolError: they cannot be kept, or the call's time is up; nothing is changed.
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
        """Let the next one change them, if `holder` was at it."""
        with self._free:
            if self._holder is holder:
                self._holder = None
            self._free.notify_all()

    def values(self) -> Mapping[str, Any]:
        """The variables as they are; not to be changed."""
        return self._values


class WorkingVariables(MutableMapping[str, Any]):
    """The session's working variables, as one call of a tool reads and sets them.

    A mapping of names to JSON values, at most 64 KiB in all. What is read is a copy: assign it to
    change it. For a change that depends on what is there, or several that belong together,

        with context.working_variables as variables:
            variables["count"] = variables.get("count", 0) + 1

    keeps other calls from changing them meanwhile; if the block raises, nothing is changed.
    """

    def __init__(self, shared: VariableSet | None = None) -> None:
        self._shared = shared or VariableSet()
        self._draft: dict[str, Any] | None = None
        self._depth = 0
        self._changes: dict[str, Change] = {}
        self.revoked = False
        """The call's time is up: it changes nothing any more."""

    def __enter__(self) -> dict[str, Any]:
        """The variables, to be changed in place, while no other call changes them."""
        if self._draft is None:
            self._draft = self._shared.lock(self)
        self._depth += 1
        return self._draft

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Keep what was changed, unless the block raised."""
        self._depth -= 1
        if self._depth or self._draft is None:
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
        with self as variables:
            variables[name] = value

    def __delitem__(self, name: str) -> None:
        with self as variables:
            del variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._present()))

    def __len__(self) -> int:
        return len(self._present())

    def __repr__(self) -> str:
        return f"WorkingVariables({dict(self._present())!r})"

    def changes(self) -> list[Change]:
        """What this call has changed so far, by name; nothing if its time was up before."""
        return [] if self.revoked else list(self._changes.values())

    def revoke(self) -> None:
        """The call's time is up."""
        self.revoked = True
        self._shared.unlock(self)

    def require_time(self) -> None:
        """Nothing, while the call has time.

        Raises:
            ToolError: it has none any more.
        """
        if self.revoked:
            raise ToolError("The call's time is up; it can set no working variables any more.")

    def _present(self) -> Mapping[str, Any]:
        return self._shared.values() if self._draft is None else self._draft


def _same(one: Any, other: Any) -> bool:
    """Whether the two are the same JSON: 1, 1.0 and true are not."""
    return json.dumps(one) == json.dumps(other)
