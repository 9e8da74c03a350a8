"""The errors and endings of turns that cannot run or that are abandoned, and their lines in the log."""

from __future__ import annotations

import logging
from dataclasses import replace

from perdure.agents import Agents
from perdure.errors import BudgetExhausted, InvalidRequest, PerdureError, loggable, reworded
from perdure.tools import around
from perdure.turns.lease.claim import TurnRef
from perdure.turns.run.settle import Ending, Failed, Verdict
from perdure.turns.run.transcript import UNREADABLE

log = logging.getLogger(__name__)

COULD_NOT_START = "The process of the turn could not start:"
"""The beginning of the error of an attempt whose dedicated process ended before it claimed the session."""


def held_verdict(ref: TurnRef) -> Verdict | None:
    """The turn's held verdict; `None` if there is no held verdict or this release cannot parse it."""
    if ref.held is None:
        return None
    try:
        return Verdict.from_json(ref.held)
    except UNREADABLE:
        log.exception("turn %s: its held ending cannot be parsed", ref.turn_id)
        return None


def log_failure(ref: TurnRef, ending: Ending) -> None:
    """Log the error of a failed turn with its cause, because the database stores only the error's code and message."""
    if isinstance(ending, Failed):
        error = ending.error
        log.warning("turn %s failed: %s", ref.turn_id, loggable(error), exc_info=error.__cause__)


def with_start_error(ref: TurnRef, verdict: Verdict) -> Verdict:
    """Add the error of a process that could not start to the error of a failed turn, but not to its reply.

    Such an error concerns the installation. The error of any other attempt may quote a user's text or a secret.
    """
    if verdict.error_message is None or not (ref.attempt_error or "").startswith(COULD_NOT_START):
        return verdict
    return replace(verdict, error_message=f"{verdict.error_message} {ref.attempt_error}")


def out_of_attempts(attempts: int) -> PerdureError:
    """The error of a turn that is abandoned."""
    return BudgetExhausted(f"I tried this {attempts} times without getting anywhere, so I gave up.")


def misconfigured() -> PerdureError:
    """The error of a turn whose model or settings cannot be used."""
    return PerdureError("I cannot answer: this installation is not set up for it. The operator's log says why.")


def unknown_agent(agent: str, waited_s: float) -> PerdureError:
    """The error of a turn for which no worker with its agent was found."""
    return InvalidRequest(f"There is no agent {agent!r}: no worker with it took the turn within {waited_s:g} s.")


def render_error(agents: Agents, ref: TurnRef, ending: Ending) -> Ending:
    """Return `ending`. If the agent has its own message for a failed turn's error, the result has that message."""
    agent = agents.find(ref.agent)
    if not isinstance(ending, Failed) or agent is None or agent.error_messages is None:
        return ending
    try:
        with around.surrounded(f"the error_messages of {agent.name}"):
            message = agent.error_messages.find(ending.error.code, ref.language)
    except Exception:
        log.exception("agent %s: its own message for the error %s cannot be used", agent.name, ending.error.code)
        return ending
    return replace(ending, error=reworded(ending.error, message)) if message else ending
