"""What leaves the prompts of a long session has a running summary."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Row

from perdure.access.tenants import UserKey
from perdure.errors import ContentFiltered, ProviderError, Unavailable
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Message, Model, ModelCall, ModelReply, ModelRequest, Role
from perdure.sessions.forking import fork
from perdure.sessions.running_summary import MAX_ATTEMPTS, Running, extended, summarise_due
from perdure.sessions.summary import MAX_SUMMARY_CHARS
from perdure.turns.additions import Additions
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.prompt.window import change, size_of
from perdure.turns.recording import record
from perdure.turns.transcript import Entry
from perdure.users.export import export_user
from tests.repository.source import ROOT
from tests.turns.harness import Harness
from tests.turns.scripted import Scripted, says, spoken, system_text

SECRET = "The harbour master is called Ines."
KEPT = 4


@pytest.fixture
def talking(harness: Harness) -> Harness:
    """A harness whose prompts have at least four turns and at most eight."""
    memory = harness.settings.memory.model_copy(update={"working_turns": KEPT})
    harness.settings = harness.settings.model_copy(update={"memory": memory})
    return harness


def _talk(harness: Harness, turns: int, first: int = 1, **given: Any) -> UUID:
    for number in range(first, first + turns):
        turn = harness.ask(SECRET if number == 1 else f"message {number}", **given)
    return UUID(turn["session_id"])


def _row(harness: Harness) -> Row[Any]:
    [row] = harness.sql("SELECT * FROM running_summaries")
    return row


def _summarise(harness: Harness, model: Model | None = None) -> int:
    return summarise_due(harness.database, harness.clock, model or OfflineModel(), 10)


def test_a_block_is_summarised_before_it_leaves(talking: Harness) -> None:
    """The prompts show the whole conversation until they are full, and from then on the summary that was made."""
    _talk(talking, KEPT + 1)
    row = _row(talking)
    assert (row.from_seq, row.to_seq, row.next_seq, row.next_summary) == (1, 0, 2 * KEPT, None)
    model = Scripted(says('{"summary": "Ines was named.", "key_topics": []}'))
    assert _summarise(talking, model) == 1
    assert SECRET in model.requests[0].messages[1].content
    assert _summarise(talking, model) == 0, "one call a block"
    _talk(talking, KEPT - 1, KEPT + 2)
    assert "Ines was named." not in system_text(talking.model.requests[-1])
    _talk(talking, 1, 2 * KEPT + 1)
    request = talking.model.requests[-1]
    assert "Ines was named." in system_text(request)
    assert not any(SECRET in each.content for each in spoken(request))
    row = _row(talking)
    assert (row.to_seq, row.summary, row.next_seq, row.extractive) == (2 * KEPT, "Ines was named.", 4 * KEPT, False)
    model.lines = [says('{"summary": "Ines was named, and more.", "key_topics": []}')]
    assert _summarise(talking, model) == 1
    assert model.requests[-1].messages[1].content.startswith("Ines was named.\nuser: message 5")


def test_a_block_without_a_summary_leaves_with_an_extract(talking: Harness) -> None:
    """The background may be late. Its summary then replaces the extract."""
    _talk(talking, 2 * KEPT)
    claimed: list[int] = []

    def late(request: ModelRequest, _: ModelCall) -> ModelReply:
        _talk(talking, 1, 2 * KEPT + 1)
        claimed.append(len(request.messages))
        assert f"user: {SECRET}" in system_text(talking.model.requests[-1])
        assert _row(talking).extractive
        return says("Ines was named.")

    model = Scripted(late, says("More."))
    assert _summarise(talking, model) == 1
    row = _row(talking)
    assert (row.summary, row.extractive, row.next_summary) == ("Ines was named.", False, None)
    assert _summarise(talking, model) == 1, "the next block"
    assert _row(talking).next_summary == "More."


@pytest.mark.parametrize("summarises", [True, False], ids=["summaries", "extracts"])
def test_nothing_of_a_turn_that_is_not_remembered_is_summarised(talking: Harness, *, summarises: bool) -> None:
    """Neither a summary nor an extract has what a client forbids to remember."""
    message = Incoming(user=UserKey("ana"), text=SECRET)
    talking.run(accept(talking.runtime, message, additions=Additions(remember=False)).session_id)
    _talk(talking, 2 * KEPT - 1, 2)
    model = Scripted(says("A summary."))
    if summarises:
        assert _summarise(talking, model) == 1
        assert "message 2" in model.requests[0].messages[1].content
        assert SECRET not in model.requests[0].messages[1].content
    _talk(talking, 1, 2 * KEPT + 1)
    row = _row(talking)
    assert row.extractive is not summarises
    assert ("A summary." if summarises else "message 2") in row.summary
    assert SECRET not in row.summary


@pytest.mark.exhaustive
@pytest.mark.parametrize("summarises", [True, False], ids=["summaries", "extracts"])
def test_a_session_of_300_turns_knows_its_first_ones(harness: Harness, *, summarises: bool) -> None:
    """With the built-in model's summaries as well as with extracts, within the limit of a summary."""
    for number in range(300):
        harness.ask(SECRET if number == 0 else f"message {number}")
        if summarises:
            _summarise(harness)
    assert SECRET in next(each for each in system_text(harness.model.requests[-1]).splitlines() if "Ines" in each)
    row = _row(harness)
    assert row.to_seq >= 2 * 260
    assert len(row.summary) <= MAX_SUMMARY_CHARS
    assert row.extractive is not summarises


def test_a_failing_model_is_asked_a_few_times(talking: Harness) -> None:
    """After an outage the block is due again, up to a limit. An error that the input causes is not repeated."""
    _talk(talking, KEPT + 1)
    model = Scripted(*[ProviderError("Down.")] * 10)
    for _ in range(MAX_ATTEMPTS + 2):
        assert _summarise(talking, model) == 0
        talking.move(200)
    assert len(model.requests) == MAX_ATTEMPTS
    assert _row(talking).due_at is None
    _talk(talking, KEPT + 1, KEPT + 2)  # the block leaves with an extract, and the next one is due
    assert SECRET in _row(talking).summary
    model = Scripted(ContentFiltered("No."), says("never"))
    for _ in range(2):
        assert _summarise(talking, model) == 0
        talking.move(200)
    assert len(model.requests) == 1


@pytest.mark.long
@pytest.mark.parametrize("boundary", range(4))
def test_a_kill_between_the_call_and_the_commit_repeats_the_call(
    talking: Harness, database_url: str, boundary: int
) -> None:
    """SIGKILL before or after each commit of the background: the session has one row, with its summary."""
    _talk(talking, KEPT + 1)
    killed = subprocess.run(
        [sys.executable, "-m", "tests.sessions.running_killing", database_url, str(boundary)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stored = boundary == 3
    assert (_row(talking).next_summary is not None) is stored
    talking.move(60)
    assert _summarise(talking) == (0 if stored else 1)
    row = _row(talking)
    assert (row.to_seq, row.next_seq, row.due_at) == (0, 2 * KEPT, None)
    assert SECRET in row.next_summary


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_turn_killed_when_turns_leave_is_repeated(talking: Harness, moment: Any) -> None:
    """A crash before or after the turn's statement: the next worker's prompt is the same."""
    _talk(talking, 2 * KEPT)
    sent = talking.send("the ninth")
    with talking.crashing(moment, "summaries.keep"):
        talking.run(sent.session_id)
    talking.move(60)
    talking.run(sent.session_id)
    talking.run(sent.session_id)
    assert talking.turn(sent.turn_id)["status"] == "done"
    assert _row(talking).to_seq == 2 * KEPT
    assert system_text(talking.model.requests[-1]).count(f"user: {SECRET}") == 1


def test_a_worker_that_lost_the_session_keeps_nothing(talking: Harness) -> None:
    """The statement is fenced, as all that a turn writes."""
    _talk(talking, 2 * KEPT)
    before = _row(talking)
    sent = talking.send("the ninth")

    def lose(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.claim"):
            talking.sql("UPDATE sessions SET nonce = gen_random_uuid() WHERE session_id = %(id)s", id=sent.session_id)

    with talking.hooked(lose):
        talking.run(sent.session_id)
    assert _row(talking) == before


def test_erasing_and_exporting_a_user_covers_the_summary(talking: Harness) -> None:
    """Also while the background summarises: what it made is dropped."""
    _talk(talking, KEPT + 1)
    exported = export_user(talking.database, talking.clock, None, UserKey("ana"))
    assert "running_summaries" in str(exported)

    def erase(*_: object) -> ModelReply:
        counts = talking.runtime.eraser.erase(UserKey("ana")).rows
        assert counts["running_summaries"] == 1
        return says("Ines.")

    assert _summarise(talking, Scripted(erase)) == 0
    assert talking.sql("SELECT * FROM running_summaries") == []


@pytest.mark.parametrize("early", [False, True])
def test_a_fork_knows_what_its_prompts_do_not_show(talking: Harness, *, early: bool) -> None:
    """It has a copy of the summary, or, if the summary covers later turns, it gets a summary of its own."""
    session_id = _talk(talking, 4 * KEPT)
    [at] = talking.sql(
        "SELECT settled_tick FROM turns WHERE session_id = %(id)s AND seq = %(seq)s",
        id=session_id, seq=3 * KEPT - 1 if early else 4 * KEPT,
    )  # fmt: skip
    if early:
        talking.sql("UPDATE running_summaries SET to_seq = next_seq, next_seq = NULL")
        assert _row(talking).to_seq > 2 * (3 * KEPT - 1), "more than the fork has"
    forked = fork(talking.database, talking.clock, session_id, at.settled_tick)
    for text in ("and now?", "and then?"):
        talking.run(talking.send(text, session_id=forked).session_id)
    if early:
        assert _summarise(talking) >= 1
    [row] = talking.sql("SELECT * FROM running_summaries WHERE session_id = %(id)s", id=forked)
    assert SECRET in (row.next_summary or row.summary)


def test_an_exported_turn_has_the_summary_that_it_had(talking: Harness) -> None:
    """A turn that ended before the summary got so far is exported without it."""
    first = talking.ask(SECRET)
    session_id = _talk(talking, 3 * KEPT, 2)
    [newest] = talking.sql(
        "SELECT turn_id FROM turns WHERE session_id = %(id)s ORDER BY seq DESC LIMIT 1", id=session_id
    )
    parts = record(talking.runtime, newest.turn_id)["prompt"]["parts"]
    assert [SECRET in str(each["pieces"]) for each in parts if each["place"] == "summary"] == [True]
    exported = record(talking.runtime, UUID(first["turn_id"]))
    assert exported["history"] == [], "nothing that was said later"
    parts = exported["prompt"]["parts"]
    assert not any(each["pieces"] for each in parts if each["place"] == "summary" and each["pieces"] != [""])


def test_the_database_may_be_unavailable(talking: Harness) -> None:
    """A round raises `Unavailable`, as every duty does."""
    talking.database.close()
    with pytest.raises(Unavailable):
        summarise_due(type(talking.database)("postgresql://nobody@127.0.0.1:1/none"), talking.clock, OfflineModel(), 1)


TURNS = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@given(TURNS, st.integers(4, 12), st.integers(100, 2_000), st.lists(st.booleans(), min_size=60, max_size=60))
def test_no_turn_is_lost_between_the_prompt_and_the_summary(
    sizes: list[int], kept: int, budget: int, made: list[bool]
) -> None:
    """Turn by turn, a prompt begins right after the summary, is within its limits, and blocks are planned ahead."""
    running, turns = Running(), list[list[Entry]]()
    for number, characters in enumerate(sizes, start=1):
        turn_id = UUID(int=number)
        turns.append([Entry(turn_id, Role.USER, "x" * characters)])
        found = change(turns, running, kept=kept, budget=budget)
        if found is not None:
            assert (found.to_seq, found.next_seq or 0) > (running.to_seq, running.next_seq or 0)
            assert found.next_seq is None or found.next_seq > found.to_seq
            running = found
        turns = [turn for turn in turns if turn[-1].seq is None or turn[-1].seq > running.to_seq]
        settled = [turn[0].seq for turn in turns[:-1]]
        assert settled == list(range(running.to_seq + 1, number))
        assert len(turns) <= 2 * kept
        assert sum(map(size_of, turns)) <= budget or len(turns) == 1
        turns[-1] = [Entry(turn_id, Role.USER, "x" * characters, seq=number)]
        if made[number - 1] and running.next_seq is not None and running.next_text is None:
            running = Running(running.to_seq, running.text, running.next_seq, "made", running.extractive)


@given(st.text(max_size=6_000), st.lists(st.text(max_size=300), max_size=60))
def test_an_extract_is_bounded_and_keeps_the_beginning(before: str, said: list[str]) -> None:
    """PostgreSQL can store it, and it begins with what it extends."""
    found = extended(before[:MAX_SUMMARY_CHARS], [Message(Role.USER, each) for each in said])
    assert len(found) <= MAX_SUMMARY_CHARS + 2
    assert "\x00" not in found
