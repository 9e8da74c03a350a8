"""Pending messages as the events of a snapshot: what was accepted in a session and has not begun.

The queue of a session is in PostgreSQL (`turns` and `inbox`), whatever the store, so nobody keeps a second one: the
events are read from there whenever a snapshot is made (`queries.pending`). An event has what it takes to accept its
message again, in this installation or another one: that is what an import does (`turns.restoring`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perdure.access.tenants import tenant_of, user_of
from perdure.snapshots.snapshot import Event

MESSAGE = "message"
"""The type of the events made here. Their source is the message's channel."""


_MEMBERS = ("message_id", "text", "agent", "priority", "reply_to", "metadata", "merged")


def events(queued: Iterable[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events for the rows of `queries.pending`, in the order accepted; members without a value are left out."""
    return tuple(Event(row["channel"], MESSAGE, _payload(row)) for row in queued)


def _payload(row: Mapping[str, Any]) -> dict[str, Any]:
    tenant = tenant_of(row["user_id"])
    user = {"user_id": user_of(row["user_id"])} | ({} if tenant is None else {"tenant": tenant})
    return user | {name: row[name] for name in _MEMBERS if row[name] is not None}
