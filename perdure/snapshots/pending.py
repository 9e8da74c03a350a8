"""Converts pending messages to the events of a snapshot. A message is pending until its turn begins.

The queue of a session is always in PostgreSQL (`turns` and `inbox`), whatever the snapshot store is. Each snapshot
reads the queue there (`queries.pending`). An event holds all that is needed to accept its message again, in this or
another installation. An import accepts the messages in this way (`turns.restore_snapshot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perdure.access.tenants import tenant_of, user_of
from perdure.snapshots.snapshot import Event

MESSAGE = "message"
"""The type of a pending message's event. The event's source is the message's channel."""

_MEMBERS = ("message_id", "text", "agent", "priority", "reply_to", "metadata", "merged")


def events(queued: Iterable[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events for the rows of `queries.pending`, oldest first; members without a value are omitted."""
    return tuple(Event(row["channel"], MESSAGE, _payload(row)) for row in queued)


def _payload(row: Mapping[str, Any]) -> dict[str, Any]:
    tenant = tenant_of(row["user_id"])
    user = {"user_id": user_of(row["user_id"])} | ({} if tenant is None else {"tenant": tenant})
    return user | {name: row[name] for name in _MEMBERS if row[name] is not None}
