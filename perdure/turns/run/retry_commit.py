"""Commits that survive a transient database error.

A model's reply or a tool's result must not be lost if its commit fails because of a lock timeout, a deadlock, a restart
or a lost connection. The runner keeps the reply or result in memory, and reads the session's state. If the fence, the
turn and the tick are unchanged, the runner commits again. If the session has advanced, the commit had succeeded despite
the error.

Called by the step loop to commit steps, and by the runner to hold a verdict and to settle a turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.turns.lease.claim import Claimed, LeaseLost, begin_next
from perdure.turns.lease.hold import Hold

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0

Committed = TypeVar("Committed")


def persist(runtime: Runtime, hold: Hold, turn_id: UUID, commit: Callable[[], Committed]) -> Committed | Claimed:
    """Retry `commit` until it succeeds; returns its result.

    If a try raised an error although it had committed, returns the session's state instead. Retries for at most the
    time limit of a turn. A process that shuts down tries at most twice.

    Raises:
        LeaseLost: another worker has the session, or the database is unavailable for the duration of a lease.
        Unavailable: the database answers, but refuses each try.
    """
    until = runtime.clock.monotonic() + runtime.settings.turn.timeout_s
    refused, lost = 0, None
    while True:
        try:
            return commit()
        except Unavailable as error:
            if runtime.clock.monotonic() >= until or (hold.draining and refused):
                raise
            refused += 1
            log.warning("turn %s: a commit was refused and is retried: %s", turn_id, error.message)
        except LeaseLost as error:
            if not refused:
                raise
            lost = error  # raised below, unless the session's state shows that an earlier try had committed
        found = find_again(runtime, hold)
        if found.turn is None or found.turn.turn_id != turn_id or found.kept.tick != hold.tick:
            return found
        if lost is not None:
            raise lost
        _pause(hold, refused)


def _pause(hold: Hold, refused: int) -> None:
    """Wait before the next try. The second try follows at once, because only the connection may have failed."""
    if refused > 1:
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(refused - 2, 10), _LONGEST_PAUSE_S)
        hold.step_within(pause_s)
        time.sleep(pause_s)


def find_again(runtime: Runtime, hold: Hold) -> Claimed:
    """Begin or read again the session's oldest unsettled turn, and renew the lease.

    Retries while the database is unavailable.

    Raises:
        LeaseLost: another worker has the session, or the database is unavailable for the duration of a lease.
    """
    limits = runtime.settings.turn
    until = runtime.clock.monotonic() + limits.lease_s
    pause_s = _FIRST_PAUSE_S
    while not hold.lost:
        hold.step_within(pause_s)
        asked_at = runtime.clock.monotonic()
        try:
            found = begin_next(runtime.database, hold.session_id, hold.fence, limits)
        except Unavailable:
            if runtime.clock.monotonic() >= until:
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        else:
            hold.renewed(asked_at)
            return found
    raise LeaseLost
