"""Notes in chats: the progress of a turn's tools in one message, within the limits of the service."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import pytest

from perdure import ToolContext, tool
from perdure.channels.services import indicators, notes
from perdure.channels.services.notes import CHANGE_S, GROUP_CHANGE_S, Notes
from perdure.channels.services.protocol import Channel, Place
from perdure.clock import SystemClock
from perdure.errors import Unavailable
from perdure.events.writer import EventWriter
from perdure.turns.cancel import cancel
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable
from tests.channels.chats.installation import Installation, Servers
from tests.channels.chats.updates import IN_CHANNEL, MENTION, said, slack_event
from tests.channels.slack_server import BOT_USER
from tests.turns.harness import until
from tests.turns.scripted import Scripted, calls, says

CHAT, GROUP = Place("1"), Place("2", group=True)
TURN, OTHER = UUID(int=1), UUID(int=2)


class Chats:
    """A channel that keeps its notes in memory; `errors` are raised by the next calls."""

    name = "chats"
    notes_a_second = 10.0

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self.errors: list[Exception] = []
        self.calls = 0
        self._ids = itertools.count(1)

    def show_note(self, place: Place, text: str, note_id: str | None) -> str:
        del place
        self._count()
        found = note_id or str(next(self._ids))
        self.shown[found] = text
        return found

    def remove_note(self, place: Place, note_id: str) -> None:
        del place
        self._count()
        del self.shown[note_id]

    def _count(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def chats() -> Chats:
    """A channel in memory."""
    return Chats()


@pytest.fixture
def made(chats: Chats) -> Notes:
    """The notes of that channel."""
    return Notes(cast("Channel", chats))


@pytest.mark.parametrize(("place", "pause_s"), [(CHAT, CHANGE_S), (GROUP, GROUP_CHANGE_S)], ids=["private", "group"])
def test_a_note_changes_seldom(made: Notes, chats: Chats, place: Place, pause_s: float) -> None:
    """Reports within the pause are skipped but for the last: each change counts towards the service's limits."""
    for tenth in range(int(pause_s * 10) + 1):
        made.want(TURN, place, f"{tenth}")
        made.update(100 + tenth / 10)
        assert list(chats.shown.values()) == ["0" if tenth < pause_s * 10 else f"{tenth}"]
    assert chats.calls == 2


def test_an_unchanged_note_is_not_sent_again(made: Notes, chats: Chats) -> None:
    """A service may refuse a change that changes nothing, and counts it."""
    for second in range(10):
        made.want(TURN, CHAT, "1 of 2")
        made.update(100 + second)
    assert chats.calls == 1


def test_a_service_has_a_share_for_notes(made: Notes, chats: Chats) -> None:
    """Of many notes, each has its turn within the share; a note to remove comes first, because the reply is there."""
    for number in range(100):
        made.want(UUID(int=number), CHAT, "1 of 2")
    made.update(100.0)
    assert chats.calls == 10
    for second in range(1, 10):
        made.update(100.0 + second)
    assert (chats.calls, len(chats.shown)) == (100, 100)
    for number in range(100):
        made.want(UUID(int=number), CHAT, "2 of 2")
    made.end(UUID(int=7))
    made.update(110.0)
    assert (len(chats.shown), list(chats.shown.values()).count("2 of 2")) == (99, 9)


def test_a_pause_is_kept(made: Notes, chats: Chats) -> None:
    """While the service asks for a pause, no note is changed or removed. The note is shown after it."""
    chats.errors = [NotAsked("wait", 30.0)]
    made.want(TURN, CHAT, "1 of 2")
    made.want(OTHER, CHAT, "1 of 2")
    for second in range(30):
        made.update(100.0 + second)
    assert (chats.calls, chats.shown) == (1, {})
    made.update(130.0)
    assert list(chats.shown.values()) == ["1 of 2", "1 of 2"]


def test_a_note_that_is_not_confirmed_is_not_shown_again(made: Notes, chats: Chats) -> None:
    """The service may have shown it: another attempt could show it twice. The notes of other turns are not affected."""
    chats.errors = [DeliveryFailed("no answer")]
    made.want(TURN, CHAT, "1 of 2")
    made.update(100.0)
    made.want(OTHER, CHAT, "1 of 3")
    for second in range(1, 20):
        made.want(TURN, CHAT, f"{second} of 20")
        made.update(100.0 + second)
    assert list(chats.shown.values()) == ["1 of 3"]


def test_a_change_that_fails_is_tried_again(made: Notes, chats: Chats) -> None:
    """A change may be repeated without harm, after a pause."""
    made.want(TURN, CHAT, "1 of 2")
    made.update(100.0)
    chats.errors = [Unavailable("down")]
    made.want(TURN, CHAT, "2 of 2")
    for second in range(2, 12):
        made.update(100.0 + second)
    assert (chats.calls, list(chats.shown.values())) == (3, ["2 of 2"])


def test_a_refused_note_is_abandoned(made: Notes, chats: Chats, caplog: pytest.LogCaptureFixture) -> None:
    """Without permission, or after the person has deleted it, nothing more is tried, and no text is logged."""
    caplog.set_level(logging.INFO)
    made.want(TURN, CHAT, "a secret")
    made.update(100.0)
    chats.errors = [Undeliverable("refused"), Undeliverable("refused")]
    for second in range(2, 20):
        made.want(TURN, CHAT, f"a secret {second}")
        made.update(100.0 + second)
    assert chats.calls == 2
    made.end(TURN)
    made.update(130.0)
    assert (chats.calls, made.is_empty()) == (3, True)
    assert "a note on chats could not be shown" in caplog.text
    assert "secret" not in caplog.text


def test_a_removal_is_tried_three_times(made: Notes, chats: Chats) -> None:
    """A note that the service does not remove stays. It is not tried for ever."""
    made.want(TURN, CHAT, "1 of 2")
    made.update(100.0)
    made.end(TURN)
    chats.errors = [DeliveryFailed("down")] * 9
    for second in range(1, 60):
        made.update(100.0 + second)
    assert (chats.calls, made.is_empty()) == (4, True)


def test_at_the_end_all_notes_are_removed(made: Notes, chats: Chats) -> None:
    """No other process knows them. If the service fails, the process ends nevertheless."""
    for number in range(4):
        made.want(UUID(int=number), CHAT, "1 of 2")
    made.update(100.0)
    chats.errors = [Undeliverable("deleted by the person")]
    made.clear()
    assert len(chats.shown) == 1
    made.want(TURN, CHAT, "2 of 2")
    made.update(102.0)
    chats.errors = [DeliveryFailed("down")]
    made.clear()
    assert len(chats.shown) == 2


# --- of a turn ---------------------------------------------------------------------------


@pytest.fixture
def writer(installation: Installation, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventWriter]:
    """Redis for the installation, as its workers and its channels use it, and rounds without pauses."""
    monkeypatch.setattr(indicators, "LOOK_S", 0.05)
    monkeypatch.setattr(notes, "CHANGE_S", 0.1)
    monkeypatch.setattr(notes, "GROUP_CHANGE_S", 0.1)
    settings = installation.runtime.settings
    made = EventWriter(redis_url, settings.redis_prefix, settings.stream, SystemClock())
    made.start()
    installation.runtime = replace(installation.runtime, clock=SystemClock(), redis_url=redis_url, events=made)
    yield made
    made.close()


def _update(name: str, content: str, *, group: bool) -> Any:
    if name == "discord":
        return said(content, 1, guild_id="31", channel_id="22", **MENTION) if group else said(content)
    return slack_event(f"<@{BOT_USER}> {content}" if group else content, **(IN_CHANNEL if group else {}))


@pytest.mark.parametrize("group", [False, True], ids=["private", "group"])
@pytest.mark.parametrize("name", ["discord", "slack"])
def test_the_progress_of_a_tool_is_shown(
    installation: Installation, servers: Servers, writer: EventWriter, name: str, group: bool
) -> None:
    """One message, where the reply goes, changes with the tool's reports. Then the reply takes its place."""
    del writer
    server = servers.discord if name == "discord" else servers.slack
    seen: list[list[str]] = []

    @tool(effect="pure")
    def brew(context: ToolContext) -> str:
        """Brew."""
        for number in (1, 2):
            context.progress(f"{number} of 2")
            until(lambda: list(server.shown.values()) == [f"brew: {number} of 2"], "the note")  # noqa: B023 (at once)
            seen.append(list(server.shown))
        return "brewed"

    installation.use(Scripted(calls(("brew", {})), says("Here it is.")), brew)
    installation.ingress(name).take(_update(name, "tea, please", group=group))
    installation.work()
    until(lambda: list(server.shown.values()) == ["Here it is."], "the note is removed")
    assert seen[0] == seen[1]
    note, reply = server.sent
    where = ("channel",) if name == "discord" else ("channel", "thread_ts")
    assert [note.get(each) for each in where] == [reply.get(each) for each in where]


def test_without_permission_the_reply_comes(installation: Installation, servers: Servers, writer: EventWriter) -> None:
    """A service that refuses the note still gets the reply."""
    del writer
    servers.discord.fail("/messages", 403, {"message": "Missing Permissions", "code": 50013})

    @tool(effect="pure")
    def brew(context: ToolContext) -> str:
        """Brew."""
        context.progress("1 of 2")
        until(lambda: not any(each.times for each in servers.discord.failures), "the note is refused")
        return "brewed"

    installation.use(Scripted(calls(("brew", {})), says("Here it is.")), brew)
    installation.ingress("discord").take(said("tea, please"))
    installation.work()
    assert list(servers.discord.shown.values()) == ["Here it is."]


def test_the_stored_progress_of_a_task_is_shown(
    installation: Installation, servers: Servers, writer: EventWriter
) -> None:
    """A parked turn has no worker: the progress of the task for which it waits is in the database."""
    del writer
    installation.ingress("slack").take(slack_event("tea, please"))
    [turn] = installation.sql("SELECT turn_id FROM turns")
    with installation.runtime.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE turns SET status = 'parked'")
        connection.exec_driver_sql(
            "INSERT INTO tool_effects (effect_id, turn_id, message_seq, position, tool, arguments, effect, status,"
            " intended_at, decide_at, waits_for, progress)"
            " SELECT gen_random_uuid(), turn_id, 1, 0, 'report', '{}', 'pure', 'intended', now(), now(), 'task',"
            " '1 of 2' FROM turns"
        )
    servers.slack.until(lambda: list(servers.slack.shown.values()) == ["report: 1 of 2"], "the note")
    with installation.runtime.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tool_effects SET progress = '2 of 2'")
    servers.slack.until(lambda: list(servers.slack.shown.values()) == ["report: 2 of 2"], "the change")
    cancel(installation.runtime, turn.turn_id)
    until(lambda: not servers.slack.shown, "the note is removed")


def test_a_turn_that_waits_for_a_person_has_no_note(
    installation: Installation, servers: Servers, writer: EventWriter
) -> None:
    """The request is the newest message then, and what a tool said before is of no use."""
    del writer

    @tool(effect="pure")
    def brew(context: ToolContext) -> str:
        """Brew."""
        context.progress("1 of 2")
        until(lambda: list(servers.slack.shown.values()) == ["brew: 1 of 2"], "the note")
        return "brewed"

    @tool(effect="pure", requires_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    installation.use(Scripted(calls(("brew", {})), calls(("pay", {})), says("Done.")), brew, pay)
    installation.ingress("slack").take(slack_event("tea, please"))
    installation.work()
    until(lambda: len(servers.slack.shown) == 1, "the note is removed")
    assert "pay" in next(iter(servers.slack.shown.values()))


def test_a_waiting_turn_makes_room(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns may wait for weeks: those that run are followed nevertheless."""
    monkeypatch.setattr(indicators, "MOST_SHOWN", 1)
    shown = indicators.Indicators(installation.runtime, installation.channels["slack"])
    try:
        shown.show(TURN, CHAT)
        shown.show(OTHER, CHAT)
        assert list(shown._shown) == [TURN]
        shown._shown[TURN].runs = False
        shown.show(OTHER, CHAT)
        assert list(shown._shown) == [OTHER]
    finally:
        shown.close()
