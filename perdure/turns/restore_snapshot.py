"""Restoring a session from a snapshot: its working variables, and its pending messages.

Called by `perdure sessions snapshot import`. A pending message is accepted like any other message, under its own
`message_id`. So it is answered once, even if a file is imported twice or the original message is still queued. If this
installation does not have the session, the session is opened under its original id. After a crash, the import may be
repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from perdure.access.tenants import parse_tenant
from perdure.errors import Conflict, InvalidRequest, NotFound, SettingsError
from perdure.files.parts import as_given
from perdure.runtime import Runtime
from perdure.sessions import queries as sessions
from perdure.sessions.routing import scope_of
from perdure.settings import OnBusy
from perdure.snapshots import exchange
from perdure.snapshots.pending import MESSAGE
from perdure.snapshots.snapshot import AgentSnapshot, Event
from perdure.text.titles import title_of
from perdure.text.untrusted import storable_json
from perdure.turns.additions import Additions
from perdure.turns.inbox.accept import accept, check
from perdure.turns.inbox.incoming import Incoming, parse_incoming

_ACCEPTED = ("user_id", "message_id", "text", "parts", "priority", "reply_to", "metadata")
"""Fields of an event's payload that are copied to the message. Unknown fields, of newer releases, are ignored."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A pending message, with what its accepting needs besides.

    `chat` is the chat that the reply goes to, if the message came from one. `conversation` is the key of the session's
    conversation, and `left_out` tells that the conversation is left out of memory.
    """

    message: Incoming
    additions: Additions
    chat: Mapping[str, Any] | None
    conversation: str | None
    left_out: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of an import.

    `accepted` is the number of messages that this import accepted. `known` is the number of messages that had been
    accepted before this import. `variables_left` is the reason why the working variables were not restored; `None` if
    they were restored.
    """

    accepted: int
    known: int
    variables_left: str | None = None


def restore(runtime: Runtime, snapshot: AgentSnapshot) -> Restored:
    """Restore the working variables, then accept the pending messages in order.

    The variables are restored only if the session is at the snapshot's tick and no turn has begun. Pending messages
    are accepted in any case.

    Raises:
        InvalidRequest, TooLarge: an event is not a message that this installation accepts; nothing was changed.
        NotFound: the session does not exist and there is no pending message, or the session is another user's.
        Conflict: the session has ended, or a message id was used for another text. Without pending messages, also:
            the session is busy or at another tick.
        RateLimited, Unavailable: some messages may have been accepted. Importing again is safe.
    """
    queued = [
        _pending(runtime, number, event, snapshot.agent_id)
        for number, event in enumerate(snapshot.event_queue_backup, start=1)
    ]
    for each in queued:
        check(runtime, each.message)
    if queued:
        _open_unknown(runtime, snapshot, queued)
    left = None
    try:
        exchange.restore(runtime.database, runtime.snapshots, snapshot, runtime.settings.turn.lease_s)
    except Conflict as conflict:
        if not queued:
            raise
        left = conflict.message
    duplicates = [
        accept(runtime, each.message, target=each.chat, additions=each.additions).duplicate for each in queued
    ]
    return Restored(duplicates.count(False), duplicates.count(True), left)


def _chat_of(event: Event) -> dict[str, Any] | None:
    """The chat that the reply to an event goes to; `None` if the event did not come from a chat."""
    reply_to = event.payload.get("reply_to") if isinstance(event.payload, dict) else None
    return reply_to if isinstance(reply_to, dict) and isinstance(reply_to.get("channel"), str) else None


def _pending(runtime: Runtime, number: int, event: Event, session_id: UUID) -> _Pending:
    """Convert an event to a pending message.

    Raises:
        InvalidRequest: the event is not an acceptable message; the error names the event and the reason.
    """
    payload: Any = event.payload
    if event.type != MESSAGE or not isinstance(payload, dict) or not payload.get("message_id"):
        raise InvalidRequest(
            f"Event {number} of event_queue_backup is not a pending message: expected type {MESSAGE!r} and a payload "
            "with user_id, message_id and text."
        )
    given = {name: payload[name] for name in _ACCEPTED if name in payload}
    if "parts" in given:
        given["parts"] = as_given(given["text"], given["parts"])
    if _chat_of(event) is not None:
        del given["reply_to"]
    if payload.get("agent") in [each.name for each in runtime.agents]:  # otherwise the session's agent answers
        given["agent"] = payload["agent"]
    on_busy = OnBusy.MERGE if payload.get("merged") else OnBusy.ENQUEUE
    given |= {"channel": event.source, "on_busy": on_busy.value, "conversation": payload.get("conversation")}
    try:
        message = parse_incoming(given, tenant=parse_tenant(payload.get("tenant")))
        additions = _additions(payload.get("additions"))
    except InvalidRequest as error:
        raise InvalidRequest(f"Event {number} of event_queue_backup: {error.message}") from error
    here = message.model_copy(update={"session_id": session_id, "conversation": None})
    return _Pending(here, additions, _chat_of(event), message.conversation, payload.get("left_out") is True)


def _additions(given: Any) -> Additions:
    try:
        return Additions.from_dict(storable_json(given))
    except (SettingsError, LookupError, TypeError, AttributeError, ValueError):
        raise InvalidRequest("additions: this release cannot read them.") from None


def _open_unknown(runtime: Runtime, snapshot: AgentSnapshot, queued: Sequence[_Pending]) -> None:
    """Open the session for the messages' user, at the snapshot's tick, unless the session exists.

    Raises:
        InvalidRequest: the messages are from more than one user; nothing was changed.
        NotFound: the session exists and is another user's; nothing was changed.
    """
    first, conversation = queued[0].message, queued[0].conversation
    if any(each.message.user != first.user for each in queued):
        raise InvalidRequest("The pending messages are from several users, but a session belongs to one.")
    runtime.database.run(
        sessions.OPEN_RESTORED,
        {
            "session_id": snapshot.agent_id,
            "user_id": first.user,
            "scope": scope_of(runtime.settings.session.scope, first.channel, conversation),
            "conversation": conversation,
            "title": title_of(first.text),
            "remember": not any(each.left_out for each in queued),
            "agent": first.agent or runtime.agents.default.name,
            "channel": first.channel,
            "tick": snapshot.tick_index,
        },
    )
    [owner] = runtime.database.run(sessions.OWNER, {"session_id": snapshot.agent_id})
    if owner.user_id != first.user:
        raise NotFound("There is no such session.")
