"""The fence on a session: every write of its holder is conditional on it.

A claim raises the token and draws a random nonce. The token orders claims; the nonce distinguishes two claims with the
same token. These can occur after a failover to a standby that had not received the first claim: its holder still runs,
and the next claim raises the same token again.

A worker of a release without the nonce raises the token alone, so its claim also shuts out every earlier holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

HELD = "session_id = %(session_id)s AND token = %(token)s AND nonce = %(nonce)s"
"""The condition of a statement that writes to `sessions` for the holder of a fence."""

RAISED = "token = s.token + 1, nonce = gen_random_uuid()"
"""Assignments of a statement that claims a session, `sessions AS s`."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The token and nonce that a session is held under."""

    token: int
    nonce: UUID

    def on(self, session_id: UUID) -> dict[str, Any]:
        """The parameters of `HELD` for a session."""
        return {"session_id": session_id, "token": self.token, "nonce": self.nonce}
