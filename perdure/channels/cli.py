"""The CLI channel: one user's conversation in a terminal.

A terminal cannot withdraw text, so it shows committed text only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any
from uuid import UUID

from perdure.access.tenants import user_key
from perdure.errors import Unavailable
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.sessions.ending import leave, request_end
from perdure.sessions.reading import find_live, read_messages
from perdure.settings import Scope
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.reading import Delays, SettlementWatch, read_turn

CHANNEL = "cli"

_LOOK_S = 0.25
_AGAIN_S = 1.0

Message = dict[str, Any]


class Conversation:
    """One user's messages and the replies. Not thread-safe.

    Args:
        runtime: The parts of this process.
        user_id: The user.
        tenant: The user's tenant, if any.
        agent: The agent's name; `None`: the session's agent.
        on_note: Called with a message: once per delay of the answer, and at each retry while the database is
            unavailable.
    """

    def __init__(
        self,
        runtime: Runtime,
        user_id: str,
        agent: str | None,
        on_note: Callable[[str], None],
        tenant: str | None = None,
    ) -> None:
        self._runtime = runtime
        self._user_id = user_id
        self._tenant = tenant
        self._user = user_key(tenant, user_id)
        self._agent = agent
        self._on_note = on_note
        self._watch = SettlementWatch(runtime.database)
        self._session_id: UUID | None = None
        self._turn_id: UUID | None = None
        self._seen = 0
        self._listening = False

    @property
    def session_id(self) -> UUID | None:
        """The session that the last message went to."""
        return self._session_id

    @property
    def waited_for(self) -> UUID | None:
        """The turn of the last message until `listen` has returned it."""
        return self._turn_id if self._listening else None

    def resume(self) -> int:
        """Continue the user's live conversation; returns its number of messages.

        Raises:
            Unavailable: the database cannot be reached.
        """
        session = self._runtime.settings.session
        scope = CHANNEL if session.scope is Scope.CHANNEL else ""
        found = find_live(self._runtime.database, self._user, scope, session.idle_timeout_s)
        if found is None:
            return 0
        self._session_id, self._seen = found
        return self._seen

    def say(self, text: str) -> None:
        """Accept `text` as a message; retries while the database is unavailable.

        Raises:
            PerdureError: the message is refused.
        """
        given = {"user_id": self._user_id, "text": text, "agent": self._agent}
        # One id for all tries: a retry after a lost answer must not send the message twice.
        given["message_id"] = str(new_id(self._runtime.clock))
        incoming = parse_incoming({"channel": CHANNEL, **given}, tenant=self._tenant)
        accepted: Accepted = self._insist(lambda: accept(self._runtime, incoming))
        if accepted.session_id != self._session_id:
            self._session_id, self._seen = accepted.session_id, 0
        self._turn_id = accepted.turn_id
        self._listening = True

    def listen(self, on_message: Callable[[Message], None]) -> dict[str, Any]:
        """Pass each committed message of the answer to `on_message`; returns the settled turn."""
        if self._turn_id is None or self._session_id is None:
            raise LookupError("nothing was said yet")
        turn_id, session_id = self._turn_id, self._session_id
        delays = Delays(self._runtime.database, turn_id)
        settled = self._watch.settled(turn_id)
        try:
            while not settled.done():
                wait((settled,), timeout=_LOOK_S)
                self._insist(lambda: self._show_new(session_id, turn_id, on_message))
                sentence = self._insist(delays.look)
                if sentence is not None:
                    self._on_note(sentence)
        finally:
            settled.cancel()
        turn: dict[str, Any] = self._insist(lambda: read_turn(self._runtime.database, turn_id))
        self._listening = False
        return turn

    def cancel(self) -> bool:
        """Cancel the turn of the last message; returns whether there was one.

        Raises:
            Unavailable: the database cannot be reached.
        """
        if self._turn_id is None:
            return False
        cancel(self._runtime, self._turn_id)
        return True

    def end(self) -> bool:
        """Request the end of the conversation; returns whether there was one.

        Raises:
            Unavailable: the database cannot be reached.
            Conflict: it has ended already.
        """
        session_id, self._session_id, self._turn_id = self._session_id, None, None
        if session_id is None:
            return False
        request_end(self._runtime.database, session_id, f"ended on {CHANNEL}").wake(self._runtime.wake)
        return True

    def leave(self) -> bool:
        """End the conversation unless the user continued it on another channel; returns whether it ends.

        Raises:
            Unavailable: the database cannot be reached.
        """
        if self._session_id is None:
            return False
        idle_s = self._runtime.settings.session.idle_timeout_s
        requested = leave(self._runtime.database, self._session_id, CHANNEL, idle_s)
        if requested is not None:
            requested.wake(self._runtime.wake)
        return requested is not None

    def close(self) -> None:
        """Stop waiting."""
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
