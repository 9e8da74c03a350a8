"""Erasing a user with the parts of a process: asked for by a route or a command, finished by the sweeper."""

from __future__ import annotations

from perdure.runtime import Runtime
from perdure.users.erase import Eraser, ErasureResult


def erase(runtime: Runtime, user_id: str) -> ErasureResult:
    """Erase all that is held of a user; who runs a turn of theirs writes nothing any more. See `Eraser.erase`.

    Raises:
        Unavailable: the database cannot be reached; it may be tried again.
    """
    return _eraser(runtime).erase(user_id)


def finish_due(runtime: Runtime) -> int:
    """The second pass of the erasures that are a lease old; how many are done with.

    Raises:
        Unavailable: the database cannot be reached.
    """
    return _eraser(runtime).finish_due()


def _eraser(runtime: Runtime) -> Eraser:
    return Eraser(
        database=runtime.database,
        clock=runtime.clock,
        snapshots=runtime.snapshots,
        redis_memory=runtime.redis_memory,
        lease_s=runtime.settings.turn.lease_s,
        file=runtime.redis_file,
    )
