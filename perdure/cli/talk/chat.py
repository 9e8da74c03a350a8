"""`perdure chat`: a conversation with an agent at a terminal, or over a pipe."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.access.tenants import parse_tenant
from perdure.cli import connecting
from perdure.cli.connecting import Tenant
from perdure.cli.talk.send import Conversation, User


def chat(
    user: User = "local",
    tenant: Tenant = None,
    conversation: Conversation = None,
    agent: Annotated[str | None, typer.Option(help="The agent; by default the first one defined.")] = None,
) -> None:
    """Talk to an agent.

    Without a terminal, each line of stdin is a message and only replies are printed.
    """
    from perdure.channels.cli import Speaker
    from perdure.cli.talk.prompt import Prompt
    from perdure.text.zones import zone_here

    with connecting.runtime() as runtime:
        if agent is not None:
            runtime.agents.get(agent)
        speaker = Speaker(user, parse_tenant(tenant), agent, zone_here())
        Prompt(runtime, speaker, conversation).run()
