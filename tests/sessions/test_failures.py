"""The text of a failure is for people: it is stored and marked, and no reader of messages for a model sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID, uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.agents import Agent, Agents, ErrorTexts
from perdure.channels.http.openai.answers import CommittedAnswer, Progress, Rewound, Text, follow
from perdure.errors import ProviderError
from perdure.events.event import Event, EventId, EventKind
from perdure.memory.consolidation.consolidate import read_conversation
from perdure.memory.import_export import export_messages
from perdure.memory.recall.search import Recall
from perdure.sessions.ending import request_end
from perdure.sessions.forking import fork
from perdure.settings import MemorySettings
from perdure.snapshots.exchange import read
from perdure.snapshots.file import FileSnapshots
from perdure.testing import Conversation
from perdure.testing.scripted import Scripted
from perdure.turns.calls.client import Exchange
from perdure.turns.cancel import cancel
from perdure.turns.committed import Committed, read_committed
from perdure.turns.feedback import Feedback, give_feedback
from perdure.users.export import export_user
from tests.memory.corpus import imported
from tests.sessions.conftest import End
from tests.turns.harness import Harness
from tests.turns.scripted import says, spoken

FAILURE = "Zinnias wilted in the pantry."
"""The text that the agent's users receive if no model answers. No other text has these words."""

ERROR = {"code": "PROVIDER_ERROR", "message": FAILURE}


def _talk(harness: Harness) -> dict[str, Any]:
    """A session with a turn that succeeds and one that fails; returns the failed turn."""
    texts = ErrorTexts({"PROVIDER_ERROR": FAILURE})
    harness.agents = Agents([Agent("assistant", "You help.", error_messages=texts)])
    harness.script(says("Hello Ana."), ProviderError("no", transient=False))
    harness.ask("I am Ana.")
    return harness.ask("Where do zinnias grow best?")


def _requested(harness: Harness) -> str:
    """All texts that the model received."""
    return "\n".join(message.content for request in harness.model.requests for message in request.messages)


def test_a_failure_is_shown_to_people_with_a_mark(harness: Harness) -> None:
    """The transcript, the turn's events, both exports and the turn itself have the text, marked as an error."""
    turn = _talk(harness)
    assert turn["reply"]["text"] == FAILURE
    shown = harness.messages(UUID(turn["session_id"]))
    assert [(each["content"], each.get("error")) for each in shown] == [
        ("I am Ana.", None), ("Hello Ana.", None), ("Where do zinnias grow best?", None), (FAILURE, ERROR),
    ]  # fmt: skip
    assert read_committed(harness.database, UUID(turn["turn_id"])).messages[-1]["error"] == ERROR
    assert [each.get("error") for each in export_messages(harness.database)] == [None, None, None, ERROR]
    tables = export_user(harness.database, harness.clock, None, UserKey("ana"))["tables"]
    assert [each.get("error") for each in tables["messages"]] == [None, None, None, ERROR]


def _prompt(harness: Harness, session_id: UUID) -> str:
    harness.send("And tulips?")
    harness.run(session_id)
    return _requested(harness)


def _prompt_of_a_fork(harness: Harness, session_id: UUID) -> str:
    copy = fork(harness.database, harness.clock, session_id)
    assert FAILURE in [content for _, content in harness.lines(copy)]  # a copy for people, too
    harness.send("And tulips?", session_id=copy)
    harness.run(copy)
    return _requested(harness)


def _prompt_after_the_session(harness: Harness, session_id: UUID) -> str:
    request_end(harness.database, session_id, "enough")
    later = harness.send("What did we talk about?")
    harness.run(later.session_id)
    return _requested(harness)


def _snapshot(harness: Harness, session_id: UUID) -> str:
    return str(read(harness.database, session_id).memory.short_term_history)


def _consolidation(harness: Harness, session_id: UUID) -> str:
    return str(read_conversation(harness.database, session_id, 1_000))


def _recall(harness: Harness, session_id: UUID) -> str:
    found = Recall(harness.database, None, MemorySettings(), harness.clock).search(
        UserKey("ana"), "zinnias wilted pantry", 9
    )
    return str([each.content for each in found])


READERS: dict[str, Callable[[Harness, UUID], str]] = {
    "the next prompt": _prompt,
    "a fork's prompt": _prompt_of_a_fork,
    "the next session's prompt": _prompt_after_the_session,
    "a snapshot": _snapshot,
    "the extraction of memories": _consolidation,
    "recall": _recall,
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_no_reader_for_a_model_has_a_failure(harness: Harness, reader: Callable[[Harness, UUID], str]) -> None:
    """Each of these reads the user's own message of the failed turn, and not the error."""
    turn = _talk(harness)
    found = reader(harness, UUID(turn["session_id"]))
    assert "zinnias grow" in found
    assert "wilted" not in found


def test_a_summary_is_made_without_failures(harness: Harness, end: End) -> None:
    """The summary model does not receive the error, and neither does an extract quote it."""
    turn = _talk(harness)
    session_id = UUID(turn["session_id"])
    request_end(harness.database, session_id, "enough")
    harness.script(*[ProviderError("no", transient=False)] * 9)
    for _ in range(5):
        end(session_id)
        harness.move(60)
    session = harness.session(session_id)
    assert session.summary.startswith("Extract")
    assert "zinnias grow" in session.summary
    assert "wilted" not in session.summary + _requested(harness) + " ".join(session.key_topics)


def test_a_failure_gets_no_vector(harness: Harness) -> None:
    """Nothing that searches has a row of the error, and no embedder receives it."""
    _talk(harness)
    seqs = [row.seq for row in harness.sql("SELECT seq FROM message_words ORDER BY seq")]
    assert seqs == [row.seq for row in harness.sql("SELECT seq FROM unembedded ORDER BY seq")] == [1, 2, 3]


def test_an_external_snapshot_omits_failures(harness: Harness, tmp_path: Any) -> None:
    """The snapshot that is saved with the failed turn has its question and not the error."""
    harness.snapshots = FileSnapshots(tmp_path)
    turn = _talk(harness)
    found = harness.snapshots.load(UUID(turn["session_id"]))
    assert found is not None
    assert [each.content for each in found.snapshot.memory.short_term_history] == [
        "I am Ana.", "Hello Ana.", "Where do zinnias grow best?",
    ]  # fmt: skip


def test_feedback_on_a_failure_makes_no_case(harness: Harness) -> None:
    """A failed turn can be praised, but its error never becomes the answer of a case."""
    turn = _talk(harness)
    give_feedback(harness.runtime, UUID(turn["turn_id"]), Feedback(score=1))
    assert harness.sql("SELECT FROM cases") == []


def test_an_openai_answer_has_no_failure() -> None:
    """A client of OpenAI's routes sends its history again, so an error is no part of an answer's text."""
    spoken = {"role": "assistant", "content": "Let me look."}
    failure = {"role": "assistant", "content": FAILURE, "error": ERROR}
    answer = CommittedAnswer({})
    answer.add(Committed({}, 0, [spoken, failure], 2))
    assert answer.text == "Let me look."

    exchange = Exchange(uuid4())

    async def streamed(*parts: str) -> str:
        async def events() -> AsyncIterator[Event]:
            for text in parts:
                yield Event(EventId(1), EventKind.DELTA, {"text": text})
            yield Event(EventId(2), EventKind.MESSAGE, failure)
            yield Event(EventId(4), EventKind.DONE, {"usage": None})

        async def read() -> Progress:
            return Progress({}, (), None, exchange)

        async def used(_progress: Progress | None) -> dict[str, Any]:
            return {}

        parts_of_answer = follow(events(), exchange, read, used)
        return "".join([part.text async for part in parts_of_answer if isinstance(part, Text)])

    assert asyncio.run(streamed()) == ""
    with pytest.raises(Rewound):  # what the model streamed before it failed is withdrawn
        asyncio.run(streamed("Zinnias grow"))


def test_a_cancelled_turn_leaves_no_words(harness: Harness) -> None:
    """The note that a turn was cancelled is the turn's error: the transcript has no message of it."""
    sent = harness.send("Never mind.")
    cancel(harness.runtime, sent.turn_id)
    _prompt(harness, sent.session_id)
    assert "cancelled" not in _requested(harness)
    assert [content for _, content in harness.lines(sent.session_id)] == ["And tulips?", "ok"]


def test_an_exported_failure_stays_one(harness: Harness) -> None:
    """An import keeps the mark, so the error is not searched there either. Only the assistant's lines may have one."""
    _talk(harness)
    lines = [{**each, "user_id": "eve"} for each in export_messages(harness.database)]
    lines.append({**lines[-1], "message_id": "later", "turn": "later", "content": "I am back.", "error": None})
    assert imported(harness.database, harness.clock, [json.dumps(each) for each in lines]).added == 5
    assert [each.get("error") for each in export_messages(harness.database, UserKey("eve"))] == [
        None,
        None,
        None,
        ERROR,
        None,
    ]
    found = Recall(harness.database, None, MemorySettings(), harness.clock).search(
        UserKey("eve"), "zinnias wilted pantry", 9
    )
    contents = [each.content for each in found]
    assert "Where do zinnias grow best?" in contents
    assert FAILURE not in contents
    wrong = imported(harness.database, harness.clock, [json.dumps({**lines[0], "message_id": "x", "error": ERROR})])
    assert wrong.bad[0].reason == "error belongs to a line with the role assistant"


def test_a_conversation_of_a_test_omits_failures() -> None:
    """`perdure.testing` sends the model the history that the engine would send."""
    model = Scripted(ProviderError("no", transient=False), "Fine.")
    texts = ErrorTexts({"PROVIDER_ERROR": FAILURE})
    talk = Conversation(Agent("assistant", "You help.", error_messages=texts), model=model)
    assert talk.ask("First?").reply == FAILURE
    talk.ask("Second?")
    assert [each.content for each in spoken(model.requests[-1])] == ["First?", "Second?"]
