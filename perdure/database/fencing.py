"""The fence on a session: each write of a worker that has claimed the session is conditional on its claim's fence.

A claim raises the token and draws a random nonce. The token orders claims; the nonce distinguishes two claims with the
same token. Two claims have the same token after a failover to a standby that had not received the first of them: the
holder of the first claim still runs, and the next claim raises the token to the same number.

A worker of a release without the nonce raises only the token. This also fences off every earlier holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

HELD = "session_id = %(session_id)s AND token = %(token)s AND nonce = %(nonce)s"
"""The condition of a statement that writes to `sessions` as the holder of a fence."""

RAISED = "token = s.token + 1, nonce = gen_random_uuid()"
"""The assignments of a statement that claims a session in `sessions AS s`."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The token and the nonce of a claim."""

    token: int
    nonce: UUID

    def on(self, session_id: UUID) -> dict[str, Any]:
        """The parameters of `HELD` for a session."""
        return {"session_id": session_id, "token": self.token, "nonce": self.nonce}
