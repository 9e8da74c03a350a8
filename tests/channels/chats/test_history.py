"""Messages that were sent on Discord while no process listened."""

from __future__ import annotations

import pytest

from perdure.channels.services.ingress import HISTORY_ATTEMPTS
from perdure.errors import Unavailable
from tests.channels import discord_server
from tests.channels.chats.installation import Installation
from tests.channels.chats.updates import discord_message
from tests.channels.discord_server import DiscordServer
from tests.turns.harness import until


def _now_id(installation: Installation, number: int) -> str:
    """The id of a Discord message that was sent now."""
    made_ms = int(installation.runtime.clock.now().timestamp() * 1000) - 1_420_070_400_000
    return str((made_ms << 22) + number)


@pytest.mark.exhaustive
def test_messages_sent_while_no_process_listened_are_read(installation: Installation, discord: DiscordServer) -> None:
    """When the bot connects, it reads all messages newer than the last one that it handled.

    Each message is accepted once, in order.
    """
    ids = [_now_id(installation, number) for number in range(150)]
    with installation.listening("discord"):
        discord.until(lambda: discord.identified, "the bot identifies itself")
        discord.dispatch("MESSAGE_CREATE", {**discord_message(0, "before"), "id": ids[0]})
        until(
            lambda: installation.sql("SELECT FROM chat_places WHERE last_message_id IS NOT NULL"),
            "the message is handled",
        )
    before = [discord_message(0, "before"), discord_message(0, "said by the bot", author=discord_server.BOT)]
    missed = [discord_message(0, f"missed {number}") for number in range(148)]
    discord.written = [{**each, "id": id_} for each, id_ in zip([*before, *missed], ids, strict=True)]
    with installation.listening("discord"):
        discord.until(lambda: len(discord.identified) == 2, "the bot identifies itself again")
        discord.dispatch("MESSAGE_CREATE", {**discord_message(0, "after"), "id": _now_id(installation, 900_000)})
        until(lambda: len(installation.sql("SELECT FROM inbox")) >= 150, "all are accepted")
    found = [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")]
    assert found == ["before", *(f"missed {number}" for number in range(148)), "after"]


def test_a_history_that_fails_is_read_again(installation: Installation, discord: DiscordServer) -> None:
    """If reading the history fails, handling the `READY` event fails. A retry of the event reads the history again.

    A deleted chat is skipped, and the retry does not request it again.
    """
    take = installation.ingress("discord").take
    take({"t": "MESSAGE_CREATE", "d": {**discord_message(0, "before"), "id": _now_id(installation, 1)}})
    take({"t": "MESSAGE_CREATE", "d": {**discord_message(0, "gone", channel_id="29"), "id": _now_id(installation, 2)}})
    discord.written = [{**discord_message(0, "missed"), "id": _now_id(installation, 3)}]
    discord.fail("/channels/29", 404, {"code": 10003, "message": "Unknown Channel"}, times=50)
    discord.fail("/channels/21", 503)
    with pytest.raises(Unavailable):
        take({"t": "READY", "d": {}})
    take({"t": "READY", "d": {}})
    found = [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")]
    assert found == ["before", "gone", "missed"]
    assert discord.failures[0].times == 49, "the deleted chat is requested once"


def test_a_history_that_can_never_be_read_is_left_out(installation: Installation, discord: DiscordServer) -> None:
    """New messages wait for the missed ones, so one chat must not stop all. A pause that Discord asks for is kept."""
    take = installation.ingress("discord").take
    take({"t": "MESSAGE_CREATE", "d": {**discord_message(0, "before"), "id": _now_id(installation, 1)}})
    take({"t": "MESSAGE_CREATE", "d": {**discord_message(0, "other", channel_id="29"), "id": _now_id(installation, 2)}})
    discord.written = [{**discord_message(0, "missed"), "id": _now_id(installation, 3)}]
    pauses = HISTORY_ATTEMPTS + 1
    discord.fail("/channels/29", 429, {"message": "slow down", "retry_after": 7.5, "global": False}, times=pauses)
    discord.fail("/channels/29", 503, times=99)
    for _ in range(pauses + HISTORY_ATTEMPTS - 1):
        with pytest.raises(Unavailable):
            take({"t": "READY", "d": {}})
    take({"t": "READY", "d": {}})
    found = [row.text for row in installation.sql("SELECT text FROM inbox ORDER BY accepted_at")]
    assert found == ["before", "other", "missed"]
