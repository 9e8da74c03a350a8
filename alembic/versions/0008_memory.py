"""Memory: the memories of a user with their entities and relations, and search data for messages.

`perdure_words()` converts a text to lexemes for full-text search. `perdure_owner()` converts a user id to a lexeme. The
user's lexeme is stored together with the lexemes of the text, so one index search finds the texts of one user.

When a message is inserted, a trigger on `messages` writes the message's lexemes in the same transaction. The trigger
also inserts a row into `unembedded`, because the message has no vector yet. It skips messages that a fork copied, so a
search finds only the original message.

Revision: 0008, after 0007.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from perdure.database.schema import vector_type

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TIMESTAMP = sa.DateTime(timezone=True)

# Only the first 20,000 characters of a message are indexed, since the transaction that inserts the message also writes
# the index. A run of characters without spaces is processed in pieces, since extracting characters from a long run
# takes quadratic time.
_FUNCTIONS = (
    """
    CREATE FUNCTION perdure_owner(user_id text) RETURNS text LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS
    $$ SELECT 'user:' || left(encode(sha256(convert_to(user_id, 'UTF8')), 'hex'), 24) $$
    """,
    # Korean and scripts without spaces are indexed by pairs of characters. The most common particles and endings of
    # Korean are removed first, so that a noun is found with any of them.
    r"""
    CREATE FUNCTION perdure_words(said text) RETURNS tsvector LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS
    $$
    DECLARE
        plain text := left(said, 20000);
        unspaced text[];
    BEGIN
        IF octet_length(plain) = length(plain) THEN
            RETURN strip(to_tsvector('pg_catalog.english', plain));
        END IF;
        plain := lower(normalize(regexp_replace(normalize(plain, NFKD), '[\u0300-\u036f]', '', 'g'), NFKC));
        unspaced := ARRAY(
            SELECT DISTINCT substr(stem, at, 2)
            FROM regexp_matches(plain, '[\uac00-\ud7a3]{1,32}|[\u3040-\u30ff\u3400-\u9fff]{1,32}', 'g') AS found (run),
                 regexp_replace(run[1], '(?<=[\uac00-\ud7a3])('
                     '입니다|습니다|합니다|이에요|에서는|에게서|으로는|했어요|했습니다|했어|하는|에서|에게|한테|으로|'
                     '까지|부터|처럼|보다|예요|이야|아요|어요|해요|은|는|이|가|을|를|에|의|로|와|과|도|만|야|요)$',
                     '') AS stem,
                 generate_series(1, greatest(length(stem) - 1, 1)) AS at
            WHERE stem !~ '^[은는이가을를에의로와과도만]$');
        plain := regexp_replace(
            plain, '[\uac00-\ud7a3\u3040-\u30ff\u3400-\u9fff\u2000-\u206f\u3000-\u303f]+', ' ', 'g');
        RETURN strip(to_tsvector('pg_catalog.english', plain)) || array_to_tsvector(unspaced);
    END
    $$
    """,
    """
    CREATE FUNCTION perdure_said() RETURNS trigger LANGUAGE plpgsql AS
    $$
    BEGIN
        WITH said AS (
            SELECT m.session_id, m.seq, s.user_id, m.created_at, coalesce(m.author || ' ', '') || m.content AS content
            FROM added AS m JOIN sessions AS s USING (session_id)
            WHERE m.role IN ('user', 'assistant') AND m.content ~ '[^[:space:]]'
              AND (s.forked_from IS NULL OR m.created_at >= s.created_at)
        ), noted AS (
            INSERT INTO unembedded (kind, id, seq, user_id, due_at)
            SELECT 'message', session_id, seq, user_id, perdure_now() FROM said
        )
        INSERT INTO message_words (session_id, seq, user_id, occurred_at, words)
        SELECT session_id, seq, user_id, created_at,
               perdure_words(content) || array_to_tsvector(ARRAY[perdure_owner(user_id)])
        FROM said;
        RETURN NULL;
    END
    $$
    """,
)


def upgrade() -> None:
    """Apply the migration."""
    for function in _FUNCTIONS[:2]:
        op.execute(sa.text(function.replace(":", "\\:")))
    _add_columns()
    _create_what_is_searched()
    _create_memories()
    _create_concepts()
    _create_what_is_read()
    op.execute(sa.text(_FUNCTIONS[2].replace(":", "\\:")))
    op.execute(
        "CREATE TRIGGER messages_said AFTER INSERT ON messages REFERENCING NEW TABLE AS added "
        "FOR EACH STATEMENT EXECUTE FUNCTION perdure_said()"
    )


def _add_columns() -> None:
    op.add_column("messages", sa.Column("author", sa.Text(), nullable=True, comment="who spoke, where it is told"))
    for column in (
        sa.Column("imported_as", sa.Text(), nullable=True, comment="its name in the file that it was imported from"),
        sa.Column("consolidated_at", _TIMESTAMP, nullable=True, comment="when its memories were drawn from it"),
        sa.Column(
            "consolidation_attempts", sa.Integer(), server_default="0", nullable=False, comment="runs that failed"
        ),
        sa.Column("consolidation_due_at", _TIMESTAMP, nullable=True, comment="not tried again before"),
        sa.Column("consolidation_error", sa.Text(), nullable=True, comment="why the last run failed"),
        sa.Column(
            "consolidation",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="what came of it: {skipped} or {stored, duplicates_merged, superseded}",
        ),
    ):
        op.add_column("sessions", column)


def _create_what_is_searched() -> None:
    op.create_table(
        "message_words",
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("occurred_at", _TIMESTAMP, nullable=False),
        sa.Column("words", postgresql.TSVECTOR(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "seq", name=op.f("message_words_pkey")),
        comment="What was said, as it is searched: written by a trigger on messages, in the same commit.",
    )
    op.create_index("message_words_user_id_idx", "message_words", ["user_id", "occurred_at"])
    op.create_index("message_words_words_idx", "message_words", ["words"], postgresql_using="gin")
    op.create_table(
        "embedders",
        sa.Column("embedder_id", sa.SmallInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("dimensions", sa.SmallInteger(), nullable=False),
        sa.Column("created_at", _TIMESTAMP, nullable=False),
        sa.Column("indexed_at", _TIMESTAMP, nullable=True, comment="its vectors are searched by an index since then"),
        sa.Column("walked_at", _TIMESTAMP, nullable=True, comment="when all that is older had been looked at"),
        sa.Column("walked_kind", sa.Text(), nullable=True, comment="how far the present look has come"),
        sa.Column("walked_id", sa.Uuid(), nullable=True),
        sa.Column("walked_seq", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("embedder_id", name=op.f("embedders_pkey")),
        sa.UniqueConstraint("name", "dimensions", name=op.f("embedders_name_dimensions_key")),
        comment="Who made vectors here. Those of different ones are never compared.",
    )
    op.create_table(
        "message_vectors",
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("embedder_id", sa.SmallInteger(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column(
            "vector",
            vector_type(op.get_bind()),
            nullable=True,
            comment="of length 1; NULL: the embedder refuses the text",
        ),
        sa.ForeignKeyConstraint(
            ["session_id", "seq"],
            ["message_words.session_id", "message_words.seq"],
            name=op.f("message_vectors_session_id_seq_fkey"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["embedder_id"], ["embedders.embedder_id"], name=op.f("message_vectors_embedder_id_fkey")
        ),
        sa.PrimaryKeyConstraint("session_id", "seq", "embedder_id", name=op.f("message_vectors_pkey")),
        comment="Vectors of what was said, beside each other where there was more than one embedder.",
    )
    op.create_index("message_vectors_user_id_idx", "message_vectors", ["user_id", "embedder_id"])
    op.create_table(
        "unembedded",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", sa.Uuid(), nullable=False, comment="the message's session, or the memory"),
        sa.Column("seq", sa.BigInteger(), nullable=False, comment="of the message; 0 for a memory"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("due_at", _TIMESTAMP, nullable=False, comment="moved ahead by whoever takes it"),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.CheckConstraint("kind IN ('message', 'memory')", name=op.f("unembedded_kind_check")),
        sa.PrimaryKeyConstraint("kind", "id", "seq", name=op.f("unembedded_pkey")),
        comment="What still has to get its vector.",
    )
    op.create_index("unembedded_due_at_idx", "unembedded", ["due_at"])
    op.create_index("unembedded_user_id_idx", "unembedded", ["user_id"])


def _create_memories() -> None:
    op.create_table(
        "memories",
        sa.Column("memory_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("importance", sa.Double(), nullable=False, comment="what decay is computed from; reinforced"),
        sa.Column("value", sa.Double(), nullable=False, comment="what decay left of it, as of decayed_at"),
        sa.Column("decayed_at", _TIMESTAMP, nullable=True),
        sa.Column("access_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column("last_accessed_at", _TIMESTAMP, nullable=True),
        sa.Column("channels", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False, comment="who wrote it"),
        sa.Column("session_id", sa.Uuid(), nullable=True, comment="the session that it was first drawn from"),
        sa.Column("created_at", _TIMESTAMP, nullable=False),
        sa.Column("valid_from", _TIMESTAMP, nullable=False, comment="when it was said"),
        sa.Column("valid_to", _TIMESTAMP, nullable=True, comment="when what contradicts it was said"),
        sa.Column("superseded_by", sa.Uuid(), nullable=True),
        sa.Column("archived_at", _TIMESTAMP, nullable=True),
        sa.Column(
            "words",
            postgresql.TSVECTOR(),
            sa.Computed("perdure_words(content) || array_to_tsvector(ARRAY[perdure_owner(user_id)])", persisted=True),
            nullable=False,
        ),
        sa.CheckConstraint(
            "kind IN ('fact', 'preference', 'insight', 'conversation')", name=op.f("memories_kind_check")
        ),
        sa.CheckConstraint("origin IN ('consolidation', 'tool')", name=op.f("memories_origin_check")),
        sa.CheckConstraint("importance >= 0 AND importance <= 1", name=op.f("memories_importance_check")),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name=op.f("memories_user_id_fkey")),
        sa.ForeignKeyConstraint(
            ["superseded_by"], ["memories.memory_id"], name=op.f("memories_superseded_by_fkey"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("memory_id", name=op.f("memories_pkey")),
        comment="Layer 3: what is known of a user. Superseded ones stay, as history.",
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index("memories_user_id_idx", "memories", ["user_id", "valid_from"])
    op.create_index("memories_words_idx", "memories", ["words"], postgresql_using="gin")
    op.create_index(
        "memories_superseded_by_idx",
        "memories",
        ["superseded_by"],
        postgresql_where=sa.text("superseded_by IS NOT NULL"),
    )
    op.create_table(
        "memory_vectors",
        sa.Column("memory_id", sa.Uuid(), nullable=False),
        sa.Column("embedder_id", sa.SmallInteger(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column(
            "vector",
            vector_type(op.get_bind()),
            nullable=True,
            comment="of length 1; NULL: the embedder refuses the text",
        ),
        sa.ForeignKeyConstraint(
            ["memory_id"], ["memories.memory_id"], name=op.f("memory_vectors_memory_id_fkey"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["embedder_id"], ["embedders.embedder_id"], name=op.f("memory_vectors_embedder_id_fkey")
        ),
        sa.PrimaryKeyConstraint("memory_id", "embedder_id", name=op.f("memory_vectors_pkey")),
        comment="Vectors of memories, beside each other where there was more than one embedder.",
    )
    op.create_index("memory_vectors_user_id_idx", "memory_vectors", ["user_id", "embedder_id"])
    op.create_table(
        "memory_sources",
        sa.Column("memory_id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["memory_id"], ["memories.memory_id"], name=op.f("memory_sources_memory_id_fkey"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["session_id", "seq"],
            ["messages.session_id", "messages.seq"],
            name=op.f("memory_sources_session_id_seq_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("memory_id", "session_id", "seq", name=op.f("memory_sources_pkey")),
        comment="The messages that a memory came from.",
    )
    op.create_index("memory_sources_session_id_seq_idx", "memory_sources", ["session_id", "seq"])


def _create_concepts() -> None:
    op.create_table(
        "entities",
        sa.Column("entity_id", sa.Uuid(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="as it was first written"),
        sa.Column("key", sa.Text(), nullable=False, comment="the name, so that its spellings are one"),
        sa.Column("kind", sa.Text(), nullable=True, comment="person, place, thing ... as it was extracted"),
        sa.Column("created_at", _TIMESTAMP, nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name=op.f("entities_user_id_fkey")),
        sa.PrimaryKeyConstraint("entity_id", name=op.f("entities_pkey")),
        sa.UniqueConstraint("user_id", "key", name=op.f("entities_user_id_key_key")),
        comment="Layer 4: whom and what a user's memories are about.",
    )
    op.create_table(
        "entity_mentions",
        sa.Column("entity_id", sa.Uuid(), nullable=False),
        sa.Column("memory_id", sa.Uuid(), nullable=False),
        sa.ForeignKeyConstraint(
            ["entity_id"], ["entities.entity_id"], name=op.f("entity_mentions_entity_id_fkey"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["memory_id"], ["memories.memory_id"], name=op.f("entity_mentions_memory_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("entity_id", "memory_id", name=op.f("entity_mentions_pkey")),
        comment="Which memories an entity is in.",
    )
    op.create_index(op.f("entity_mentions_memory_id_idx"), "entity_mentions", ["memory_id"])
    op.create_table(
        "relations",
        sa.Column("source_id", sa.Uuid(), nullable=False),
        sa.Column("predicate", sa.Text(), nullable=False),
        sa.Column("target_id", sa.Uuid(), nullable=False),
        sa.Column("memory_id", sa.Uuid(), nullable=False, comment="the memory that says so"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("created_at", _TIMESTAMP, nullable=False),
        sa.ForeignKeyConstraint(
            ["source_id"], ["entities.entity_id"], name=op.f("relations_source_id_fkey"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["target_id"], ["entities.entity_id"], name=op.f("relations_target_id_fkey"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["memory_id"], ["memories.memory_id"], name=op.f("relations_memory_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("source_id", "predicate", "target_id", "memory_id", name=op.f("relations_pkey")),
        comment="How entities stand to each other, once for each memory that says so.",
    )
    for column in ("target_id", "memory_id", "user_id"):
        op.create_index(op.f(f"relations_{column}_idx"), "relations", [column])


def _create_what_is_read() -> None:
    op.create_table(
        "memory_accesses",
        sa.Column("memory_id", sa.Uuid(), nullable=False),
        sa.Column("accessed_at", _TIMESTAMP, nullable=False),
        sa.Column("access_id", sa.Uuid(), nullable=False, comment="of one recall"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["memory_id"], ["memories.memory_id"], name=op.f("memory_accesses_memory_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("memory_id", "accessed_at", "access_id", name=op.f("memory_accesses_pkey")),
        comment="Layer 5: which memories were recalled when, for some days.",
    )
    op.create_index("memory_accesses_user_id_idx", "memory_accesses", ["user_id", "accessed_at"])
    op.create_index(op.f("memory_accesses_accessed_at_idx"), "memory_accesses", ["accessed_at"])
    op.create_table(
        "hot_memories",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("memory_id", sa.Uuid(), nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("refreshed_at", _TIMESTAMP, nullable=False),
        sa.ForeignKeyConstraint(
            ["memory_id"], ["memories.memory_id"], name=op.f("hot_memories_memory_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("user_id", "rank", name=op.f("hot_memories_pkey")),
        sa.UniqueConstraint("memory_id", name=op.f("hot_memories_memory_id_key")),
        comment="Layer 5: the memories that a user's conversations come back to.",
    )


def downgrade() -> None:
    """Revert the migration."""
    op.execute("DROP TRIGGER messages_said ON messages")
    op.execute("DROP FUNCTION perdure_said()")
    for table in (
        "hot_memories",
        "memory_accesses",
        "relations",
        "entity_mentions",
        "entities",
        "memory_sources",
        "memory_vectors",
        "memories",
        "unembedded",
        "message_vectors",
        "embedders",
        "message_words",
    ):
        op.drop_table(table)
    for column in (
        "imported_as",
        "consolidated_at",
        "consolidation_attempts",
        "consolidation_due_at",
        "consolidation_error",
        "consolidation",
    ):
        op.drop_column("sessions", column)
    op.drop_column("messages", "author")
    op.execute("DROP FUNCTION perdure_words(text)")
    op.execute("DROP FUNCTION perdure_owner(text)")
