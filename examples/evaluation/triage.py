"""The agent under evaluation: it sorts messages of a shop's customers, and writes an answer."""

from typing import Literal

from pydantic import BaseModel

from perdure import Agent, ToolError, tool

ORDERS = {
    4711: "shipped on Monday, expected on Thursday",
    4712: "delivered",
    4713: "not paid",
    4714: "in the warehouse",
}


class Ticket(BaseModel):
    """Where a message goes, and what the customer reads at once."""

    team: Literal["orders", "billing", "returns", "other"]
    urgent: bool
    answer: str


@tool(effect="pure")
def order(number: int) -> str:
    """Look up the state of an order."""
    if number not in ORDERS:
        raise ToolError(f"There is no order {number}.")
    return ORDERS[number]


triage = Agent(
    "triage",
    "You sort the messages of customers, and answer in one sentence. Look up each order that the customer names. A "
    "message is urgent if someone loses money or may be hurt.",
    tools=[order],
    output=Ticket,
)
