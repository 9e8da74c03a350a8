"""The errors and endings of turns that cannot run or that are abandoned, and their lines in the log."""

from __future__ import annotations

import logging
from dataclasses import replace

from perdure.agents import Agents
from perdure.errors import BudgetExhausted, DeadlineExceeded, InvalidRequest, PerdureError, loggable, reworded
from perdure.runtime import Runtime
from perdure.tools import around
from perdure.turns.lease.tenure import Tenure, TurnRow
from perdure.turns.outcome import Cancelled, Ending, Failed
from perdure.turns.run.verdict import Verdict, conclude_unread, stored_verdict

log = logging.getLogger(__name__)

COULD_NOT_START = "The process of the turn could not start:"
"""The beginning of the error of an attempt whose dedicated process ended before it claimed the session."""


def log_failure(turn: TurnRow, ending: Ending) -> None:
    """Log the error of a failed turn with its cause, because the database stores only the error's code and message."""
    if isinstance(ending, Failed):
        error = ending.error
        log.warning("turn %s failed: %s", turn.turn_id, loggable(error), exc_info=error.__cause__)


def abandoned_verdict(runtime: Runtime, tenure: Tenure) -> Verdict:
    """The verdict on a turn that is out of attempts: its stored verdict, or that it has failed or is cancelled.

    Does not read data that may have caused the failures.
    """
    attempts = runtime.settings.turn.max_attempts
    stored = stored_verdict(tenure.at_hand) if tenure.strikes == attempts + 1 else None
    if stored is not None:
        return stored
    log.error("turn %s is abandoned after %d attempts", tenure.at_hand.turn_id, attempts)
    gave_up = BudgetExhausted(f"I tried this {attempts} times without getting anywhere, so I gave up.")
    return _unread_verdict(runtime, tenure, Failed(gave_up))


def unrun_verdict(runtime: Runtime, tenure: Tenure, ending: Ending) -> Verdict:
    """The verdict on a turn that ends with `ending` without being run here: its stored verdict, if it has one."""
    return stored_verdict(tenure.at_hand) or _unread_verdict(runtime, tenure, ending)


def _unread_verdict(runtime: Runtime, tenure: Tenure, ending: Ending) -> Verdict:
    """The verdict on a turn whose rows are not read, and which may be cancelled.

    The error of a process that could not start is added to the error of a failed turn, but not to its reply. Such an
    error concerns the installation. The error of any other attempt may quote a user's text or a secret.
    """
    turn = tenure.at_hand
    if turn.cancel_requested_at is not None:
        ending = Cancelled()
    verdict = conclude_unread(runtime.database, tenure, render_error(runtime.agents, turn, ending))
    if verdict.error_message is None or not (turn.attempt_error or "").startswith(COULD_NOT_START):
        return verdict
    return replace(verdict, error_message=f"{verdict.error_message} {turn.attempt_error}")


def out_of_time(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"I could not finish within {limit_s:g} seconds, so I stopped.")


def misconfigured() -> PerdureError:
    return PerdureError("I cannot answer: this installation is not set up for it. The operator's log says why.")


def unknown_agent(agent: str, waited_s: float) -> PerdureError:
    return InvalidRequest(f"There is no agent {agent!r}: no worker with it took the turn within {waited_s:g} s.")


def render_error(agents: Agents, turn: TurnRow, ending: Ending) -> Ending:
    """Return `ending`. If the agent has its own message for a failed turn's error, the result has that message."""
    agent = agents.find(turn.agent)
    if not isinstance(ending, Failed) or agent is None or agent.error_messages is None:
        return ending
    try:
        with around.surrounded(f"the error_messages of {agent.name}"):
            message = agent.error_messages.find(ending.error.code, turn.language)
    except Exception:
        log.exception("agent %s: its own message for the error %s cannot be used", agent.name, ending.error.code)
        return ending
    return replace(ending, error=reworded(ending.error, message)) if message else ending
