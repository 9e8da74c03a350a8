"""Rewords the comments of tables and columns.

Revision: 0031, after 0030.
"""

from __future__ import annotations

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

readable_from = "0016"

_TABLES = {
    "identities": "Maps a person's id on a channel to a user.",
    "link_attempts": "How many codes an identity has sent since `since`; limits guessing.",
    "conversations": "Conversations whose key a caller gave.",
    "chat_places": "Chats in which people wrote to a channel's bot.",
    "answered_requests": "The last turn whose answer was sent completely, for requests without an idempotency key.",
    "messages": "The transcript. Rows are appended and never updated.",
    "tool_effects": "Tool calls: the intent is written before the call, the result after it.",
    "deliveries": "The outbox: replies to deliver.",
    "schedule_slots": "Slots of the schedule: taken by the task that does the work, done when the work is done.",
    "schedule_entries": "The schedule's entries, each with the lease on its current slot.",
    "sweeps": "When each kind of sweep is due: the worker that moves the time ahead does it.",
    "intake": "Whether workers start turns: one row, which `perdure drain` closes and opens.",
    "erasures": "Users who were erased less than a lease ago: what paused workers still write is deleted at `due_at`.",
    "message_words": "The full-text index of messages: written by a trigger on messages, in the same commit.",
    "embedders": "Embedders that made vectors. Vectors of different embedders are never compared.",
    "message_vectors": "Vectors of messages; one row for each embedder.",
    "memory_vectors": "Vectors of memories; one row for each embedder.",
    "unembedded": "Messages and memories whose vector is still to be made.",
    "memories": "Layer 3: facts about a user. Superseded ones are kept, as history.",
    "entities": "Layer 4: people and things that a user's memories mention.",
    "entity_mentions": "Which memories mention an entity.",
    "relations": "Relations between entities; one row for each memory that states the relation.",
    "memory_accesses": "Layer 5: which memories were recalled, and when; kept for some days.",
    "hot_memories": "Layer 5: the memories that were recalled most, weighted by time.",
    "cases": "Questions answered before, with success rates. Only vectors of one embedder and size are compared.",
    "case_executions": "Turns that had a case in their prompt, with their outcome.",
    "case_archive": "Copies of cases, made when they were archived.",
    "case_history": "Changes of a case's status or readers, and merges of its counts. Rows are never updated.",
    "case_runs": "Runs of the weekly policy; at most one is in progress.",
    "case_run_items": "A run's plan: one row for each case, with its outcome.",
}

_COLUMNS = {
    "chat_places.thread": "'': the chat has no threads",
    "chat_places.conversation": "opened by a command; NULL: the chat's own conversation",
    "chat_places.last_message_id": "the newest message that was accepted",
    "answered_requests.fingerprint": "a digest of the conversation, the agent and the messages",
    "unrouted.routed_to": "the turn that the message was merged into or repeated",
    "unrouted.error_code": "why the message was refused",
    "unrouted.settled_at": "when routed_to or error_code was set",
    "sessions.scope": "'': all channels; else a channel, or '/' and a conversation's key",
    "sessions.routable": "accepts messages without a session_id",
    "sessions.turn_count": "settled turns",
    "sessions.message_count": "seq of the last message",
    "sessions.unsettled": "turns that are accepted and not settled",
    "sessions.tick": "committed steps",
    "sessions.nonce": "a random id, new with each claim; the fence's second half",
    "sessions.claims": "claims of the present turn",
    "sessions.not_before": "its turn waits until then, e.g. for a person; NULL: it does not wait",
    "sessions.end_attempts": "claims made to end it",
    "sessions.summary_extractive": "the summary is made of extracts, because no model wrote one",
    "sessions.previous_session_id": "the session before it in the scope",
    "sessions.forked_from": "the session it was copied from",
    "sessions.variables_tick": "the tick that last changed the working variables; NULL: it has none",
    "sessions.saved_token": "token of the valid snapshot in an external store",
    "sessions.saved_tick": "tick of that snapshot",
    "sessions.imported_as": "its name in the imported file",
    "sessions.consolidated_at": "when its memories were extracted",
    "sessions.consolidation_attempts": "failed runs",
    "sessions.consolidation_due_at": "when the next run may start",
    "sessions.consolidation_given_up_at": "when the last run failed; an operator can start another",
    "sessions.consolidation": "the result: {skipped} or {stored, duplicates_merged, superseded}",
    "sessions.priority": "the highest priority of its turns since it last had no unsettled turn",
    "sessions.paced": "while not_before is set: its turn waits for a model; few such sessions are woken at a time",
    "sessions.queued_at": "since when it waits for its user's other turns; NULL: it does not wait",
    "turns.settled_tick": "the session's tick when the turn was settled",
    "turns.held": "how the turn ends; it is settled when the session's snapshot is saved",
    "turns.held_error": "why the snapshot is not saved yet",
    "turns.feedback": "a person's feedback: a score, -1 or 1, and a comment",
    "inbox.position": "order within the turn; over 1: it was merged into it",
    "messages.tool_calls": "[{id, name, arguments}]; arguments is the model's text",
    "messages.message_id": "the sender's id, if one was given",
    "messages.usage": "{input_tokens, output_tokens} of the model call that produced it",
    "messages.author": "who wrote the message, in a group",
    "tool_effects.message_seq": "seq of the assistant message that makes the call",
    "tool_effects.position": "index of the call in that message, from 0",
    "tool_effects.decide_at": "deadline: intent + timeout",
    "tool_effects.variables": "[[number, name, value]] for the step to commit; without a value: removed",
    "tool_effects.waits_for": "what the call waits for without a worker",
    "tool_effects.sent_at": "since when its task may be with the broker",
    "tool_effects.probe_at": "when the sweeper asks for its task's result, or revokes the task",
    "tool_effects.progress": "the task's last progress report, as JSON",
    "tool_effects.parts": "[[status, result]]: the calls of a list of arguments",
    "deliveries.due_at": "the next attempt; an attempt moves it ahead",
    "deliveries.wake_at": "when it may be published again; NULL: when it is due",
    "snapshots.set_aside": "could not be used; kept for the operator and never read",
    "snapshots.variables": "JSON text, not jsonb, so that values are read back exactly",
    "snapshots.tick": "the session's tick at which these values were set",
    "snapshots.token": "the writer's fencing token",
    "schedule_slots.retry_at": "when the next attempt may start",
    "schedule_entries.since": "when the entry was first seen; earlier slots are skipped",
    "schedule_entries.lease_until": "lease on the slot in progress; NULL: no slot is in progress",
    "schedule_entries.wakes": "the sweeper's wake-ups since a slot was taken",
    "intake.closed_at": "since when workers start no turns; NULL: they do",
    "erasures.user_id": "whose Redis keys are deleted again",
    "erasures.session_ids": "the user's sessions",
    "erasures.due_at": "when every worker that was paused has lost its lease",
    "embedders.indexed_at": "since when its vectors are searched by an index",
    "embedders.walked_at": "when the last search for texts without its vector ended",
    "embedders.walked_kind": "how far the present search has come",
    "message_vectors.vector": "of length 1; NULL: the embedder refuses the text",
    "unembedded.id": "the message's session_id, or the memory_id",
    "unembedded.seq": "the message's seq; 0 for a memory",
    "unembedded.due_at": "the next attempt; an attempt moves it ahead",
    "memories.importance": "the value before decay; raised when the memory is repeated",
    "memories.value": "the importance after decay until decayed_at",
    "memories.session_id": "the session that it was first extracted from",
    "memories.valid_from": "when the user said it",
    "memories.valid_to": "when the user said the contrary",
    "entities.name": "the first spelling",
    "entities.key": "the normalised name, the same for all spellings",
    "entities.kind": "person, place, thing ... as extracted",
    "relations.memory_id": "the memory that states it",
    "memory_accesses.access_id": "id of the recall",
    "cases.user_id": "the author, whose words it holds; NULL: no user's words",
    "cases.turn_id": "the turn that it was learned from",
    "cases.review": "problems that reflection found",
    "cases.bank": "agents with this bank find the case",
    "cases.shared_at": "since when an administrator lets it enter all users' prompts",
    "case_archive.user_id": "the author, whose words it holds; NULL: no user's words",
    "case_archive.turn_id": "the turn that it was learned from",
    "case_archive.review": "problems that reflection found",
    "case_archive.keeper_id": "the case that its counts were merged into",
    "case_archive.restored_at": "when it was restored; the row is kept",
    "case_executions.succeeded": "whether the turn succeeded",
    "case_executions.feedback": "-1 or 1; it overrides `succeeded`",
    "case_runs.dry_run": "the run ends with the plan",
    "case_runs.done": "cases done in this phase",
    "case_runs.total": "cases of this phase",
    "case_runs.planned_at": "the moment that ages in the plan are counted from",
    "case_runs.expires_at": "when a plan that waits for approval expires",
    "case_runs.error": "the last error",
    "case_run_items.keeper_id": "of a duplicate: the case that its counts are merged into",
    "case_run_items.similarity": "of a duplicate: its similarity to the keeper",
    "case_run_items.keeper_weight": "number of uses behind the keeper's rate when the plan was made",
    "case_run_items.usage_count": "the case's, with the plan's merges",
    "case_run_items.success_rate": "as usage_count",
    "case_run_items.last_accessed_at": "as usage_count",
    "case_run_items.outcome_rule": "the rule that spared the case when the plan was applied",
}


def upgrade() -> None:
    """Apply the migration."""
    for kind, comments in (("TABLE", _TABLES), ("COLUMN", _COLUMNS)):
        for name, comment in comments.items():
            quoted = comment.replace("'", "''")
            op.execute(f"COMMENT ON {kind} {name} IS '{quoted}'")


def downgrade() -> None:
    """Revert the migration. The comments stay, since the tables do not change."""
