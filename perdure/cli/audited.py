"""Records operators' commands that change something (`perdure.audit`).

A command declares its action. `connecting` records it once the database is open, with the outcome of the block in which
it is: a command that has done only a part raises its `Failure` there.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from perdure.access.tenants import parse_tenant, user_key

if TYPE_CHECKING:
    from perdure import audit
    from perdure.database.engine import Database


@dataclass(frozen=True, slots=True)
class _Command:
    """A command that runs: its action, as the same action over the API is recorded, and its parameters."""

    name: str
    target: str | None
    notes: tuple[str, ...]
    names_user: Callable[[Mapping[str, Any]], bool]
    given: Mapping[str, Any]

    def action(self) -> audit.Action:
        """The action to record.

        Raises:
            InvalidRequest: the tenant or the user is invalid.
        """
        from perdure import audit

        given, user = self.given, None
        if given.get("user") and self.names_user(given):
            user = user_key(parse_tenant(given.get("tenant")), given["user"])
        told = {name: given.get(name, True) for name in self.notes}
        note = ", ".join(name if value is True else f"{name} {value}" for name, value in told.items() if value)
        target = None if self.target is None else given[self.target]
        return audit.Action("command", f"{_user()}@{socket.gethostname()}", self.name, target, user, note or None)


_RUNNING: ContextVar[_Command | None] = ContextVar("_RUNNING", default=None)
_ACTION: ContextVar[audit.Action | None] = ContextVar("_ACTION", default=None)


def audited(
    name: str,
    target: str | None = None,
    notes: tuple[str, ...] = (),
    *,
    when: Callable[[Mapping[str, Any]], bool] = lambda given: not given.get("dry_run"),
    names_user: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorator of a command that an operator's record names.

    Args:
        name: The action.
        target: The parameter with the id or the name of what is changed.
        notes: Parameters that say what the command does, none of them with a user's text, or words to note.
        when: Whether the command changes something, by its parameters.
        names_user: Whether the record has the user of `--user`. The erasure of a user erases such records.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            _RUNNING.set(_Command(name, target, notes, names_user, given) if when(given) else None)
            _ACTION.set(None)
            command(**given)

        run.__dict__["audited"] = name
        return run

    return decorated


@contextmanager
def recorded(database: Database) -> Iterator[None]:
    """Record the command that runs, with the outcome of the `with` block. Other commands are not recorded."""
    running = _RUNNING.get()
    if running is None:
        yield
        return
    from perdure import audit
    from perdure.clock import SystemClock

    action = running.action()
    _ACTION.set(action)
    with audit.recorded(database, SystemClock(), action):
        yield


def describe(note: str) -> None:
    """Add to the record of the command that runs how much it has changed. Does nothing if it is not recorded."""
    action = _ACTION.get()
    if action is not None:
        action.note = ", ".join(filter(None, (action.note, note)))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"
