"""The share of a prompt that is the same as the beginning of the conversation's previous prompt.

A provider reads that share from its prompt cache. The prompts are the bodies of the requests, as they are sent over
both wires of perdure. Marks of the cache are no part of a prompt, and are left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import mean
from typing import Any

from sqlalchemy import text
from sqlalchemy.engine import URL

from benchmarks.report import Section
from benchmarks.setup import Setup, connected
from benchmarks.statements import Bench, bench
from perdure.agents import Agents
from perdure.builtin import assistant
from perdure.clock import SystemClock
from perdure.database.engine import Database
from perdure.memory.embedding import embed_sessions
from perdure.memory.import_export import import_messages
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.offline import OfflineModel
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Usage
from perdure.models.providers import chat_wire, messages_wire
from perdure.sessions.running_summary import summarise_due

NAME = "prefix"

_TURNS = 60
_USER = "ana"
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_EMBEDDER = HashEmbedder(384)
_WORDS = [
    "orchard",
    "harbour",
    "kettle",
    "violin",
    "lemon",
    "river",
    "lantern",
    "saddle",
    "marble",
    "pepper",
    "anchor",
    "meadow",
    "copper",
    "thimble",
    "ladder",
    "walnut",
    "pillow",
    "tunnel",
    "barley",
    "candle",
    "falcon",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kitten",
]
WIRES = {"Chat Completions": chat_wire.WIRE.request_body, "Messages": messages_wire.WIRE.request_body}

PAST = (
    text("""
        UPDATE sessions SET summary = 'They talked about the ' || key_topics[1] || repeat(' and what to do with it', 8)
        FROM (SELECT 1) AS once WHERE user_id = :user_id
    """),
    text("""
        INSERT INTO memories (memory_id, user_id, kind, content, importance, value, channels, origin, created_at,
                              valid_from)
        SELECT gen_random_uuid(), :user_id, 'fact', 'Fact ' || n || ': the ' || word || ' of the user is in room ' || n,
               0.5, 0.5, '{http}', 'tool', now(), now()
        FROM unnest(cast(:words AS text[])) WITH ORDINALITY AS each (word, n)
    """),
    text("""
        INSERT INTO hot_memories (user_id, rank, memory_id, score, refreshed_at)
        SELECT user_id, row_number() OVER (ORDER BY content), memory_id, 1, now() FROM memories WHERE user_id = :user_id
    """),
)


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of each prompt from the second on that is the beginning of the prompt before it."""

    each: list[float]

    @property
    def mean(self) -> float:
        """The mean of all turns."""
        return mean(self.each)

    @property
    def late(self) -> float:
        """The mean of the turns after the twentieth."""
        return mean(self.each[19:])


class Talking:
    """A model that answers with some words, and keeps what it was sent."""

    name = "talking"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []
        self._chance = random.Random(5)  # noqa: S311 (no secret)

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Answer with forty words."""
        self.requests.append(request)
        answer = _sentence(self._chance, 40)
        call.delta(answer)
        return ModelReply(answer, usage=Usage(100, 50), model=self.name)


def _sentence(chance: random.Random, count: int) -> str:
    """A text of `count` words."""
    return f"{' '.join(chance.choices(_WORDS, k=count))}."


def question(number: object) -> str:
    """A message of 25 words, the same for the same `number`."""
    return _sentence(random.Random(str(number)), 25)  # noqa: S311 (no secret)


def shared(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """The share of the request `after` that is the beginning of the request `before`, in bytes.

    >>> shared({"messages": "abcd"}, {"messages": "abxyz"})
    0.7...
    """
    one, other = _sent(before), _sent(after)
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    return same / len(other)


def _sent(body: Any) -> bytes:
    return json.dumps(_unmarked(body), ensure_ascii=False).encode()


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unmarked(each) for name, each in value.items() if name != "cache_control"}
    return [_unmarked(each) for each in value] if isinstance(value, list) else value


def shares(requests: list[ModelRequest], wire: Callable[..., dict[str, Any]]) -> Shares:
    """The shares of the consecutive `requests`."""
    bodies = [wire("model", each) for each in requests]
    return Shares([shared(one, other) for one, other in pairwise(bodies)])


def measure(setup: Setup) -> Section:
    """Measure a conversation of 60 turns, of a user without a past and of one with a past."""
    found = {
        (past, wire): shares(requests, body)
        for past in (False, True)
        for requests in [_conversation(setup, past=past)]
        for wire, body in WIRES.items()
    }
    return Section(
        name=NAME,
        title=f"The share of a prompt that is the beginning of the previous prompt, over {_TURNS} turns",
        method=(
            "The built-in agent with its tools, one model call a turn, messages of 25 words and replies of 40. The "
            "past: ten ended sessions with summaries, 26 memories, all of them hot. "
            "Running summaries are made after each turn. Bytes of the request's body."
        ),
        columns=["past", "wire", f"mean of turns 2 to {_TURNS}", f"of turns 21 to {_TURNS}", "least"],
        rows=[
            ["yes" if past else "no", wire, f"{each.mean:.2f}", f"{each.late:.2f}", f"{min(each.each):.2f}"]
            for (past, wire), each in found.items()
        ],
        figures={
            f"{'past' if past else 'new'}_{'chat' if wire.startswith('Chat') else 'messages'}": each.mean
            for (past, wire), each in found.items()
        },
    )


def _conversation(setup: Setup, *, past: bool) -> list[ModelRequest]:
    setup.progress("a conversation of a user with a past" if past else "a conversation of a new user")
    with setup.database("bench_prefix") as url:
        if past:
            _give_past(url)
        with bench(url, Agents([assistant])) as made:
            return _converse(made)


def _converse(made: Bench) -> list[ModelRequest]:
    """The requests of a conversation."""
    made.model = model = Talking()
    for number in range(_TURNS):
        made.turn(_USER, text=question(number))
        summarise_due(made.database, SystemClock(), OfflineModel(), 10)
    return model.requests


def _give_past(url: URL) -> None:
    """Give the user earlier sessions and memories."""
    database = Database(url)
    for imported in import_messages(database, SystemClock(), assistant.name, _lines()):
        assert not imported.bad, imported.bad[0]
    embed_sessions(database, _EMBEDDER, imported.sessions)
    database.close()
    with connected(url) as admin:
        for each in PAST:
            admin.execute(each, {"user_id": _USER, "words": list(_WORDS)})


def _lines() -> Iterator[str]:
    chance = random.Random(3)  # noqa: S311 (no secret)
    for number in range(200):
        yield json.dumps(
            {
                "user_id": _USER,
                "session": f"session {number // 20}",
                "message_id": f"m{number}",
                "role": "assistant" if number % 2 else "user",
                "content": _sentence(chance, 25),
                "occurred_at": (_BEGIN + timedelta(hours=number)).isoformat(),
            }
        )
