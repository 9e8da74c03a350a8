"""`agent_tool` and `handoff`: another agent as a tool. The agent may be of another library (`adopt`)."""

from __future__ import annotations

from typing import Any

from perdure.adapters.adopt import adopt
from perdure.agents import Agent
from perdure.errors import SettingsError
from perdure.text import declarations
from perdure.tools.awaited.declared import require_declared
from perdure.tools.delegation import NOTHING, TASK, AgentTool, HandoffTool
from perdure.tools.registry import MAX_RESULT_CHARS, USER, Approval, Approver, require_max_result_chars


def agent_tool(
    agent: Agent | Any,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = 3_600,
    max_result_chars: int = MAX_RESULT_CHARS,
    requires_approval: Approval = False,
    approver: Approver = USER,
) -> AgentTool:
    """Make a tool from another agent. The model passes it a `task`, and receives the agent's answer as the result.

    `agent` is an agent of perdure or of pydantic-ai, or the name of one. The agent works in a session of its own, with
    the turn's user, channel and metadata. While it works, the turn waits without a worker. Its tokens and its cost
    count as those of the turn. If the agent fails, the model reads its error; if it has an `output`, the data is the
    result. An agent that has not answered after `timeout_s` seconds is cancelled. `name` defaults to the agent's name.

    Raises:
        SettingsError: a value is invalid; the message names it.

    Example:
        >>> searcher = Agent("searcher", "You search and report.")
        >>> research = agent_tool(searcher, name="research", description="Find something out.", timeout_s=600)
        >>> writer = Agent("writer", "You write.", tools=[research])
        >>> writing = Scripted(call("research", task="When was Rome founded?"), "In 753 BC, legend says.")
        >>> answer = ask(writer, "How old is Rome?", model=writing, models={"searcher": Scripted("753 BC.")})
        >>> answer.calls[0].result, answer.reply
        ('753 BC.', 'In 753 BC, legend says.')
    """
    agent_name, given = _named("agent_tool", agent)
    owner, chosen = f"the agent_tool of {agent_name!r}", agent_name if name is None else name
    require_declared(owner, chosen, description, requires_approval, approver)
    declarations.require(declarations.is_seconds(timeout_s), owner, "timeout_s", timeout_s, declarations.SECONDS)
    require_max_result_chars(owner, max_result_chars)
    return AgentTool(
        name=chosen,
        description=description or f"Give a task to the agent {agent_name}, which works on it and returns its answer.",
        parameters=TASK,
        max_result_chars=max_result_chars,
        requires_approval=requires_approval,
        approver=approver,
        _signature=None,
        _each=TASK,
        agent_name=agent_name,
        agent=given,
        timeout_s=float(timeout_s),
    )


def handoff(
    to: Agent | Any,
    *,
    name: str | None = None,
    description: str | None = None,
    requires_approval: Approval = False,
    approver: Approver = USER,
) -> HandoffTool:
    """Make a tool whose call leaves the conversation to the agent `to`.

    `to` is an agent of perdure or of pydantic-ai, or the name of one. When the calls of the model's reply have their
    results, one commit makes `to` the agent of the turn and of the session: the turn's next model call is that of `to`,
    with its instructions, tools and limits, and later messages that name no agent go to `to`. `name` defaults to
    `handoff_to_` and the agent's name.

    Raises:
        SettingsError: a value is invalid; the message names it.

    Example:
        >>> billing = Agent("billing", "You answer questions about invoices.")
        >>> desk = Agent("desk", "You welcome customers.", tools=[handoff(billing)])
        >>> models = {"billing": Scripted("It is due on Monday.")}
        >>> answer = ask(desk, "My invoice?", model=Scripted(call("handoff_to_billing")), models=models)
        >>> answer.reply, answer.agent
        ('It is due on Monday.', 'billing')
    """
    agent_name, given = _named("handoff", to)
    owner, chosen = f"the handoff to {agent_name!r}", f"handoff_to_{agent_name}" if name is None else name
    require_declared(owner, chosen, description, requires_approval, approver)
    return HandoffTool(
        name=chosen,
        description=description
        or f"Hand this conversation over to the agent {agent_name}, which answers from then on.",
        parameters=NOTHING,
        max_result_chars=MAX_RESULT_CHARS,
        requires_approval=requires_approval,
        approver=approver,
        _signature=None,
        _each=NOTHING,
        agent_name=agent_name,
        agent=given,
    )


def _named(function: str, agent: object) -> tuple[str, Agent | None]:
    if isinstance(agent, str):
        return agent, None
    try:
        adopted = adopt(agent)
    except SettingsError as error:
        raise SettingsError(f"{function}: {error}; accepted: an agent, or the name of one") from error
    if not isinstance(agent, Agent) and getattr(agent, "name", None) is None:
        raise SettingsError(f"{function} is given an agent without a name: pass name=… to the agent")
    return adopted.name, adopted
