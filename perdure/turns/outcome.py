"""How the running of a turn stopped: the closed union `Outcome`.

The step loop returns an outcome, and `run.leave` acts on it. An `Ending` ends the turn: its verdict is written, its
snapshot saved, and the turn settled. A `Stop` leaves the turn to a later worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import UUID

from perdure.errors import PerdureError, TurnCancelled
from perdure.models.protocol import Role
from perdure.text.untrusted import storable
from perdure.turns.transcript import Entry

CANCELLED = "The turn was cancelled."


@dataclass(frozen=True, slots=True)
class Replied:
    """The model replied without tool calls, or an adapted agent has its output.

    `data` is an output that is no text, as JSON values. `closing` has the messages before the reply that no step has
    committed, such as the results of open calls. `is_step`: the reply is a reply of the model.
    """

    status: ClassVar[str] = "done"
    error: ClassVar[None] = None
    reply: Entry
    data: Any = None
    closing: tuple[Entry, ...] = ()
    is_step: bool = True

    def last_entries(self, _turn_id: UUID) -> list[Entry]:
        """What ends the turn's transcript: the reply."""
        return [*self.closing, self.reply]

    def last_step(self) -> list[Entry]:
        """The model's reply that ended the turn, if one did."""
        made = [entry for entry in self.closing if entry.role is Role.ASSISTANT]
        return [*made, self.reply] if self.is_step else made

    def charged(self) -> list[Entry]:
        """An output that is no reply of the model, and no step: what guards used for it counts."""
        return [] if self.is_step else [self.reply]

    def refused(self, error: PerdureError) -> Failed:
        """The failure of the turn if a hook or a guard rejects the reply."""
        return Failed(error, tuple(self.last_step()), tuple(self.charged()))


@dataclass(frozen=True, slots=True)
class Failed:
    """The turn failed. The error's message is sent as the reply.

    `rejected` has the model's reply, if a hook rejected it. It is not stored, but it counts as a step, with its usage.
    `unstored` has a rejected output that is no reply of the model, and no step: what guards used for it counts.
    """

    status: ClassVar[str] = "failed"
    error: PerdureError
    rejected: tuple[Entry, ...] = ()
    unstored: tuple[Entry, ...] = ()

    def last_entries(self, turn_id: UUID) -> list[Entry]:
        return [Entry(turn_id, Role.ASSISTANT, storable(self.error.message))]

    def last_step(self) -> list[Entry]:
        return list(self.rejected)

    def charged(self) -> list[Entry]:
        return list(self.unstored)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The turn was cancelled; there is no reply."""

    status: ClassVar[str] = "cancelled"

    @property
    def error(self) -> PerdureError:
        return TurnCancelled(CANCELLED)

    def last_entries(self, _turn_id: UUID) -> list[Entry]:
        return []

    def last_step(self) -> list[Entry]:
        return []

    def charged(self) -> list[Entry]:
        return []


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The turn has another agent, which goes on with it. The commit of the last step says so."""


@dataclass(frozen=True, slots=True)
class ShutDown:
    """The worker shuts down. The next worker continues after the turn's last committed step."""


@dataclass(frozen=True, slots=True)
class AwaitsDecision:
    """Calls of the message at `message_seq` wait for a person."""

    message_seq: int


@dataclass(frozen=True, slots=True)
class AwaitsCalls:
    """Calls of the message at `message_seq` wait for a task, a client, an agent or a time.

    `results` are the rows of its other calls.
    """

    message_seq: int
    results: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class AwaitsModel:
    """No model answers: the turn continues after `wait_s` seconds. `model` is the name of the turn's model.

    A turn that waits for a budget (`is_paced` is false) has the setting's name there: it returns without regard to how
    many turns a model takes.

    `steps` is the number of the turn's steps so far. `spent_s` is the turn's run time in seconds, without the failed
    model call.
    """

    error: PerdureError
    wait_s: float
    spent_s: float
    steps: int
    model: str = ""
    is_paced: bool = True


@dataclass(frozen=True, slots=True)
class Lacking:
    """This process lacks `what`: the turn's agent, or the tool of a call that an earlier worker committed."""

    what: str


@dataclass(frozen=True, slots=True)
class Struck:
    """An attempt was lost: the turn raised `error`, or the database was lost too often (`None`)."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class NotSaved:
    """The snapshot was not saved, so the turn is not answered yet. Its verdict is stored. `reason` is for operators."""

    reason: str


Ending = Replied | Failed | Cancelled
Waiting = AwaitsDecision | AwaitsCalls | AwaitsModel
Stop = ShutDown | Waiting | Lacking | Struck | NotSaved
Outcome = Ending | Stop | HandedOver
