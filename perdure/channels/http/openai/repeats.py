"""Recognises repeated requests, so that a repeated request finds its turn and does not begin another.

`accept` recognises a repeated message by its `message_id`. If the client sends an `Idempotency-Key`, this key is the
`message_id`. Otherwise the `message_id` has two parts. The first is the request's fingerprint: a digest of the
conversation, the agent, the session, the messages and what the client adds to the agent. The second is the id of the
last turn that had the same user and fingerprint and whose answer was sent completely.

If an answer was lost, a repeated request therefore finds the turn, even if the turn is unsettled or the gateway has
restarted. If the answer was sent, a repeated request makes a new turn, unless the SDK has marked the request as a retry
(`X-Stainless-Retry-Count`). Without an `Idempotency-Key`, a cancelled turn is never found, nor one that settled more
than ten minutes ago.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from uuid import UUID

from perdure.database.engine import Executor
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.turns import queries
from perdure.turns.additions import NO_ADDITIONS, Additions
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.reading import SETTLED

CHANNEL = "openai"
FOUND_AGAIN_S = 600.0
"""Seconds for which a repeated request still finds a turn after the turn is settled."""

_DIGITS = 32
_MOST_STALE = 10
"""The most earlier turns of a request, each cancelled or settled long ago, after which a repeated one is not found."""


@dataclass(frozen=True, slots=True)
class RepeatableRequest:
    """The data that identify a request.

    `fingerprint` is a digest of the conversation, the agent, the session, the messages and the additions; equal for a
    repeated request. `key` is the `Idempotency-Key`. `is_retry` tells whether the SDK has marked the request as a
    retry.
    """

    message: Incoming
    fingerprint: str
    key: str | None
    is_retry: bool
    additions: Additions = NO_ADDITIONS

    @classmethod
    def of(
        cls,
        message: Incoming,
        messages: Sequence[Any],
        key: str | None,
        *,
        is_retry: bool,
        additions: Additions = NO_ADDITIONS,
    ) -> Self:
        parts = [message.conversation, message.agent, None if message.session_id is None else str(message.session_id)]
        added = additions.to_dict()
        text = json.dumps([*parts, messages, *([added] if added else [])], sort_keys=True, ensure_ascii=True)
        return cls(message, hashlib.sha256(text.encode()).hexdigest()[:_DIGITS], key, is_retry, additions)

    def without_parts(self) -> Self:
        """The same request, without the files of its message in memory."""
        return replace(self, message=self.message.model_copy(update={"parts": None}))


def accept_once(runtime: Runtime, request: RepeatableRequest) -> Accepted:
    """Accept a request's message, or find the turn of an earlier request that this one repeats. Blocks.

    Raises:
        PerdureError: as `accept`.
    """
    if request.key is not None:
        return _accept(runtime, request, request.key)
    user, fingerprint = request.message.user, request.fingerprint
    given = {"user_id": user, "fingerprint": fingerprint, "within_s": FOUND_AGAIN_S}
    rows = runtime.database.run(queries.ANSWERED, given)
    last = rows[0] if rows else None
    is_open = last is not None and last.status not in SETTLED and not last.asks
    if last is not None and (is_open or ((last.recent or last.asks) and request.is_retry)):
        return Accepted(last.turn_id, last.session_id, last.seq, last.status, duplicate=True, joined=last.joined)
    # The same text may answer two questions of one turn.
    base = "first" if last is None else f"{last.turn_id.hex}{last.messages if last.asks else ''}"
    for _ in range(_MOST_STALE):
        accepted = _accept(runtime, request, f"{fingerprint}-{base}")
        if not _is_stale(runtime.database, accepted):
            return accepted
        base = accepted.turn_id.hex
    return _accept(runtime, request, f"{fingerprint}-{new_id(runtime.clock).hex}")


def note_sent(executor: Executor, request: RepeatableRequest, turn_id: UUID) -> None:
    """Record that the turn's answer was sent completely; does nothing if `request.key` is set. Blocks."""
    if request.key is None:
        given = {"user_id": request.message.user, "fingerprint": request.fingerprint, "turn_id": turn_id}
        executor.run(queries.NOTE_ANSWERED, given)


def _accept(runtime: Runtime, request: RepeatableRequest, message_id: str) -> Accepted:
    message = request.message.model_copy(update={"message_id": message_id})
    return accept(runtime, message, additions=request.additions)


def _is_stale(executor: Executor, accepted: Accepted) -> bool:
    """Whether `accepted` is an earlier request's turn that was cancelled, or settled more than `FOUND_AGAIN_S` ago."""
    if not accepted.duplicate:
        return False
    found = executor.run(queries.NOT_REPEATED, {"turn_id": accepted.turn_id, "within_s": FOUND_AGAIN_S})
    return bool(found)
