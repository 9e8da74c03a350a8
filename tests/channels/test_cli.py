"""The CLI channel accepts each line once, and shows only committed messages of the line's own turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfoNotFoundError

import pytest

from perdure import Agent, ask_user
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.channels.cli import Speaker, TerminalConversation
from perdure.errors import InvalidRequest, Unavailable
from perdure.events.event import Event, EventKind
from perdure.runtime import Runtime
from perdure.text.zones import zone_here
from perdure.turns.inbox import accept as inbox
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.reading import question_of, read_turn
from perdure.turns.run.loop import Runner
from tests.conftest import RecordingWaker
from tests.turns.scripted import Scripted, calls, says


@pytest.fixture
def troubles() -> list[str]:
    """The messages about database failures that are shown to the user."""
    return []


@pytest.fixture
def conversation(
    runtime: Runtime, troubles: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[TerminalConversation]:
    """A conversation of the user `local`. It retries failed database calls without a pause."""
    monkeypatch.setattr("perdure.channels.cli._AGAIN_S", 0)
    made = TerminalConversation(runtime, Speaker("local"), None, troubles.append)
    yield made
    made.close()


@pytest.fixture
def worker(runtime: Runtime, waker: RecordingWaker) -> Iterator[Any]:
    """A function that runs the session of the last wake-up in a thread."""
    runner = Runner(runtime, owner="test")
    threads: list[threading.Thread] = []

    def work() -> None:
        thread = threading.Thread(target=runner.run, args=(waker.sessions[-1],))
        thread.start()
        threads.append(thread)

    yield work
    for thread in threads:
        thread.join(timeout=30)
    runner.close()


@pytest.mark.parametrize(("zone", "sent"), [("Asia/Tokyo", {"timezone": "Asia/Tokyo"}), ("Etc/UTC", None)])
def test_a_message_has_the_time_zone_of_the_terminal(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, zone: str, sent: object
) -> None:
    """The zone of a machine in UTC is not sent: it says nothing about the user."""
    monkeypatch.setattr("tzlocal.get_localzone_name", lambda: zone)
    talk = TerminalConversation(runtime, Speaker("local", timezone=zone_here()), None, lambda _: None)
    talk.say("hello")
    assert talk.waited_for is not None
    assert read_turn(runtime.database, talk.waited_for).get("metadata") == sent
    talk.close()


def test_a_machine_without_a_time_zone_tells_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise ZoneInfoNotFoundError("no such zone")

    monkeypatch.setattr("tzlocal.get_localzone_name", fails)
    assert zone_here() is None


def test_an_answer_is_shown_message_by_message(conversation: TerminalConversation, worker: Any) -> None:
    """The tool call, its result and the reply are each shown once, in order, after they are committed."""
    conversation.say("what is 12*7+5?")
    worker()
    shown: list[dict[str, Any]] = []
    turn = conversation.listen(shown.append)

    assert turn["status"] == "done"
    assert [message["role"] for message in shown] == ["assistant", "tool", "assistant"]
    assert shown[-1]["content"] == turn["reply"]["text"]


def test_replies_to_other_channels_are_not_shown(
    conversation: TerminalConversation, runtime: Runtime, worker: Any
) -> None:
    """The terminal does not show replies to messages that the user sent on another channel in the same session."""
    inbox.accept(runtime, Incoming(user=UserKey("local"), text="what is 2+2?", channel="http"))
    conversation.say("what is 3*3?")
    worker()
    shown: list[dict[str, Any]] = []
    conversation.listen(shown.append)

    assert not any("4" in message["content"] for message in shown)
    assert any("9" in message["content"] for message in shown)


def test_a_second_start_resumes_the_conversation(
    runtime: Runtime, conversation: TerminalConversation, worker: Any
) -> None:
    """A second start of the CLI resumes the conversation. It counts the earlier messages but does not show them."""
    assert conversation.resume() == 0
    conversation.say("hello")
    worker()
    conversation.listen(lambda _: None)
    later = TerminalConversation(runtime, Speaker("local"), None, lambda _: None)

    assert later.resume() == 2
    assert later.session_id == conversation.session_id
    later.close()


def test_a_message_is_accepted_once_if_the_response_is_lost(
    conversation: TerminalConversation,
    troubles: list[str],
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    worker: Any,
) -> None:
    """If the connection breaks after the commit, the retry does not create a second message."""
    accept, tries = inbox.accept, 0

    def breaking(*given: Any) -> Any:
        nonlocal tries
        tries += 1
        accepted = accept(*given)
        if tries == 1:
            raise Unavailable("The database cannot be reached; please try again.")
        return accepted

    monkeypatch.setattr("perdure.channels.cli.accept", breaking)
    conversation.say("hello")
    worker()
    turn = conversation.listen(lambda _: None)

    assert (tries, turn["seq"], turn["status"]) == (2, 1, "done")
    assert len(troubles) == 1


def test_a_pending_turn_can_be_cancelled(conversation: TerminalConversation) -> None:
    """A turn that no worker has begun is cancelled at once, and the wait for its reply ends."""
    assert not conversation.cancel()
    conversation.say("hello")

    assert conversation.cancel()
    assert conversation.listen(lambda _: None)["status"] == "cancelled"


def test_a_refusal_reaches_the_person(conversation: TerminalConversation) -> None:
    """An invalid line is refused with the error message that other channels use."""
    with pytest.raises(InvalidRequest, match="NUL"):
        conversation.say("a\x00b")


def test_leaving_ends_the_conversation(
    runtime: Runtime, conversation: TerminalConversation, worker: Any, waker: RecordingWaker
) -> None:
    """`leave` ends the session, so the next start begins another one. Before the first line, `leave` does nothing."""
    assert not conversation.leave()
    conversation.say("hello")
    worker()
    conversation.listen(lambda _: None)
    assert conversation.leave()
    assert waker.endings == [conversation.session_id]
    later = TerminalConversation(runtime, Speaker("local"), None, lambda _: None)
    assert later.resume() == 0
    later.close()


def test_ending_a_conversation_begins_another(
    conversation: TerminalConversation, worker: Any, waker: RecordingWaker
) -> None:
    """`/end` ends the session but does not leave the chat. The user's next message begins a new session."""
    assert not conversation.end()
    conversation.say("hello")
    first = conversation.session_id
    worker()
    conversation.listen(lambda _: None)
    assert conversation.end()
    assert waker.endings == [first]
    conversation.say("something else")
    assert conversation.session_id != first


def test_an_end_that_failed_can_be_repeated(
    conversation: TerminalConversation, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `/end` fails because the database is unavailable, the session stays open and a second `/end` succeeds."""

    def fail(*_: object) -> None:
        raise Unavailable("The database cannot be reached.")

    conversation.say("hello")
    worker()
    with monkeypatch.context() as patched:
        patched.setattr("perdure.channels.cli.request_end", fail)
        with pytest.raises(Unavailable):
            conversation.end()
    assert conversation.end()


def test_a_tenants_user_continues_their_own_conversation(runtime: Runtime, conversation: TerminalConversation) -> None:
    """Users of the same name in two tenants, or without a tenant, have separate conversations."""
    conversation.say("hello")
    acmes, bolts = (
        TerminalConversation(runtime, Speaker("local", tenant), None, lambda _note: None) for tenant in ("acme", "bolt")
    )
    acmes.say("hello")
    assert len({conversation.session_id, acmes.session_id}) == 2
    again = TerminalConversation(runtime, Speaker("local", "acme"), None, lambda _note: None)
    again.resume()
    bolts.resume()
    assert (again.session_id, bolts.session_id) == (acmes.session_id, None)
    for each in (acmes, bolts, again):
        each.close()


@pytest.mark.long
@pytest.mark.parametrize("streams", [False, True])
def test_a_question_returns_to_the_prompt_and_the_next_line_answers(
    runtime: Runtime, waker: RecordingWaker, streams: bool
) -> None:
    """The terminal shows the question; the line that answers it continues the same turn."""
    model = Scripted(calls(("ask_milk", {"question": "Milk?"})), says("Here is your tea."))
    agent = Agent("assistant", "You help.", [ask_user(bool, name="ask_milk")])
    runtime = replace(runtime, agents=Agents([agent]), models=lambda _: model)
    conversation = TerminalConversation(runtime, Speaker("local"), None, lambda _: None)
    runner, shown, turn = Runner(runtime, owner="test"), [], {}

    def note(event: Event) -> None:
        if event.kind is EventKind.MESSAGE or question_of(event.data) is not None:
            shown.append(question_of(event.data) or event.data["content"])

    for line in ("tea, please", "hm", "yes"):
        conversation.say(line)
        runner.run(waker.sessions[-1])
        turn = conversation.stream(note) if streams else conversation.listen(lambda each: shown.append(each["content"]))
    again = "Please answer yes or no.\nMilk?"
    expected = ["", "Milk?", again, "true", "Here is your tea."]
    assert shown == (["tea, please", *expected] if streams else expected)
    assert (turn["status"], turn["error"]) == ("done", None)
    runner.close()
    conversation.close()
