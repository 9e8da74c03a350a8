"""`PERDURE_MEMORY__WORKING_TURNS` limits the number of turns in a prompt and in a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.models.protocol import Role
from perdure.snapshots import exchange
from perdure.snapshots.resolve import resolve
from tests.turns.harness import Harness


def _converse(harness: Harness, turns: int) -> None:
    for number in range(1, turns + 1):
        harness.run(harness.send(f"message {number}").session_id)


def _user_messages(harness: Harness) -> list[str]:
    """The user's messages in the newest prompt."""
    return [message.content for message in harness.model.requests[-1].messages if message.role is Role.USER]


def _limit(harness: Harness, turns: int) -> None:
    memory = harness.settings.memory.model_copy(update={"working_turns": turns})
    harness.settings = harness.settings.model_copy(update={"memory": memory})


@pytest.mark.parametrize("turns", [1, 3, 25])
def test_a_prompt_holds_the_configured_turns(harness: Harness, turns: int) -> None:
    """The limit includes the current turn. The limit may exceed its default."""
    _limit(harness, turns)
    _converse(harness, 27)

    assert _user_messages(harness) == [f"message {number}" for number in range(28 - turns, 28)]


@pytest.mark.parametrize("url", ["postgres", "file"])
def test_a_snapshot_holds_the_configured_turns(harness: Harness, tmp_path: Path, url: str) -> None:
    """The limit applies to snapshots in PostgreSQL and in an external store."""
    _limit(harness, 2)
    where = f"file://{tmp_path}" if url == "file" else url
    harness.snapshots = resolve(where, harness.settings, harness.database, "redis://127.0.0.1:0")
    _converse(harness, 4)
    session_id = harness.send("message 5").session_id
    harness.run(session_id)

    exported = exchange.read(harness.database, session_id, harness.settings.memory.working_turns)
    expected = ["message 4", "ok", "message 5", "ok"]
    assert [message.content for message in exported.memory.short_term_history] == expected
    if url == "file":
        stored = harness.snapshots.load(session_id)
        assert stored is not None
        assert [message.content for message in stored.snapshot.memory.short_term_history] == expected
