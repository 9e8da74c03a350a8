"""Trying a turn again: its messages are accepted as a new turn of the same conversation.

The new message has the id `retry-TURN`, which the web chat uses, too: however often a turn is tried again, it has one
new turn. That turn can be tried again in its turn.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import UserKey, tenant_of, user_of
from perdure.database.engine import Statement
from perdure.errors import Conflict, NotFound
from perdure.files.parts import as_given, joined
from perdure.runtime import Runtime
from perdure.sessions.routing import conversation_of
from perdure.settings import OnBusy
from perdure.text.untrusted import load_object
from perdure.turns.additions import Additions
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.run.verdict import WITHHELD

# The turn's own messages are in the transcript since the turn began, as its hooks and guards let them pass. If none has
# passed, they are in the inbox until retention deletes them.
_READ = Statement(
    "turns.read_to_retry",
    """
    SELECT t.session_id, t.user_id, t.agent, t.channel, t.priority, t.reply_to, t.metadata::text AS metadata, t.status,
           t.additions, s.ended_at IS NOT NULL OR s.end_requested_at IS NOT NULL AS ended, s.routable, s.scope,
           s.depth,
           coalesce(
               (SELECT json_agg(json_build_object('text', m.content, 'parts', m.parts) ORDER BY m.seq)
                FROM messages AS m
                WHERE m.session_id = t.session_id AND m.turn_id = t.turn_id AND m.role = 'user'
                HAVING bool_and(m.content <> %(withheld)s)),
               (SELECT json_agg(json_build_object('text', i.text, 'parts', i.parts) ORDER BY i.position)
                FROM inbox AS i WHERE i.turn_id = t.turn_id)) AS messages
    FROM turns AS t JOIN sessions AS s USING (session_id)
    WHERE t.turn_id = %(turn_id)s
    """,
    writes=False,
)

_AGAIN = ("failed", "cancelled")


def retry(runtime: Runtime, turn_id: UUID) -> Accepted:
    """Accept the messages of a failed or cancelled turn again; a repeated call returns the same new turn.

    The new turn waits behind the session's unsettled turns. If the session has ended, the new turn is in the
    conversation's next session. The text is what the turn's hooks and guards made of it. The agent, priority, metadata,
    receiver of the reply and what a client added are those of the turn.

    Raises:
        NotFound: there is no such turn.
        Conflict: the turn has not failed, was not cancelled, or answers another agent's call; or it has no messages.
        InvalidRequest, TooLarge, RateLimited, Unavailable: see `accept`.
    """
    rows = runtime.database.run(_READ, {"turn_id": turn_id, "withheld": WITHHELD})
    if not rows:
        raise NotFound("There is no such turn.")
    row = rows[0]
    if row.status not in _AGAIN:
        raise Conflict(f"The turn is {row.status}: only a failed or cancelled turn can be tried again.")
    if row.depth > 0:
        raise Conflict("The turn answers a call of another agent: try that agent's turn again.")
    if not row.messages:
        raise Conflict("The turn has no messages any more.")
    chat = row.reply_to if row.reply_to is not None and "channel" in row.reply_to else None
    said = _said(row, runtime.settings.guard.max_chars)
    fields = {**said, **_message(row, turn_id, None if chat else row.reply_to)}
    message = parse_incoming(fields, tenant=tenant_of(row.user_id))
    added = Additions.from_dict(row.additions)
    return accept(runtime, message, target=chat, any_agent=True, answers=False, additions=added)


def _said(row: Row[Any], longest: int) -> dict[str, Any]:
    """The text and the files of the turn's messages. What joins them does not make them exceed `longest` characters."""
    texts = [each["text"] for each in row.messages]
    text = next((whole for gap in ("\n\n", "\n") if len(whole := gap.join(texts)) <= longest), "".join(texts))
    parts = [part for each in row.messages for part in as_given(each["text"], each["parts"] or ())]
    has_files = any(part["type"] != "text" for part in parts)
    if not has_files:
        return {"text": text}
    if len(joined(part["text"] for part in parts if part["type"] == "text")) <= longest:
        return {"parts": parts}
    return {"parts": [{"type": "text", "text": text}, *(part for part in parts if part["type"] != "text")]}


def _place(row: Row[Any]) -> dict[str, str]:
    """Where the new message goes. None is routed to a fork, which has the conversation of its source."""
    conversation = conversation_of(row.scope)
    if not row.ended and (conversation is None or not row.routable):
        return {"session_id": str(row.session_id)}
    return {} if conversation is None else {"conversation": conversation}


def _message(row: Row[Any], turn_id: UUID, reply_to: dict[str, Any] | None) -> dict[str, Any]:
    optional = {"reply_to": reply_to, "metadata": None if row.metadata is None else load_object(row.metadata)}
    return {
        **_place(row),
        **{name: value for name, value in optional.items() if value is not None},
        "user_id": user_of(UserKey(row.user_id)),
        "message_id": f"retry-{turn_id}",
        "channel": row.channel,
        "agent": row.agent,
        "priority": row.priority,
        "on_busy": OnBusy.ENQUEUE.value,
    }
