"""A bank's support agent, written with pydantic-ai, as an agent of perdure.

`PERDURE_AGENTS=bank perdure up` runs it. The agent has no model of its own, so it uses `PERDURE_MODEL`.
"""

from dataclasses import dataclass

from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext

import perdure

BALANCES = {"ana": 123.45}
BLOCKED: dict[str, str] = {}
"""The ids of the calls that blocked a card, by customer. A bank would keep them in its database."""


@dataclass
class Customer:
    """The dependencies of a run: whose turn it is."""

    name: str


class Advice(BaseModel):
    """The agent's output, which `reply.data` has."""

    advice: str = Field(description="Advice returned to the customer")
    risk: int = Field(description="Risk level of the query", ge=0, le=10)


support = Agent(
    deps_type=Customer,
    output_type=Advice,
    instructions="You support the customers of our bank. Judge the risk of each query.",
)


@support.instructions
def whose(context: RunContext[Customer]) -> str:
    """Name the customer."""
    return f"The customer's name is {context.deps.name}."


@support.tool(metadata=perdure.effect("pure"))
def balance(context: RunContext[Customer]) -> float:
    """The customer's balance in dollars."""
    return BALANCES[context.deps.name]


def was_blocked(context: perdure.ToolContext) -> perdure.Happened | perdure.DidNotHappen:
    """Whether the interrupted call blocked the card."""
    did = str(context.effect_id) in BLOCKED.values()
    return perdure.Happened("The card is blocked.") if did else perdure.DidNotHappen()


@support.tool(requires_approval=True, metadata=perdure.effect("unsafe", probe=was_blocked))
def block_card(context: RunContext[Customer]) -> str:
    """Block the customer's card. A person approves each call."""
    BLOCKED[context.deps.name] = str(perdure.effect_id())
    return "The card is blocked."


agent = perdure.adapt(support, name="support", deps=lambda turn: Customer(turn.user_id))
