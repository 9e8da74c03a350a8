"""The same small talk, session after session, ends at a constant number of memories, whatever the model says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.models.offline import OfflineModel
from perdure.models.protocol import Model, ModelCall, ModelReply, ModelRequest
from tests.memory.archive import Archive, answer, memory

TALK = (
    ("Hi, how are you?", "Hello! What's up?", "Good morning!"),
    ("I like coffee.", "I really like coffee.", "I like coffee a lot."),
    ("The weather is nice today.", "Nice weather today!", "It is sunny again."),
    ("I live in Lyon.", "My home is in Lyon.", "I live in Lyon."),
    ("Thanks, bye!", "Bye, thank you.", "See you."),
)
DECISIONS = ("new", "changes", "same", "ends")


class Bad:
    """A model that makes a memory of every line, and decides at random about a memory that may be any."""

    name = "bad"

    def __init__(self) -> None:
        self._calls = 0

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        self._calls += 1
        known = len(request.messages[2].content.splitlines()) - 1 if len(request.messages) > 2 else 0
        lines = [line.split("user: ", 1)[1] for line in request.messages[1].content.splitlines() if "user: " in line]
        found = []
        for position, line in enumerate(lines):
            turn = self._calls + position
            decision = DECISIONS[turn % len(DECISIONS)] if known else "new"
            named = 1 + turn % known if known and decision != "new" else 0
            found.append(memory(line, decision=decision, known=named))
        return answer(*found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [Bad, OfflineModel], ids=["bad model", "offline"])
def test_the_same_small_talk_does_not_pile_up(archive: Archive, make: Callable[[], Model]) -> None:
    """After 120 and after 180 sessions of three variants there are as many memories, current and in all.

    No wording is stored twice, even if the model says that a repetition changes what it repeats.
    """
    model, counts = make(), list[tuple[int, int]]()
    archive.limit(batch_size=1_000)
    for _ in range(3):
        for number in range(60):
            archive.ended(*(variants[number % 3] for variants in TALK))
        done = archive.consolidator(model).batch()
        assert (done.processed, done.failed) == (60, 0)
        known = archive.known()
        counts.append((sum(row.valid_to is None for row in known), len(known)))
    assert counts[1] == counts[2]
    assert len({row.content for row in known}) == len(known)
    assert "I live in Lyon." in [row.content for row in known if row.valid_to is None]
