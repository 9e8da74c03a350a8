"""`PERDURE_MEMORY__WORKING_TURNS` limits the number of turns in a prompt and in a snapshot."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from perdure import Agent
from perdure.agents import Agents
from perdure.errors import ContentFiltered, ContextTooLong
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Role
from perdure.sessions.forking import fork
from perdure.settings import MemorySettings
from perdure.snapshots import exchange
from perdure.snapshots.resolve import resolve
from perdure.text.tokens import estimate_tokens
from perdure.turns.prompt.build import within_window
from tests.turns.harness import Harness
from tests.turns.scripted import says, spoken, system_text


def _converse(harness: Harness, turns: int) -> None:
    for number in range(1, turns + 1):
        harness.run(harness.send(f"message {number}").session_id)


def _user_messages(harness: Harness) -> list[str]:
    """The user's messages in the newest prompt."""
    return [message.content for message in harness.model.requests[-1].messages if message.role is Role.USER]


def _limit(harness: Harness, turns: int) -> None:
    memory = harness.settings.memory.model_copy(update={"working_turns": turns})
    harness.settings = harness.settings.model_copy(update={"memory": memory})


@pytest.mark.long
@pytest.mark.parametrize(("turns", "shown"), [(1, 1), (3, 3), (10, 17), (12, 15), (25, 27)])
def test_a_prompt_holds_the_configured_turns(harness: Harness, turns: int, shown: int) -> None:
    """At least so many, the current one included, and at most twice as many: then the older half leaves."""
    _limit(harness, turns)
    _converse(harness, 27)

    assert _user_messages(harness) == [f"message {number}" for number in range(28 - shown, 28)]


def test_a_conversation_fits_a_small_window_at_once(harness: Harness) -> None:
    """A known window limits the history, so that the model need not refuse a prompt first. The newest turns remain."""
    harness.settings = harness.settings.model_copy(update={"model_window": 2_048})
    for number in range(12):
        harness.ask(f"{number:02} " + "word " * 500)

    newest = _user_messages(harness)
    assert newest[-1].startswith("11 ")
    assert sum(map(estimate_tokens, newest)) < 1_024


def test_the_budgets_follow_the_window() -> None:
    """A window of 144,000 tokens has all default budgets, except that of files; a smaller one has them in proportion.

    In a larger one, the instructions and the turns have an eighth of it, unless their budgets are set.
    """
    limits = MemorySettings()
    assert within_window(limits, None) is limits
    large = within_window(limits, 1_000_000)
    assert (large.budget_working, large.budget_system, large.budget_semantic) == (125_000, 125_000, 12_000)
    given = MemorySettings(budget_working=40_000, budget_system=8_000)
    assert within_window(given, 1_000_000) == given
    assert within_window(given, 128_000) == given.model_copy(update={"budget_files": 32_000})
    small = within_window(limits, 32_000)
    assert (small.budget_working, small.budget_semantic, small.budget_system) == (10_000, 3_000, limits.budget_system)


@pytest.mark.parametrize("error", [ContextTooLong("Too long."), ContentFiltered("No.")], ids=repr)
def test_a_turn_that_its_own_input_failed_is_left_out(harness: Harness, error: Exception) -> None:
    """The failed turn would fail later ones, too. It does not take the place of another turn in the prompt either."""
    _limit(harness, 3)
    _converse(harness, 2)
    harness.script(*[error] * 3)
    assert harness.ask("too much")["status"] == "failed"
    harness.script()
    assert harness.ask("message 3")["status"] == "done"

    assert _user_messages(harness) == ["message 1", "message 2", "message 3"]
    [session] = harness.sql("SELECT session_id FROM sessions")
    assert ("user", "too much") in harness.lines(session.session_id)


def test_a_fork_leaves_the_same_turns_out(harness: Harness) -> None:
    """A fork copies failed turns with their errors, so that its prompts are those of its source."""
    _converse(harness, 1)
    harness.script(*[ContextTooLong("Too long.")] * 3)
    failed = harness.ask("too much")
    assert failed["status"] == "failed"
    harness.script()
    _converse(harness, 1)
    forked = fork(harness.database, harness.clock, UUID(failed["session_id"]), None)
    harness.run(harness.send("message 9", session_id=forked).session_id)

    assert _user_messages(harness) == ["message 1", "message 1", "message 9"]


def test_a_prompt_that_is_too_long_is_built_again(harness: Harness) -> None:
    """The prompt is halved twice before the turn fails. The agent's instructions stay, and so does the question."""
    harness.agents = Agents([Agent("assistant", "Never tell the password. " * 50)])
    for number in range(8):
        harness.ask(f"message {number} " + "x" * 2_000)
    sizes: list[int] = []

    def refuses(request: ModelRequest, _: ModelCall) -> ModelReply:
        sizes.append(sum(len(each.content) for each in spoken(request)))
        assert "Never tell the password. " * 50 in system_text(request)
        assert request.messages[-1].content == "and now?"
        raise ContextTooLong("Too long.")

    harness.script(refuses, refuses, refuses)
    assert harness.ask("and now?")["error"]["code"] == "CONTEXT_TOO_LONG"
    assert len(sizes) == 3
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.6 * sizes[1]
    assert harness.ask("hi")["status"] == "done"


def test_a_prompt_that_cannot_be_smaller_is_sent_once(harness: Harness) -> None:
    """If no budget leaves anything out, another request would fail in the same way."""
    harness.script(ContextTooLong("Too long."), says("never"))
    assert harness.ask("hello")["error"]["code"] == "CONTEXT_TOO_LONG"
    assert len(harness.model.requests) == 1


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
