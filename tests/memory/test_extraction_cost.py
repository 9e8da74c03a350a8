"""The tokens that a consolidated session costs, measured on the shipped conversations. `docs/memory.md` has them."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from benchmarks.recall import SHIPPED, lines_of
from perdure.models.offline import OfflineModel
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.settings import Settings
from perdure.text.tokens import estimate_tokens
from perdure.turns.lease.keeper import Keeper
from tests.memory.archive import Archive
from tests.turns.harness import Harness


class Counting(OfflineModel):
    """The offline model, which notes the estimated tokens of each call: the instructions', the other ones', its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        reply = super().respond(request, call)
        instructions, *rest = (estimate_tokens(message.content) for message in request.messages)
        self.calls.append((instructions, sum(rest), estimate_tokens(reply.content)))
        return reply


@pytest.mark.long
def test_the_tokens_of_a_consolidated_session(harness: Harness, settings: Settings) -> None:
    """One call a session, most of whose tokens are the instructions, which a provider may read from its cache."""
    harness.check = lambda: None  # type: ignore[method-assign]  # the check would fail: no turn ran
    archive = Archive(harness, Keeper(harness.database, harness.clock, settings.turn))
    sessions = messages = 0
    for sample in json.loads(SHIPPED.with_name("conversations.json").read_text(encoding="utf-8")):
        for _, said in groupby(lines_of(sample), lambda line: line["session"]):
            lines = [(line["role"], line["content"]) for line in said]
            archive.ended(*lines, user_id=sample["sample_id"])
            sessions, messages = sessions + 1, messages + len(lines)
    model = Counting()
    done = archive.consolidator(model).batch()
    assert (done.processed, done.failed, len(model.calls)) == (sessions, 0, sessions)
    instructions, read, written = (sum(column) // sessions for column in zip(*model.calls, strict=True))
    assert (sessions, messages) == (7, 66)
    assert [round(each, -1) for each in (instructions, read, written)] == [620, 300, 50], "docs/memory.md has them"
