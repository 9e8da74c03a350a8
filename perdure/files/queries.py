"""The statements that store, use, read and delete files."""

from __future__ import annotations

from perdure.database.engine import Statement

_FILE = """f.file_id, f.media_type, f.name, f.content_id, f.created_at, c.sha256, c.size, c.width, c.height, c.pages,
           c.place"""

# The live content of a tenant with this hash. The lock keeps it until the commit, which gives it another file.
FIND_CONTENT = Statement(
    "files.find_content",
    """
    SELECT content_id FROM file_contents
    WHERE tenant = %(tenant)s AND sha256 = %(sha256)s::bytea AND delete_at IS NULL
    FOR KEY SHARE
    """,
)

# `delete_after_s`: seconds until the object of this content is deleted, unless a file has it by then; NULL: the caller
# gives it a file in the same transaction. Returns no row if there is a live content with the same hash.
ADD_CONTENT = Statement(
    "files.add_content",
    """
    INSERT INTO file_contents (content_id, tenant, sha256, size, width, height, pages, place, delete_at)
    VALUES (%(content_id)s::uuid, %(tenant)s, %(sha256)s::bytea, %(size)s, %(width)s, %(height)s, %(pages)s, %(place)s,
            perdure_now() + make_interval(secs => %(delete_after_s)s::float8))
    ON CONFLICT (tenant, sha256) WHERE delete_at IS NULL DO NOTHING
    RETURNING content_id
    """,
)

ADD_CHUNK = Statement(
    "files.add_chunk",
    """
    INSERT INTO file_chunks (content_id, number, data) VALUES (%(content_id)s::uuid, %(number)s, %(data)s::bytea)
    """,
)

# Keeps a content whose object is written. Returns no row if `Files.collect` has deleted it.
KEEP_CONTENT = Statement(
    "files.keep_content",
    """
    UPDATE file_contents SET delete_at = NULL WHERE content_id = %(content_id)s::uuid AND delete_at > perdure_now()
    RETURNING content_id
    """,
)

# The session of a call that returns a file. An erasure of its user waits for this lock. After an erasure, this
# statement returns no row.
LOCK_SESSION = Statement(
    "files.lock_session",
    "SELECT FROM sessions WHERE session_id = %(session_id)s::uuid AND user_id = %(user_id)s FOR KEY SHARE",
)

# Does nothing if a call that runs again has stored the file before.
ADD_FILE = Statement(
    "files.add_file",
    """
    INSERT INTO files (file_id, tenant, user_id, content_id, media_type, name, created_at, used_at, session_id)
    VALUES (%(file_id)s::uuid, %(tenant)s, %(user_id)s, %(content_id)s::uuid, %(media_type)s, %(name)s, perdure_now(),
            CASE WHEN %(session_id)s::uuid IS NOT NULL THEN perdure_now() END, %(session_id)s::uuid)
    ON CONFLICT (file_id) DO NOTHING
    """,
)

# The bytes of a user's files, without those of the file itself.
STORED_BYTES = Statement(
    "files.stored_bytes",
    """
    SELECT coalesce(sum(c.size), 0)::bigint AS size
    FROM files AS f JOIN file_contents AS c USING (content_id)
    WHERE f.user_id = %(user_id)s AND f.file_id <> %(file_id)s::uuid
    """,
    writes=False,
)

# Marks files as used by a message of a user's session, and returns them. A file of no user is copied for the user:
# `new_ids` has an id for each. Files that the user may not use are not returned.
USE = Statement(
    "files.use",
    f"""
    WITH found AS (
        SELECT given.position, given.new_id, f.user_id AS owner, {_FILE}
        FROM unnest(%(file_ids)s::uuid[], %(new_ids)s::uuid[]) WITH ORDINALITY AS given (file_id, new_id, position)
             JOIN files AS f USING (file_id) JOIN file_contents AS c USING (content_id)
        WHERE f.user_id = %(user_id)s OR f.user_id IS NULL AND f.tenant = %(tenant)s
        FOR NO KEY UPDATE OF f
    ), used AS (
        UPDATE files SET used_at = coalesce(used_at, perdure_now()), session_id = %(session_id)s::uuid
        WHERE file_id = ANY (ARRAY(SELECT file_id FROM found WHERE owner IS NOT NULL))
    ), copied AS (
        INSERT INTO files (file_id, tenant, user_id, content_id, media_type, name, created_at, used_at, session_id)
        SELECT new_id, %(tenant)s, %(user_id)s, content_id, media_type, name, perdure_now(), perdure_now(),
               %(session_id)s::uuid
        FROM found WHERE owner IS NULL
    )
    SELECT position, CASE WHEN owner IS NULL THEN new_id ELSE file_id END AS file_id, media_type, name, sha256, size,
           width, height, pages
    FROM found ORDER BY position
    """,  # noqa: S608 (constants)
)

READ = Statement(
    "files.read",
    f"""
    SELECT {_FILE}, f.user_id, f.tenant FROM files AS f JOIN file_contents AS c USING (content_id)
    WHERE f.file_id = ANY (%(file_ids)s::uuid[])
    """,  # noqa: S608 (constants)
    writes=False,
)

CHUNK = Statement(
    "files.chunk",
    "SELECT data FROM file_chunks WHERE content_id = %(content_id)s::uuid AND number = %(number)s",
    writes=False,
)

# --- deleting ----------------------------------------------------------------------------

# Deletes files that no message has. A message that uses one of them concurrently keeps it.
DELETE_UNUSED = Statement(
    "files.delete_unused",
    """
    WITH old AS (
        SELECT file_id FROM files
        WHERE used_at IS NULL AND created_at < perdure_now() - make_interval(secs => %(unused_s)s)
        ORDER BY created_at LIMIT %(most)s FOR UPDATE SKIP LOCKED
    )
    DELETE FROM files WHERE file_id = ANY (ARRAY(SELECT file_id FROM old)) RETURNING content_id
    """,
)

DELETE_OF_USER = Statement("files.delete_of_user", "DELETE FROM files WHERE user_id = %(user_id)s RETURNING content_id")

# Deletes the files of a user that were being stored during the user's erasure. A time in the future was written while
# the clock was ahead: files of today would be older.
DELETE_OF_ERASED_USER = Statement(
    "files.delete_of_erased_user",
    """
    DELETE FROM files
    WHERE user_id = %(user_id)s AND created_at <= %(erased_at)s::timestamptz
      AND %(erased_at)s::timestamptz <= perdure_now()
    RETURNING content_id
    """,
)

# Locks contents in one order. The next statement sees the files that concurrent commits have given them.
LOCK_CONTENTS = Statement(
    "files.lock_contents",
    """
    SELECT FROM file_contents WHERE content_id = ANY (%(content_ids)s::uuid[]) ORDER BY content_id FOR UPDATE
    """,
)

# Of the locked contents, deletes those that no file has. Those with an object are deleted after it.
RELEASE_CONTENTS = Statement(
    "files.release_contents",
    """
    WITH free AS (
        SELECT content_id FROM file_contents AS c
        WHERE content_id = ANY (%(content_ids)s::uuid[]) AND delete_at IS NULL
          AND NOT EXISTS (SELECT FROM files WHERE files.content_id = c.content_id)
    ), gone AS (
        DELETE FROM file_contents WHERE content_id IN (SELECT content_id FROM free) AND place IS NULL RETURNING 1
    ), later AS (
        UPDATE file_contents SET delete_at = perdure_now()
        WHERE content_id IN (SELECT content_id FROM free) AND place IS NOT NULL RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM later) AS gone
    """,
)

DUE_OBJECTS = Statement(
    "files.due_objects",
    """
    SELECT content_id, place FROM file_contents WHERE delete_at <= perdure_now() ORDER BY delete_at LIMIT %(most)s
    """,
    writes=False,
)

FORGET_CONTENT = Statement(
    "files.forget_content",
    "DELETE FROM file_contents WHERE content_id = %(content_id)s::uuid AND delete_at <= perdure_now()",
)
