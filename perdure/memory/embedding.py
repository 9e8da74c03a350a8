"""Computes the vectors of messages and memories in the background.

The commit that stores a message or memory also adds it to the table `unembedded`. Each sweep calls `embed_missing`,
which claims some rows of this table with a lease. `embed_missing` embeds the texts of these rows without an open
transaction, and writes the vectors in one statement. If the embedder fails, the rows are postponed. While a text has no
vector, only word search finds the text.

Vectors are stored per embedder and dimensions, those of messages in half precision. After a change of
`PERDURE_EMBEDDER`, a background scan reads all messages and memories page by page. The scan adds each row that lacks a
vector of the new embedder to `unembedded`. Vectors of the previous embedder stay. The scan is repeated daily, to find
rows that were missed. It also moves vectors of full precision, which a former release wrote, to half precision.

A message gets no vector if retention would delete it (`vectors_days`, `PERDURE_RETENTION__VECTORS_DAYS`; 0: never).

`build_indexes` builds the HNSW indexes of an embedder once the embedder has enough vectors. Workers call it in the
background (`perdure.workers.upkeep`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Row

from perdure.database import indexes
from perdure.database.engine import Database, Executor
from perdure.errors import Abandoned, PerdureError, loggable
from perdure.memory import embedding_queries as queries
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import ModelCall

log = logging.getLogger(__name__)

MAX_CHARS = 8_000
"""Maximum characters of a text that are embedded."""

BATCH = 64
"""Maximum texts that one round claims."""

_LEASE_S = 300
_PAUSE_S = 10
_DOUBLINGS = 8
_LONGEST_POSTPONEMENT_S = max(_LEASE_S, _PAUSE_S * 2**_DOUBLINGS)
_WALK_EVERY_S = 86_400
_PAGE = 512
_FIRST_ID = UUID(int=0)
_INDEXES = (
    ("message_vectors", "_half", "coalesce(half, vector::@vector.halfvec)"),
    ("memory_vectors", "", "vector"),
)
"""Table, suffix of the index's name, and vector."""
_MOST_INDEXED = 4_000
"""Maximum dimensions of half-precision vectors in pgvector's HNSW indexes."""


@dataclass(frozen=True, slots=True)
class RegisteredEmbedder:
    """A row of the table `embedders`. `indexed`: whether the embedder's vectors have their indexes."""

    embedder_id: int
    dimensions: int
    indexed: bool


@dataclass(frozen=True, slots=True)
class EmbeddingRound:
    """The result of one round: how many texts were embedded, and how many texts the embedder refused.

    `more` is true if texts may remain without a vector. `error` is `None` unless the embedder failed.
    """

    embedded: int = 0
    refused: int = 0
    more: bool = False
    error: str | None = None


def vector_literal(vector: Vector) -> str:
    """`vector` as a pgvector literal with nine significant digits, which represent a four-byte float exactly."""
    numbers = ",".join(["%.9g"] * len(vector)) % tuple(vector)  # twice as fast as formatting one by one
    return f"[{numbers}]"


def text_to_embed(content: str, author: str | None = None, occurred_at: datetime | None = None) -> str:
    """The text to embed: the author, the day and the content. Only the content if author or day is unknown.

    A chat message alone has little context, and questions often name the author or the day of a message.
    """
    if author is None or occurred_at is None:
        return content
    return f"{author}, {occurred_at:%d %B %Y}: {content}"


def register(executor: Executor, name: str, dimensions: int) -> RegisteredEmbedder:
    """Return the row of the embedder `name` with these `dimensions`. Inserts the row if it does not exist."""
    parameters = {"name": name, "dimensions": dimensions}
    # If another process inserts the row concurrently, the statement returns no row. A second run finds the row.
    rows = executor.run(queries.REGISTER, parameters) or executor.run(queries.REGISTER, parameters)
    return RegisteredEmbedder(rows[0].embedder_id, dimensions, rows[0].indexed)


def embed_missing(
    database: Database,
    embedder: Embedder,
    *,
    batch: int = BATCH,
    call: ModelCall | None = None,
    vectors_days: int = 0,
) -> EmbeddingRound:
    """Embed at most `batch` of the texts in `unembedded`.

    If fewer than `batch` texts are due, also continues the background scan by one page (see the module's docstring).
    If the embedder fails, postpones the texts and returns the embedder's error.

    Raises:
        CallAborted: `call` was aborted; the claimed texts are due again when their lease expires.
        Unavailable: the database cannot be reached; a retry is safe.
    """
    parameters = {"most": batch, "lease_s": _LEASE_S, "most_chars": MAX_CHARS, "furthest_s": _LONGEST_POSTPONEMENT_S}
    claimed = database.run(queries.CLAIM, {**parameters, "vectors_days": vectors_days})
    filled = _fill(database, embedder, claimed, call, vectors_days) if claimed else EmbeddingRound()
    if filled.error is not None or len(claimed) == batch:
        return replace(filled, more=len(claimed) == batch)
    try:
        dimensions = _dimensions(embedder, call)
    except Abandoned:
        raise
    except PerdureError as error:
        log.warning("the embedding of older texts is postponed: %s", loggable(error))
        return replace(filled, error=error.message)
    return replace(filled, more=_walk(database, register(database, embedder.name, dimensions), vectors_days))


def embed_sessions(
    database: Database, embedder: Embedder, session_ids: Sequence[UUID], vectors_days: int = 0
) -> EmbeddingRound:
    """Embed the messages of these sessions that have no vector. Stops at the first failure of the embedder.

    Raises:
        Unavailable: the database cannot be reached; a retry is safe.
    """
    embedded = refused = 0
    while True:
        parameters = {"session_ids": list(session_ids), "most": BATCH, "most_chars": MAX_CHARS}
        missing = database.run(queries.MISSING_OF_SESSIONS, {**parameters, "vectors_days": vectors_days})
        filled = _fill(database, embedder, missing, None, vectors_days) if missing else EmbeddingRound()
        embedded, refused = embedded + filled.embedded, refused + filled.refused
        if not missing or filled.error is not None:
            return EmbeddingRound(embedded, refused, bool(missing), filled.error)


def build_indexes(database: Database, name: str, rows: int) -> bool:
    """Build the missing indexes on the vectors of the embedder `name`; see `build_index`.

    Returns whether indexes were completed.
    """
    built = False
    for row in database.run(queries.OF_NAME, {"name": name}):
        built |= build_index(database, RegisteredEmbedder(row.embedder_id, row.dimensions, row.indexed), rows)
    return built


def build_index(database: Database, registered: RegisteredEmbedder, rows: int) -> bool:
    """Build the missing indexes of an embedder that has at least `rows` vectors. Returns whether they are now complete.

    Takes minutes on large tables, waits for older transactions, and blocks neither reads nor writes. If another process
    builds these indexes, returns False at once. pgvector cannot index vectors of more than `_MOST_INDEXED` dimensions.
    """
    parameters = {"embedder_id": registered.embedder_id}
    if (
        registered.indexed
        or registered.dimensions > _MOST_INDEXED
        or not database.run(queries.HAS_ENOUGH_VECTORS, {**parameters, "rows": rows})[0].large
    ):
        return False
    with database.lock("perdure memory indexes") as alone:
        if not alone:
            return False
        for table, suffix, vector in _INDEXES:
            definition = (
                f"ON @schema.{table} "
                f"USING hnsw (({vector}::@vector.halfvec({registered.dimensions})) @vector.halfvec_cosine_ops) "
                f"WHERE embedder_id = {registered.embedder_id} AND {vector} IS NOT NULL"
            )
            if not indexes.build_index(database, f"{table}_{registered.embedder_id}{suffix}_idx", definition):
                return False
        database.run(queries.MARK_INDEXED, parameters)
    return True


def _fill(
    database: Database, embedder: Embedder, claimed: Sequence[Row[Any]], call: ModelCall | None, vectors_days: int
) -> EmbeddingRound:
    present = [row for row in claimed if row.content is not None]
    try:
        dimensions = _dimensions(embedder, call)
        vectors = _embed(embedder, [text_to_embed(row.content, row.author, row.created_at) for row in present], call)
    except Abandoned:
        raise
    except PerdureError as error:
        log.warning("the embedding of %d texts is postponed: %s", len(present), loggable(error))
        database.run(queries.POSTPONE, {**_keys(present), "pause_s": _PAUSE_S, "doublings": _DOUBLINGS})
        return EmbeddingRound(error=error.message)
    registered = register(database, embedder.name, dimensions)
    by_row = {
        row: None if vector is None else vector_literal(vector) for row, vector in zip(present, vectors, strict=True)
    }
    parameters = {
        **_keys(claimed),
        "vectors": [by_row.get(row) for row in claimed],
        "embedder_id": registered.embedder_id,
        "vectors_days": vectors_days,
    }
    database.run(queries.STORE, parameters)
    refused = sum(vector is None for vector in vectors)
    return EmbeddingRound(len(present) - refused, refused)


def _embed(embedder: Embedder, texts: Sequence[str], call: ModelCall | None) -> list[Vector | None]:
    """A vector for each text; `None` for a text that the embedder refuses.

    Raises:
        PerdureError: the embedder failed for a reason that does not depend on the text.
    """
    try:
        return list(embedder.embed(texts, call)) if texts else []
    except Abandoned:
        raise
    except PerdureError as error:
        if error.transient is not False:
            raise
        if len(texts) == 1:
            # Embed a random text, which is in no cache, to find out whether the embedder refuses this text or every
            # text (a wrong key, an open breaker).
            embedder.embed([str(uuid4())], call)
            log.warning(
                "the embedder %s refuses a text, so only keyword search finds it: %s", embedder.name, loggable(error)
            )
            return [None]
    return [vector for text in texts for vector in _embed(embedder, [text], call)]


def _keys(rows: Sequence[Row[Any]]) -> dict[str, Any]:
    return {
        "kinds": [row.kind for row in rows],
        "ids": [row.id for row in rows],
        "seqs": [row.seq for row in rows],
    }


def _dimensions(embedder: Embedder, call: ModelCall | None) -> int:
    return embedder.dimensions or len(embedder.embed(["perdure"], call)[0])


def _walk(database: Database, registered: RegisteredEmbedder, vectors_days: int) -> bool:
    """Scan the next page, and add its rows that lack a vector to `unembedded`. Returns whether pages remain."""
    parameters = {"embedder_id": registered.embedder_id, "every_s": _WALK_EVERY_S}
    places = database.run(queries.PLACE, parameters)
    if not places:
        return False
    place = places[0]
    walk = queries.WALK_MEMORIES if place.walked_kind == "memory" else queries.WALK_MESSAGES
    moved = database.run(
        walk,
        {
            **parameters,
            "most": _PAGE,
            "vectors_days": vectors_days,
            "kind_before": place.walked_kind,
            "id_before": place.walked_id,
            "seq_before": place.walked_seq,
            "id": place.walked_id or _FIRST_ID,
            "seq": place.walked_seq or 0,
        },
    )
    return not moved or moved[0].walked_kind is not None
