"""The verdict on a turn that has ended: everything that settling the turn writes, as JSON values.

Settling also adds a result to each tool call that has none, because model providers reject a transcript with an
unanswered call. While the session's snapshot is being saved in a store other than PostgreSQL, the turn's row stores the
verdict.

Called by the loop, and by `cancel` and `accept` when they settle a turn that no worker runs. The errors of turns that
cannot run, or that are abandoned, are here too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from perdure.agents import Agents
from perdure.database.engine import Executor, as_json
from perdure.database.fencing import Fence
from perdure.errors import BudgetExhausted, DeadlineExceeded, InvalidRequest, PerdureError, loggable, reworded
from perdure.models.protocol import Role, Usage, unknown_members
from perdure.runtime import Runtime
from perdure.snapshots import queries as snapshots
from perdure.text.untrusted import OF_AUTHORS, load_object, storable
from perdure.tools import around
from perdure.tools.variables import VariableSet
from perdure.turns.calls.queries import CLOSE_CALLS
from perdure.turns.calls.result_values import last_recorded, outcome_of
from perdure.turns.lease.tenure import TurnRow
from perdure.turns.outcome import Cancelled, Ending, Failed, Replied
from perdure.turns.run import queries
from perdure.turns.transcript import UNREADABLE, Entry, Transcript, heard, result_of, steps_in, total_usage

log = logging.getLogger(__name__)

WITHHELD = "[message withheld]"
"""What the transcript has of a message that the agent's hooks and guards did not let pass."""

COULD_NOT_START = "The process of the turn could not start:"
"""The beginning of the error of an attempt whose dedicated process ended before it claimed the session."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that settling a turn writes, as JSON values.

    `messages` has the new messages, as made by `Entry.to_dict`. `variables` has the working variables, or is `None` if
    they are unchanged. `case_ids` names the cases in the prompt. `data` is the reply's data. `extra` has the members of
    an unsaved verdict that this release does not know.
    """

    status: str
    messages: list[dict[str, Any]]
    replied: bool
    steps: int
    usage: dict[str, Any] | None
    error_code: str | None
    error_message: str | None
    variables: dict[str, Any] | None
    case_ids: list[str] = field(default_factory=list)
    data: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def used(self) -> Usage | None:
        """The tokens that the turn used; `None` if no provider reported them."""
        return None if self.usage is None else Usage.from_dict(self.usage)

    @property
    def for_models(self) -> list[dict[str, Any]]:
        """`messages` without the reply of a failed turn, which no later prompt has."""
        return self.messages[:-1] if self.status == "failed" else self.messages

    def to_json(self) -> str:
        """The verdict as a JSON object, with the members of `extra` at the top level."""
        record = asdict(self)
        return as_json({**record.pop("extra"), **record})

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Parse the output of `to_json` of this or another release."""
        record = json.loads(text)
        known = {each.name for each in fields(cls)} - {"extra"}
        return cls(
            **{name: value for name, value in record.items() if name in known}, extra=unknown_members(record, known)
        )


def conclude(
    executor: Executor,
    turn: TurnRow,
    transcript: Transcript,
    ending: Ending,
    *,
    case_ids: Sequence[str] = (),
    screens: bool = False,
    fence: Fence | None = None,
) -> Verdict:
    """The verdict on a turn, which ends with `ending`, with results for open calls.

    `case_ids` names the cases in the prompt. `screens`: the agent has hooks or guards that must let the user's message
    pass, before it enters the transcript. `fence` is that of the caller's lease: from now on, no result of the turn's
    calls is accepted. `None`: the caller has locked the session's row, or nobody else writes to the turn.
    """
    said = transcript.uncommitted
    if screens and not transcript.is_screened:
        said = _withheld(said)
    open_reply, closing, variables = transcript.open_reply(), [], None
    closed = isinstance(ending, Replied) and bool(ending.closing)
    if open_reply is not None and not closed:  # some calls may have finished
        held = None if fence is None else fence.on(turn.session_id)
        results, changes = last_recorded(executor, open_reply, held, screens=screens)
        closing = result_entries(open_reply, [result.text for result in results], [each.used for each in results])
        if changes:
            kept = executor.run(snapshots.KEPT, {"session_id": turn.session_id})
            replayed = VariableSet(load_object(kept[0].variables) if kept else None)
            replayed.replay(changes)
            variables = replayed.changed()
    entries = [*said, *closing, *ending.last_entries(turn.turn_id)]
    spent = [*transcript.present, *closing, *ending.last_step()]
    usage = total_usage([*spent, *ending.charged()])
    return _verdict(
        entries,
        ending,
        steps=steps_in(spent),
        usage=None if usage is None else usage.to_dict(),
        variables=variables,
        # A cancelled turn does not show whether the cases were useful.
        case_ids=[] if isinstance(ending, Cancelled) else list(case_ids),
    )


def conclude_unread(
    executor: Executor, turn: TurnRow, ending: Ending, *, screens: bool = False, fence: Fence | None = None
) -> Verdict:
    """The verdict on a turn, built without parsing its rows, so that an unreadable row cannot prevent the settlement.

    Working variables stay as the last step committed them. `screens` and `fence` as for `conclude`.
    """
    if fence is not None:
        executor.run(CLOSE_CALLS, {**fence.on(turn.session_id), "turn_id": turn.turn_id})
    [remains] = executor.run(
        queries.REMAINS, {"session_id": turn.session_id, "turn_id": turn.turn_id, "first_seq": turn.first_seq}
    )
    said = heard(turn.turn_id, remains.uncommitted)
    closing = [
        Entry(turn.turn_id, Role.TOOL, storable(outcome_of(each["status"], each["result"])[1]), tool_call_id=each["id"])
        for each in remains.open_calls
    ]
    entries = [*(_withheld(said) if screens else said), *closing, *ending.last_entries(turn.turn_id)]
    return _verdict(entries, ending, steps=remains.steps, usage=remains.usage)


def conclude_begun(executor: Executor, turn: TurnRow, ending: Ending, *, screens: bool) -> Verdict:
    """The verdict on a turn that this process did not run; see `conclude` and `conclude_unread`."""
    try:
        return conclude(executor, turn, Transcript.load(executor, turn, window=1), ending, screens=screens)
    except UNREADABLE:
        log.exception("turn %s cannot be parsed; its open calls are closed unread", turn.turn_id)
        return conclude_unread(executor, turn, ending, screens=screens)


def _withheld(said: Sequence[Entry]) -> list[Entry]:
    """The user's messages without what they say. Their texts stay in the inbox."""
    return [replace(entry, content=WITHHELD, parts=()) for entry in said]


def stored_verdict(turn: TurnRow) -> Verdict | None:
    """The verdict in the turn's row; `None` if there is none or this release cannot parse it."""
    if turn.verdict is None:
        return None
    try:
        return Verdict.from_json(turn.verdict)
    except UNREADABLE:
        log.exception("turn %s: its stored verdict cannot be parsed", turn.turn_id)
        return None


def _verdict(
    entries: Sequence[Entry],
    ending: Ending,
    *,
    steps: int,
    usage: dict[str, Any] | None,
    variables: dict[str, Any] | None = None,
    case_ids: Sequence[str] = (),
) -> Verdict:
    error = ending.error
    return Verdict(
        status=ending.status,
        messages=[entry.to_dict(position) for position, entry in enumerate(entries, start=1)],
        replied=not isinstance(ending, Cancelled),
        steps=steps,
        usage=usage,
        error_code=error.code if error else None,
        error_message=storable(error.message) if error else None,
        variables=variables,
        case_ids=list(case_ids),
        data=ending.data if isinstance(ending, Replied) else None,
    )


def result_entries(open_reply: Entry, texts: Sequence[str], used: Sequence[Usage | None] | None = None) -> list[Entry]:
    """The entries that answer the calls of `open_reply` with `texts`, in the order of the calls.

    `used` has the tokens of other agents that answered the calls.
    """
    calls, tokens = open_reply.tool_calls, used or [None] * len(texts)
    return [result_of(open_reply.turn_id, *each) for each in zip(calls, texts, tokens, strict=True)]


def abandoned_verdict(runtime: Runtime, fence: Fence, turn: TurnRow, strikes: int) -> Verdict:
    """The verdict on a turn that is out of attempts: its stored verdict, or that it has failed or is cancelled.

    Does not read data that may have caused the failures. `strikes` is the number of the turn's attempts, the present
    one included. Only the first attempt after the last permitted one uses the stored verdict.
    """
    attempts = runtime.settings.turn.max_attempts
    stored = stored_verdict(turn) if strikes == attempts + 1 else None
    if stored is not None:
        return stored
    log.error("turn %s is abandoned after %d attempts", turn.turn_id, attempts)
    gave_up = BudgetExhausted(f"I tried this {attempts} times without getting anywhere, so I gave up.")
    return _unread_verdict(runtime, fence, turn, Failed(gave_up))


def unrun_verdict(runtime: Runtime, fence: Fence, turn: TurnRow, ending: Ending) -> Verdict:
    """The verdict on a turn that ends with `ending` without being run here: its stored verdict, if it has one."""
    return stored_verdict(turn) or _unread_verdict(runtime, fence, turn, ending)


def _unread_verdict(runtime: Runtime, fence: Fence, turn: TurnRow, ending: Ending) -> Verdict:
    """The verdict on a turn whose rows are not read, and which may be cancelled.

    The error of a process that could not start is added to the error of a failed turn, but not to its reply. Such an
    error concerns the installation. The error of any other attempt may quote a user's text or a secret.
    """
    if turn.cancel_requested_at is not None:
        ending = Cancelled()
    screens = runtime.agents.screens(turn.agent)
    ending = render_error(runtime.agents, turn, ending)
    verdict = conclude_unread(runtime.database, turn, ending, screens=screens, fence=fence)
    if verdict.error_message is None or not (turn.attempt_error or "").startswith(COULD_NOT_START):
        return verdict
    return replace(verdict, error_message=f"{verdict.error_message} {turn.attempt_error}")


def out_of_time(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"I could not finish within {limit_s:g} seconds, so I stopped.")


def misconfigured() -> PerdureError:
    return PerdureError("I cannot answer: this installation is not set up for it. The operator's log says why.")


def unknown_agent(agent: str, waited_s: float) -> PerdureError:
    return InvalidRequest(f"There is no agent {agent!r}: no worker with it took the turn within {waited_s:g} s.")


def log_failure(turn: TurnRow, ending: Ending) -> None:
    """Log the error of a failed turn with its cause, because the database stores only the error's code and message."""
    if isinstance(ending, Failed):
        error = ending.error
        log.warning("turn %s failed: %s", turn.turn_id, loggable(error), exc_info=error.__cause__)


def keep_received(executor: Executor, turn: TurnRow, ending: Ending) -> None:
    """Keep what a model's server sent in the turn's row, where the operator finds it, if it may be quoted."""
    if isinstance(ending, Failed) and ending.error.received is not None:
        noted = f"The model's server sent: {ending.error.received}"
        executor.run(queries.NOTE_RECEIVED, {"turn_id": turn.turn_id, "received": noted})


def render_error(agents: Agents, turn: TurnRow, ending: Ending) -> Ending:
    """Return `ending`. If the agent has its own message for a failed turn's error, the result has that message.

    An error of an author, such as `GuardRejected("")`, may have no message; the user reads its code.
    """
    if isinstance(ending, Failed) and not ending.error.message.strip():
        ending = replace(ending, error=reworded(ending.error, f"I cannot answer this ({ending.error.code})."))
    agent = agents.find(turn.agent)
    if not isinstance(ending, Failed) or agent is None or agent.error_messages is None:
        return ending
    try:
        with around.surrounded(f"the error_messages of {agent.name}"):
            message = agent.error_messages.find(ending.error.code, turn.language)
    except OF_AUTHORS:
        log.exception("agent %s: its own message for the error %s cannot be used", agent.name, ending.error.code)
        return ending
    return replace(ending, error=reworded(ending.error, message)) if message else ending
