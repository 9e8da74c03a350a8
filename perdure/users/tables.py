"""Which tables hold what is said by or known of a user, and how their rows are found.

Erasure and export both go by this list, so that neither forgets what the other knows. A test
compares it with the tables that there are: a new table is named here, as one or the other.
"""

from __future__ import annotations

from dataclasses import dataclass

_OF_SESSIONS = "session_id IN (SELECT session_id FROM sessions WHERE user_id = %(user_id)s)"
_OF_TURNS = f"turn_id IN (SELECT turn_id FROM turns WHERE {_OF_SESSIONS})"  # noqa: S608 (constants)
_OF_MEMORIES = "memory_id IN (SELECT memory_id FROM memories WHERE user_id = %(user_id)s)"
_OF_CASES = "SELECT case_id FROM cases WHERE user_id = %(user_id)s"
_OF_USER = "user_id = %(user_id)s"


@dataclass(frozen=True, slots=True)
class UserTable:
    """A table with rows of users: `of_user` finds those of `%(user_id)s`.

    `left_out` are columns that an export leaves out: what texts that are in it are searched by, and what a delivery
    met in the network of this installation, which is the operator's to know.
    """

    table: str
    of_user: str
    left_out: tuple[str, ...] = ()


USER_TABLES = (
    UserTable("hot_memories", _OF_USER),
    UserTable("memory_accesses", _OF_USER),
    UserTable("relations", _OF_USER),
    UserTable("entity_mentions", _OF_MEMORIES),
    UserTable("entities", _OF_USER),
    UserTable("memory_sources", _OF_MEMORIES),
    UserTable("memory_vectors", _OF_USER, ("vector",)),
    UserTable("memories", _OF_USER, ("words",)),
    UserTable("unembedded", _OF_USER),
    UserTable("message_vectors", _OF_USER, ("vector",)),
    UserTable("message_words", _OF_USER, ("words",)),
    # A line of a plan quotes the words in which a case differs from the one that it is near to.
    UserTable("case_run_items", f"case_id IN ({_OF_CASES}) OR keeper_id IN ({_OF_CASES})"),
    UserTable("case_executions", f"case_id IN ({_OF_CASES}) OR {_OF_TURNS}"),
    UserTable("case_history", f"case_id IN ({_OF_CASES})"),
    UserTable("case_archive", _OF_USER, ("query_vector",)),
    UserTable("cases", _OF_USER, ("query_vector",)),
    UserTable("deliveries", _OF_TURNS, ("last_error",)),
    UserTable("tool_effects", _OF_TURNS),
    UserTable("messages", _OF_SESSIONS),
    UserTable("snapshots", _OF_SESSIONS),
    UserTable("inbox", _OF_USER),
    UserTable("turns", _OF_SESSIONS),
    UserTable("sessions", _OF_USER),
    UserTable("identities", _OF_USER),
    UserTable("users", _OF_USER),
)
"""In the order in which they are erased: whoever refers to another goes first."""

TABLES_WITHOUT_USER_DATA = frozenset(
    {"schedule_slots", "schedule_entries", "sweeps", "intake", "embedders", "case_runs", "schema_compatibility"}
)
"""The tables that hold nothing of users."""

ERASURE_TABLES = frozenset({"erasures"})
"""What erasing itself notes, and removes when it is over."""
