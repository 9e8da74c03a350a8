"""The fence of a session: the token and the nonce of the newest claim.

A worker claims a session before it writes to the session. Each claim increments the token and sets a random nonce. The
worker's writes take effect only while the session still has this token and this nonce.

The token orders the claims. The nonce distinguishes two claims with the same token. Such claims occur after a crash
that has lost the first claim, and after a failover to a standby that had not received it: the first worker still runs,
and the next claim gets the same token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

HELD = "session_id = %(session_id)s AND token = %(token)s AND nonce = %(nonce)s"
"""The SQL condition that a row of `sessions` still has a worker's token and nonce."""

UNLEASED = """
(lease_until IS NULL OR lease_until <= perdure_now()
 OR lease_until > perdure_now() + make_interval(secs => %(lease_s)s::float * 2))
""".strip()
"""The SQL condition that no worker has a lease on a row of `sessions`, so that a worker may claim it.

A lease that ends more than two lease times from now was granted while the server's clock was ahead, and has expired.
"""

RENEWED = f"""
UPDATE sessions SET lease_until = perdure_now() + make_interval(secs => %(lease_s)s)
WHERE {HELD}
RETURNING session_id
""".strip()  # noqa: S608 (constants)
"""The SQL statement that renews a worker's lease; it returns no row if another worker has the session."""

RAISED = "token = s.token + 1, nonce = gen_random_uuid()"
"""The SQL assignments that give a row of `sessions AS s` a new token and nonce."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The token and the nonce of a claim."""

    token: int
    nonce: UUID

    def on(self, session_id: UUID) -> dict[str, Any]:
        return {"session_id": session_id, "token": self.token, "nonce": self.nonce}
