"""Vectors for what was said and what is known: made beside the turn, filled in whenever one is lacking.

What is said is noted as lacking a vector in the commit that says it. Whoever comes by (`embed_missing`, by
every sweep) takes some, embeds them with no transaction open, and writes them in one statement; an
embedder that is away postpones them, and search goes by words meanwhile. Each vector knows who made it: another
`PERDURE_EMBEDDER` walks through what is there already, a page at a time, and the vectors of the one
before stay. The walk is repeated daily: whatever was missed, for whatever reason, is found.

Beyond some thousands of vectors an index of their own is built for each embedder and size, beside
whoever reads and writes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Row

from perdure.database.engine import Database, Executor
from perdure.errors import Abandoned, PerdureError, loggable
from perdure.memory import embedding_queries as queries
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import ModelCall

log = logging.getLogger(__name__)

MAX_CHARS = 8_000
"""Characters of a text that are embedded."""

BATCH = 64
"""Texts that are taken at once."""

_LEASE_S = 300
_PAUSE_S = 10
_DOUBLINGS = 8
_LONGEST_S = max(_LEASE_S, _PAUSE_S * 2**_DOUBLINGS)
_WALK_EVERY_S = 86_400
_PAGE = 512
_FIRST = UUID(int=0)
_TABLES = ("message_vectors", "memory_vectors")


@dataclass(frozen=True, slots=True)
class RegisteredEmbedder:
    """An embedder as the database knows it. `indexed`: its vectors have an index."""

    embedder_id: int
    dimensions: int
    indexed: bool


@dataclass(frozen=True, slots=True)
class EmbeddingRound:
    """What a round did: texts that have a vector now, texts that the embedder refuses, what it failed with.

    `more`: there was as much as one round takes, or older texts are still looked through.
    """

    embedded: int = 0
    refused: int = 0
    more: bool = False
    error: str | None = None


def vector_literal(vector: Vector) -> str:
    """`vector` as a statement takes it, to the last bit of the four bytes that PostgreSQL keeps of each number."""
    numbers = ",".join(["%.9g"] * len(vector)) % tuple(vector)  # formatting them one by one takes twice as long
    return f"[{numbers}]"


def text_to_embed(content: str, author: str | None = None, occurred_at: datetime | None = None) -> str:
    """What is embedded: the speaker and the day stand in front where the speaker is told.

    A line of a chat says little by itself; who said it, and when, is often what is asked.
    """
    if author is None or occurred_at is None:
        return content
    return f"{author}, {occurred_at:%d %B %Y}: {content}"


def register(executor: Executor, name: str, dimensions: int) -> RegisteredEmbedder:
    """The embedder called `name` that makes vectors of `dimensions` numbers; made known if it is new."""
    asked = {"name": name, "dimensions": dimensions}
    # Another process may make it known at the same moment: then it is read again.
    rows = executor.run(queries.REGISTER, asked) or executor.run(queries.REGISTER, asked)
    return RegisteredEmbedder(rows[0].embedder_id, dimensions, rows[0].indexed)


def embed_missing(
    database: Database, embedder: Embedder, *, batch: int = BATCH, call: ModelCall | None = None
) -> EmbeddingRound:
    """Give a vector to at most `batch` texts that lack one.

    That the embedder is away is no error here: it is said in what is returned, and the texts are
    tried again later.

    Raises:
        CallAborted: `call` was ended; what was taken is due again when its lease is over.
        Unavailable: the database cannot be reached; doing it again is safe.
    """
    asked = {"most": batch, "lease_s": _LEASE_S, "most_chars": MAX_CHARS, "furthest_s": _LONGEST_S}
    taken = database.run(queries.TAKE, asked)
    filled = _fill(database, embedder, taken, call) if taken else EmbeddingRound()
    if filled.error is not None or len(taken) == batch:
        return replace(filled, more=len(taken) == batch)
    try:
        dimensions = _dimensions(embedder, call)
    except Abandoned:
        raise
    except PerdureError as error:
        log.warning("what is older gets its vectors later: %s", loggable(error))
        return replace(filled, error=error.message)
    return replace(filled, more=_walk(database, register(database, embedder.name, dimensions)))


def embed_sessions(
    database: Database, embedder: Embedder, session_ids: Sequence[UUID], call: ModelCall | None = None
) -> EmbeddingRound:
    """Give all messages of these sessions their vectors, now; stops at the first failure of the embedder.

    Raises:
        CallAborted: `call` was ended.
        Unavailable: the database cannot be reached; doing it again is safe.
    """
    embedded = refused = 0
    while True:
        asked = {"session_ids": list(session_ids), "most": BATCH, "most_chars": MAX_CHARS}
        lacking = database.run(queries.LACKING, asked)
        filled = _fill(database, embedder, lacking, call) if lacking else EmbeddingRound()
        embedded, refused = embedded + filled.embedded, refused + filled.refused
        if not lacking or filled.error is not None:
            return EmbeddingRound(embedded, refused, bool(lacking), filled.error)


def build_index(database: Database, registered: RegisteredEmbedder, rows: int) -> bool:
    """Build the indexes of an embedder that has none and at least `rows` vectors; whether it did.

    Takes minutes on large tables and lets everybody read and write meanwhile. To be called by one
    process at a time; what another one left half-built is built again.

    Raises:
        Unavailable: the database cannot be reached.
    """
    given = {"embedder_id": registered.embedder_id}
    if registered.indexed or not database.run(queries.LARGE, {**given, "rows": rows})[0].large:
        return False
    names = {f"{table}_{registered.embedder_id}_idx": table for table in _TABLES}
    found = {row.name: row.valid for row in database.run(queries.INDEX_STATES, {"names": list(names)})}
    with database.engine.connect() as connection:
        for name, table in names.items():
            if found.get(name):
                continue
            connection.exec_driver_sql(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
            connection.exec_driver_sql(
                f"CREATE INDEX CONCURRENTLY {name} ON {table} "
                f"USING hnsw ((vector::halfvec({registered.dimensions})) halfvec_cosine_ops) "
                f"WHERE embedder_id = {registered.embedder_id} AND vector IS NOT NULL"
            )
    database.run(queries.INDEXED, given)
    return True


def _fill(database: Database, embedder: Embedder, taken: Sequence[Row[Any]], call: ModelCall | None) -> EmbeddingRound:
    there = [row for row in taken if row.content is not None]
    try:
        dimensions = _dimensions(embedder, call)
        vectors = _embed(embedder, [text_to_embed(row.content, row.author, row.created_at) for row in there], call)
    except Abandoned:
        raise
    except PerdureError as error:
        log.warning("%d texts get their vectors later: %s", len(there), loggable(error))
        database.run(queries.POSTPONE, {**_keys(there), "pause_s": _PAUSE_S, "doublings": _DOUBLINGS})
        return EmbeddingRound(error=error.message)
    registered = register(database, embedder.name, dimensions)
    by_row = {
        row: None if vector is None else vector_literal(vector) for row, vector in zip(there, vectors, strict=True)
    }
    given = {**_keys(taken), "vectors": [by_row.get(row) for row in taken], "embedder_id": registered.embedder_id}
    database.run(queries.STORE, given)
    refused = sum(vector is None for vector in vectors)
    return EmbeddingRound(len(there) - refused, refused)


def _embed(embedder: Embedder, texts: Sequence[str], call: ModelCall | None) -> list[Vector | None]:
    """A vector for each text; None for one that the embedder refuses by itself.

    Raises:
        PerdureError: it does not work just now, whatever the text.
    """
    try:
        return list(embedder.embed(texts, call)) if texts else []
    except Abandoned:
        raise
    except PerdureError as error:
        if error.transient is not False:
            raise
        if len(texts) == 1:
            # The text is to blame, or something that befalls every text (a wrong key, an open breaker). This
            # one has never been embedded, so that no cache answers.
            embedder.embed([str(uuid4())], call)
            log.warning("the embedder %s refuses a text, which is found by its words only: %s", embedder.name, error)
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


def _walk(database: Database, registered: RegisteredEmbedder) -> bool:
    """Look through a page of what is older than the embedder; False when there is no more of it."""
    given = {"embedder_id": registered.embedder_id, "every_s": _WALK_EVERY_S}
    places = database.run(queries.PLACE, given)
    if not places:
        return False
    place = places[0]
    walk = queries.WALK_MEMORIES if place.walked_kind == "memory" else queries.WALK_MESSAGES
    moved = database.run(
        walk,
        {
            **given,
            "most": _PAGE,
            "kind_before": place.walked_kind,
            "id_before": place.walked_id,
            "seq_before": place.walked_seq,
            "id": place.walked_id or _FIRST,
            "seq": place.walked_seq or 0,
        },
    )
    return not moved or moved[0].walked_kind is not None
