"""`PERDURE_MEMORY__WORKING_TURNS` bounds what a prompt and a snapshot hold of the conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.models.protocol import Role
from perdure.snapshots import exchange
from perdure.snapshots.resolve import resolve
from tests.turns.stage import Stage


def _converse(stage: Stage, turns: int) -> None:
    for number in range(1, turns + 1):
        stage.run(stage.send(f"message {number}").session_id)


def _said(stage: Stage) -> list[str]:
    """What the user says in the newest prompt."""
    return [message.content for message in stage.model.requests[-1].messages if message.role is Role.USER]


def _limit(stage: Stage, turns: int) -> None:
    memory = stage.settings.memory.model_copy(update={"working_turns": turns})
    stage.settings = stage.settings.model_copy(update={"memory": memory})


@pytest.mark.parametrize("turns", [1, 3, 25])
def test_a_prompt_holds_the_configured_turns(stage: Stage, turns: int) -> None:
    """The present turn is one of them; more than the default works, too."""
    _limit(stage, turns)
    _converse(stage, 27)

    assert _said(stage) == [f"message {number}" for number in range(28 - turns, 28)]


@pytest.mark.parametrize("url", ["postgres", "file"])
def test_a_snapshot_holds_the_configured_turns(stage: Stage, tmp_path: Path, url: str) -> None:
    """In PostgreSQL and in a store elsewhere alike."""
    _limit(stage, 2)
    where = f"file://{tmp_path}" if url == "file" else url
    stage.snapshots = resolve(where, stage.settings, stage.database, "redis://127.0.0.1:0")
    _converse(stage, 4)
    session_id = stage.send("message 5").session_id
    stage.run(session_id)

    exported = exchange.read(stage.database, session_id, stage.settings.memory.working_turns)
    expected = ["message 4", "ok", "message 5", "ok"]
    assert [message.content for message in exported.memory.short_term_history] == expected
    if url == "file":
        stored = stage.snapshots.load(session_id)
        assert stored is not None
        assert [message.content for message in stored.snapshot.memory.short_term_history] == expected
