"""Operators' actions: the answer of `/v1/audit`."""

from __future__ import annotations

from typing import Literal

from perdure.channels.http.schemas.answer import TURN_ID, Answer, Instant, examples

_DECIDED = {
    "audit_id": "01931e72-1a3b-7c11-9d52-2b7c9e1f0a33",
    "via": "console",
    "actor": "key 3fa2c1d0",
    "action": "turns.decide",
    "target": TURN_ID,
    "tenant": None,
    "user_id": "ann",
    "note": "approve call_1",
    "began_at": "2026-05-02T09:30:00+00:00",
    "outcome": "done",
}


class Audited(Answer):
    """An action of an operator. `outcome` is `done`, an error's code, or null: unfinished, or its process died.

    `actor` is the begin of the SHA-256 of an admin key or, for a command, a user of the machine.
    """

    model_config = examples(_DECIDED)

    audit_id: str
    via: Literal["api", "command", "console"]
    actor: str
    action: str
    target: str | None
    tenant: str | None
    user_id: str | None
    note: str | None
    began_at: Instant
    outcome: str | None
