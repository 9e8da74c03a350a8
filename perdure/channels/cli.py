"""The CLI channel: one user's conversation in a terminal, for `perdure chat` and `perdure send`.

`stream` reports events as they happen, including text that is not committed yet. `listen` reports only committed
messages, because text that was printed to a pipe cannot be withdrawn.

Each method that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from perdure.access.tenants import UserKey, user_key
from perdure.channels import CLI
from perdure.channels.activity import PRESENCE, note_activity
from perdure.channels.http.stream.follow import Follower
from perdure.channels.http.stream.hub import Hub
from perdure.channels.http.threads import Threads
from perdure.errors import Conflict, NotFound, Unavailable
from perdure.events.event import Event, EventId, EventKind
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.sessions.conversations import list_conversations
from perdure.sessions.ending import leave, request_end
from perdure.sessions.reading import find_live, read_messages
from perdure.sessions.routing import scope_of
from perdure.turns.cancel import cancel
from perdure.turns.committed import Committed, read_committed
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.reading import (
    DELAYED,
    Delays,
    SettlementWatch,
    delay_message,
    question_of,
    read_attempt_error,
    read_turn,
)

_LOOK_S = 0.25
_AGAIN_S = 1.0
_MOST_LISTED = 20
_MOST_LOOKED_AT = 50
_PAUSE_S = 60.0
_THREADS = 2

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Speaker:
    """A user at a terminal.

    `user_id` is the user's id within `tenant`. `agent` is the name of the agent that replies; if it is `None`, the
    session's agent replies. `timezone` is the user's, such as `Europe/Paris`, if it is known.
    """

    user_id: str
    tenant: str | None = None
    agent: str | None = None
    timezone: str | None = None

    @property
    def user(self) -> UserKey:
        return user_key(self.tenant, self.user_id)


class TerminalConversation:
    """The messages and replies of one user. Not thread-safe.

    Args:
        runtime: The runtime of this process.
        speaker: The user.
        key: The conversation's key; `None`: the user's conversation without a key.
        on_note: Called with a note to print, once for each delay of the reply. While the database is unavailable, also
            called before each retry.
    """

    def __init__(self, runtime: Runtime, speaker: Speaker, key: str | None, on_note: Callable[[str], None]) -> None:
        self.key = key
        self._runtime = runtime
        self._speaker = speaker
        self._on_note = on_note
        self._watch = SettlementWatch(runtime.database)
        self._session_id: UUID | None = None
        self._turn_id: UUID | None = None
        self._seen = 0
        self._last: EventId | None = None
        self._listening = False
        self._answers = False
        """Whether the last message answers a question of its turn."""

    @property
    def session_id(self) -> UUID | None:
        return self._session_id

    @property
    def waited_for(self) -> UUID | None:
        return self._turn_id if self._listening else None

    def resume(self) -> int:
        """Continue the conversation's live session, if any; returns the number of the session's messages, or 0."""
        session = self._runtime.settings.session
        scope = scope_of(session.scope, CLI, self.key)
        found = find_live(self._runtime.database, self._speaker.user, scope, session.idle_timeout_s)
        if found is None:
            return 0
        self._session_id, self._seen = found
        return self._seen

    def switch(self, key: str | None) -> int:
        """Change to another conversation and resume its live session; returns the result of `resume`."""
        self.key, self._session_id, self._turn_id, self._seen = key, None, None, 0
        return self.resume()

    def others(self) -> list[dict[str, Any]]:
        """The user's conversations that are not archived, most recently active first."""
        return list_conversations(self._runtime.database, self._speaker.user, _MOST_LISTED, archived=False)

    def earlier(self) -> list[str]:
        """The user's messages in the current session, oldest first."""
        if self._session_id is None:
            return []
        messages = read_messages(self._runtime.database, self._session_id)
        return [each["content"] for each in messages if each["role"] == "user"]

    def last(self, most: int) -> list[Message]:
        """The last messages of the user and the agent in the current session, at most `most`, oldest first."""
        if self._session_id is None:
            return []
        after = max(0, self._seen - _MOST_LOOKED_AT)
        messages = read_messages(self._runtime.database, self._session_id, after=after)
        return [each for each in messages if each["role"] != "tool" and each["content"].strip()][-most:]

    def received(self) -> str | None:
        """What the model's server sent when the last turn failed, if it may be shown: by default, if it is local."""
        return None if self._turn_id is None else read_attempt_error(self._runtime.database, self._turn_id)

    def say(self, text: str) -> None:
        """Accept `text` as a message; retries while the database is unavailable.

        Raises:
            PerdureError: the message is refused.
        """
        speaker = self._speaker
        given: dict[str, Any] = {
            "user_id": speaker.user_id, "text": text, "agent": speaker.agent, "conversation": self.key
        }  # fmt: skip
        if speaker.timezone is not None:
            given["metadata"] = {"timezone": speaker.timezone}
        # All attempts use one id. If the confirmation of a commit is lost, the retry must not add a second message.
        given["message_id"] = str(new_id(self._runtime.clock))
        incoming = parse_incoming({"channel": CLI, **given}, tenant=speaker.tenant)
        accepted: Accepted = self._insist(lambda: accept(self._runtime, incoming))
        if accepted.session_id != self._session_id:
            self._session_id, self._seen = accepted.session_id, 0
        self._answers = accepted.turn_id == self._turn_id
        if not self._answers:
            self._last = None
        self._turn_id = accepted.turn_id
        self._listening = True

    def listen(self, on_message: Callable[[Message], None]) -> dict[str, Any]:
        """Pass each committed message of the turn to `on_message`; returns the turn if it is settled or asks the user.

        A question is passed like a message of the agent.
        """
        if self._turn_id is None or self._session_id is None:
            raise LookupError("no message was sent yet")
        turn_id, session_id = self._turn_id, self._session_id
        delays = Delays(self._runtime.database, turn_id)
        settled = self._watch.settled(turn_id)
        try:
            while not settled.done():
                wait((settled,), timeout=_LOOK_S)
                self._insist(lambda: self._show_new(session_id, self._joined(turn_id), on_message))
                present: dict[str, Any] = self._insist(lambda: read_turn(self._runtime.database, turn_id))
                if (question := question_of(present)) is not None:
                    on_message({"role": "assistant", "content": question})
                    self._listening = False
                    return present
                sentence = self._insist(delays.look)
                if sentence is not None:
                    self._on_note(sentence)
        finally:
            settled.cancel()
        turn: dict[str, Any] = self._insist(lambda: read_turn(self._runtime.database, turn_id))
        self._listening = False
        return turn

    def _joined(self, turn_id: UUID) -> UUID:
        """The turn that the message of the turn `turn_id` joined, or this turn."""
        return UUID(read_turn(self._runtime.database, turn_id)["turn_id"])

    def stream(self, on_event: Callable[[Event], None]) -> dict[str, Any]:
        """Pass the turn's events to `on_event` as they happen; returns the turn when it is settled or asks the user.

        After an interruption, the next call continues after the last event that was passed to `on_event`.
        """
        if self._turn_id is None:
            raise LookupError("no message was sent yet")
        turn = asyncio.run(self._stream(self._turn_id, on_event))
        self._listening = False
        return turn

    async def _stream(self, turn_id: UUID, on_event: Callable[[Event], None]) -> dict[str, Any]:
        threads = Threads(_THREADS)
        hub = Hub(self._runtime, threads, lambda _: None)
        hub.start()

        async def read(turn_id: UUID, after: int) -> Committed:
            return await threads.run(partial(read_committed, self._runtime.database, turn_id, after))

        try:
            while True:
                try:
                    async with aclosing(Follower(hub, read, turn_id, self._last).events(_PAUSE_S)) as events:
                        async for event in events:
                            if event is not None and (turn := self._pass_on(event, on_event)) is not None:
                                return turn
                except Unavailable as error:
                    self._on_note(error.message)
                    await asyncio.sleep(_AGAIN_S)
        finally:
            await hub.close()
            threads.close()

    def _pass_on(self, event: Event, on_event: Callable[[Event], None]) -> dict[str, Any] | None:
        """Pass an event to `on_event`; returns the turn if it is settled or asks the user."""
        self._last = event.id
        if event.kind is EventKind.DONE:
            return dict(event.data)
        if event.kind is EventKind.MESSAGE:
            self._seen = event.data["seq"]
        asks = event.kind is EventKind.STATE and question_of(event.data) is not None
        if event.kind is EventKind.STATE and event.data["status"] == "parked" and not asks:
            note = delay_message(event.data)
            if note is not None or not self._answers:  # else a worker is about to read the user's answer
                self._on_note(note or DELAYED)
        on_event(event)
        return {**event.data, "error": None} if asks else None

    def cancel(self) -> bool:
        """Cancel the turn of the last message; returns `False` if no message was sent."""
        if self._turn_id is None:
            return False
        cancel(self._runtime, self._turn_id)
        return True

    def end(self) -> bool:
        """Request the end of the session; returns `False` without a session.

        Raises:
            Conflict: the session has already ended.
            NotFound: the session's user was erased.
        """
        if self._session_id is None:
            return False
        try:
            request_end(self._runtime.database, self._session_id, f"ended on {CLI}").wake(self._runtime.wake)
        except (Conflict, NotFound):
            self._session_id = self._turn_id = None
            raise
        self._session_id = self._turn_id = None
        return True

    def leave(self) -> bool:
        """Request the end of the session unless another channel uses it; returns whether the end was requested."""
        if self._session_id is None:
            return False
        idle_s = self._runtime.settings.session.idle_timeout_s
        requested = leave(self._runtime.database, self._session_id, CLI, idle_s)
        if requested is not None:
            requested.wake(self._runtime.wake)
        return requested is not None

    def note_presence(self) -> None:
        note_activity(self._runtime, self._speaker.user, CLI, PRESENCE)

    def close(self) -> None:
        self._watch.close()

    def _show_new(self, session_id: UUID, turn_id: UUID, on_message: Callable[[Message], None]) -> None:
        for message in read_messages(self._runtime.database, session_id, after=self._seen):
            self._seen = message["seq"]
            if message["turn_id"] == str(turn_id) and message["role"] != "user":
                on_message(message)

    def _insist(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except Unavailable as error:
                self._on_note(error.message)
                time.sleep(_AGAIN_S)
