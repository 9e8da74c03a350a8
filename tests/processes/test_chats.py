"""Progress of a tool in a chat: from a real worker, through `perdure channels`, to a simulated Telegram."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import pytest

from tests.channels import telegram_server
from tests.channels.telegram_server import TelegramServer
from tests.cli.conftest import Perdure
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to
from tests.processes.reporting_agents import gate

TEXT = "slow: work"
REPLY = answer_to(TEXT, f"done with {TEXT}")
PATIENCE_S = 60.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture
def telegram(installation: Installation) -> Iterator[TelegramServer]:
    """A server that imitates Telegram, and a worker that sends replies to it."""
    made = TelegramServer()
    installation.environment |= {
        "PERDURE_AGENTS": "tests.processes.reporting_agents",
        "PERDURE_TELEGRAM__TOKEN": telegram_server.TOKEN,
        "PERDURE_TELEGRAM__API_URL": made.url,
    }
    installation.worker().ready()
    sender = {"id": 11, "is_bot": False, "first_name": "Ana"}
    message = {"message_id": 5, "date": 1, "chat": telegram_server.CHAT, "from": sender, "text": TEXT}
    made.updates.append({"update_id": 1, "message": message})
    yield made
    made.close()


@contextmanager
def _channels(perdure: Perdure, installation: Installation) -> Iterator[BaseProcess]:
    process = perdure.start("channels", env=installation.environment)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _until_shown(telegram: TelegramServer, *texts: str) -> None:
    wait_until(lambda: list(telegram.shown.values()) == [*texts], f"the chat shows {texts}", PATIENCE_S)


@pytest.mark.exhaustive
def test_a_note_follows_the_tool(installation: Installation, telegram: TelegramServer, perdure: Perdure) -> None:
    """The note changes in place and does not notify; when the reply is there, the chat has the reply only."""
    with _channels(perdure, installation) as channels:
        _until_shown(telegram, "slow: 1 of 3 <b>")
        gate(installation.directory, 1).touch()
        _until_shown(telegram, "slow: 2 of 3 <b>")
        gate(installation.directory, 2).touch()
        gate(installation.directory, 3).touch()
        _until_shown(telegram, REPLY)
        assert channels.pid is not None
        os.kill(channels.pid, signal.SIGTERM)
        channels.join(PATIENCE_S)
        assert channels.exitcode == 0
    note, reply = telegram.given("sendMessage")
    assert (note["disable_notification"], "disable_notification" in reply) == ("true", False)
    assert {each["message_id"] for each in telegram.given("editMessageText")} == {next(iter(telegram.deleted))}
    installation.check()


def test_a_process_that_ends_removes_its_notes(
    installation: Installation, telegram: TelegramServer, perdure: Perdure
) -> None:
    """After SIGTERM no process would change the note, so it is removed. The reply is not affected."""
    with _channels(perdure, installation) as channels:
        _until_shown(telegram, "slow: 1 of 3 <b>")
        assert channels.pid is not None
        os.kill(channels.pid, signal.SIGTERM)
        channels.join(PATIENCE_S)
        assert (channels.exitcode, telegram.shown) == (0, {})
    for step in (1, 2, 3):
        gate(installation.directory, step).touch()
    _until_shown(telegram, REPLY)
    installation.check()


@pytest.mark.exhaustive
def test_a_killed_process_leaves_one_note(
    installation: Installation, telegram: TelegramServer, perdure: Perdure
) -> None:
    """Its successor shows no second note about the turn. The old one stays as it was, and the reply comes once."""
    with _channels(perdure, installation) as channels:
        _until_shown(telegram, "slow: 1 of 3 <b>")
        assert channels.pid is not None
        os.kill(channels.pid, signal.SIGKILL)
        channels.join(PATIENCE_S)
    with _channels(perdure, installation):
        polls = len(telegram.given("getUpdates"))
        wait_until(lambda: len(telegram.given("getUpdates")) > polls + 3, "the successor polls", PATIENCE_S)
        gate(installation.directory, 1).touch()
        gate(installation.directory, 2).touch()
        gate(installation.directory, 3).touch()
        _until_shown(telegram, "slow: 1 of 3 <b>", REPLY)
    assert len(telegram.given("sendMessage")) == 2
    installation.check()
