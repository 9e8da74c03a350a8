"""The schema: all tables, indexes and functions of the first release.

SQL statements read the time from `perdure_now()`. This function adds the offset `perdure.clock_offset` to the server's
clock. Tests may set the offset on their connections.

Revision: 0001, after nothing.
"""

from __future__ import annotations

import re

from alembic import op

from perdure.database.schema import Names, create_extension, extension_schema

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

readable_from = "0001"

# `perdure_words`: only the first 20,000 characters of a message are indexed, since the transaction that inserts the
# message also writes the index. A run of characters without spaces is processed in pieces, since extracting characters
# from a long run takes quadratic time. Korean and scripts without spaces are indexed by pairs of characters. The most
# common particles and endings of Korean are removed first, so that a noun is found with any of them.
#
# `perdure_said`: the reply of a failed turn is an error, which only people read, so it is not indexed. The trigger runs
# at the end of the statement that settles the turn, so it sees the turn's new status.
_FUNCTIONS = r"""
    CREATE FUNCTION perdure_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS
    $$ SELECT now() + coalesce(nullif(current_setting('perdure.clock_offset', true), ''), '0')::interval $$;

    CREATE FUNCTION perdure_illegal_transition(state text, triggers text) RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'PD001', MESSAGE = state, DETAIL = triggers; END $$;

    CREATE FUNCTION perdure_owner(user_id text) RETURNS text LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS
    $$ SELECT 'user:' || left(encode(sha256(convert_to(user_id, 'UTF8')), 'hex'), 24) $$;

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
    $$;

    CREATE FUNCTION perdure_said() RETURNS trigger LANGUAGE plpgsql AS
    $$
    BEGIN
        WITH said AS (
            SELECT m.session_id, m.seq, s.user_id, m.created_at, coalesce(m.author || ' ', '') || m.content AS content
            FROM added AS m JOIN sessions AS s USING (session_id)
            WHERE m.role IN ('user', 'assistant') AND m.content ~ '[^[:space:]]'
              AND (s.forked_from IS NULL OR m.created_at >= s.created_at)
              AND NOT EXISTS (SELECT FROM turns AS f
                              WHERE f.turn_id = m.turn_id AND f.reply_seq = m.seq AND f.status = 'failed')
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
"""

_TABLES = r"""
    CREATE TABLE users (
        user_id text PRIMARY KEY,
        created_at timestamptz NOT NULL
    );

    CREATE TABLE identities (
        channel text NOT NULL,
        external_id text NOT NULL,
        user_id text NOT NULL REFERENCES users,
        created_at timestamptz NOT NULL,
        tenant text NOT NULL DEFAULT '',
        PRIMARY KEY (tenant, channel, external_id)
    );
    CREATE INDEX identities_user_id_idx ON identities (user_id);

    CREATE TABLE link_codes (
        user_id text PRIMARY KEY REFERENCES users ON DELETE CASCADE,
        code_hash bytea NOT NULL UNIQUE,
        expires_at timestamptz NOT NULL
    );
    CREATE INDEX link_codes_expires_at_idx ON link_codes (expires_at);

    CREATE TABLE link_attempts (
        tenant text NOT NULL,
        channel text NOT NULL,
        external_id text NOT NULL,
        attempts integer NOT NULL,
        since timestamptz NOT NULL,
        PRIMARY KEY (tenant, channel, external_id)
    );
    CREATE INDEX link_attempts_since_idx ON link_attempts (since);

    CREATE TABLE conversations (
        user_id text NOT NULL REFERENCES users,
        conversation text NOT NULL,
        title text NOT NULL,
        titled boolean NOT NULL DEFAULT false,
        archived_at timestamptz,
        created_at timestamptz NOT NULL,
        PRIMARY KEY (user_id, conversation)
    );

    CREATE TABLE chat_places (
        user_id text NOT NULL REFERENCES users,
        channel text NOT NULL,
        chat text NOT NULL,
        thread text NOT NULL,
        conversation text,
        last_message_id text,
        seen_at timestamptz NOT NULL,
        PRIMARY KEY (user_id, channel, chat, thread)
    );
    CREATE INDEX chat_places_seen_idx ON chat_places (channel, seen_at);

    CREATE TABLE answered_requests (
        user_id text NOT NULL REFERENCES users,
        fingerprint text NOT NULL,
        turn_id uuid NOT NULL,
        answered_at timestamptz NOT NULL,
        PRIMARY KEY (user_id, fingerprint)
    );
    CREATE INDEX answered_requests_answered_at_idx ON answered_requests (answered_at);

    CREATE TABLE metered_requests (
        request_id uuid PRIMARY KEY,
        user_id text NOT NULL,
        kind text NOT NULL,
        requested_at timestamptz NOT NULL,
        model text,
        usage jsonb
    );
    CREATE INDEX metered_requests_user_idx ON metered_requests (user_id, requested_at);
    CREATE INDEX metered_requests_requested_at_idx ON metered_requests (requested_at);

    CREATE TABLE reminders (
        schedule_id uuid PRIMARY KEY,
        user_id text NOT NULL,
        text text NOT NULL,
        cron text,
        once timestamptz,
        timezone text NOT NULL,
        channel text NOT NULL,
        conversation text,
        agent text,
        reply_to jsonb,
        paused boolean NOT NULL DEFAULT false,
        next_due timestamptz,
        taken_until timestamptz,
        last_slot timestamptz,
        last_turn_id uuid,
        error text,
        created_at timestamptz NOT NULL
    );
    CREATE INDEX reminders_user_id_idx ON reminders (user_id, next_due);
    CREATE INDEX reminders_next_due_idx ON reminders (next_due);

    CREATE TABLE unrouted (
        turn_id uuid PRIMARY KEY,
        position bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
        user_id text NOT NULL,
        message jsonb NOT NULL,
        accepted_at timestamptz NOT NULL DEFAULT now(),
        due_at timestamptz NOT NULL DEFAULT now(),
        attempts integer NOT NULL DEFAULT '0',
        routed_to uuid,
        error_code text,
        error_message text,
        settled_at timestamptz
    );
    CREATE INDEX unrouted_due_at_idx ON unrouted (due_at, position) WHERE settled_at IS NULL;
    CREATE INDEX unrouted_user_id_idx ON unrouted (user_id, position);
    CREATE INDEX unrouted_settled_at_idx ON unrouted (settled_at) WHERE settled_at IS NOT NULL;
    CREATE INDEX unrouted_user_idx ON unrouted ((md5(user_id) || user_id), position) WHERE settled_at IS NULL;

    CREATE TABLE sessions (
        session_id uuid PRIMARY KEY,
        user_id text NOT NULL REFERENCES users,
        scope text NOT NULL,
        routable boolean NOT NULL,
        agent text NOT NULL,
        state text NOT NULL CHECK (
            state IN ('initializing', 'active', 'thinking', 'tool_executing', 'waiting_approval', 'summarizing',
                      'ending', 'ended')
        ),
        created_at timestamptz NOT NULL,
        last_activity_at timestamptz NOT NULL,
        ended_at timestamptz,
        channels text[] NOT NULL,
        summary text,
        key_topics text[] NOT NULL DEFAULT '{}',
        turn_count integer NOT NULL DEFAULT '0',
        message_count bigint NOT NULL DEFAULT '0',
        last_turn_seq bigint NOT NULL DEFAULT '0',
        unsettled integer NOT NULL DEFAULT '0' CHECK (unsettled >= 0),
        tick bigint NOT NULL DEFAULT '0',
        token bigint NOT NULL DEFAULT '0',
        nonce uuid,
        lease_owner text,
        lease_until timestamptz,
        strikes integer NOT NULL DEFAULT '0',
        claims integer NOT NULL DEFAULT '0',
        spent_s double precision NOT NULL DEFAULT '0',
        woken_at timestamptz,
        wakes integer NOT NULL DEFAULT '0',
        not_before timestamptz,
        end_requested_at timestamptz,
        end_reason text,
        end_attempts integer NOT NULL DEFAULT '0',
        summary_extractive boolean,
        previous_session_id uuid REFERENCES sessions,
        forked_from uuid,
        variables_tick bigint,
        saved_token bigint,
        saved_tick bigint,
        imported_as text,
        consolidated_at timestamptz,
        consolidation_attempts integer NOT NULL DEFAULT '0',
        consolidation_due_at timestamptz,
        consolidation_given_up_at timestamptz,
        consolidation_error text,
        consolidation jsonb,
        priority smallint NOT NULL DEFAULT '5',
        paced boolean NOT NULL DEFAULT false,
        queued_at timestamptz,
        deaths integer NOT NULL DEFAULT '0',
        blamed_token bigint,
        unequipped_since timestamptz,
        parked_for text
    ) WITH (fillfactor = 70);
    CREATE UNIQUE INDEX sessions_live_key ON sessions (user_id, scope) WHERE routable;
    CREATE INDEX sessions_ending_idx ON sessions (end_requested_at)
        WHERE end_requested_at IS NOT NULL AND ended_at IS NULL;
    CREATE INDEX sessions_previous_session_id_idx ON sessions (previous_session_id)
        WHERE previous_session_id IS NOT NULL;
    CREATE UNIQUE INDEX sessions_imported_as_key ON sessions (user_id, imported_as) WHERE imported_as IS NOT NULL;
    CREATE INDEX sessions_forked_from_idx ON sessions (forked_from) WHERE forked_from IS NOT NULL;
    CREATE INDEX sessions_created_at_idx ON sessions (created_at, session_id);
    CREATE INDEX sessions_of_user_idx ON sessions (user_id, created_at, session_id);
    CREATE INDEX sessions_waiting_idx ON sessions (ended_at)
        WHERE ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL;
    CREATE INDEX sessions_consolidation_due_idx ON sessions (coalesce(consolidation_due_at, ended_at))
        WHERE ended_at IS NOT NULL AND consolidated_at IS NULL AND consolidation_given_up_at IS NULL;
    CREATE INDEX sessions_given_up_idx ON sessions (consolidation_given_up_at, session_id)
        WHERE consolidation_given_up_at IS NOT NULL;
    CREATE INDEX sessions_given_up_of_user_idx ON sessions (user_id, consolidation_given_up_at, session_id)
        WHERE consolidation_given_up_at IS NOT NULL;
    CREATE INDEX sessions_wake_idx ON sessions (priority, least(wakes, 6), coalesce(woken_at, '-infinity'::timestamptz))
        WHERE unsettled > 0 AND not_before IS NULL;
    CREATE INDEX sessions_postponed_idx ON sessions (paced, least(wakes, 6), not_before)
        WHERE unsettled > 0 AND not_before IS NOT NULL;
    CREATE INDEX sessions_postponed_woken_at_idx ON sessions (woken_at)
        WHERE unsettled > 0 AND not_before IS NOT NULL;
    CREATE INDEX sessions_ending_wake_idx ON sessions (least(wakes, 6), coalesce(woken_at, '-infinity'::timestamptz))
        WHERE end_requested_at IS NOT NULL AND ended_at IS NULL AND unsettled = 0;
    CREATE INDEX sessions_admitted_idx ON sessions (user_id) WHERE unsettled > 0 AND not_before IS NULL;
    CREATE INDEX sessions_queued_idx ON sessions (user_id, priority DESC, queued_at)
        WHERE unsettled > 0 AND queued_at IS NOT NULL;
    CREATE INDEX sessions_of_tenant_idx ON sessions (split_part(user_id, chr(31), 1), created_at, session_id)
        WHERE strpos(user_id, chr(31)) > 0;
    CREATE INDEX sessions_of_scope_idx ON sessions (user_id, scope, created_at, session_id);
    CREATE INDEX sessions_idle_idx ON sessions (last_activity_at) WHERE end_requested_at IS NULL;
    CREATE INDEX sessions_queued_user_idx ON sessions ((md5(user_id) || user_id))
        WHERE unsettled > 0 AND queued_at IS NOT NULL;
    CREATE INDEX sessions_parked_idx ON sessions (coalesce(parked_for, ''), least(wakes, 6), not_before)
        WHERE unsettled > 0 AND not_before IS NOT NULL AND paced;
    CREATE INDEX sessions_open_forks_idx ON sessions (user_id) WHERE forked_from IS NOT NULL AND ended_at IS NULL;

    CREATE TABLE turns (
        turn_id uuid PRIMARY KEY,
        session_id uuid NOT NULL REFERENCES sessions,
        seq bigint NOT NULL,
        user_id text NOT NULL,
        agent text NOT NULL,
        channel text NOT NULL,
        priority smallint NOT NULL,
        reply_to jsonb,
        metadata jsonb,
        status text NOT NULL
            CHECK (status IN ('accepted', 'running', 'waiting_approval', 'parked', 'done', 'failed', 'cancelled')),
        attempts integer NOT NULL DEFAULT '0',
        steps integer NOT NULL DEFAULT '0',
        first_seq bigint,
        reply_seq bigint,
        error_code text,
        error_message text,
        usage jsonb,
        cancel_requested_at timestamptz,
        accepted_at timestamptz NOT NULL,
        started_at timestamptz,
        settled_at timestamptz,
        settled_tick bigint,
        unsaved json,
        unsaved_error text,
        attempt_error text,
        feedback jsonb,
        UNIQUE (session_id, seq),
        CONSTRAINT turns_settled_check
            CHECK ((settled_at IS NULL) = (status IN ('accepted', 'running', 'waiting_approval', 'parked')))
    ) WITH (fillfactor = 70);
    CREATE INDEX turns_unsettled_idx ON turns (session_id, seq) WHERE settled_at IS NULL;
    CREATE INDEX turns_user_id_idx ON turns (user_id, turn_id);
    CREATE INDEX turns_error_idx ON turns (turn_id) WHERE error_code IS NOT NULL;

    CREATE TABLE inbox (
        user_id text NOT NULL,
        channel text NOT NULL,
        message_id text NOT NULL,
        turn_id uuid NOT NULL REFERENCES turns,
        position integer NOT NULL,
        text text NOT NULL,
        accepted_at timestamptz NOT NULL,
        PRIMARY KEY (user_id, channel, message_id)
    );
    CREATE INDEX inbox_turn_id_idx ON inbox (turn_id);
    CREATE INDEX inbox_user_id_idx ON inbox (user_id, accepted_at);

    CREATE TABLE messages (
        session_id uuid NOT NULL REFERENCES sessions,
        seq bigint NOT NULL,
        turn_id uuid NOT NULL,
        role text NOT NULL CHECK (role IN ('user', 'assistant', 'tool')),
        content text NOT NULL,
        tool_calls jsonb,
        tool_call_id text,
        message_id text,
        channel text NOT NULL,
        token_count integer NOT NULL,
        model text,
        fallback boolean,
        usage jsonb,
        created_at timestamptz NOT NULL,
        author text,
        stop_reason text,
        PRIMARY KEY (session_id, seq)
    );

    CREATE TABLE tool_effects (
        effect_id uuid PRIMARY KEY,
        turn_id uuid NOT NULL REFERENCES turns,
        message_seq bigint NOT NULL,
        position integer NOT NULL,
        tool text NOT NULL,
        arguments text NOT NULL,
        effect text NOT NULL CHECK (effect IN ('pure', 'idempotent', 'unsafe')),
        status text NOT NULL
            CHECK (status IN ('asked', 'approved', 'intended', 'done', 'failed', 'unknown', 'denied')),
        result text,
        intended_at timestamptz NOT NULL,
        decide_at timestamptz NOT NULL,
        finished_at timestamptz,
        variables json,
        waits_for text CHECK (waits_for IN ('task', 'timer')),
        sent_at timestamptz,
        probe_at timestamptz,
        progress text,
        parts json,
        approver text,
        decided_by text,
        decided_at timestamptz,
        UNIQUE (turn_id, message_seq, position)
    );
    CREATE INDEX tool_effects_probe_idx ON tool_effects (probe_at) WHERE probe_at IS NOT NULL;
    CREATE INDEX tool_effects_asked_idx ON tool_effects (effect_id) WHERE status = 'asked';
    CREATE INDEX tool_effects_decided_by_idx ON tool_effects (decided_by) WHERE decided_by IS NOT NULL;

    CREATE TABLE deliveries (
        delivery_id uuid PRIMARY KEY,
        turn_id uuid NOT NULL,
        user_id text NOT NULL,
        scope text,
        asking_seq bigint,
        target jsonb NOT NULL,
        status text NOT NULL CHECK (status IN ('pending', 'delivered', 'failed')),
        attempts integer NOT NULL DEFAULT '0',
        due_at timestamptz NOT NULL,
        last_error text,
        created_at timestamptz NOT NULL,
        delivered_at timestamptz,
        wake_at timestamptz,
        wakes integer NOT NULL DEFAULT '0'
    );
    CREATE INDEX deliveries_over_idx ON deliveries (created_at) WHERE status <> 'pending';
    CREATE INDEX deliveries_wake_idx ON deliveries (greatest(due_at, wake_at)) WHERE status = 'pending';
    CREATE UNIQUE INDEX deliveries_turn_key ON deliveries (turn_id, asking_seq) NULLS NOT DISTINCT;
    CREATE INDEX deliveries_pending_idx ON deliveries (
        user_id, scope,
        md5(coalesce(target ->> 'url', target ->> 'task',
            (coalesce(target ->> 'channel', '') || ' ') || coalesce(target #>> '{place,chat}', ''))),
        delivery_id
    ) WHERE status = 'pending';
    CREATE INDEX deliveries_refused_idx ON deliveries (user_id) WHERE scope IS NULL;
    CREATE INDEX deliveries_service_idx ON deliveries (
        md5(coalesce(lower(substring(target ->> 'url', '^[^:/?#]+://(?:[^/?#@]*@)?([^/?#]*)')),
            'task ' || coalesce(target ->> 'queue', target ->> 'task'), 'channel ' || (target ->> 'channel'), '')),
        greatest(due_at, wake_at)
    ) WHERE status = 'pending';
    CREATE INDEX deliveries_user_idx ON deliveries (
        md5(coalesce(lower(substring(target ->> 'url', '^[^:/?#]+://(?:[^/?#@]*@)?([^/?#]*)')),
            'task ' || coalesce(target ->> 'queue', target ->> 'task'), 'channel ' || (target ->> 'channel'), '')),
        md5(user_id), greatest(due_at, wake_at)
    ) WHERE status = 'pending';

    CREATE TABLE snapshots (
        session_id uuid NOT NULL REFERENCES sessions,
        set_aside boolean NOT NULL,
        variables json NOT NULL,
        events json NOT NULL,
        tick bigint NOT NULL,
        token bigint NOT NULL,
        saved_at timestamptz NOT NULL,
        PRIMARY KEY (session_id, set_aside, tick)
    );
    CREATE INDEX snapshots_set_aside_idx ON snapshots (saved_at) WHERE set_aside;

    CREATE TABLE schedule_slots (
        entry text NOT NULL,
        slot timestamptz NOT NULL,
        taken_at timestamptz NOT NULL,
        done_at timestamptz,
        attempts integer NOT NULL DEFAULT '1',
        retry_at timestamptz,
        error text,
        PRIMARY KEY (entry, slot)
    );

    CREATE TABLE schedule_entries (
        entry text PRIMARY KEY,
        since timestamptz NOT NULL,
        token bigint NOT NULL DEFAULT '0',
        lease_until timestamptz,
        woken_at timestamptz,
        wakes integer NOT NULL DEFAULT '0'
    ) WITH (fillfactor = 70);

    CREATE TABLE sweeps (
        name text PRIMARY KEY,
        due_at timestamptz NOT NULL,
        after text,
        paces jsonb
    );

    CREATE TABLE intake (
        name text PRIMARY KEY,
        closed_at timestamptz
    );

    CREATE TABLE schema_compatibility (
        single boolean PRIMARY KEY CHECK (single),
        readable_from text NOT NULL
    );

    CREATE TABLE erasures (
        erasure_id uuid PRIMARY KEY,
        user_id text NOT NULL,
        session_ids uuid[] NOT NULL,
        erased_at timestamptz NOT NULL,
        due_at timestamptz NOT NULL,
        task_ids uuid[] NOT NULL DEFAULT '{}',
        revoked_at timestamptz
    );

    CREATE TABLE stale_statistics (
        table_name text PRIMARY KEY,
        erased_at timestamptz NOT NULL,
        due_at timestamptz NOT NULL
    );

    CREATE TABLE message_words (
        session_id uuid NOT NULL,
        seq bigint NOT NULL,
        user_id text NOT NULL,
        occurred_at timestamptz NOT NULL,
        words tsvector NOT NULL,
        PRIMARY KEY (session_id, seq)
    );
    CREATE INDEX message_words_user_id_idx ON message_words (user_id, occurred_at);
    CREATE INDEX message_words_words_idx ON message_words USING gin (words) WITH (gin_pending_list_limit = 64);

    CREATE TABLE embedders (
        embedder_id smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        name text NOT NULL,
        dimensions smallint NOT NULL,
        created_at timestamptz NOT NULL,
        indexed_at timestamptz,
        walked_at timestamptz,
        walked_kind text,
        walked_id uuid,
        walked_seq bigint,
        UNIQUE (name, dimensions)
    );

    CREATE TABLE message_vectors (
        session_id uuid NOT NULL,
        seq bigint NOT NULL,
        embedder_id smallint NOT NULL REFERENCES embedders,
        user_id text NOT NULL,
        vector @vector.vector,
        PRIMARY KEY (session_id, seq, embedder_id),
        FOREIGN KEY (session_id, seq) REFERENCES message_words ON DELETE CASCADE
    );
    CREATE INDEX message_vectors_user_id_idx ON message_vectors (user_id, embedder_id);

    CREATE TABLE unembedded (
        kind text NOT NULL CHECK (kind IN ('message', 'memory')),
        id uuid NOT NULL,
        seq bigint NOT NULL,
        user_id text NOT NULL,
        due_at timestamptz NOT NULL,
        attempts integer NOT NULL DEFAULT '0',
        PRIMARY KEY (kind, id, seq)
    );
    CREATE INDEX unembedded_due_at_idx ON unembedded (due_at);
    CREATE INDEX unembedded_user_id_idx ON unembedded (user_id);

    CREATE TABLE memories (
        memory_id uuid PRIMARY KEY,
        user_id text NOT NULL REFERENCES users,
        kind text NOT NULL CHECK (kind IN ('fact', 'preference', 'insight', 'conversation')),
        content text NOT NULL,
        importance double precision NOT NULL CHECK (importance >= 0 AND importance <= 1),
        value double precision NOT NULL,
        decayed_at timestamptz,
        access_count integer NOT NULL DEFAULT '0',
        last_accessed_at timestamptz,
        channels text[] NOT NULL,
        origin text NOT NULL CHECK (origin IN ('consolidation', 'tool')),
        session_id uuid,
        created_at timestamptz NOT NULL,
        valid_from timestamptz NOT NULL,
        valid_to timestamptz,
        superseded_by uuid REFERENCES memories ON DELETE SET NULL,
        archived_at timestamptz,
        words tsvector NOT NULL GENERATED ALWAYS AS (
            perdure_words(content) || array_to_tsvector(ARRAY[perdure_owner(user_id)])
        ) STORED
    ) WITH (fillfactor = 80);
    CREATE INDEX memories_user_id_idx ON memories (user_id, valid_from);
    CREATE INDEX memories_words_idx ON memories USING gin (words) WITH (gin_pending_list_limit = 64);
    CREATE INDEX memories_superseded_by_idx ON memories (superseded_by) WHERE superseded_by IS NOT NULL;

    CREATE TABLE memory_vectors (
        memory_id uuid NOT NULL REFERENCES memories ON DELETE CASCADE,
        embedder_id smallint NOT NULL REFERENCES embedders,
        user_id text NOT NULL,
        vector @vector.vector,
        PRIMARY KEY (memory_id, embedder_id)
    );
    CREATE INDEX memory_vectors_user_id_idx ON memory_vectors (user_id, embedder_id);

    CREATE TABLE memory_sources (
        memory_id uuid NOT NULL REFERENCES memories ON DELETE CASCADE,
        session_id uuid NOT NULL,
        seq bigint NOT NULL,
        PRIMARY KEY (memory_id, session_id, seq),
        FOREIGN KEY (session_id, seq) REFERENCES messages ON DELETE CASCADE
    );
    CREATE INDEX memory_sources_session_id_seq_idx ON memory_sources (session_id, seq);

    CREATE TABLE entities (
        entity_id uuid PRIMARY KEY,
        user_id text NOT NULL REFERENCES users,
        name text NOT NULL,
        key text NOT NULL,
        kind text,
        created_at timestamptz NOT NULL,
        UNIQUE (user_id, key)
    );

    CREATE TABLE entity_mentions (
        entity_id uuid NOT NULL REFERENCES entities ON DELETE CASCADE,
        memory_id uuid NOT NULL REFERENCES memories ON DELETE CASCADE,
        PRIMARY KEY (entity_id, memory_id)
    );
    CREATE INDEX entity_mentions_memory_id_idx ON entity_mentions (memory_id);

    CREATE TABLE relations (
        source_id uuid NOT NULL REFERENCES entities ON DELETE CASCADE,
        predicate text NOT NULL,
        target_id uuid NOT NULL REFERENCES entities ON DELETE CASCADE,
        memory_id uuid NOT NULL REFERENCES memories ON DELETE CASCADE,
        user_id text NOT NULL,
        created_at timestamptz NOT NULL,
        PRIMARY KEY (source_id, predicate, target_id, memory_id)
    );
    CREATE INDEX relations_target_id_idx ON relations (target_id);
    CREATE INDEX relations_memory_id_idx ON relations (memory_id);
    CREATE INDEX relations_user_id_idx ON relations (user_id);

    CREATE TABLE memory_accesses (
        memory_id uuid NOT NULL REFERENCES memories ON DELETE CASCADE,
        accessed_at timestamptz NOT NULL,
        access_id uuid NOT NULL,
        user_id text NOT NULL,
        PRIMARY KEY (memory_id, accessed_at, access_id)
    );
    CREATE INDEX memory_accesses_user_id_idx ON memory_accesses (user_id, accessed_at);
    CREATE INDEX memory_accesses_accessed_at_idx ON memory_accesses (accessed_at);

    CREATE TABLE hot_memories (
        user_id text NOT NULL,
        rank integer NOT NULL,
        memory_id uuid NOT NULL UNIQUE REFERENCES memories ON DELETE CASCADE,
        score double precision NOT NULL,
        refreshed_at timestamptz NOT NULL,
        PRIMARY KEY (user_id, rank)
    );

    CREATE TABLE cases (
        case_id text COLLATE "C" PRIMARY KEY,
        query text NOT NULL,
        response_text text NOT NULL,
        category_path text,
        query_vector @vector.vector,
        embedder text,
        usage_count bigint NOT NULL DEFAULT '0' CHECK (usage_count >= 0),
        success_rate double precision CHECK (success_rate BETWEEN 0 AND 100),
        last_accessed_at timestamptz,
        created_at timestamptz NOT NULL,
        user_id text,
        turn_id uuid UNIQUE,
        review jsonb,
        status text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'archived')),
        bank text NOT NULL DEFAULT 'common',
        shared_at timestamptz,
        CONSTRAINT cases_embedder_check CHECK (query_vector IS NULL OR embedder IS NOT NULL),
        CONSTRAINT cases_author_check CHECK (turn_id IS NULL OR user_id IS NOT NULL)
    ) WITH (fillfactor = 80);
    CREATE INDEX cases_flagged_idx ON cases (case_id) WHERE review IS NOT NULL;
    CREATE INDEX cases_user_id_idx ON cases (user_id) WHERE user_id IS NOT NULL;
    CREATE INDEX cases_of_tenant_idx ON cases (split_part(user_id, chr(31), 1)) WHERE strpos(user_id, chr(31)) > 0;
    CREATE INDEX cases_bank_idx ON cases (bank, embedder) WHERE status = 'active' AND query_vector IS NOT NULL;
    CREATE INDEX cases_everybodys_idx ON cases (bank, embedder)
        WHERE status = 'active' AND query_vector IS NOT NULL AND user_id IS NULL;
    CREATE INDEX cases_approved_idx ON cases (bank, embedder)
        WHERE status = 'active' AND query_vector IS NOT NULL AND shared_at IS NOT NULL AND user_id IS NOT NULL;

    CREATE TABLE case_executions (
        case_id text COLLATE "C" NOT NULL,
        turn_id uuid NOT NULL,
        succeeded boolean NOT NULL,
        feedback smallint CHECK (feedback IN (-1, 1)),
        error text,
        executed_at timestamptz NOT NULL,
        counted boolean NOT NULL DEFAULT false,
        PRIMARY KEY (case_id, turn_id)
    );
    CREATE INDEX case_executions_newest_idx ON case_executions (case_id, executed_at, turn_id);
    CREATE INDEX case_executions_turn_id_idx ON case_executions (turn_id);
    CREATE INDEX case_executions_uncounted_idx ON case_executions (case_id) WHERE NOT counted;

    CREATE TABLE case_archive (
        archive_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        case_id text COLLATE "C" NOT NULL REFERENCES cases ON DELETE CASCADE,
        query text NOT NULL,
        response_text text NOT NULL,
        category_path text,
        query_vector @vector.vector,
        embedder text,
        usage_count bigint NOT NULL DEFAULT '0',
        success_rate double precision,
        last_accessed_at timestamptz,
        created_at timestamptz NOT NULL,
        user_id text,
        turn_id uuid,
        review jsonb,
        archived_at timestamptz NOT NULL,
        archived_reason text NOT NULL,
        keeper_id text,
        run_id uuid,
        restored_at timestamptz
    );
    CREATE INDEX case_archive_archived_at_idx ON case_archive (archived_at);
    CREATE INDEX case_archive_case_id_idx ON case_archive (case_id);

    CREATE TABLE case_history (
        history_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        case_id text COLLATE "C" NOT NULL REFERENCES cases ON DELETE CASCADE,
        event text NOT NULL CHECK (event IN ('added', 'archived', 'absorbed', 'restored', 'shared', 'unshared')),
        reason text NOT NULL,
        details jsonb,
        run_id uuid,
        at timestamptz NOT NULL
    );
    CREATE INDEX case_history_case_id_idx ON case_history (case_id);

    CREATE TABLE case_runs (
        run_id uuid PRIMARY KEY,
        dry_run boolean NOT NULL DEFAULT false,
        phase text NOT NULL CHECK (
            phase IN ('planning', 'notifying', 'waiting_approval', 'applying', 'reporting', 'done', 'withheld',
                      'rejected', 'expired')
        ),
        done bigint NOT NULL DEFAULT '0',
        total bigint NOT NULL DEFAULT '0',
        started_at timestamptz NOT NULL,
        planned_at timestamptz,
        notified_at timestamptz,
        expires_at timestamptz,
        decided_by text,
        finished_at timestamptz,
        error text,
        token bigint NOT NULL DEFAULT '1',
        lease_until timestamptz,
        CONSTRAINT case_runs_finished_check CHECK (
            (finished_at IS NULL) = (phase IN ('planning', 'notifying', 'waiting_approval', 'applying', 'reporting'))
        ),
        CONSTRAINT case_runs_dry_run_check CHECK (NOT dry_run OR phase IN ('planning', 'done'))
    );
    CREATE INDEX case_runs_started_at_idx ON case_runs (started_at);
    CREATE UNIQUE INDEX case_runs_one_at_a_time_key ON case_runs ((true)) WHERE finished_at IS NULL AND NOT dry_run;
    CREATE UNIQUE INDEX case_runs_one_dry_run_key ON case_runs ((true)) WHERE finished_at IS NULL AND dry_run;

    CREATE TABLE case_run_items (
        run_id uuid NOT NULL REFERENCES case_runs ON DELETE CASCADE,
        position integer NOT NULL,
        action text NOT NULL CHECK (action IN ('remove', 'merge', 'archive', 'spare')),
        case_id text COLLATE "C" NOT NULL,
        rule text NOT NULL,
        reason text NOT NULL,
        keeper_id text COLLATE "C",
        similarity double precision,
        keeper_weight bigint,
        usage_count bigint NOT NULL,
        success_rate double precision,
        last_accessed_at timestamptz,
        outcome text CHECK (outcome IN ('done', 'spared')),
        outcome_rule text,
        outcome_reason text,
        PRIMARY KEY (run_id, position)
    );
    CREATE INDEX case_run_items_keeper_idx ON case_run_items (run_id, keeper_id) WHERE action = 'merge'
"""

_TRIGGER = """
    CREATE TRIGGER messages_said AFTER INSERT ON messages REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION perdure_said()
"""

_COMMENTS = {
    "identities": "Maps a person's id on a channel to a user.",
    "link_codes": "The newest code of each user that links another channel.",
    "link_codes.code_hash": "SHA-256 of the code",
    "link_attempts": "How many codes an identity has sent since `since`; limits guessing.",
    "conversations": "Conversations whose key a caller gave.",
    "conversations.conversation": "the caller's key",
    "conversations.titled": "a caller set the title; summaries do not replace it",
    "chat_places": "Chats in which people wrote to a channel's bot.",
    "chat_places.thread": "'': the chat has no threads",
    "chat_places.conversation": "opened by a command; NULL: the chat's own conversation",
    "chat_places.last_message_id": "the newest message that was accepted",
    "answered_requests": "The last turn whose answer was sent completely, for requests without an idempotency key.",
    "answered_requests.fingerprint": "a digest of the conversation, the agent and the messages",
    "metered_requests": (
        "Requests that begin no turn and count as messages: side requests of chat front ends, and forks."
    ),
    "metered_requests.user_id": "a user's key; the user may have no row, so no foreign key",
    "metered_requests.kind": "'side_request' or 'fork'",
    "metered_requests.model": "the model that answered a side request",
    "metered_requests.usage": "tokens of that answer",
    "reminders": "Users' schedules. One that fires once is deleted when its message is accepted.",
    "reminders.cron": "NULL: it fires once",
    "reminders.once": "the moment of a schedule that fires once",
    "reminders.next_due": "NULL: paused, or its only message was refused",
    "reminders.taken_until": "a worker fires it until then",
    "reminders.error": "why its last message was refused",
    "unrouted": "Messages of applications, inserted in their transactions. A routed one becomes a turn and is deleted.",
    "unrouted.position": "order of insertion",
    "unrouted.message": "the fields of POST /v1/messages",
    "unrouted.routed_to": "the turn that the message was merged into or repeated",
    "unrouted.error_code": "why the message was refused",
    "unrouted.settled_at": "when routed_to or error_code was set",
    "sessions.scope": "'': all channels; else a channel, or '/' and a conversation's key",
    "sessions.routable": "accepts messages without a session_id",
    "sessions.turn_count": "settled turns",
    "sessions.message_count": "seq of the last message",
    "sessions.last_turn_seq": "seq of the last turn accepted",
    "sessions.unsettled": "turns that are accepted and not settled",
    "sessions.tick": "committed steps",
    "sessions.token": "fencing token; grows with each claim",
    "sessions.nonce": "a random id, new with each claim; the fence's second half",
    "sessions.strikes": "claims since the last commit of a step",
    "sessions.claims": "claims of the present turn",
    "sessions.spent_s": "seconds under lease in the present turn",
    "sessions.wakes": "the sweeper's wake-ups since the last claim",
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
    "sessions.consolidation_error": "why the last run failed",
    "sessions.consolidation": "the result: {skipped} or {stored, duplicates_merged, superseded}",
    "sessions.priority": "the highest priority of its turns since it last had no unsettled turn",
    "sessions.paced": "while not_before is set: its turn waits for a model; few such sessions are woken at a time",
    "sessions.queued_at": "since when it waits for its user's other turns; NULL: it does not wait",
    "sessions.deaths": "processes that died during its turn since the last progress",
    "sessions.blamed_token": "token of the claim whose process died; the death is charged to a turn",
    "sessions.unequipped_since": "when a worker first lacked the agent or a tool of its turn",
    "sessions.parked_for": "while paced is set: the model for which its turn waits",
    "turns.seq": "order of acceptance within the session",
    "turns.first_seq": "seq of its first message; set when it begins",
    "turns.reply_seq": "seq of the message that is its reply",
    "turns.settled_tick": "the session's tick when the turn was settled",
    "turns.unsaved": "how the turn ends; it is settled when the session's snapshot is saved",
    "turns.unsaved_error": "why the snapshot is not saved yet",
    "turns.attempt_error": "why the last attempt failed",
    "turns.feedback": "a person's feedback: a score, -1 or 1, and a comment",
    "inbox": "Every message accepted, once; it enters the transcript with its turn's first commit.",
    "inbox.position": "order within the turn; over 1: it was merged into it",
    "messages": "The transcript. Rows are appended and never updated.",
    "messages.tool_calls": "[{id, name, arguments}]; arguments is the model's text",
    "messages.message_id": "the sender's id, if one was given",
    "messages.usage": "{input_tokens, output_tokens} of the model call that produced it",
    "messages.author": "who wrote the message, in a group",
    "messages.stop_reason": "why the model's reply is incomplete, such as length",
    "tool_effects": "Tool calls: the intent is written before the call, the result after it.",
    "tool_effects.effect_id": "the tool's idempotency key",
    "tool_effects.message_seq": "seq of the assistant message that makes the call",
    "tool_effects.position": "index of the call in that message, from 0",
    "tool_effects.decide_at": "deadline: intent + timeout",
    "tool_effects.variables": "[[number, name, value]] for the step to commit; without a value: removed",
    "tool_effects.waits_for": "what the call waits for without a worker",
    "tool_effects.sent_at": "since when its task may be with the broker",
    "tool_effects.probe_at": "when the sweeper asks for its task's result, or revokes the task",
    "tool_effects.progress": "the task's last progress report, as JSON",
    "tool_effects.parts": "[[status, result]]: the calls of a list of arguments",
    "tool_effects.approver": "who approves it: user or staff; NULL: it needs no approval",
    "tool_effects.decided_by": "who approved or denied it, such as user:KEY",
    "deliveries": "The outbox: replies to deliver.",
    "deliveries.turn_id": "in turns, or in unrouted if the message was refused",
    "deliveries.user_id": "the turn's user",
    "deliveries.scope": "the scope of the turn's session; NULL: it has no session",
    "deliveries.asking_seq": "seq of the message whose calls need approval; NULL: the reply",
    "deliveries.due_at": "the next attempt; an attempt moves it ahead",
    "deliveries.wake_at": "when it may be published again; NULL: when it is due",
    "deliveries.wakes": "the sweeper's wake-ups since the last attempt",
    "snapshots": "Working variables and pending events: a row with each step that changed them.",
    "snapshots.set_aside": "could not be used; kept for the operator and never read",
    "snapshots.variables": "JSON text, not jsonb, so that values are read back exactly",
    "snapshots.events": "[{source, type, payload}]",
    "snapshots.tick": "the session's tick at which these values were set",
    "snapshots.token": "the writer's fencing token",
    "schedule_slots": "Slots of the schedule: taken by the task that does the work, done when the work is done.",
    "schedule_slots.retry_at": "when the next attempt may start",
    "schedule_slots.error": "why the last attempt failed",
    "schedule_entries": "The schedule's entries, each with the lease on its current slot.",
    "schedule_entries.since": "when the entry was first seen; earlier slots are skipped",
    "schedule_entries.token": "grows with each slot taken",
    "schedule_entries.lease_until": "lease on the slot in progress; NULL: no slot is in progress",
    "schedule_entries.wakes": "the sweeper's wake-ups since a slot was taken",
    "sweeps": "When each kind of sweep is due: the worker that moves the time ahead does it.",
    "sweeps.after": "where the last round stopped; NULL: it visited all",
    "sweeps.paces": "by model: the turns that it takes at once, and those that it has",
    "intake": "Whether workers start turns: one row, which `perdure drain` closes and opens.",
    "intake.closed_at": "since when workers start no turns; NULL: they do",
    "schema_compatibility": "Which releases can use the schema: one row, which every migration writes.",
    "schema_compatibility.readable_from": "newest revision of the oldest release that can use it",
    "erasures": "Users who were erased less than a lease ago: what paused workers still write is deleted at `due_at`.",
    "erasures.user_id": "whose Redis keys are deleted again",
    "erasures.session_ids": "the user's sessions",
    "erasures.due_at": "when every worker that was paused has lost its lease",
    "erasures.task_ids": "tasks of Celery tools that may be queued",
    "erasures.revoked_at": "when they were first revoked; they are again at due_at",
    "stale_statistics": "Tables whose planner statistics may have samples of erased rows.",
    "stale_statistics.erased_at": "when rows were last erased",
    "stale_statistics.due_at": "when a worker may analyze the table",
    "message_words": "The full-text index of messages: written by a trigger on messages, in the same commit.",
    "embedders": "Embedders that made vectors. Vectors of different embedders are never compared.",
    "embedders.indexed_at": "since when its vectors are searched by an index",
    "embedders.walked_at": "when the last search for texts without its vector ended",
    "embedders.walked_kind": "how far the present search has come",
    "message_vectors": "Vectors of messages; one row for each embedder.",
    "message_vectors.vector": "of length 1; NULL: the embedder refuses the text",
    "unembedded": "Messages and memories whose vector is still to be made.",
    "unembedded.id": "the message's session_id, or the memory_id",
    "unembedded.seq": "the message's seq; 0 for a memory",
    "unembedded.due_at": "the next attempt; an attempt moves it ahead",
    "memories": "Layer 3: facts about a user. Superseded ones are kept, as history.",
    "memories.importance": "the value before decay; raised when the memory is repeated",
    "memories.value": "the importance after decay until decayed_at",
    "memories.origin": "who wrote it",
    "memories.session_id": "the session that it was first extracted from",
    "memories.valid_from": "when the user said it",
    "memories.valid_to": "when the user said the contrary",
    "memory_vectors": "Vectors of memories; one row for each embedder.",
    "memory_vectors.vector": "of length 1; NULL: the embedder refuses the text",
    "memory_sources": "The messages that a memory came from.",
    "entities": "Layer 4: people and things that a user's memories mention.",
    "entities.name": "the first spelling",
    "entities.key": "the normalised name, the same for all spellings",
    "entities.kind": "person, place, thing ... as extracted",
    "entity_mentions": "Which memories mention an entity.",
    "relations": "Relations between entities; one row for each memory that states the relation.",
    "relations.memory_id": "the memory that states it",
    "memory_accesses": "Layer 5: which memories were recalled, and when; kept for some days.",
    "memory_accesses.access_id": "id of the recall",
    "hot_memories": "Layer 5: the memories that were recalled most, weighted by time.",
    "cases": "Questions answered before, with success rates. Only vectors of one embedder and size are compared.",
    "cases.success_rate": "percent; NULL while unknown",
    "cases.user_id": "the author, whose words it holds; NULL: no user's words",
    "cases.turn_id": "the turn that it was learned from",
    "cases.review": "problems that reflection found",
    "cases.bank": "agents with this bank find the case",
    "cases.shared_at": "since when an administrator lets it enter all users' prompts",
    "case_executions": "Turns that had a case in their prompt, with their outcome.",
    "case_executions.case_id": "no foreign key: its check would lock the case's row",
    "case_executions.succeeded": "whether the turn succeeded",
    "case_executions.feedback": "-1 or 1; it overrides `succeeded`",
    "case_executions.counted": "whether the case's usage_count and last_accessed_at include it",
    "case_archive": "Copies of cases, made when they were archived.",
    "case_archive.success_rate": "percent; NULL while unknown",
    "case_archive.user_id": "the author, whose words it holds; NULL: no user's words",
    "case_archive.turn_id": "the turn that it was learned from",
    "case_archive.review": "problems that reflection found",
    "case_archive.keeper_id": "the case that its counts were merged into",
    "case_archive.restored_at": "when it was restored; the row is kept",
    "case_history": "Changes of a case's status or readers, and merges of its counts. Rows are never updated.",
    "case_runs": "Runs of the weekly policy; at most one is in progress.",
    "case_runs.dry_run": "the run ends with the plan",
    "case_runs.done": "cases done in this phase",
    "case_runs.total": "cases of this phase",
    "case_runs.planned_at": "the moment that ages in the plan are counted from",
    "case_runs.expires_at": "when a plan that waits for approval expires",
    "case_runs.decided_by": "who approved or rejected the plan",
    "case_runs.error": "the last error",
    "case_runs.token": "fencing token; grows with each claim",
    "case_run_items": "A run's plan: one row for each case, with its outcome.",
    "case_run_items.position": "order in which the plan is applied",
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
    connection = op.get_bind()
    create_extension(connection)
    tables = Names("", extension_schema(connection)).render(_TABLES)
    for statements in (_FUNCTIONS, tables, _TRIGGER):
        connection.exec_driver_sql(statements)
    for name, comment in _COMMENTS.items():
        quoted = comment.replace("'", "''")
        connection.exec_driver_sql(f"COMMENT ON {'COLUMN' if '.' in name else 'TABLE'} {name} IS '{quoted}'")


def downgrade() -> None:
    """Revert the migration. The extension `vector` stays, because the application may use it."""
    op.execute("DROP TABLE " + ", ".join(re.findall(r"CREATE TABLE (\w+)", _TABLES)))
    op.execute("DROP FUNCTION " + ", ".join(re.findall(r"CREATE FUNCTION (\w+)", _FUNCTIONS)))
