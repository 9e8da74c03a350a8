"""The tables with users' data, and the conditions that find one user's rows.

Erasure and export use `USER_TABLES`. A test requires each table of the schema to be in `USER_TABLES`, in
`TABLES_WITHOUT_USER_DATA` or in `ERASURE_TABLES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from perdure.database.failures import FAILURE_OF

_OF_SESSIONS = "session_id IN (SELECT session_id FROM sessions WHERE user_id = %(user_id)s)"
OF_TURNS = f"turn_id IN (SELECT turn_id FROM turns WHERE {_OF_SESSIONS})"  # noqa: S608 (constants)
# Deliveries of the user's turns and of the user's refused messages. A refused message has no turn.
_OF_DELIVERIES = f"""
    turn_id IN (
        SELECT turn_id FROM turns WHERE {_OF_SESSIONS}
        UNION ALL
        SELECT turn_id FROM deliveries WHERE user_id = %(user_id)s AND scope IS NULL
    )
"""  # noqa: S608 (constants)
_OF_MEMORIES = "memory_id IN (SELECT memory_id FROM memories WHERE user_id = %(user_id)s)"
_OF_CASES = "SELECT case_id FROM cases WHERE user_id = %(user_id)s"
_OF_USER = "user_id = %(user_id)s"

# Rows of the identities that are linked to the user. If the user is an unlinked identity, its user key consists of the
# tenant, the channel and the external id; the last condition finds the rows of that identity.
_OF_IDENTITIES = """
    (tenant, channel, external_id) IN (
        SELECT tenant, channel, external_id FROM identities WHERE user_id = %(user_id)s
    ) OR concat(CASE WHEN tenant <> '' THEN tenant || chr(31) END, channel, ':', external_id) = %(user_id)s
"""

_ERROR = f"""
    coalesce((SELECT jsonb_build_object('error', jsonb_build_object('code', failed.error_code,
                                                                    'message', failed.error_message))
              FROM turns AS failed WHERE {FAILURE_OF}), '{{}}')
"""  # noqa: S608 (constants)


_SHA256 = """
    (SELECT jsonb_build_object('size', c.size, 'sha256', encode(c.sha256, 'hex'))
     FROM file_contents AS c WHERE c.content_id = m.content_id)
"""


@dataclass(frozen=True, slots=True)
class UserTable:
    """A table with users' data. `of_user` is the SQL condition for the rows of the user `%(user_id)s`.

    An export omits the columns `left_out`: search data derived from exported texts, records of prompts, hashes of link
    codes, delivery errors, and the keys of operators. Delivery errors describe the operator's network. `added` is SQL
    for a JSON object that an export adds to a row, which the SQL names `m`.
    """

    table: str
    of_user: str
    left_out: tuple[str, ...] = ()
    added: str = "'{}'"


USER_TABLES = (
    UserTable("hot_memories", _OF_USER),
    UserTable("memory_accesses", _OF_USER),
    UserTable("relations", _OF_USER),
    UserTable("entity_mentions", _OF_MEMORIES),
    UserTable("entities", _OF_USER),
    UserTable("memory_sources", _OF_MEMORIES),
    UserTable("forgotten_messages", _OF_SESSIONS),
    UserTable("message_vectors", _OF_USER, ("vector", "half")),
    UserTable("message_words", _OF_USER, ("words",)),
    UserTable("memory_vectors", _OF_USER, ("vector",)),
    UserTable("memories", _OF_USER, ("words",)),
    UserTable("unembedded", _OF_USER),  # last of these five: vectors are stored in this order (embedding.store)
    # An item of a CaseBank plan may quote words of its case and of the similar case `keeper_id`.
    UserTable("case_run_items", f"case_id IN ({_OF_CASES}) OR keeper_id IN ({_OF_CASES})"),
    UserTable("case_executions", f"case_id IN ({_OF_CASES}) OR {OF_TURNS}"),
    UserTable("case_history", f"case_id IN ({_OF_CASES})"),
    UserTable("case_archive", _OF_USER, ("query_vector",)),
    UserTable("cases", _OF_USER, ("query_vector",)),
    UserTable("unrouted", _OF_USER),  # before deliveries: refusing a message locks its row, then inserts a delivery
    UserTable("deliveries", _OF_DELIVERIES, ("last_error",)),
    UserTable("tool_effects", OF_TURNS),
    UserTable("running_summaries", _OF_SESSIONS),
    UserTable("messages", _OF_SESSIONS, ("prompt",), added=_ERROR),
    UserTable("snapshots", _OF_SESSIONS),
    UserTable("reminders", _OF_USER),
    UserTable("files", _OF_USER, added=_SHA256),
    UserTable("inbox", _OF_USER),
    UserTable("turn_spendings", OF_TURNS),
    UserTable("turns", _OF_SESSIONS),
    UserTable("sessions", _OF_USER),
    UserTable("link_codes", _OF_USER, ("code_hash",)),
    UserTable("link_attempts", _OF_IDENTITIES),
    UserTable("answered_requests", _OF_USER),
    UserTable("metered_requests", _OF_USER),
    UserTable("chat_places", _OF_USER),
    UserTable("conversations", _OF_USER),
    UserTable("pauses", _OF_USER),
    UserTable("audit", _OF_USER, ("actor",)),
    UserTable("day_spendings", "kind = 'user' AND key = %(user_id)s"),  # a tenant's sums stay: its limit holds
    UserTable("identities", _OF_USER),
    UserTable("users", _OF_USER),
)
"""In the order in which an erasure deletes rows: a table with a foreign key precedes the table that it references."""

TABLES_WITHOUT_USER_DATA = frozenset({
    "schedule_slots", "schedule_entries", "sweeps", "intake", "embedders", "case_runs", "schema_compatibility",
    "model_windows", "processes",
})  # fmt: skip

SHARED_TABLES = frozenset({"file_contents", "file_chunks"})
"""The contents of files, each of which several users may have. The erasure of the last of them deletes it."""

ERASURE_TABLES = frozenset({"erasures", "stale_statistics"})
"""The tables that record unfinished erasures. The second pass of an erasure deletes the erasure's row from `erasures`.
`stale_statistics` has the names of tables, and no users' data.
"""
