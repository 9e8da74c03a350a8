"""A log of all changes of sessions. A database trigger logs each change in the transaction of the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perdure.sessions.states import TRANSITIONS, State

SESSION_LOG = """
    CREATE TABLE session_log (entry bigserial PRIMARY KEY, session_id uuid, before text, after text, what text);

    CREATE FUNCTION session_log() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO session_log (session_id, after, what) VALUES (NEW.session_id, NEW.state, 'opened');
            RETURN NULL;
        END IF;
        IF OLD.state <> NEW.state THEN
            INSERT INTO session_log (session_id, before, after, what)
            VALUES (NEW.session_id, OLD.state, NEW.state, 'moved');
        END IF;
        IF OLD.summary IS DISTINCT FROM NEW.summary THEN
            INSERT INTO session_log (session_id, before, after, what)
            VALUES (NEW.session_id, OLD.summary, NEW.summary, 'summarised');
        END IF;
        IF OLD.consolidation_attempts <> NEW.consolidation_attempts THEN
            INSERT INTO session_log (session_id, before, after, what)
            VALUES (NEW.session_id, OLD.consolidation_attempts, NEW.consolidation_attempts, 'being consolidated');
        END IF;
        IF OLD.consolidated_at IS DISTINCT FROM NEW.consolidated_at THEN
            INSERT INTO session_log (session_id, before, after, what)
            VALUES (NEW.session_id, OLD.consolidated_at, NEW.consolidated_at, 'consolidated');
        END IF;
        IF OLD.ended_at IS DISTINCT FROM NEW.ended_at THEN
            INSERT INTO session_log (session_id, before, after, what)
            VALUES (NEW.session_id, OLD.ended_at, NEW.ended_at, 'marked for consolidation');
        END IF;
        RETURN NULL;
    END $$;

    CREATE TRIGGER session_log AFTER INSERT OR UPDATE ON sessions FOR EACH ROW EXECUTE FUNCTION session_log();
"""

ARROWS = {(before, after) for (before, _), after in TRANSITIONS.items() if before is not after}
"""The changes of state that the table of transitions allows."""

ONCE = ("summarised", "marked for consolidation")


class Sql(Protocol):
    """Runs an SQL statement."""

    def __call__(self, text: str, **parameters: Any) -> Sequence[Any]:
        """Run `text`; returns its rows."""
        ...


@dataclass(frozen=True)
class SessionLog:
    """The changes of sessions since `begin`."""

    sql: Sql

    def begin(self) -> None:
        """Create the log's table and trigger."""
        self.sql(SESSION_LOG)

    def states(self, session_id: object) -> list[str]:
        """The states of a session, in order."""
        rows = self.sql(
            "SELECT after FROM session_log WHERE session_id = %(id)s AND what IN ('opened', 'moved') ORDER BY entry",
            id=str(session_id),
        )
        return [row.after for row in rows]

    def check_arrows(self) -> None:
        """Check that sessions begin as `initializing`, and that `TRANSITIONS` allows every logged change of state."""
        opened = {row.after for row in self.sql("SELECT DISTINCT after FROM session_log WHERE what = 'opened'")}
        moved = self.sql("SELECT DISTINCT before, after FROM session_log WHERE what = 'moved'")
        assert opened <= {State.INITIALIZING}
        assert {(row.before, row.after) for row in moved} <= ARROWS

    def check_ended(self, session_id: object) -> None:
        """Check that the session ended with one summary, and was marked once for consolidation."""
        assert self.states(session_id)[-3:] == [State.SUMMARIZING, State.ENDING, State.ENDED]
        for what in ONCE:
            assert self._before(session_id, what) == [None], what

    def check_consolidated(self, session_id: object) -> None:
        """Check that the session was consolidated once, at the first attempt."""
        assert self._before(session_id, "being consolidated") == ["0"]
        assert self._before(session_id, "consolidated") == [None]

    def _before(self, session_id: object, what: str) -> list[str | None]:
        """The old values in the session's log entries of the kind `what`, in order."""
        found = self.sql(
            "SELECT before FROM session_log WHERE session_id = %(id)s AND what = %(what)s ORDER BY entry",
            id=str(session_id),
            what=what,
        )
        return [row.before for row in found]
