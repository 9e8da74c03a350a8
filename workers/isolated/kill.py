"""Kills child processes that cannot exit by themselves, and settles their turns.

While a call holds the interpreter lock of a child, the child does not notice a cancellation, a lost lease or its time
limit. The worker's thread `perdure-warden` checks all children once a second, with one SQL statement
(`perdure.turns.run.child_watch`). The thread settles a turn only after the turn's process has ended, and uses the fence
that the process held.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from perdure.database.fencing import Fence
from perdure.errors import Unavailable
from perdure.observe.current import working_on
from perdure.runtime import Runtime
from perdure.turns.outcome import Ending
from perdure.turns.run import child_watch
from perdure.turns.run.child_watch import Overdue, Standing, Watch
from perdure.turns.run.loop import Runner

log = logging.getLogger(__name__)

_END_S = 5.0


def owner(pid: int | None = None) -> str:
    """The name under which the child process `pid` owns leases. `pid` is this process by default."""
    return f"{socket.gethostname()}:{pid or os.getpid()} alone"


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A turn whose process was killed, and the ending to settle it with."""

    session_id: UUID
    fence: Fence
    turn_id: UUID
    ending: Ending


class Warden:
    """Kills overdue child processes and settles their turns. Only one thread may use an instance."""

    def __init__(self, runtime: Runtime, runner: Runner) -> None:
        self._runtime = runtime
        self._runner = runner
        self._watches: dict[int, Watch] = {}
        self._unsettled: list[_Unsettled] = []

    def check(self, children: Mapping[UUID, subprocess.Popen[bytes]]) -> None:
        """Kill the overdue `children` (keyed by session id), and settle their turns.

        Raises:
            Unavailable: the database cannot be reached; the next call settles the remaining turns.
        """
        now = self._runtime.clock.monotonic()
        self._watches = {
            child.pid: self._watches.get(child.pid) or Watch(owner(child.pid), now) for child in children.values()
        }
        if children:
            standings = child_watch.look(self._runtime, children)
            for session_id, child in children.items():
                standing = standings.get(session_id)
                overdue = self._watches[child.pid].see(standing, now)
                if overdue is not None:
                    with working_on(session_id=session_id):
                        self._end(session_id, child, overdue, standing)
        while self._unsettled:
            with working_on(session_id=self._unsettled[0].session_id, turn_id=self._unsettled[0].turn_id):
                self._settle(self._unsettled[0])
            del self._unsettled[0]

    def _end(
        self, session_id: UUID, child: subprocess.Popen[bytes], overdue: Overdue, standing: Standing | None
    ) -> None:
        log.warning("session %s: its process %d is killed: %s", session_id, child.pid, overdue.reason)
        child.kill()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            log.warning("the process %d has not ended %g s after SIGKILL", child.pid, _END_S)
            return  # the process may still write, so its turn is not settled yet
        if overdue.ending is not None and standing is not None and standing.turn_id is not None:
            self._unsettled.append(_Unsettled(session_id, standing.fence, standing.turn_id, overdue.ending))

    def _settle(self, left: _Unsettled) -> None:
        try:
            settled = self._runner.settle_killed(left.session_id, left.fence, left.turn_id, left.ending)
        except Unavailable:
            raise
        except Exception:
            log.exception(
                "turn %s, whose process was killed, could not be settled; its next claim does it", left.turn_id
            )
            return
        if not settled:
            log.info("turn %s, whose process was killed, was claimed by another runner", left.turn_id)
