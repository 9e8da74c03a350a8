"""The installation with Discord and Slack that this directory's tests use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import text

from perdure import Agent
from perdure.agents import Agents, OwnTool
from perdure.channels.services import configured
from perdure.channels.services.buttons import Buttons
from perdure.channels.services.ingress import Ingress
from perdure.channels.services.listening import Listening
from perdure.channels.services.protocol import Channel
from perdure.channels.services.replies import ChatCarrier, read_file
from perdure.models.protocol import Model
from perdure.runtime import Runtime
from perdure.turns.outbox import deliver, note_sent
from perdure.turns.run.loop import Runner
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.channels.telegram_server import TelegramServer
from tests.conftest import RecordingWaker


@dataclass(frozen=True)
class Servers:
    """The servers that imitate Discord and Slack."""

    discord: DiscordServer
    slack: SlackServer


@dataclass(frozen=True)
class AllServers(Servers):
    """The servers that imitate all services."""

    telegram: TelegramServer

    def sent(self) -> list[dict[str, Any]]:
        """The messages of the bot on all services, as each service was given them."""
        return [*self.discord.sent, *self.slack.sent, *self.telegram.given("sendMessage")]

    def received(self) -> list[tuple[str, bytes]]:
        """The names and contents of the files that the bot has sent."""
        every = [*self.discord.received, *self.slack.received, *self.telegram.received]
        return [(name, content) for _, name, content in every]

    def texts(self) -> list[str]:
        """The texts of `sent`."""
        return [str(each.get("content") or each.get("text") or "") for each in self.sent()]


class Installation:
    """A runtime with the Discord and Slack channels. The test itself runs the turns and the deliveries."""

    def __init__(self, runtime: Runtime, waker: RecordingWaker) -> None:
        self.runtime = runtime
        self.channels = configured.channels(runtime.settings, runtime.clock)
        self._carriers = {"channel": self.carrier()}
        self._ingresses: list[Ingress] = []
        self._waker = waker
        self._runner = Runner(runtime, owner="test")

    def carrier(self) -> ChatCarrier:
        """The carrier of a new worker."""
        buttons = Buttons(self.runtime.settings.signing_keys())
        note, read = partial(note_sent, self.runtime.database), partial(read_file, self.runtime)
        return ChatCarrier(self.channels, buttons, note=note, read_file=read)

    def ingress(self, name: str) -> Ingress:
        """A new handler of the channel's updates."""
        made = Ingress(self.runtime, self.channels[name])
        self._ingresses.append(made)
        return made

    def use(self, model: Model, *tools: OwnTool) -> None:
        """Replace the model, and replace the agent by one with these tools."""
        self._runner.close()
        agents = Agents([Agent("assistant", "You help.", tools)])
        self.runtime = replace(self.runtime, agents=agents, models=lambda _: model)
        self._runner = Runner(self.runtime, owner="test")

    def work(self) -> None:
        """Run the sessions that have wake-ups, then send the pending deliveries."""
        self.run_sessions()
        for row in self.sql("SELECT delivery_id FROM deliveries WHERE status = 'pending' ORDER BY created_at"):
            deliver(self.runtime.database, self._carriers, row.delivery_id)

    def run_sessions(self) -> None:
        """Run the sessions that have wake-ups."""
        while self._waker.sessions:
            self._runner.run(self._waker.sessions.pop(0))

    def sql(self, statement: str, **given: Any) -> list[Any]:
        """Run a query; returns its rows."""
        with self.runtime.database.engine.connect() as connection:
            return list(connection.execute(text(statement), given))

    def users(self) -> list[str]:
        """The users with a session, in the order of their first message."""
        return [row.user_id for row in self.sql("SELECT user_id FROM sessions ORDER BY created_at")]

    def close(self) -> None:
        """Close the ingresses and channels."""
        self._runner.close()
        for ingress in self._ingresses:
            ingress.close()
        for channel in self.channels.values():
            channel.close()

    @contextmanager
    def listening(self, *names: str) -> Iterator[None]:
        """Listen on these channels for the duration of the block."""
        channels: list[tuple[Channel, Ingress]] = [(self.channels[name], self.ingress(name)) for name in names]
        made = Listening(self.runtime.database, channels)
        made.start()
        yield
        assert made.stop(10)
