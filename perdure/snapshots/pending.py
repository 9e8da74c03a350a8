"""Converts pending messages to the events of a snapshot. A message is pending until its turn begins.

Whichever snapshot store is configured, a session's queue is in PostgreSQL, in the tables `turns` and `inbox`.
`queries.pending` reads the queue for each snapshot. An import (`turns.restore_snapshot`) converts each event back to a
message and accepts the message. An event contains everything that the import needs for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perdure.access.tenants import tenant_of, user_of
from perdure.snapshots.snapshot import Event

MESSAGE = "message"
"""`Event.type` of a pending message. `Event.source` is the message's channel."""

_MEMBERS = (
    "message_id", "text", "parts", "agent", "priority", "reply_to", "metadata", "additions", "merged", "conversation",
    "left_out",
)  # fmt: skip


def events(queued: Iterable[Mapping[str, Any]]) -> tuple[Event, ...]:
    """One event for each row of `queries.pending`, oldest first. Payloads omit members whose value is `None`."""
    return tuple(Event(row["channel"], MESSAGE, _payload(row)) for row in queued)


def _payload(row: Mapping[str, Any]) -> dict[str, Any]:
    tenant = tenant_of(row["user_id"])
    user = {"user_id": user_of(row["user_id"])} | ({} if tenant is None else {"tenant": tenant})
    return user | {name: row[name] for name in _MEMBERS if row[name] is not None}
