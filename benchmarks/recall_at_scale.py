"""Recall among 100,000 memories, for a user who owns 1 % of them and a user who owns half.

The benchmark compares the results of recall's vector search with an exact scan over the user's memories. Recall chooses
whether its search is exact or uses the index. The reported time covers a whole recall of the semantic layer: embedding
the question, and searching by words and by vectors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import create_engine

from benchmarks.report import Section
from benchmarks.setup import Setup, connected
from perdure.access.tenants import UserKey
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.ids import new_id
from perdure.memory.embedding import build_index, register, vector_literal
from perdure.memory.recall import queries
from perdure.memory.recall.queries import CANDIDATES
from perdure.memory.recall.search import Layer, Recall
from perdure.models.embedders.hashing import HashEmbedder
from perdure.settings import MemorySettings

NAME = "recall-at-scale"

K = 10

_MEMORIES = 100_000
_QUESTIONS = 200
_INDEX_FROM = 1_000
_EMBEDDER = HashEmbedder(384)
_BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
_AT_ONCE = 1_000
_OTHERS = 49
_PAUSE_S = 120
"""Seconds to wait after the index build, since a host may throttle a virtual machine that was busy for minutes."""

_WHO = [
    "Marta",
    "Tom",
    "Ines",
    "Pieter",
    "Jonas",
    "Amira",
    "Wei",
    "Sofia",
    "Noor",
    "Luca",
    "the-user",
    "Grandma",
    "Oskar",
    "Hana",
    "Dario",
    "Lena",
]
_DOES = [
    "lives in",
    "moved to",
    "works in",
    "travels to",
    "dreams of",
    "was born in",
    "has a house in",
    "studied in",
    "met Paul in",
    "plays chess in",
    "teaches music in",
    "sold a car in",
    "lost a key in",
    "ran a race in",
    "opened a shop in",
    "wrote about",
]
_PLACES = [
    "Lisbon",
    "Ghent",
    "Busan",
    "Oslo",
    "Lyon",
    "Turin",
    "Graz",
    "Porto",
    "Malmö",
    "Bergen",
    "Ostend",
    "Antwerp",
    "Quito",
    "Lima",
    "Hanoi",
    "Kyoto",
    "Perth",
    "Cork",
    "Bath",
    "Leeds",
    "Basel",
    "Trier",
    "Ulm",
    "Krakow",
    "Brno",
    "Riga",
    "Tartu",
    "Varna",
    "Split",
    "Patras",
    "Bursa",
    "Tbilisi",
    "Accra",
    "Dakar",
    "Nairobi",
]
_THINGS = [
    "cello",
    "bakery",
    "lighthouse",
    "tile",
    "orchard",
    "bicycle",
    "cat",
    "canal",
    "recipe",
    "violin",
    "garden",
    "kayak",
    "telescope",
    "loom",
    "chapel",
    "harbour",
    "piano",
    "library",
    "kiln",
    "beehive",
    "vineyard",
    "sledge",
    "compass",
    "typewriter",
    "easel",
    "saddle",
    "anvil",
    "lantern",
]


def measure(setup: Setup) -> Section:
    """Generate memories and measure recall; returns the section."""
    memories = setup.scaled(_MEMORIES)
    owners = {"half": memories // 2, "hundredth": memories // 100}
    with setup.database("bench_recall_at_scale") as url:
        database = Database(url)
        setup.progress(f"recall at scale: writing {memories:,} memories with their vectors")
        embedder_id = _fill(database, memories, owners)
        setup.progress("recall at scale: building the index (minutes, at full size)")
        build_index(database, register(database, _EMBEDDER.name, _EMBEDDER.dimensions), _INDEX_FROM)
        with connected(url) as admin:
            admin.exec_driver_sql("VACUUM ANALYZE")
            admin.exec_driver_sql("CHECKPOINT")
        setup.progress("recall at scale: a pause, then the questions")
        time.sleep(setup.scaled(_PAUSE_S))
        section = _measure(setup, database, owners, embedder_id)
        database.close()
    return section


def _sentence(chance: random.Random) -> str:
    return (
        f"{chance.choice(_WHO)} {chance.choice(_DOES)} {chance.choice(_PLACES)} since {chance.randint(1950, 2024)} "
        f"and keeps a {chance.choice(_THINGS)} beside the {chance.choice(_THINGS)}."
    )


def _owners(memories: int, owners: dict[str, int]) -> Iterator[str]:
    for name, count in owners.items():
        yield from [name] * count
    for number in range(memories - sum(owners.values())):
        yield f"other {number % _OTHERS}"


def _fill(database: Database, memories: int, owners: dict[str, int]) -> int:
    chance, clock = random.Random(1), SystemClock()  # noqa: S311 (no secret)
    embedder_id = register(database, _EMBEDDER.name, 384).embedder_id
    users = list(_owners(memories, owners))
    chance.shuffle(users)
    engine = create_engine(database.url)
    with engine.begin() as connection:
        for user_id in sorted(set(users)):
            connection.exec_driver_sql("INSERT INTO users VALUES (%s, now())", (user_id,))
    for start in range(0, memories, _AT_ONCE):
        portion = users[start : start + _AT_ONCE]
        contents = [_sentence(chance) for _ in portion]
        ids = [new_id(clock) for _ in portion]
        with engine.begin() as connection:
            connection.exec_driver_sql(
                """
                INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin,
                                      created_at, valid_from)
                SELECT id, owner, 'fact', content, 0.7, 0.7, '{cli}', 'consolidation', said, said
                FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::timestamptz[]) AS m (id, owner, content, said)
                """,
                (ids, portion, contents, [_BEGIN + timedelta(hours=chance.randrange(9_000)) for _ in portion]),
            )
            connection.exec_driver_sql(
                """
                INSERT INTO memory_vectors (memory_id, embedder_id, user_id, vector)
                SELECT id, %s, owner, made::public.vector
                FROM unnest(%s::uuid[], %s::text[], %s::text[]) AS m (id, owner, made)
                """,
                (embedder_id, ids, portion, [vector_literal(each) for each in _EMBEDDER.embed(contents)]),
            )
    engine.dispose()
    return embedder_id


def _measure(setup: Setup, database: Database, owners: dict[str, int], embedder_id: int) -> Section:
    questions = setup.scaled(_QUESTIONS)
    recall = Recall(database, _EMBEDDER, MemorySettings(), SystemClock())
    rows, figures = [], {}
    for user_id, count in owners.items():
        chance = random.Random(2)  # noqa: S311 (no secret)
        sample = [_question(chance) for _ in range(questions)]
        for question in sample[:20]:  # warm up: plans and pages
            recall.search(UserKey(user_id), question, K, [Layer.SEMANTIC], record=False)
        took = sorted(_timed(recall, user_id, question) for question in sample)
        hits = sum(_found(database, recall, user_id, question, embedder_id) for question in sample)
        figures[f"{user_id} recall@{K}"] = hits / (K * questions)
        for percent in (50, 95, 99):
            figures[f"{user_id} p{percent}_ms"] = took[min(len(took) - 1, len(took) * percent // 100)]
        rows.append(
            [
                f"a user with {count:,} memories",
                f"{figures[f'{user_id} recall@{K}']:.3f}",
                *(f"{figures[f'{user_id} p{percent}_ms']:.1f}" for percent in (50, 95, 99)),
            ]
        )
    return Section(
        NAME,
        f"Recall among {setup.scaled(_MEMORIES):,} memories",
        f"{questions} questions per user, with the embedder {_EMBEDDER.name}, {setup.scaled(_PAUSE_S)} s after the "
        "index was built. The ten nearest memories are compared with those of an exact scan; the time is that of a "
        "whole recall.",
        ["", f"recall@{K}", "p50 ms", "p95 ms", "p99 ms"],
        rows,
        figures,
    )


def _question(chance: random.Random) -> str:
    return f"Who {chance.choice(_DOES)} {chance.choice(_PLACES)} and has a {chance.choice(_THINGS)}?"


def _found(database: Database, recall: Recall, user_id: str, question: str, embedder_id: int) -> int:
    """How many of the ten nearest memories are among the first ten results of the vector search."""
    given = {"user_id": user_id, "vector": vector_literal(_EMBEDDER.embed([question])[0]), "embedder_id": embedder_id}
    exact = database.run(queries.MEMORIES_NEAR, {**given, "most": CANDIDATES})
    seen = recall.nearest_memories(UserKey(user_id), question)
    # Ties with the tenth nearest count as found.
    floor = exact[K - 1].similarity - 1e-6
    return sum(row.similarity >= floor for row in seen[:K])


def _timed(recall: Recall, user_id: str, question: str) -> float:
    begun = time.perf_counter()
    found: Sequence[object] = recall.search(UserKey(user_id), question, K, [Layer.SEMANTIC], record=False)
    assert len(found) == K
    return (time.perf_counter() - begun) * 1000
