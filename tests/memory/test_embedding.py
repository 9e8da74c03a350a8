"""Every text gets a vector, despite crashes, embedder failures and a change of the embedder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import ProviderError
from perdure.memory.embedding import build_index, embed_missing, embed_sessions, register
from perdure.memory.recall.search import Recall
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Vector
from perdure.models.protocol import ModelCall
from perdure.retention import retain
from perdure.settings import MemorySettings, RetentionSettings
from tests.databases import engine_of
from tests.memory.corpus import import_conversation
from tests.turns.harness import side_by_side

_TALK = [f"This is line number {number} about the {thing}." for number, thing in enumerate(["oboe", "kiln", "quay"])]


class Fickle:
    """An embedder that raises `fault` while `fault` is set. It refuses a batch if one of the texts contains `taboo`."""

    def __init__(self, dimensions: int = 64) -> None:
        self._embedder = HashEmbedder(dimensions)
        self.fault: ProviderError | None = None
        self.taboo: str | None = None
        self.seen: list[str] = []

    @property
    def name(self) -> str:
        return self._embedder.name

    @property
    def dimensions(self) -> int:
        return self._embedder.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        if self.fault is not None:
            raise self.fault
        if self.taboo is not None and any(self.taboo in text for text in texts):
            raise ProviderError("This text cannot be embedded.", transient=False)
        self.seen += texts
        return self._embedder.embed(texts, call)


@pytest.fixture
def connection(database: Database) -> Iterator[Connection]:
    """A connection for the test's own statements."""
    engine = engine_of(database.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as made:
        yield made
    engine.dispose()


def _count(connection: Connection, table: str, condition: str = "true") -> Any:
    return connection.exec_driver_sql(f"SELECT count(*) FROM {table} WHERE {condition}").scalar()  # noqa: S608


def _vectors(connection: Connection, dimensions: int) -> Any:
    return _count(connection, "message_vectors", f"public.vector_dims(half) = {dimensions}")


def test_messages_get_their_vectors_later(database: Database, clock: MovedClock, connection: Connection) -> None:
    """The commit of a message adds a row to `unembedded`. `embed_missing` embeds each message once."""
    import_conversation(database, clock, _TALK)
    assert _count(connection, "unembedded") == 3
    embedder = Fickle()
    assert embed_missing(database, embedder, batch=2).embedded == 2
    assert embed_missing(database, embedder, batch=2).embedded == 1
    assert (_count(connection, "unembedded"), _count(connection, "message_vectors")) == (0, 3)
    assert embed_missing(database, embedder).embedded == 0


def test_texts_of_an_unavailable_embedder_are_postponed(
    database: Database, clock: MovedClock, connection: Connection
) -> None:
    """`embed_missing` returns the embedder's error and retries the texts after a pause."""
    import_conversation(database, clock, _TALK)
    embedder = Fickle()
    embedder.fault = ProviderError("The embedder's server cannot be reached.", transient=True)
    failed = embed_missing(database, embedder)
    assert (failed.embedded, failed.error) == (0, "The embedder's server cannot be reached.")
    assert _count(connection, "unembedded") == 3
    embedder.fault = None
    assert embed_missing(database, embedder).embedded == 0
    clock.advance(timedelta(seconds=11))
    assert embed_missing(database, embedder).embedded == 3


def test_a_pause_written_by_a_clock_that_was_ahead_is_ignored(database: Database, clock: MovedClock) -> None:
    """A pause that was set while the server's clock was ahead is ignored once the clock is corrected."""
    clock.advance(timedelta(days=1))
    import_conversation(database, clock, _TALK)
    embedder = Fickle()
    embedder.fault = ProviderError("The embedder's server cannot be reached.", transient=True)
    assert embed_missing(database, embedder).error is not None
    embedder.fault = None
    clock.advance(-timedelta(days=1))
    assert embed_missing(database, embedder).embedded == 3


@pytest.mark.parametrize("batch", [1, 3])
def test_a_refused_text_does_not_block_others(
    batch: int, database: Database, clock: MovedClock, connection: Connection
) -> None:
    """A text that the embedder refuses is marked, is not sent again and does not block others.

    If the embedder refuses every text, for example because its API key is wrong, no text is marked.
    """
    import_conversation(database, clock, _TALK)
    embedder = Fickle()
    embedder.fault = ProviderError("Wrong key.", transient=False)
    assert embed_missing(database, embedder, batch=batch).error == "Wrong key."
    assert _count(connection, "message_vectors") == 0
    clock.advance(timedelta(minutes=1))
    embedder.fault, embedder.taboo = None, "kiln"
    filled = [embed_missing(database, embedder, batch=batch) for _ in range(3)]
    assert (sum(each.embedded for each in filled), sum(each.refused for each in filled)) == (2, 1)
    assert _count(connection, "message_vectors", "half IS NULL") == 1
    assert _count(connection, "unembedded") == 0
    found = Recall(database, embedder, MemorySettings(), clock).search(UserKey("ana"), "the number line", 3)
    assert len(found) == 3


def test_texts_of_a_dead_process_are_embedded_by_another(
    database: Database, clock: MovedClock, connection: Connection
) -> None:
    """If a process dies, another process embeds the dead process's texts once their lease has expired."""
    import_conversation(database, clock, _TALK)

    class Dying(Fickle):
        def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
            raise SystemExit

    with pytest.raises(SystemExit):
        embed_missing(database, Dying())
    assert embed_missing(database, Fickle()).embedded == 0
    clock.advance(timedelta(seconds=301))
    assert embed_missing(database, Fickle()).embedded == 3


def test_two_processes_share_the_work(database: Database, clock: MovedClock, connection: Connection) -> None:
    """Two concurrent processes embed different texts."""
    import_conversation(database, clock, [f"Line {number}." for number in range(40)])
    embedders = Fickle(), Fickle()
    done = side_by_side(*(lambda each=each: embed_missing(database, each, batch=20) for each in embedders))
    assert sum(each.embedded for each in done) == 40
    assert len({*embedders[0].seen, *embedders[1].seen}) == 40


def test_a_new_embedder_embeds_all_texts_again(database: Database, clock: MovedClock, connection: Connection) -> None:
    """After a change of the embedder, every text gets a second vector. The old vectors stay.

    While the new vectors are missing, recall searches by words.
    """
    import_conversation(database, clock, _TALK)
    old, new = Fickle(64), Fickle(128)
    while embed_missing(database, old).more:
        pass
    recall = Recall(database, new, MemorySettings(), clock)
    assert recall.search(UserKey("ana"), "the kiln", 1)[0].content == _TALK[1]
    assert _vectors(connection, 128) == 0
    for _ in range(6):
        embed_missing(database, new)
    assert _vectors(connection, 128) == _vectors(connection, 64) == 3
    assert recall.search(UserKey("ana"), "the kiln", 1)[0].content == _TALK[1]


def test_the_daily_walk_finds_missing_vectors(database: Database, clock: MovedClock, connection: Connection) -> None:
    """The daily scan finds a message whose vector was lost, and the message gets a new vector."""
    import_conversation(database, clock, _TALK)
    embedder = Fickle()
    for _ in range(6):
        embed_missing(database, embedder)
    connection.exec_driver_sql("DELETE FROM message_vectors WHERE seq = 2")
    assert embed_missing(database, embedder).embedded == 0
    clock.advance(timedelta(days=1, minutes=1))
    for _ in range(6):
        embed_missing(database, embedder)
    assert _count(connection, "message_vectors") == 3


def test_vectors_that_retention_deletes_are_not_made_again(
    database: Database, clock: MovedClock, connection: Connection
) -> None:
    """Neither by the daily scan, nor by that for a new embedder. The vectors of newer messages are made."""
    import_conversation(database, clock, _TALK, user_id="bo", occurred_at=clock.now().isoformat())
    embedder, days = Fickle(), 30
    embed_missing(database, embedder, vectors_days=days)
    assert _vectors(connection, 64) == 3
    for _ in range(3):
        clock.advance(timedelta(days=days, minutes=1))
        new = import_conversation(database, clock, _TALK, session=str(clock.now()), occurred_at=clock.now().isoformat())
        deleted = retain(database, settings=RetentionSettings(vectors_days=days))["vectors of messages"]
        assert deleted == 3
        seen = len(embedder.seen)
        for _ in range(6):
            embed_missing(database, embedder, vectors_days=days)
        assert (len(embedder.seen) - seen, _vectors(connection, 64), new.added) == (3, 3, 3)
    for _ in range(6):
        embed_missing(database, Fickle(128), vectors_days=days)
    assert _vectors(connection, 128) == 3
    clock.advance(timedelta(days=1, minutes=1))
    for _ in range(6):
        embed_missing(database, embedder)
    assert _vectors(connection, 64) == 12, "without a limit, all messages get their vectors"


@pytest.mark.parametrize("is_named", [True, False], ids=["the import's sessions", "the workers' rounds"])
def test_an_old_message_that_is_imported_gets_no_vector(
    database: Database, clock: MovedClock, connection: Connection, *, is_named: bool
) -> None:
    """Retention would delete it. The words of the message are searched; it no longer waits for a vector."""
    done = import_conversation(database, clock, _TALK)
    embedder, days = Fickle(), 30
    if is_named:
        assert embed_sessions(database, embedder, done.sessions, vectors_days=days).error is None
    else:
        for _ in range(6):
            embed_missing(database, embedder, batch=2, vectors_days=days)
    assert (embedder.seen, _count(connection, "message_vectors"), _count(connection, "unembedded")) == ([], 0, 0)
    recall = Recall(database, embedder, MemorySettings(), clock)
    assert recall.search(UserKey("ana"), "the kiln", 1)[0].content == _TALK[1]


def test_vectors_of_full_precision_are_found_and_moved(
    database: Database, clock: MovedClock, connection: Connection
) -> None:
    """Recall finds a vector that a former release wrote, and the daily scan moves it to half precision."""
    import_conversation(database, clock, _TALK)
    embedder = Fickle()
    for _ in range(6):
        embed_missing(database, embedder)
    connection.exec_driver_sql("UPDATE message_vectors SET vector = half, half = NULL WHERE seq <> 2")
    recall = Recall(database, embedder, MemorySettings(recall_text=0), clock)
    before = recall.search(UserKey("ana"), _TALK[0], 3)
    assert before[0].content == _TALK[0]
    assert len({each.score for each in before}) == 3  # each message has a similarity of its own
    clock.advance(timedelta(days=1, minutes=1))
    for _ in range(6):
        embed_missing(database, embedder)
    assert _count(connection, "message_vectors", "half IS NOT NULL AND vector IS NULL") == 3
    assert recall.search(UserKey("ana"), _TALK[0], 3) == before


def test_a_text_erased_during_embedding_gets_no_vector(
    database: Database, clock: MovedClock, connection: Connection
) -> None:
    """A message that is erased during the embedder's call gets no vector."""
    import_conversation(database, clock, _TALK)

    class Slow(Fickle):
        def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
            connection.exec_driver_sql("DELETE FROM message_words WHERE seq = 2")
            return super().embed(texts, call)

    assert embed_missing(database, Slow()).error is None
    assert (_count(connection, "message_vectors"), _count(connection, "unembedded")) == (2, 0)


def test_many_vectors_get_an_index_of_their_own(database: Database, clock: MovedClock, connection: Connection) -> None:
    """Once an embedder has enough vectors, `build_index` builds its indexes. A second call builds nothing."""
    done = import_conversation(database, clock, [f"Line {number}." for number in range(20)])
    embedder = Fickle()
    assert embed_sessions(database, embedder, done.sessions).embedded == 20
    registered = register(database, embedder.name, 64)
    assert not build_index(database, registered, 21)
    assert build_index(database, registered, 20)
    again = register(database, embedder.name, 64)
    assert again.indexed
    assert not build_index(database, again, 20)
    names = (
        connection.exec_driver_sql("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%%hnsw%%'").scalars().all()
    )
    assert sorted(names) == ["memory_vectors_1_idx", "message_vectors_1_half_idx"]
    few = MemorySettings(exact_rows=1)
    found = Recall(database, embedder, few, clock).search(UserKey("ana"), "Line 7.", 3)
    assert found[0].content == "Line 7."
