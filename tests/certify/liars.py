"""Tools that declare what they are not, and honest ones. Their effects are lines of files in `LIARS`."""

from __future__ import annotations

import os
from pathlib import Path

from perdure import Agent, DidNotHappen, Happened, ToolContext, tool

_DIRECTORY = Path(os.environ.get("LIARS", "."))


def _append(name: str, line: object) -> str:
    with (_DIRECTORY / name).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    return f"{name} has {line}"


def _has(name: str, line: object) -> bool:
    file = _DIRECTORY / name
    return file.exists() and str(line) in file.read_text(encoding="utf-8").splitlines()


@tool(effect="pure")
def look_up(article: str) -> str:
    """Look up an article: a pure tool that writes."""
    return _append("looked-up", article)


@tool(effect="idempotent")
def order(article: str, pieces: int) -> str:
    """Order an article: an idempotent tool that ignores its effect id."""
    return _append("orders", f"{pieces} {article}")


def _never_paid(_: ToolContext) -> DidNotHappen:
    return DidNotHappen()


@tool(probe=_never_paid)
def pay(amount: int, context: ToolContext) -> str:
    """Pay: its probe denies each payment."""
    return _append("payments", context.effect_id)


def _always_sent(_: ToolContext) -> Happened:
    return Happened("Sent.")


@tool(probe=_always_sent)
def send(text: str, context: ToolContext) -> str:
    """Send a message: its probe claims each message."""
    return _append("messages", context.effect_id)


@tool(effect="pure")
def price(article: str) -> str:
    """Look up a price: honest."""
    return f"{article} costs 1 euro"


@tool(effect="idempotent")
def book(room: str, context: ToolContext) -> str:
    """Book a room: honest."""
    return "Booked before." if _has("rooms", context.effect_id) else _append("rooms", context.effect_id)


@tool
def mail(text: str, context: ToolContext) -> str:
    """Send an e-mail: honest, and without a probe."""
    return _append("mails", context.effect_id)


def _was_shipped(context: ToolContext) -> Happened | DidNotHappen:
    return Happened("Shipped.") if _has("parcels", context.effect_id) else DidNotHappen()


@tool(probe=_was_shipped, requires_approval=True, approver="staff")
def ship(order: int, context: ToolContext) -> str:
    """Ship an order: honest, with a probe, after an approval."""
    return _append("parcels", context.effect_id)


liar = Agent("liar", "You lie.", tools=[look_up, order, pay, send])
honest = Agent("honest", "You do not lie.", tools=[price, book, mail, ship])
